#include "model/config.h"

#include <algorithm>
#include <array>

#include "base/files.h"
#include "io/json.h"
#include "io/text_file.h"
#include "model/config_reader.h"
#include "model/config_sections.h"

namespace assay {
namespace {

using namespace config_sections;  // NOLINT: this file puts the sections together

// Configs have some kilobytes; a wrong path must not fill memory.
constexpr uint64_t kMaxConfigBytes = 16u << 20;

// The table of what is read; docs/models.md has the same list for users.
struct FamilyName {
  std::string_view model_type;
  Family family;
};

// model_type of config.json; several names may be one architecture.
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

// As transformers' configuration classes have them where a key is absent; tests/parity holds them against the real
// ones.
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

// Sizes first: the sections divide by them. What stands in the file and nobody read becomes a note, not an error: new
// keys appear with every release of transformers, and those that change arithmetic are refused by name.
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
  // Asked of the table itself: int(head * partial_rotary_factor) may come out odd or 0.
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
// Objects on the way are made where they are missing.
Status ApplyOverride(const std::string& override_text, Json* root) {
  const size_t equals = override_text.find('=');
  if (equals == std::string::npos || equals == 0) {
    return Status::Usage("config override \"" + override_text + "\": expected key=value");
  }
  const std::string path = override_text.substr(0, equals), text = override_text.substr(equals + 1);
  Result<Json> parsed = ParseJson(text, "override");
  // "rope_type=yarn" needs no quotes of its own.
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
  // A reader of its own for the family's name: keys are only known once the family is.
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
  const std::string file = IsDirectory(path) ? path + "/config.json" : path;
  ASSAY_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(file, kMaxConfigBytes));
  return ParseModelConfig(text, file, overrides);
}

Result<ModelConfig> LoadModelConfig(const std::string& path) { return LoadModelConfig(path, {}); }

}  // namespace assay
