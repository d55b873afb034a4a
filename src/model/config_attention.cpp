// Latent, multi-head and grouped-query attention, and sliding windows.
#include <algorithm>
#include <string>

#include "model/config_sections.h"

namespace assay::config_sections {

// Keys and shapes: DeepSeek-V2 (arXiv 2405.04434), section 2.1. Latent norms have 1e-6 whatever rms_norm_eps says.
void ReadMla(ConfigReader* r, ModelConfig* config) {
  config->kv_lora_rank = r->Int("kv_lora_rank", 1, kMaxSize);
  config->qk_nope_head_dim = r->Int("qk_nope_head_dim", 1, kMaxHeadSize);
  config->qk_rope_head_dim = r->Int("qk_rope_head_dim", 2, kMaxHeadSize);
  config->v_head_dim = r->Int("v_head_dim", 1, kMaxHeadSize);
  // An explicit null means "no query latent"; an absent key would mean the family's 1536, which nobody intends.
  config->q_lora_rank = r->has("q_lora_rank") || !r->present("q_lora_rank") ? r->Int("q_lora_rank", 1, kMaxSize) : 0;
  r->RefuseIf(config->family == Family::kGlmMoeDsa && config->q_lora_rank == 0, "q_lora_rank",
              "glm_moe_dsa has a query latent");
  config->head_dim = config->qk_rope_head_dim;
  config->n_kv_heads = config->n_heads;
  r->RefuseIf(r->Int("num_key_value_heads", 1, kMaxSize, config->n_heads) != config->n_heads, "num_key_value_heads",
              "MLA has as many key as query heads");
  config->attention_bias = config->o_bias = r->Bool("attention_bias", false);
  r->Known({"head_dim", "qk_head_dim"});
  if (config->family == Family::kGlmMoeDsa) {
    const int64_t topk = r->Int("index_topk", 1, kMaxPositions, 2048);
    r->Known({"index_head_dim", "index_n_heads", "indexer_types", "index_topk_freq", "index_topk_pattern",
              "index_skip_topk_offset", "indexer_rope_interleave"});
    config->notes.push_back("attention is dense: the indexer is left out, which changes nothing up to index_topk = " +
                            std::to_string(topk) + " tokens of context");
  }
}

// An explicit null for the kv heads means as many as query heads, as in transformers; an absent key the family's
// default.
void ReadGqa(ConfigReader* r, const Defaults& defaults, ModelConfig* config) {
  const bool null_kv_heads = r->present("num_key_value_heads") && !r->has("num_key_value_heads");
  const int64_t kv_default = null_kv_heads || defaults.n_kv_heads == 0 ? config->n_heads : defaults.n_kv_heads;
  config->n_kv_heads = r->Int("num_key_value_heads", 1, kMaxSize, kv_default);
  r->RefuseIf(config->n_heads % config->n_kv_heads != 0, "num_key_value_heads",
              "does not divide num_attention_heads = " + std::to_string(config->n_heads));
  config->head_dim = r->Int("head_dim", 2, kMaxHeadSize, defaults.head_dim);
  if (config->head_dim == 0) {
    r->RefuseIf(
        config->hidden_size % config->n_heads != 0, "hidden_size",
        "not a multiple of num_attention_heads = " + std::to_string(config->n_heads) + ", and head_dim is not there");
    config->head_dim = config->hidden_size / config->n_heads;
  }
  // Which of q, k, v and o have a bias no key says alike: the families' own code decides.
  switch (config->family) {
    case Family::kQwen2:
      config->attention_bias = true;
      r->Known({"attention_bias"});
      break;
    case Family::kQwen2Moe:
      config->attention_bias = r->Bool("qkv_bias", true);
      r->Known({"attention_bias"});
      break;
    case Family::kMistral:
      r->RefuseIf(r->Bool("attention_bias", false), "attention_bias", "mistral has none");
      break;
    case Family::kGlm4Moe:
      config->attention_bias = r->Bool("attention_bias", false);
      config->qk_norm = r->Bool("use_qk_norm", false);
      break;
    case Family::kGlm4:
      config->attention_bias = r->Bool("attention_bias", true);
      config->sandwich_norm = true;
      break;
    default:
      config->attention_bias = config->o_bias = r->Bool("attention_bias", false);
  }
  if (config->family == Family::kQwen3 || config->family == Family::kQwen3Moe) config->qk_norm = true;
}

// Families without windows must not ask for one: a window that is ignored gives wrong results beyond its length only.
void ReadWindow(ConfigReader* r, ModelConfig* config) {
  const bool mistral = config->family == Family::kMistral;
  const bool qwen = config->family == Family::kQwen2 || config->family == Family::kQwen3 || IsQwenMoe(config->family);
  const std::vector<std::string> types = r->Strings("layer_types");
  const size_t n = static_cast<size_t>(config->n_layers);
  if (!types.empty() && config->family != Family::kGlmMoeDsa) {
    r->RefuseIf(types.size() != n, "layer_types", "expected one entry a layer, " + std::to_string(n));
    for (const std::string& type : types) {
      r->RefuseIf(type != "full_attention" && type != "sliding_attention", "layer_types",
                  "\"" + type + "\" is not implemented (full_attention and sliding_attention are)");
    }
  }
  const bool any_sliding = std::find(types.begin(), types.end(), "sliding_attention") != types.end();
  if (!mistral && !qwen) {
    r->RefuseIf(r->has("sliding_window") && r->Int("sliding_window", 0, kMaxPositions, 0) != 0 &&
                    r->Bool("use_sliding_window", true),
                "sliding_window", r->family() + " has no sliding window");
    r->RefuseIf(any_sliding, "layer_types", r->family() + " has no sliding window");
    return;
  }
  // mistral: null means no window; qwen: use_sliding_window decides.
  const bool on =
      mistral ? !(r->present("sliding_window") && !r->has("sliding_window")) : r->Bool("use_sliding_window", false);
  const int64_t window = r->Int("sliding_window", 0, kMaxPositions, 4096);
  const int64_t first = r->Int("max_window_layers", 0, kMaxPositions, 28);
  if (!on || window == 0) {
    r->RefuseIf(any_sliding, "layer_types", "sliding_attention without a sliding_window in use");
    return;
  }
  config->sliding_window = window;
  const bool by_types = config->family != Family::kQwen3Moe && !mistral;
  if (!by_types) {  // every layer, whatever layer_types says: do not let it say something else
    r->RefuseIf(!types.empty() && std::find(types.begin(), types.end(), "full_attention") != types.end(), "layer_types",
                r->family() + " windows every layer");
    return;
  }
  for (int64_t l = 0; l < config->n_layers; ++l) {
    // Without layer_types: qwen2 and qwen3 window the layers from max_window_layers on, qwen2_moe every other one below
    // it.
    bool windowed = config->family == Family::kQwen2Moe ? (l % 2 == 0 && l < first) : l >= first;
    if (types.size() == n) windowed = types[static_cast<size_t>(l)] == "sliding_attention";
    config->layer_windowed.push_back(windowed ? 1 : 0);
  }
}

}  // namespace assay::config_sections
