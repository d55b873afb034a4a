// Any bytes as a quantised safetensors checkpoint: the first line is config.json, the rest the file. Whatever is
// assembled decodes inside of its tensors.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "quant/assemble.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const uint8_t* end = data + size;
  const uint8_t* line = std::find(data, end, uint8_t{'\n'});
  if (line == end) return 0;
  const auto config = assay::ParseJson(std::string(data, line), "config.json");
  if (!config.ok()) return 0;
  const auto file = assay::ParseSafetensors(reinterpret_cast<const std::byte*>(line + 1),
                                            static_cast<size_t>(end - line - 1), "input");
  if (!file.ok()) return 0;
  assay::WeightAssembly assembly;
  assay::AssembleSafetensors(file->tensors, assay::ReadQuantSettings(*config), &assembly);
  for (const auto& [name, weight] : assembly.weights) {
    if (weight->rows() == 0 || weight->cols() == 0 || weight->cols() > (1 << 20)) continue;
    std::vector<float> row(static_cast<size_t>(weight->cols()));
    std::vector<double> wide(row.size());
    assay::WeightParts parts;
    for (const int64_t r : {int64_t{0}, weight->rows() - 1}) {
      weight->Decode(r, 1, row.data());
      weight->Decode(r, 1, wide.data());
      weight->Parts(r, &parts);
    }
  }
  return 0;
}
