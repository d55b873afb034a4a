#include "model/config.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>

#include "io/json.h"
#include "io/text_file.h"
#include "model/config_reader.h"

namespace assay {
namespace {

constexpr uint64_t kMaxConfigBytes = 16u << 20;
// Bounds that keep every product of two sizes far from overflow; real models stay below a tenth of them.
constexpr int64_t kMaxSize = int64_t{1} << 24;
constexpr int64_t kMaxHeadSize = int64_t{1} << 16;
constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxExperts = int64_t{1} << 16;
constexpr int64_t kMaxPositions = int64_t{1} << 40;

struct FamilyName {
  std::string_view model_type;
  Family family;
};

constexpr std::array<FamilyName, 12> kFamilies{{
    {"deepseek_v2", Family::kDeepseekV2},
    {"deepseek_v3", Family::kDeepseekV3},
    {"kimi_k2", Family::kDeepseekV3},
    {"glm4_moe", Family::kGlm4Moe},
    {"glm_moe_dsa", Family::kGlmMoeDsa},
    {"llama", Family::kLlama},
    {"qwen2", Family::kQwen2},
    {"qwen3", Family::kQwen3},
    {"qwen2_moe", Family::kQwen2Moe},
    {"qwen3_moe", Family::kQwen3Moe},
    {"glm4", Family::kGlm4},
    {"mistral", Family::kMistral},
}};

// What differs between families where a key is absent, or where there is no key at all.
struct Defaults {
  double rms_norm_eps = 1e-6;
  int64_t n_kv_heads = 0;  // 0: as many as heads
  int64_t head_dim = 0;    // 0: hidden_size / heads
  double partial_rotary_factor = 1.0;
  int64_t first_k_dense = 0;
  int64_t n_shared_experts = 0;
  int64_t n_group = 1, topk_group = 1;
  double routed_scaling_factor = 1.0;
  bool norm_topk_prob = false;
  int64_t bos_token_id = -1;
  std::vector<int64_t> eos_token_ids;
};

Defaults DefaultsOf(Family family) {
  Defaults d;
  switch (family) {
    case Family::kDeepseekV2:
      d.n_shared_experts = 2;
      d.bos_token_id = 1;
      d.eos_token_ids = {2};
      break;
    case Family::kDeepseekV3:
      d.first_k_dense = 3;
      d.n_shared_experts = 1;
      d.n_group = 8;
      d.topk_group = 4;
      d.routed_scaling_factor = 2.5;
      d.norm_topk_prob = true;
      d.bos_token_id = 0;
      d.eos_token_ids = {1};
      break;
    case Family::kGlm4Moe:
      d.rms_norm_eps = 1e-5;
      d.n_kv_heads = 8;
      d.partial_rotary_factor = 0.5;
      d.first_k_dense = 1;
      d.n_shared_experts = 1;
      d.norm_topk_prob = true;
      break;
    case Family::kGlmMoeDsa:
      d.rms_norm_eps = 1e-5;
      d.first_k_dense = 3;
      d.n_shared_experts = 1;
      d.routed_scaling_factor = 2.5;
      d.norm_topk_prob = true;
      d.bos_token_id = 0;
      d.eos_token_ids = {1};
      break;
    case Family::kGlm4:
      d.rms_norm_eps = 1.5625e-7;
      d.n_kv_heads = 2;
      d.head_dim = 128;
      d.partial_rotary_factor = 0.5;
      d.eos_token_ids = {151329, 151336, 151338};
      break;
    case Family::kLlama:
      d.bos_token_id = 1;
      d.eos_token_ids = {2};
      break;
    case Family::kMistral:
      d.n_kv_heads = 8;
      d.bos_token_id = 1;
      d.eos_token_ids = {2};
      break;
    case Family::kQwen2:
      d.n_kv_heads = 32;
      break;
    case Family::kQwen3:
      d.n_kv_heads = 32;
      d.head_dim = 128;
      break;
    case Family::kQwen2Moe:
      d.n_kv_heads = 16;
      break;
    case Family::kQwen3Moe:
      d.n_kv_heads = 4;
      break;
  }
  return d;
}

bool IsMla(Family family) {
  return family == Family::kDeepseekV2 || family == Family::kDeepseekV3 || family == Family::kGlmMoeDsa;
}

bool IsQwenMoe(Family family) { return family == Family::kQwen2Moe || family == Family::kQwen3Moe; }

bool HasExperts(Family family) { return IsMla(family) || family == Family::kGlm4Moe || IsQwenMoe(family); }

// ---- RoPE ------------------------------------------------------------------------------------------------------

// Both styles: rope_parameters holding everything, and rope_scaling with rope_theta beside it.
void ReadRope(ConfigReader* top, const Json& root, const Defaults& defaults, ModelConfig* config) {
  RopeConfig& rope = config->rope;
  const Json* parameters = top->find("rope_parameters");
  const Json* scaling = top->find("rope_scaling");
  if (parameters != nullptr && scaling != nullptr && *parameters != *scaling) {
    return top->Refuse("rope_scaling", "rope_parameters is there too and says something else: keep one of them");
  }
  const char* const key = scaling != nullptr ? "rope_scaling" : "rope_parameters";
  const Json empty = Json::object();
  const Json& object = scaling != nullptr ? *scaling : parameters != nullptr ? *parameters : empty;
  if (!object.is_object()) return top->Refuse(key, "expected an object");

  ConfigReader r(object, top->where() + ": " + key, top->family());
  const double theta = top->Number("rope_theta", 1e-3, 1e15, 10000.0);
  rope.theta = r.Number("rope_theta", 1e-3, 1e15, theta);
  const double partial = top->Number("partial_rotary_factor", 0, 1, defaults.partial_rotary_factor);
  rope.partial_rotary_factor = r.Number("partial_rotary_factor", 0, 1, partial);

  const std::string type = r.String("type", ""), rope_type = r.String("rope_type", type.empty() ? "default" : type);
  r.RefuseIf(!type.empty() && type != rope_type, "type", "rope_type is there too and says \"" + rope_type + "\"");
  if (rope_type == "default") {
    rope.kind = RopeKind::kDefault;
  } else if (rope_type == "linear") {
    rope.kind = RopeKind::kLinear;
  } else if (rope_type == "yarn") {
    rope.kind = RopeKind::kYarn;
  } else if (rope_type == "llama3") {
    rope.kind = RopeKind::kLlama3;
  } else {
    r.Refuse(r.has("rope_type") ? "rope_type" : "type", "not implemented (default, linear, yarn and llama3 are)");
  }

  if (rope.kind != RopeKind::kDefault) {
    const double max_position = static_cast<double>(config->max_position_embeddings);
    const double original = top->Number("original_max_position_embeddings", 1, static_cast<double>(kMaxPositions), 0);
    rope.original_max_position =
        r.Number("original_max_position_embeddings", 1, static_cast<double>(kMaxPositions), max_position);
    if (original > 0) rope.original_max_position = original;  // transformers gives the outer key priority
    r.RefuseIf(rope.kind != RopeKind::kLinear && rope.original_max_position < 1, "original_max_position_embeddings",
               "needed, and max_position_embeddings is not there to stand in for it");
    const double ratio = rope.original_max_position >= 1 ? max_position / rope.original_max_position : 0;
    const bool by_ratio = rope.kind == RopeKind::kYarn && !r.has("factor") && ratio >= 1;
    rope.factor = by_ratio ? ratio : r.Number("factor", 1e-6, 1e9);
  }
  if (rope.kind == RopeKind::kYarn) {
    rope.beta_fast = r.Number("beta_fast", 0, 1e9, 32);
    rope.beta_slow = r.Number("beta_slow", 0, 1e9, 1);
    if (rope.beta_fast == 0) rope.beta_fast = 32;  // transformers: 0 counts as absent
    if (rope.beta_slow == 0) rope.beta_slow = 1;
    r.RefuseIf(rope.beta_slow > rope.beta_fast, "beta_slow", "above beta_fast");
    rope.attention_factor = r.Number("attention_factor", 1e-6, 1e6, 0);
    rope.truncate = r.Bool("truncate", true);
  }
  rope.mscale = r.Number("mscale", 0, 1e6, 0);
  rope.mscale_all_dim = r.Number("mscale_all_dim", 0, 1e6, 0);
  if (rope.kind == RopeKind::kLlama3) {
    rope.low_freq_factor = r.Number("low_freq_factor", 1e-6, 1e6);
    rope.high_freq_factor = r.Number("high_freq_factor", 1e-6, 1e6);
    r.RefuseIf(rope.low_freq_factor >= rope.high_freq_factor, "high_freq_factor", "not above low_freq_factor");
  }
  r.Known({"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate",
           "low_freq_factor", "high_freq_factor"});
  for (const std::string& name : r.unknown()) r.Refuse(name, "unknown RoPE key: it may change the frequencies");
  if (!r.status().ok()) return top->Adopt(r.status());

  const bool glm4 = config->family == Family::kGlm4 || config->family == Family::kGlm4Moe;
  top->RefuseIf(!glm4 && rope.partial_rotary_factor != 1.0,
                FindKey(object, "partial_rotary_factor") != nullptr ? key : "partial_rotary_factor",
                "part rotation is not implemented for " + top->family());
  switch (config->family) {
    case Family::kDeepseekV3:
      rope.interleaved = top->Bool("rope_interleave", true);
      break;
    case Family::kDeepseekV2:
    case Family::kGlmMoeDsa:
    case Family::kGlm4:
      rope.interleaved = true;
      break;
    default:
      rope.interleaved = false;
  }
  if (FindKey(root, "rope_interleave") != nullptr && config->family != Family::kDeepseekV3) {
    top->RefuseIf(top->Bool("rope_interleave", rope.interleaved) != rope.interleaved, "rope_interleave",
                  top->family() + " pairs channels the other way");
  }
}

// ---- Attention -------------------------------------------------------------------------------------------------

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
    bool windowed = config->family == Family::kQwen2Moe ? (l % 2 == 0 && l < first) : l >= first;
    if (types.size() == n) windowed = types[static_cast<size_t>(l)] == "sliding_attention";
    config->layer_windowed.push_back(windowed ? 1 : 0);
  }
}

// ---- Mixture of experts ----------------------------------------------------------------------------------------

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

// ---- The whole file --------------------------------------------------------------------------------------------

// Keys that say nothing about the arithmetic of inference.
void MarkHarmless(ConfigReader* r) {
  r->Known({"model_type",
            "architectures",
            "transformers_version",
            "torch_dtype",
            "dtype",
            "use_cache",
            "auto_map",
            "initializer_range",
            "attention_dropout",
            "pad_token_id",
            "pretraining_tp",
            "output_router_logits",
            "router_aux_loss_coef",
            "aux_loss_alpha",
            "seq_aux",
            "ep_size",
            "_name_or_path",
            "num_nextn_predict_layers",
            "num_mtp_layers",
            "max_window_layers",
            "use_sliding_window",
            "rope_interleave",
            "partial_rotary_factor",
            "original_max_position_embeddings",
            "rope_theta",
            "qk_head_dim",
            "_attn_implementation",
            "unk_token_id",
            "sep_token_id",
            "chunk_size_feed_forward",
            "output_attentions",
            "output_hidden_states",
            "return_dict",
            "is_encoder_decoder",
            "id2label",
            "label2id",
            "problem_type",
            "_attn_implementation_autoset"});
}

ModelConfig ReadConfig(ConfigReader* r, const Json& root, Family family) {
  const Defaults defaults = DefaultsOf(family);
  ModelConfig config;
  config.family = family;
  config.model_type = r->String("model_type", "");
  config.vocab_size = r->Int("vocab_size", 1, kMaxSize);
  config.hidden_size = r->Int("hidden_size", 1, kMaxSize);
  config.intermediate_size = r->Int("intermediate_size", 1, kMaxSize);
  config.n_layers = r->Int("num_hidden_layers", 1, kMaxLayers);
  config.n_heads = r->Int("num_attention_heads", 1, kMaxSize);
  config.max_position_embeddings = r->Int("max_position_embeddings", 1, kMaxPositions, 0);
  config.rms_norm_eps = r->Number("rms_norm_eps", 0, 1, defaults.rms_norm_eps);
  config.tie_word_embeddings = r->Bool("tie_word_embeddings", false);
  config.bos_token_id = r->Int("bos_token_id", 0, kMaxSize, defaults.bos_token_id);
  config.eos_token_ids = r->Ints("eos_token_id", defaults.eos_token_ids);
  config.dtype = r->String("dtype", r->String("torch_dtype", ""));
  r->RefuseIf(r->String("hidden_act", "silu") != "silu", "hidden_act", "only silu is implemented");
  r->RefuseIf(r->Bool("mlp_bias", false), "mlp_bias", "biases in the FFN are not implemented");
  if (r->has("quantization_config")) {
    config.notes.push_back(
        "weights are decoded from their quantised form; activations and arithmetic are not quantised");
  }
  if (!r->status().ok()) return config;  // what follows divides by these sizes

  if (IsMla(family)) {
    ReadMla(r, &config);
  } else {
    ReadGqa(r, defaults, &config);
  }
  ReadWindow(r, &config);
  if (HasExperts(family)) ReadMoe(r, defaults, &config);
  ReadRope(r, root, defaults, &config);
  r->RefuseIf(config.head_dim > kMaxHeadSize, "hidden_size", "heads of more than 65536 channels");
  if (!r->status().ok()) return config;
  const int64_t rotated = MakeRopeTable(config).rotary_dim;
  r->RefuseIf(rotated < 2 || rotated % 2 != 0, IsMla(family) ? "qk_rope_head_dim" : "head_dim",
              "RoPE would turn " + std::to_string(rotated) + " channels, which is no positive even number");
  const int64_t drafts =
      std::max(r->Int("num_nextn_predict_layers", 0, kMaxLayers, 0), r->Int("num_mtp_layers", 0, kMaxLayers, 0));
  if (drafts > 0) config.notes.push_back("the " + std::to_string(drafts) + " draft (MTP) layer(s) are left out");
  MarkHarmless(r);
  for (const std::string& name : r->unknown()) {
    config.notes.push_back("key \"" + name + "\" is unknown to " + r->family() + " and was ignored");
  }
  return config;
}

// Sets root[path] to value, path dotted.
Status ApplyOverride(const std::string& override_text, Json* root) {
  const size_t equals = override_text.find('=');
  if (equals == std::string::npos || equals == 0) {
    return Status::Usage("config override \"" + override_text + "\": expected key=value");
  }
  const std::string path = override_text.substr(0, equals), text = override_text.substr(equals + 1);
  Result<Json> parsed = ParseJson(text, "override");
  const Json value = parsed.ok() ? *parsed : Json(text);
  Json* at = root;
  size_t begin = 0;
  for (size_t dot = path.find('.'); dot != std::string::npos; dot = path.find('.', begin)) {
    Json& child = (*at)[path.substr(begin, dot - begin)];
    if (child.is_null()) child = Json::object();
    if (!child.is_object()) {
      return Status::Usage("config override \"" + override_text + "\": \"" + path.substr(0, dot) + "\" is no object");
    }
    at = &child;
    begin = dot + 1;
  }
  const std::string key = path.substr(begin);
  (*at)[key] = value;
  return {};
}

}  // namespace

std::string_view NameOf(Family family) {
  for (const FamilyName& f : kFamilies) {
    if (f.family == family) return f.model_type;
  }
  return "unknown";
}

Result<ModelConfig> ParseModelConfig(std::string_view json, std::string_view what,
                                     const std::vector<std::string>& overrides) {
  ASSAY_ASSIGN_OR_RETURN(Json root, ParseJson(json, what));
  if (!root.is_object()) return Status::BadInput(std::string(what) + ": no JSON object");
  for (const std::string& text : overrides) ASSAY_RETURN_IF_ERROR(ApplyOverride(text, &root));

  std::string known;
  for (const FamilyName& f : kFamilies) known += (known.empty() ? "" : ", ") + std::string(f.model_type);
  ConfigReader top(root, std::string(what), "assay");
  const std::string model_type = top.String("model_type", "");
  ASSAY_RETURN_IF_ERROR(top.status());
  for (const FamilyName& f : kFamilies) {
    if (f.model_type != model_type) continue;
    ConfigReader reader(root, std::string(what), model_type);
    ModelConfig config = ReadConfig(&reader, root, f.family);
    ASSAY_RETURN_IF_ERROR(reader.status());
    return config;
  }
  top.Refuse("model_type", "unknown family; known are " + known);
  return top.status();
}

Result<ModelConfig> LoadModelConfig(const std::string& path, const std::vector<std::string>& overrides) {
  struct stat info {};
  const bool folder = ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
  const std::string file = folder ? path + "/config.json" : path;
  ASSAY_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(file, kMaxConfigBytes));
  return ParseModelConfig(text, file, overrides);
}

Result<ModelConfig> LoadModelConfig(const std::string& path) { return LoadModelConfig(path, {}); }

}  // namespace assay
