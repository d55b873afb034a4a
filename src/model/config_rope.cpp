// Rotary embedding: kind, frequencies, scaling and pairing.
#include <string>

#include "model/config_sections.h"

namespace assay::config_sections {

// Both styles: rope_parameters holding everything, and rope_scaling with rope_theta beside it.
void ReadRope(ConfigReader* top, const Json& root, const Defaults& defaults, ModelConfig* config) {
  RopeConfig& rope = config->rope;
  const Json* parameters = top->find("rope_parameters");
  const Json* scaling = top->find("rope_scaling");
  if (parameters != nullptr && scaling != nullptr && *parameters != *scaling) {
    return top->Refuse("rope_scaling", "rope_parameters is there too and says something else: keep one of them");
  }
  const char* const key = scaling != nullptr ? "rope_scaling" : "rope_parameters";
  // A model without any of the keys has plain RoPE.
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
    // YaRN without a factor stretches the original context to the declared one, as in transformers.
    const bool by_ratio = rope.kind == RopeKind::kYarn && !r.has("factor") && ratio >= 1;
    rope.factor = by_ratio ? ratio : r.Number("factor", 1e-6, 1e9);
  }
  if (rope.kind == RopeKind::kYarn) {
    // The ends of its ramp are logarithms to this base.
    r.RefuseIf(rope.theta <= 1, "rope_theta", "YaRN needs a base above 1");
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

  // Families whose reference code rotates a part of the head; with others the key would be ignored.
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

}  // namespace assay::config_sections
