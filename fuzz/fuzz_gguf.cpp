// Any bytes as a GGUF file: what is accepted lies inside the bytes, and every weight decodes without a fault.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "io/gguf.h"
#include "quant/weight_source.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::byte* bytes = reinterpret_cast<const std::byte*>(data);
  const auto parsed = assay::ParseGguf(bytes, size, "input");
  if (!parsed.ok()) {
    if (parsed.status().message().compare(0, 7, "input: ") != 0) std::abort();
    return 0;
  }
  size_t touched = 0;
  for (const assay::GgufValue& value : parsed->metadata) {
    touched += value.text().value_or("").size() + value.texts().size();
    if (value.count > 0) touched += value.number(value.count - 1).has_value() ? 1 : 0;
  }
  for (const assay::GgufTensor& t : parsed->tensors) {
    if (t.file_offset > size || t.size_bytes > size - t.file_offset) std::abort();
  }
  const auto source = assay::WeightSource::FromGguf(bytes, size, "input");
  if (!source.ok()) std::abort();  // what parses is a source, if one with problems
  for (const assay::WeightPtr& weight : (*source)->weights()) {
    if (weight->rows() == 0 || weight->cols() > (1 << 20)) continue;
    std::vector<float> row(static_cast<size_t>(weight->cols()));
    assay::WeightParts parts;
    for (const int64_t r : {int64_t{0}, weight->rows() - 1}) {
      weight->Decode(r, 1, row.data());
      weight->Parts(r, &parts);
      touched += parts.code.size();
    }
  }
  volatile size_t sink = touched;
  (void)sink;
  return 0;
}
