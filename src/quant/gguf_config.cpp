// The configuration that a GGUF file's metadata describes, in the keys of config.json, so that one reader of
// configurations serves both.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "quant/assemble.h"

namespace assay {
namespace {

// ggml's name and the family that computes it. deepseek2 stands for V2 and V3: the router tells them apart (Experts).
struct Architecture {
  std::string_view ggml, model_type;
};
constexpr Architecture kArchitectures[] = {
    {"llama", "llama"},        {"qwen2", "qwen2"},           {"qwen3", "qwen3"},      {"qwen2moe", "qwen2_moe"},
    {"qwen3moe", "qwen3_moe"}, {"deepseek2", "deepseek_v3"}, {"glm4moe", "glm4_moe"}, {"glm-dsa", "glm_moe_dsa"},
};

// Reads "ARCHITECTURE.KEY"; what is missing or of another type is `absent`.
class Builder {
 public:
  Builder(const GgufFile& file, std::string architecture) : file_(file), architecture_(std::move(architecture)) {}

  const GgufValue* Find(const std::string& key) const { return file_.find(architecture_ + "." + key); }
  int64_t Int(const std::string& key, int64_t absent) const {
    const GgufValue* value = Find(key);
    return value == nullptr ? absent : value->integer().value_or(absent);
  }
  double Number(const std::string& key, double absent) const {
    const GgufValue* value = Find(key);
    return value == nullptr ? absent : value->number().value_or(absent);
  }
  std::string Text(const std::string& key) const {
    const GgufValue* value = Find(key);
    return value == nullptr ? std::string() : std::string(value->text().value_or(""));
  }
  // Copies a number under the key of config.json when it is there.
  void Copy(const char* from, const char* to, Json* config) const {
    const GgufValue* value = Find(from);
    if (value == nullptr) return;
    if (const auto integer = value->integer()) {
      (*config)[to] = *integer;
    } else if (const auto number = value->number()) {
      (*config)[to] = *number;
    }
  }

 private:
  const GgufFile& file_;
  std::string architecture_;
};

// Tied heads are left out of the file, biases and norms are there or not: tensors say what no key does.
bool Has(const std::vector<CheckpointTensor>& tensors, std::string_view name) {
  for (const CheckpointTensor& t : tensors) {
    if (t.name == name) return true;
  }
  return false;
}

bool HasPart(const std::vector<CheckpointTensor>& tensors, std::string_view part) {
  for (const CheckpointTensor& t : tensors) {
    if (t.name.find(part) != std::string::npos) return true;
  }
  return false;
}

// A float of a file that stands for a decimal number: 1e-5f is meant to be 1e-5.
double Shortened(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.7g", value);
  return std::strtod(text, nullptr);
}

// Llama 3's scaling is in the file as the factor of each pair's wavelength alone. The numbers that they were made from
// are found again: the largest is `factor`, and a pair that is blended between kept and stretched tells the original
// context. Only when all factors then come out as stored, to float32's rounding, is it taken to be that; null
// otherwise.
Json Llama3FromFactors(const CheckpointTensor& tensor, double theta) {
  constexpr double kLow = 1, kHigh = 4;  // of every Llama 3
  constexpr uint64_t kMaxPairs = 1u << 15;
  const uint64_t pairs = tensor.size_bytes / 4;
  if (tensor.shape.size() != 1 || tensor.size_bytes != 4 * static_cast<uint64_t>(tensor.shape[0])) return nullptr;
  if (pairs == 0 || pairs > kMaxPairs) return nullptr;
  std::vector<float> stored(pairs);
  std::memcpy(stored.data(), tensor.data, tensor.size_bytes);
  const auto wavelength = [&](size_t i) {
    return 2 * M_PI * std::pow(theta, static_cast<double>(i) / static_cast<double>(pairs));
  };
  double factor = 1;
  for (const float f : stored) {
    if (!(f >= 1) || !std::isfinite(f)) return nullptr;
    factor = std::max(factor, static_cast<double>(f));
  }
  double context = 0;
  for (size_t i = 0; i < stored.size() && context == 0; ++i) {
    const double f = static_cast<double>(stored[i]);
    if (f <= 1 || f >= factor) continue;
    const double smooth = (1 / f - 1 / factor) / (1 - 1 / factor);
    context = std::round(wavelength(i) * (kLow + smooth * (kHigh - kLow)));
  }
  if (!(context >= 1) || !(context < 1e9)) return nullptr;
  for (size_t i = 0; i < stored.size(); ++i) {
    const double wave = wavelength(i), smooth = (context / wave - kLow) / (kHigh - kLow);
    const double want = smooth < 0 ? factor : smooth > 1 ? 1 : 1 / ((1 - smooth) / factor + smooth);
    if (std::fabs(static_cast<double>(stored[i]) - want) > 1e-5 * want) return nullptr;
  }
  return Json{{"rope_type", "llama3"},
              {"factor", factor},
              {"low_freq_factor", kLow},
              {"high_freq_factor", kHigh},
              {"original_max_position_embeddings", static_cast<int64_t>(context)}};
}

// Bases and factors are kept as float32 in the file.
void Rope(const Builder& from, const std::vector<CheckpointTensor>& tensors, Json* config) {
  (*config)["rope_theta"] = Shortened(from.Number("rope.freq_base", 10000.0));
  const std::string type = from.Text("rope.scaling.type");
  if (type.empty() || type == "none") {
    for (const CheckpointTensor& t : tensors) {
      if (t.name != "rope_freqs.weight") continue;
      Json scaling = Llama3FromFactors(t, (*config)["rope_theta"].get<double>());
      if (!scaling.is_null()) (*config)["rope_scaling"] = std::move(scaling);
    }
    return;
  }
  Json scaling = Json::object();
  scaling["rope_type"] = type;
  scaling["factor"] = Shortened(from.Number("rope.scaling.factor", 1.0));
  const int64_t original = from.Int("rope.scaling.original_context_length", 0);
  if (original > 0) scaling["original_max_position_embeddings"] = original;
  // ggml keeps 0.1 x mscale_all_dim here.
  const double log_multiplier = from.Number("rope.scaling.yarn_log_multiplier", 0);
  if (type == "yarn" && log_multiplier != 0) {
    scaling["mscale"] = Shortened(10 * log_multiplier);
    scaling["mscale_all_dim"] = Shortened(10 * log_multiplier);
  }
  (*config)["rope_scaling"] = std::move(scaling);
}

// MLA: key_length of absorbed files is c + dr, so the _mla keys go first.
void Attention(const Builder& from, const std::string& model_type, Json* config) {
  from.Copy("attention.head_count", "num_attention_heads", config);
  from.Copy("attention.head_count_kv", "num_key_value_heads", config);
  if (model_type != "deepseek_v3" && model_type != "glm_moe_dsa") {
    from.Copy("attention.key_length", "head_dim", config);
    return;
  }
  const int64_t rope = from.Int("rope.dimension_count", 64);
  // Files of the absorbed form count one key head and give the materialised sizes beside.
  const int64_t key = from.Int("attention.key_length_mla", from.Int("attention.key_length", 0));
  const int64_t value = from.Int("attention.value_length_mla", from.Int("attention.value_length", 0));
  (*config)["num_key_value_heads"] = from.Int("attention.head_count", 0);
  from.Copy("attention.kv_lora_rank", "kv_lora_rank", config);
  if (model_type == "glm_moe_dsa") from.Copy("attention.indexer.top_k", "index_topk", config);
  const int64_t query = from.Int("attention.q_lora_rank", 0);
  (*config)["q_lora_rank"] = query > 0 ? Json(query) : Json(nullptr);
  (*config)["qk_rope_head_dim"] = rope;
  (*config)["qk_nope_head_dim"] = key - rope;
  (*config)["v_head_dim"] = value;
}

// Gating function 2 is the sigmoid (V3), 1 softmax (V2).
void Experts(const Builder& from, std::string* model_type, Json* config) {
  if (from.Int("expert_count", 0) == 0) return;
  from.Copy("expert_count", "n_routed_experts", config);
  from.Copy("expert_used_count", "num_experts_per_tok", config);
  from.Copy("expert_feed_forward_length", "moe_intermediate_size", config);
  if (model_type->rfind("qwen", 0) == 0) {
    (*config)["num_experts"] = (*config)["n_routed_experts"];
    config->erase("n_routed_experts");
    from.Copy("expert_shared_feed_forward_length", "shared_expert_intermediate_size", config);
    (*config)["norm_topk_prob"] = *model_type == "qwen3_moe";
    return;
  }
  from.Copy("expert_shared_count", "n_shared_experts", config);
  from.Copy("leading_dense_block_count", "first_k_dense_replace", config);
  from.Copy("expert_group_count", "n_group", config);
  from.Copy("expert_group_used_count", "topk_group", config);
  (*config)["routed_scaling_factor"] = Shortened(from.Number("expert_weights_scale", 1.0));
  const bool glm = *model_type == "glm4_moe" || *model_type == "glm_moe_dsa";
  const bool sigmoid = from.Int("expert_gating_func", glm ? 2 : 1) == 2;
  if (!sigmoid) {
    *model_type = "deepseek_v2";
    (*config)["norm_topk_prob"] = false;
    return;
  }
  for (const char* key : {"n_group", "topk_group"}) {
    if (!config->contains(key)) (*config)[key] = 1;
  }
  (*config)["norm_topk_prob"] = from.Int("expert_weights_norm", 1) != 0;
}

}  // namespace

GgufParts PartsFromGguf(const GgufFile& file) {
  GgufParts parts;
  if (const GgufValue* value = file.find("general.architecture"))
    parts.architecture = std::string(value->text().value_or(""));
  const Builder from(file, parts.architecture);
  parts.n_heads = from.Int("attention.head_count", 0);
  parts.n_kv_heads = from.Int("attention.head_count_kv", parts.n_heads);
  return parts;
}

// Keys that the file lacks are left out, so that the config reader names them or takes the family's default.
Json ConfigFromGguf(const GgufFile& file, const std::vector<CheckpointTensor>& tensors) {
  const std::string architecture = PartsFromGguf(file).architecture;
  std::string model_type;
  for (const Architecture& known : kArchitectures) {
    if (known.ggml == architecture) model_type = known.model_type;
  }
  const Builder from(file, architecture);
  // Mixtral goes by llama's name.
  if (model_type.empty() || (model_type == "llama" && from.Int("expert_count", 0) > 0)) return nullptr;
  Json config = Json::object();
  config["model_type"] = model_type;
  from.Copy("embedding_length", "hidden_size", &config);
  from.Copy("block_count", "num_hidden_layers", &config);
  // Draft layers are counted among the blocks.
  const int64_t blocks = from.Int("block_count", 0), drafts = from.Int("nextn_predict_layers", 0);
  if (drafts > 0 && drafts < blocks) config["num_hidden_layers"] = blocks - drafts;
  from.Copy("feed_forward_length", "intermediate_size", &config);
  from.Copy("context_length", "max_position_embeddings", &config);
  from.Copy("vocab_size", "vocab_size", &config);
  if (!config.contains("vocab_size")) {
    for (const CheckpointTensor& t : tensors) {
      if (t.name == "token_embd.weight" && t.shape.size() == 2) config["vocab_size"] = t.shape[0];
    }
  }
  config["rms_norm_eps"] = Shortened(from.Number("attention.layer_norm_rms_epsilon", 1e-6));
  config["tie_word_embeddings"] = !Has(tensors, "output.weight");
  if (model_type == "llama" || model_type == "glm4_moe") config["attention_bias"] = HasPart(tensors, ".attn_q.bias");
  if (model_type == "glm4_moe") config["use_qk_norm"] = HasPart(tensors, ".attn_q_norm.");
  Attention(from, model_type, &config);
  Experts(from, &model_type, &config);
  config["model_type"] = model_type;
  Rope(from, tensors, &config);
  for (const auto& [key, id] : {std::pair("tokenizer.ggml.bos_token_id", "bos_token_id"),
                                std::pair("tokenizer.ggml.eos_token_id", "eos_token_id")}) {
    const GgufValue* value = file.find(key);
    if (value != nullptr && value->integer()) config[id] = *value->integer();
  }
  return config;
}

}  // namespace assay
