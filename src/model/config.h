// config.json of a decoder checkpoint, with the family's defaults for the keys that it lacks, and the two derived
// quantities that implementations get wrong most often: the RoPE frequencies and the softmax scale.
//
// A key that would change the arithmetic and is not implemented is refused by name; it is never ignored silently.
// What is ignored on purpose (a sparse-attention indexer, draft layers) is said in ModelConfig::notes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace assay {

enum class Family : uint8_t {
  kDeepseekV2,
  kDeepseekV3,  // kimi_k2 is the same architecture under another name
  kGlm4Moe,
  kGlmMoeDsa,  // GLM-5; its attention is computed dense
  kLlama,
  kQwen2,
  kQwen3,
  kQwen2Moe,
  kQwen3Moe,
  kGlm4,
  kMistral,
};
std::string_view NameOf(Family family);  // the model_type, "deepseek_v3"

enum class RopeKind : uint8_t { kDefault, kLinear, kYarn, kLlama3 };

// The keys of rope_parameters (or of the older rope_scaling and rope_theta) as they apply to this family.
// Formulas: Peng et al., YaRN, sections 3.2 to 3.4; transformers, modeling_rope_utils.py.
struct RopeConfig {
  RopeKind kind = RopeKind::kDefault;
  double theta = 10000.0;                 // base of the frequencies
  double factor = 1.0;                    // of the context length
  double original_max_position = 0;       // of the unscaled model, in tokens
  double beta_fast = 32, beta_slow = 1;   // YaRN: turns in the original context between which pairs are blended
  double mscale = 0, mscale_all_dim = 0;  // 0: absent
  double attention_factor = 0;            // 0: by formula
  double low_freq_factor = 1, high_freq_factor = 4;  // llama3: the same by wavelength
  double partial_rotary_factor = 1.0;                // the first int(d * factor) channels of a head are rotated
  bool truncate = true;                              // YaRN: the blended range has whole channel numbers as its ends
  bool interleaved = false;                          // pairing (2i, 2i+1); false: (i, i + d/2)
};

struct ModelConfig {
  Family family = Family::kDeepseekV3;
  std::string model_type;  // as the file has it: "kimi_k2"
  int64_t hidden_size = 0, n_layers = 0, vocab_size = 0, intermediate_size = 0;
  int64_t n_heads = 0, n_kv_heads = 0;  // query heads, and key heads that n_heads / n_kv_heads of them share
  int64_t head_dim = 0;                 // MLA: qk_rope_head_dim
  int64_t max_position_embeddings = 0;  // in tokens
  double rms_norm_eps = 1e-6;
  double latent_norm_eps = 1e-6;     // of q_a_layernorm and kv_a_layernorm: 1e-6 whatever rms_norm_eps says
  bool tie_word_embeddings = false;  // the head is the embedding's weight
  bool attention_bias = false;       // on q, k, v (MLA: on q_a and kv_a)
  bool o_bias = false;               // on the output projection
  bool qk_norm = false;              // RMSNorm over head_dim on q and k, before RoPE, with rms_norm_eps
  bool sandwich_norm = false;  // glm4: a further norm after o_proj and one after the FFN, before each residual add
  // MLA; kv_lora_rank 0: not MLA. q_lora_rank 0: plain q_proj.
  int64_t kv_lora_rank = 0, q_lora_rank = 0, qk_nope_head_dim = 0, qk_rope_head_dim = 0, v_head_dim = 0;
  RopeConfig rope;
  // Sliding window: 0 none; layer l is windowed when layer_windowed[l] (empty: all layers when window > 0).
  // A windowed query at position p sees keys p - sliding_window + 1 .. p.
  int64_t sliding_window = 0;
  std::vector<uint8_t> layer_windowed;
  // MoE; n_routed_experts 0: dense. moe_layer[l] tells which layers are MoE (size n_layers).
  int64_t n_routed_experts = 0, n_experts_per_tok = 0, n_shared_experts = 0, moe_intermediate_size = 0;
  int64_t shared_intermediate_size = 0;  // of all shared experts together
  bool shared_expert_gate = false;       // qwen2_moe: sigmoid gate on the shared expert
  // Routing. scores = scoring_sigmoid ? sigmoid(logits) : softmax(logits); selection uses scores (+ correction bias);
  // n_group > 1: a group's score is the sum of its two best (group_top2_sum) or its best, the topk_group best groups
  // stay; the k best experts win; weights are the scores without the bias, divided by (their sum + norm_topk_eps) if
  // norm_topk_prob, then multiplied by routed_scaling_factor.
  int64_t n_group = 1, topk_group = 1;
  bool scoring_sigmoid = false, correction_bias = false, norm_topk_prob = false, group_top2_sum = false;
  double norm_topk_eps = 0;
  double routed_scaling_factor = 1.0;
  std::vector<uint8_t> moe_layer;
  int64_t bos_token_id = -1;           // -1: none
  std::vector<int64_t> eos_token_ids;  // any of them ends a generation
  std::string dtype;                   // of the checkpoint as declared
  std::vector<std::string> notes;      // what of the config is left out on purpose, one sentence each

  bool mla() const { return kv_lora_rank > 0; }
  int64_t qk_head_dim() const { return mla() ? qk_nope_head_dim + qk_rope_head_dim : head_dim; }
  int64_t value_head_dim() const { return mla() ? v_head_dim : head_dim; }
  bool windowed(int64_t layer) const {
    return sliding_window > 0 && (layer_windowed.empty() || layer_windowed[static_cast<size_t>(layer)] != 0);
  }
  bool is_moe(int64_t layer) const { return !moe_layer.empty() && moe_layer[static_cast<size_t>(layer)] != 0; }
};

// path: config.json, or the folder that holds it. kBadInput names the file and key: a missing key without a default, a
// value of the wrong type or out of range, an unknown family, or a combination that is not implemented.
Result<ModelConfig> LoadModelConfig(const std::string& path);
// overrides: "key=value" strings in JSON syntax, applied to the parsed JSON first ("rope_parameters.factor=4"; a value
// that is not JSON is taken as a string; null counts as absent, as in the file). kUsage: an override without "=".
Result<ModelConfig> LoadModelConfig(const std::string& path, const std::vector<std::string>& overrides);
// The same from bytes; what names them in messages.
Result<ModelConfig> ParseModelConfig(std::string_view json, std::string_view what,
                                     const std::vector<std::string>& overrides = {});

// Rotation angles: position p turns pair i by p * inv_freq[i]; cos and sin are then multiplied by scaling.
struct RopeTable {
  int64_t rotary_dim = 0;        // channels rotated (MLA: qk_rope_head_dim), even; the rest of a head passes through
  std::vector<double> inv_freq;  // rotary_dim / 2
  double scaling = 1.0;          // YaRN attention factor; 1 for the other kinds
};
RopeTable MakeRopeTable(const ModelConfig& config);
// Factor on q.k before softmax: qk_head_dim^-0.5, for MLA families with scaled RoPE and mscale_all_dim times
// (0.1 mscale_all_dim ln(factor) + 1)^2.
double SoftmaxScale(const ModelConfig& config);

}  // namespace assay
