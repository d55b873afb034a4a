// A checkpoint as logical weights: safetensors with config.json and its quantization_config, or GGUF. Every weight is
// under the name that transformers gives it ("model.layers.3.mlp.down_proj.weight"), whatever the file calls it, and
// in transformers' order of rows (ggml's permutation of llama's query and key rows is undone).
//
// A tensor that cannot be decoded is no error of the source: it is listed in problems(), so that an audit can report it
// and a reader of other weights need not care.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "io/json.h"
#include "quant/weight.h"

namespace assay {

struct WeightProblem {
  std::string name;  // logical
  std::string cls;   // class of the case bank: "Q-LAYOUT", "LOAD"; empty: of a format that is not decoded, no fault
  std::string what;  // the whole message, with file and offset
  bool of_experts = false;  // of experts that lie together: "*" in the name stands for the number of each
};

// Owns the mapped files that its weights decode from: keep it while a weight is used.
class WeightSource {
 public:
  // path: a folder (safetensors, or else GGUF), a .safetensors or index file, or a .gguf file (the first of a split
  // model: its fellows are opened too). kBadInput, kEnvironment as the readers say.
  static Result<std::shared_ptr<const WeightSource>> Open(const std::string& path);
  // Plain or quantised safetensors that are open already; config.json's content, or null.
  static std::shared_ptr<const WeightSource> FromCheckpoint(std::shared_ptr<const Checkpoint> checkpoint,
                                                            const Json& config);
  // A GGUF file in memory, for tests and fuzzing; bytes outlive the source.
  static Result<std::shared_ptr<const WeightSource>> FromGguf(const std::byte* data, uint64_t size_bytes,
                                                              const std::string& file);
  ~WeightSource();

  const std::string& path() const;
  bool is_gguf() const;
  // config.json, or its equivalent made of a GGUF file's metadata; null when there is none.
  const Json& config() const;
  std::string config_file() const;  // for messages
  // Ascending name.
  const std::vector<WeightPtr>& weights() const;
  const Weight* find(std::string_view name) const;  // nullptr when absent or undecodable
  const std::vector<WeightProblem>& problems() const;
  // Stored tensors that are neither a weight nor a part of one (activation scales, rotary tables), by name.
  const std::vector<std::string>& others() const;
  // Stored tensors as they lie in the files.
  const std::vector<CheckpointTensor>& stored() const;

 private:
  WeightSource();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// What kept the weight `name` from being one; nullptr: nothing. A problem of experts that lie together
// ("….experts.*.up_proj.weight") is one of each, and one of NAME is one of its companions, NAME.absmax. Names come out
// of files: what stands in them is no pattern.
const WeightProblem* FindProblem(const WeightSource& source, const std::string& name);

// The name under which a trace has a weight: "layers.3.mlp.down_proj.weight" for
// "model.layers.3.mlp.down_proj.weight", self_attn as attn, "lm_head.weight", "embed_tokens.weight", "norm.weight".
std::string CanonicalWeightName(std::string_view checkpoint_name);

}  // namespace assay
