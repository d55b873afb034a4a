// The native reference runtime: prefill and decode of a decoder model on the CPU, every canonical site observed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "io/safetensors.h"
#include "model/config.h"
#include "probe/recorder.h"
#include "quant/weight_source.h"

namespace assay {

// How MLA is computed; both give the same function (runner_mla.cpp).
enum class AttentionPath : uint8_t { kMaterialised, kAbsorbed };
// kBF16: float arithmetic, rounded where eager bf16 code stores a tensor (numerics.h).
enum class ComputeDType : uint8_t { kF32, kF64, kBF16 };
enum class KvDType : uint8_t { kAuto, kF32, kBF16, kFp8E4M3 };  // kAuto: as the run computes

// Checked by Engine::Create; a planted fault may raise some of them to what it needs.
struct EngineOptions {
  AttentionPath path = AttentionPath::kMaterialised;  // MLA only; MHA/GQA models have one path
  ComputeDType dtype = ComputeDType::kF32;
  KvDType kv_dtype = KvDType::kAuto;
  double kv_scale = 0;              // fp8: dequantised = code * scale; 0: amax of a layer's first rows / 448
  int shards = 1;                   // tensor-parallel ranks in lock-step, reductions explicit
  int64_t chunk = 0;                // prefill chunk in tokens, 0: in one piece; chunks merge by LSE
  int64_t block_size = 16;          // of the paged cache
  int64_t max_batch_tokens = 8192;  // rows a step
  bool prefix_cache = false;        // equal prompt prefixes share full blocks
  bool sequential = false;          // one request after the other, instead of batched
  int threads = 1;                  // of the kernels
  int64_t max_tokens = 16;          // to generate for each prompt
  double temperature = 0;           // 0: greedy
  uint64_t seed = 0;                // of the draws, with temperature > 0
  bool ignore_eos = false;          // end tokens do not end a generation
  bool stream = false;              // drop weights after use; set by itself when they would fill half of memory
  bool all_logits = false;          // logits of every row, not only of those that choose a token
  int64_t first_layer = 0, last_layer = -1;  // half-open [first, last); last -1: all
  std::string layer_input_trace;             // payload of "layers.(first-1).out" when first_layer > 0
  std::string fault;  // "NAME" or "NAME@layer"; empty: none. "none:NAME" sets up what NAME needs, plants nothing
};

// Ids in [0, vocab_size); tokens must not be empty.
struct PromptInput {
  std::vector<int64_t> tokens;
  std::vector<int64_t> forced;  // continuation to follow instead of sampling (--like); empty: sample
};

struct Generation {
  std::vector<int64_t> tokens;  // generated, without the prompt
  bool stopped = false;         // by an end token
};

// Of the last call of Generate. A step that has prompt rows counts as prefill with all its rows.
struct RunStats {
  double prefill_seconds = 0, decode_seconds = 0;  // wall clock, recording included
  int64_t prefill_tokens = 0, decode_tokens = 0;
  // Tokens that were chosen from logits with NaN or +inf among them, and the first of these.
  int64_t nonsense_choices = 0, nonsense_prompt = -1, nonsense_position = -1;
};

// Sees each row of logits as it is computed: prompt number, position of the row, values (bf16 and f32 runs widened).
using LogitsSink = std::function<void(int64_t prompt, int64_t position, std::span<const double> logits)>;

// recorder may be null. Deterministic for given options and thread count. kUsage: options that do not fit the model
// or each other; kUsage with "changed nothing" when a planted fault had no effect.
class Engine {
 public:
  static Result<std::unique_ptr<Engine>> Create(std::shared_ptr<const WeightSource> source, const ModelConfig& config,
                                                const EngineOptions& options);
  static Result<std::unique_ptr<Engine>> Create(std::shared_ptr<const Checkpoint> checkpoint, const ModelConfig& config,
                                                const EngineOptions& options);
  ~Engine();
  // One entry a prompt; a planted fault that needs a second prompt adds one, and its generation, at the end. With a
  // fault planted the clean twin runs first, unrecorded. May be called again; every call starts with an empty cache.
  Result<std::vector<Generation>> Generate(const std::vector<PromptInput>& prompts, Recorder* recorder,
                                           const LogitsSink& sink = nullptr);
  // The options and the model as they run, with what a fault needs set up.
  const EngineOptions& options() const;
  const ModelConfig& config() const;
  // For ProcessInfo::meta: engine, path, dtypes, shards, model.* and the like. A fault may cut these prompts into
  // chunks.
  std::vector<std::pair<std::string, std::string>> Describe(const std::vector<PromptInput>& prompts = {}) const;
  const RunStats& stats() const;

 private:
  Engine();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace assay
