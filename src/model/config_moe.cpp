// Mixture of experts: layers, numbers and routing.
#include <algorithm>
#include <string>

#include "model/config_sections.h"

namespace assay::config_sections {
namespace {

// The number of routed experts goes by three names; 0 when none is there.
int64_t ReadExpertCount(ConfigReader* r) {
  int64_t count = 0;
  for (const char* key : {"n_routed_experts", "num_local_experts", "num_experts"}) {
    const int64_t value = r->Int(key, 0, kMaxExperts, 0);
    r->RefuseIf(count != 0 && value != 0 && value != count, key,
                "another key of the same meaning says " + std::to_string(count));
    if (value != 0) count = value;
  }
  return count;
}

// Qwen counts layers from 1 for the sparse step; the others have dense layers first.
void ReadMoeLayers(ConfigReader* r, const Defaults& defaults, ModelConfig* config) {
  const size_t n = static_cast<size_t>(config->n_layers);
  config->moe_layer.assign(n, 0);
  if (IsQwenMoe(config->family)) {
    const int64_t step = r->Int("decoder_sparse_step", 1, kMaxLayers, 1);
    const std::vector<int64_t> dense = r->Ints("mlp_only_layers", {});
    for (size_t l = 0; l < n; ++l) {
      const bool listed = std::find(dense.begin(), dense.end(), static_cast<int64_t>(l)) != dense.end();
      config->moe_layer[l] = !listed && (static_cast<int64_t>(l) + 1) % step == 0 ? 1 : 0;
    }
    return;
  }
  r->RefuseIf(r->Int("moe_layer_freq", 1, kMaxLayers, 1) != 1, "moe_layer_freq", "only 1 is implemented");
  const int64_t first = r->Int("first_k_dense_replace", 0, kMaxSize, defaults.first_k_dense);
  for (size_t l = 0; l < n; ++l) config->moe_layer[l] = static_cast<int64_t>(l) >= first ? 1 : 0;
  if (config->family != Family::kGlmMoeDsa || !r->has("mlp_layer_types")) return;
  const std::vector<std::string> types = r->Strings("mlp_layer_types");
  if (types.size() != n) return r->Refuse("mlp_layer_types", "expected one entry a layer, " + std::to_string(n));
  for (size_t l = 0; l < n; ++l) {
    r->RefuseIf(types[l] != "dense" && types[l] != "sparse", "mlp_layer_types", "expected dense or sparse");
    config->moe_layer[l] = types[l] == "sparse" ? 1 : 0;
  }
}

// Only the combinations that transformers computes are let through: other engines read some keys that it ignores.
void ReadRouting(ConfigReader* r, const Defaults& defaults, ModelConfig* config) {
  config->norm_topk_prob = r->Bool("norm_topk_prob", defaults.norm_topk_prob);
  if (IsQwenMoe(config->family)) return;

  config->routed_scaling_factor = r->Number("routed_scaling_factor", 0, 1e9, defaults.routed_scaling_factor);
  const bool v2 = config->family == Family::kDeepseekV2;
  const std::string scoring = r->String("scoring_func", v2 ? "softmax" : "sigmoid");
  r->RefuseIf(scoring != (v2 ? "softmax" : "sigmoid"), "scoring_func", "not implemented for " + r->family());
  const std::string method = r->String("topk_method", v2 ? "greedy" : "noaux_tc");
  if (v2) {
    r->RefuseIf(method != "greedy" && method != "group_limited_greedy", "topk_method",
                "not implemented for deepseek_v2 (greedy and group_limited_greedy are)");
    r->RefuseIf(config->norm_topk_prob, "norm_topk_prob",
                "transformers ignores it for deepseek_v2 and other engines do not: set it to false");
  } else {
    r->RefuseIf(method != "noaux_tc", "topk_method", "not implemented for " + r->family() + " (noaux_tc is)");
    config->scoring_sigmoid = config->correction_bias = config->group_top2_sum = true;
    config->norm_topk_eps = 1e-20;
  }
  const bool grouped = !v2 || method == "group_limited_greedy";
  const int64_t groups = r->Int("n_group", 1, kMaxExperts, defaults.n_group);
  const int64_t kept = r->Int("topk_group", 1, kMaxExperts, defaults.topk_group);
  if (!grouped) return;
  config->n_group = groups;
  config->topk_group = kept;
  const int64_t experts = config->n_routed_experts;
  r->RefuseIf(experts % groups != 0, "n_group", "does not divide the " + std::to_string(experts) + " experts");
  r->RefuseIf(kept > groups, "topk_group", "above n_group = " + std::to_string(groups));
  r->RefuseIf(config->group_top2_sum && experts / groups < 2, "n_group", "leaves fewer than two experts a group");
  r->RefuseIf(kept * (experts / groups) < config->n_experts_per_tok, "topk_group",
              "leaves fewer experts than num_experts_per_tok = " + std::to_string(config->n_experts_per_tok));
}

}  // namespace

// The layers first: a config with experts of which no layer has any is a dense model, and its other keys do not matter.
void ReadMoe(ConfigReader* r, const Defaults& defaults, ModelConfig* config) {
  ReadMoeLayers(r, defaults, config);
  config->n_routed_experts = ReadExpertCount(r);
  const bool any = std::find(config->moe_layer.begin(), config->moe_layer.end(), 1) != config->moe_layer.end();
  if (!any || (config->n_routed_experts == 0 && IsQwenMoe(config->family))) {
    config->n_routed_experts = 0;
    config->moe_layer.clear();
    r->Known({"num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "shared_expert_intermediate_size",
              "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor", "scoring_func", "topk_method"});
    return;
  }
  if (config->n_routed_experts == 0) {
    r->Int("n_routed_experts", 1, kMaxExperts);  // reports it as missing
    return;
  }
  config->n_experts_per_tok = r->Int("num_experts_per_tok", 1, config->n_routed_experts);
  config->moe_intermediate_size = r->Int("moe_intermediate_size", 1, kMaxSize);
  if (config->family == Family::kQwen2Moe) {
    config->n_shared_experts = 1;
    config->shared_intermediate_size = r->Int("shared_expert_intermediate_size", 1, kMaxSize);
    config->shared_expert_gate = true;
  } else if (config->family != Family::kQwen3Moe) {
    config->n_shared_experts = r->Int("n_shared_experts", 1, 4096, defaults.n_shared_experts);
    config->shared_intermediate_size = config->n_shared_experts * config->moe_intermediate_size;
  }
  ReadRouting(r, defaults, config);
}

}  // namespace assay::config_sections
