// What a metadata key means when the event does not have it: docs/adding-a-case.md, last column of its table.
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "capture/capture.h"

namespace assay {
namespace {

// Looked up in this order: the event, the process, the fallback.
struct KeyDefault {
  std::string_view key;
  std::string_view model;     // key of the process that stands behind it, or empty
  std::string_view fallback;  // or empty: none
};

constexpr std::array<KeyDefault, 42> kDefaults = {{
    {"softmax_scale", "model.softmax_scale", ""},
    {"window", "model.sliding_window", "0"},
    {"soft_cap", "", "0"},
    {"attention_chunk", "", "0"},
    {"prefix_len", "", "0"},
    {"kv_source", "kv_source", "fresh"},
    {"accum_dtype", "", "f32"},
    {"rope.theta", "model.rope_theta", "10000"},
    {"rope.factor", "model.rope_factor", "1"},
    {"rope.dim", "model.rope_dim", ""},
    {"rope.attention_factor", "model.rope_attention_factor", ""},
    {"rope.original_max_position", "model.rope_original_max_position", ""},
    {"rope.beta_fast", "model.rope_beta_fast", "32"},
    {"rope.beta_slow", "model.rope_beta_slow", "1"},
    {"rope.truncate", "model.rope_truncate", "1"},
    {"rope.mscale", "model.rope_mscale", ""},
    {"rope.mscale_all_dim", "model.rope_mscale_all_dim", ""},
    {"rope.low_freq_factor", "model.rope_low_freq_factor", "1"},
    {"rope.high_freq_factor", "model.rope_high_freq_factor", "4"},
    {"eps", "model.rms_norm_eps", "1e-6"},
    {"renormalise", "model.norm_topk_prob", ""},
    {"routed_scaling_factor", "model.routed_scaling_factor", "1"},
    {"weight_on_input", "", "0"},
    {"n_group", "model.n_group", "1"},
    {"topk_group", "model.topk_group", "1"},
    {"group_score", "model.group_score", "max"},
    {"activation", "", "silu"},
    {"gate_up_layout", "", "halves"},
    {"swiglu_alpha", "", "1.702"},
    {"swiglu_limit", "", "7"},
    {"branch_scale", "", "1"},
    {"embed_scale", "", "1"},
    {"logit_scale", "", "1"},
    {"residual_scale", "", "1"},
    {"block_size", "block_size", "1"},
    {"kv_scale", "", "1"},
    {"scale_rule", "", "static"},
    {"scale_layout", "", "linear"},
    {"rope_permuted", "", "0"},
    {"tie_word_embeddings", "model.tie_word_embeddings", "0"},
    {"compiled", "", "0"},
    {"inplace", "", "0"},
}};

// Keys whose value is another word than that of the model's key.
std::optional<std::string> Translated(std::string_view key, const std::optional<std::string>& model_value) {
  if (!model_value) return std::nullopt;
  const bool yes = *model_value == "1" || *model_value == "true";
  if (key == "rope.pairing") return yes ? "interleaved" : "half";
  if (key == "scoring") return yes ? "sigmoid" : "softmax";
  return std::nullopt;
}

// The last one of a key wins, as in the trace.
const std::string* FindKey(const Metadata& meta, std::string_view key) {
  const std::string* value = nullptr;
  for (const auto& entry : meta) {
    if (entry.first == key) value = &entry.second;
  }
  return value;
}

}  // namespace

std::optional<std::string> Capture::OwnText(const EventInfo& event, std::string_view key) {
  const std::string* value = FindKey(event.event.meta, key);
  return value == nullptr ? std::nullopt : std::optional<std::string>(*value);
}

std::optional<std::string> Capture::ProcessText(const EventInfo& event, std::string_view key) const {
  const std::string* value = FindKey(trace_->processes()[event.file].info.meta, key);
  return value == nullptr ? std::nullopt : std::optional<std::string>(*value);
}

// Keys with a rule of their own come before the table.
std::optional<std::string> Capture::Text(const EventInfo& event, std::string_view key) const {
  if (auto own = OwnText(event, key)) return own;
  if (key == "rope.pairing") {
    auto found = Translated(key, ProcessText(event, "model.rope_interleaved"));
    return found ? found : "half";
  }
  if (key == "scoring") return Translated(key, ProcessText(event, "model.scoring_sigmoid"));
  if (key == "rope.type") {
    if (auto type = ProcessText(event, "model.rope_type")) return type;
    const double factor = Number(event, "rope.factor").value_or(1);
    return ProcessText(event, "model.rope_factor") && factor > 1 ? "yarn" : "default";
  }
  if (key == "world_size") return std::to_string(trace_->processes()[event.file].info.world_size);
  if (key == "group_size") {
    const std::string quant = OwnText(event, "quant").value_or("");
    if (quant == "nvfp4") return "16";
    if (quant == "mxfp4") return "32";
    return std::nullopt;
  }
  for (const KeyDefault& d : kDefaults) {
    if (d.key != key) continue;
    if (!d.model.empty()) {
      if (auto found = ProcessText(event, d.model)) return found;
    }
    return d.fallback.empty() ? std::nullopt : std::optional<std::string>(d.fallback);
  }
  return ProcessText(event, key.starts_with("model.") ? std::string(key) : "model." + std::string(key));
}

std::optional<double> Capture::Number(const EventInfo& event, std::string_view key) const {
  const std::optional<std::string> text = Text(event, key);
  if (!text || text->empty()) return std::nullopt;
  // Exact below 2^53, which user-space addresses are.
  if (text->starts_with("0x")) {  // addresses
    uint64_t value = 0;
    const auto r = std::from_chars(text->data() + 2, text->data() + text->size(), value, 16);
    if (r.ec != std::errc() || r.ptr != text->data() + text->size()) return std::nullopt;
    return static_cast<double>(value);
  }
  double value = 0;
  const auto r = std::from_chars(text->data(), text->data() + text->size(), value);
  // "nan" and "inf" are read as well, and are no scale, bound or size of anything.
  if (r.ec != std::errc() || r.ptr != text->data() + text->size() || !std::isfinite(value)) return std::nullopt;
  return value;
}

std::optional<int64_t> Capture::Integer(const EventInfo& event, std::string_view key) const {
  const std::optional<std::string> text = Text(event, key);
  if (!text) return std::nullopt;
  int64_t value = 0;
  const auto r = std::from_chars(text->data(), text->data() + text->size(), value);
  if (r.ec == std::errc() && r.ptr == text->data() + text->size()) return value;
  return std::nullopt;
}

bool Capture::Flag(const EventInfo& event, std::string_view key) const {
  const std::string value = Text(event, key).value_or("0");
  return value == "1" || value == "true";
}

}  // namespace assay
