// config.json of a decoder checkpoint, with the family's defaults for the keys that it lacks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace assay {

enum class Family : uint8_t { kDeepseekV2, kDeepseekV3, kGlm4Moe, kGlmMoeDsa, kLlama, kQwen2, kQwen3, kQwen2Moe, kQwen3Moe, kGlm4 };
enum class RopeKind : uint8_t { kDefault, kLinear, kYarn, kLlama3 };

struct RopeConfig {
  RopeKind kind = RopeKind::kDefault;
  double theta = 10000.0;
  double factor = 1.0;
  double original_max_position = 0;
  double beta_fast = 32, beta_slow = 1;
  double mscale = 0, mscale_all_dim = 0;
  double attention_factor = 0;      // 0: by formula
  double low_freq_factor = 1, high_freq_factor = 4;
  double partial_rotary_factor = 1.0;
  bool truncate = true;
  bool interleaved = false;         // pairing (2i, 2i+1); false: (i, i + d/2)
};

struct ModelConfig {
  Family family = Family::kDeepseekV3;
  std::string model_type;
  int64_t hidden_size = 0, n_layers = 0, vocab_size = 0, intermediate_size = 0;
  int64_t n_heads = 0, n_kv_heads = 0, head_dim = 0;
  double rms_norm_eps = 1e-6;
  bool tie_word_embeddings = false, attention_bias = false, o_bias = false, qk_norm = false;
  // MLA; kv_lora_rank 0: not MLA. q_lora_rank 0: plain q_proj.
  int64_t kv_lora_rank = 0, q_lora_rank = 0, qk_nope_head_dim = 0, qk_rope_head_dim = 0, v_head_dim = 0;
  RopeConfig rope;
  // Sliding window: 0 none; layer l is windowed when layer_windowed[l] (empty: all layers when window > 0).
  int64_t sliding_window = 0;
  std::vector<uint8_t> layer_windowed;
  // MoE; n_routed_experts 0: dense. moe_layer[l] tells which layers are MoE.
  int64_t n_routed_experts = 0, n_experts_per_tok = 0, n_shared_experts = 0, moe_intermediate_size = 0;
  int64_t shared_intermediate_size = 0;  // of all shared experts together
  bool shared_expert_gate = false;       // qwen2_moe: sigmoid gate on the shared expert
  int64_t n_group = 1, topk_group = 1;
  bool scoring_sigmoid = false, correction_bias = false, norm_topk_prob = false, group_top2_sum = false;
  double routed_scaling_factor = 1.0;
  std::vector<uint8_t> moe_layer;
  int64_t bos_token_id = -1;
  std::vector<int64_t> eos_token_ids;
  std::string dtype;  // of the checkpoint as declared

  bool mla() const { return kv_lora_rank > 0; }
  int64_t qk_head_dim() const { return mla() ? qk_nope_head_dim + qk_rope_head_dim : head_dim; }
};

// path: config.json. kBadInput names the file and key: a missing key without a default, a value of the wrong type or
// out of range, an unknown family, or a combination that is not implemented. Nothing is guessed.
Result<ModelConfig> LoadModelConfig(const std::string& path);
// overrides: "key=value" strings in JSON syntax, applied to the parsed JSON first ("rope_parameters.factor=4").
Result<ModelConfig> LoadModelConfig(const std::string& path, const std::vector<std::string>& overrides);

}  // namespace assay
