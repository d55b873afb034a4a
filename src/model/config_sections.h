// The sections of config.json, a file each, and what they share: the families' defaults and the bounds of sizes. Each
// reads its keys through the ConfigReader, whose first error sticks, and fills its part of the ModelConfig.
#pragma once

#include <cstdint>
#include <vector>

#include "io/json.h"
#include "model/config.h"
#include "model/config_reader.h"

namespace assay::config_sections {

// Bounds that keep every product of two sizes far from overflow; real models stay below a tenth of them.
inline constexpr int64_t kMaxSize = int64_t{1} << 24;
inline constexpr int64_t kMaxHeadSize = int64_t{1} << 16;
inline constexpr int64_t kMaxLayers = 4096;
inline constexpr int64_t kMaxExperts = int64_t{1} << 16;
inline constexpr int64_t kMaxPositions = int64_t{1} << 40;

// What differs between families where a key is absent, or where there is no key at all.
struct Defaults {
  double rms_norm_eps = 1e-6;
  int64_t n_kv_heads = 0;  // 0: as many as heads
  int64_t head_dim = 0;    // 0: hidden_size / heads
  double partial_rotary_factor = 1.0;
  // Layers before the first with experts.
  int64_t first_k_dense = 0;
  int64_t n_shared_experts = 0;         // beside the routed ones, for every token
  int64_t n_group = 1, topk_group = 1;  // groups of experts; of them stay
  double routed_scaling_factor = 1.0;   // of the experts' weights
  bool norm_topk_prob = false;          // weights of the chosen experts sum to 1
  int64_t bos_token_id = -1;
  std::vector<int64_t> eos_token_ids;
};

// Latent attention, experts under Qwen's names, experts at all.
inline bool IsMla(Family family) {
  return family == Family::kDeepseekV2 || family == Family::kDeepseekV3 || family == Family::kGlmMoeDsa;
}
inline bool IsQwenMoe(Family family) { return family == Family::kQwen2Moe || family == Family::kQwen3Moe; }
inline bool HasExperts(Family family) { return IsMla(family) || family == Family::kGlm4Moe || IsQwenMoe(family); }

// Head sizes, biases, norms and latents; needs the model's own sizes to be read. Windows need the layers' number too.
void ReadMla(ConfigReader* r, ModelConfig* config);
void ReadGqa(ConfigReader* r, const Defaults& defaults, ModelConfig* config);
void ReadWindow(ConfigReader* r, ModelConfig* config);
// Which layers have experts, how many, and the arithmetic of the router.
void ReadMoe(ConfigReader* r, const Defaults& defaults, ModelConfig* config);
// root: the whole file, which top reads. Needs max_position_embeddings.
void ReadRope(ConfigReader* top, const Json& root, const Defaults& defaults, ModelConfig* config);

}  // namespace assay::config_sections
