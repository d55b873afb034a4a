// How the tensors of a checkpoint become weights. Internal to the source.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "io/gguf.h"
#include "io/json.h"
#include "quant/weight_source.h"

namespace assay {

// Classes of a tensor that is no weight: its parts do not fit together; a part is missing; it is of a known format that
// nothing here decodes, which is no fault.
inline constexpr std::string_view kOfLayout = "Q-LAYOUT", kOfLoad = "LOAD", kOfNoFault = "";

// What a source consists of while it is put together.
// Owned by the source that is being made; `weights` borrow its mapped bytes.
struct WeightAssembly {
  std::map<std::string, WeightPtr> weights;  // by logical name, "model.layers.0.self_attn.o_proj.weight"
  std::vector<WeightProblem> problems;       // tensors that are there and cannot be decoded, with the reason
  std::vector<std::string> others;           // tensors that no decoder took for a weight

  // A weight, or what kept it from being one, of class `cls` (WeightProblem::cls).
  void Add(const std::string& name, Result<WeightPtr> weight, std::string_view cls = kOfLayout);
};

// quantization_config as far as the decoders need it. All optional.
// Where a tensor's own companions already say it, these are not asked.
struct QuantSettings {
  std::string method;  // quant_method
  int bits = 4;
  int64_t block_rows = 0, block_cols = 0;  // weight_block_size or block_structure
  int64_t group_size = 0;
  bool zero_points = false, act_order = false;  // of packed integers: companions that must be there
  bool gptq_v2 = false;
};
// config: the whole config.json. Keys of another type than expected count as absent.
QuantSettings ReadQuantSettings(const Json& config);

// Groups the tensors of one logical weight (codes, scales, zero points, permutations) by the suffixes of the format and
// adds a decoder for each; everything else is a plain weight. The tensors' data is borrowed.

// tensors: ascending name.
void AssembleSafetensors(const std::vector<CheckpointTensor>& tensors, const QuantSettings& settings,
                         WeightAssembly* out);

// GGUF: tensors as CheckpointTensor (logical shape, dtype unset), types beside them.
// What the assembler needs of the metadata. Counts of 0: the file does not say.
struct GgufParts {
  std::string architecture;
  int64_t n_heads = 0, n_kv_heads = 0;
};
void AssembleGguf(const std::vector<CheckpointTensor>& tensors, const std::vector<uint32_t>& types,
                  const GgufParts& parts, WeightAssembly* out);
// config.json of the model that the metadata describes; null when its architecture is not known.
Json ConfigFromGguf(const GgufFile& file, const std::vector<CheckpointTensor>& tensors);
// Heads: for the order of rows of llama's queries and keys; 0 when the file does not say.
GgufParts PartsFromGguf(const GgufFile& file);

}  // namespace assay
