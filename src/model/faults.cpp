#include "model/faults.h"

#include <algorithm>
#include <charconv>

#include "model/engine.h"
#include "probe/settings.h"

namespace assay {
namespace {

// Whether the fault can be planted in that layer of the model as SetUp left it.
bool Exists(const FaultDef& def, const ModelConfig& config, int64_t layer) {
  switch (def.needs.layers) {
    case LayerKind::kMoe:
      return config.is_moe(layer);
    case LayerKind::kDense:
      return !config.is_moe(layer);
    case LayerKind::kNoLayer:
      return false;
    case LayerKind::kMla:
    case LayerKind::kAny:
      return true;
  }
  return true;
}

// Changes options and config to what the fault needs, or says why this model cannot have it. Settings are only
// raised, never lowered, where more does no harm (shards, tokens).
Status SetUp(const FaultDef& def, EngineOptions* options, ModelConfig* config) {
  const FaultNeeds& needs = def.needs;
  const std::string name(def.name);
  if (needs.variant == Variant::kGqa) {
    if (config->mla()) {
      config->kv_lora_rank = config->q_lora_rank = 0;
      config->n_heads = 4;
      config->n_kv_heads = 2;
      config->head_dim = 64;
      config->qk_norm = true;
      config->attention_bias = config->o_bias = false;
      config->rope.partial_rotary_factor = 1.0;
    } else if (config->n_kv_heads == config->n_heads) {
      return Status::Usage("fault " + name + " needs grouped kv heads or an MLA model to make a variant of");
    }
  }
  if (needs.layers == LayerKind::kMla && !config->mla()) {
    return Status::Usage("fault " + name + " lives in MLA attention; this model has none");
  }
  if (needs.path == "materialised") options->path = AttentionPath::kMaterialised;
  if (needs.path == "absorbed") options->path = AttentionPath::kAbsorbed;
  if (!config->mla()) options->path = AttentionPath::kMaterialised;  // a variant may have no latent
  if (needs.float_run && options->dtype == ComputeDType::kBF16) options->dtype = ComputeDType::kF32;
  options->shards = std::max(options->shards, needs.shards);
  if (needs.fp8) options->kv_dtype = KvDType::kFp8E4M3;
  if (needs.prefix_cache) options->prefix_cache = true;
  // Both must be in the cache at once.
  if (needs.second_prompt) options->sequential = false;
  if (needs.decode) options->max_tokens = std::max<int64_t>(options->max_tokens, 4);
  if (needs.block_size > 0) options->block_size = needs.block_size;
  if (needs.window) {
    config->sliding_window = 8;
    config->layer_windowed.clear();
  }
  if (needs.yarn) {
    // Attention factor and softmax factor both differ from 1: mscale and mscale_all_dim are not equal.
    RopeConfig& rope = config->rope;
    rope.kind = RopeKind::kYarn;
    rope.factor = 4.0;
    rope.original_max_position = 512;
    rope.mscale = 1.0;
    rope.mscale_all_dim = 0.5;
    rope.attention_factor = 0;
  }
  if (needs.routed_scaling > 0 && config->routed_scaling_factor == 1.0) {
    config->routed_scaling_factor = needs.routed_scaling;
  }
  if (needs.layers == LayerKind::kMoe && config->n_routed_experts == 0) {
    return Status::Usage("fault " + name + " lives in a mixture of experts; this model has none");
  }
  if ((def.id == FaultId::kSharedPerRank || def.id == FaultId::kSharedReducedTwice) && config->n_shared_experts == 0 &&
      config->shared_intermediate_size == 0) {
    return Status::Usage("fault " + name + " lives in the shared experts; this model has none");
  }
  if (def.id == FaultId::kMoeBiasInWeights && !config->correction_bias) {
    return Status::Usage("fault " + name + " needs a router with a correction bias; this model has none");
  }
  return {};
}

}  // namespace

// Absorbed attention is first seen in the latent space, before W_UV gives attn.out.
std::string_view FirstBadOn(const FaultDef& fault, bool absorbed) {
  return absorbed && fault.before_w_uv && fault.needs.path != "materialised" ? "layers.N.attn.latent_out"
                                                                             : fault.first_bad;
}

std::vector<std::string> ListNeeds(const FaultNeeds& needs) {
  std::vector<std::string> out;
  const auto add = [&](bool wanted, std::string text) {
    if (wanted) out.push_back(std::move(text));
  };
  add(!needs.path.empty(), "path " + std::string(needs.path));
  add(needs.shards > 1, "shards >= " + std::to_string(needs.shards));
  add(needs.chunk, "chunked prefill");
  add(needs.staggered, "requests with contexts of different length in one step");
  add(needs.fp8, "fp8 cache");
  add(needs.second_prompt, "a second prompt");
  add(needs.prefix_cache, "prefix cache and a common beginning");
  add(needs.decode, "4 generated tokens");
  add(needs.block_size > 0, "block size " + std::to_string(needs.block_size));
  add(needs.yarn, "config override: YaRN, factor 4, mscale 1, mscale_all_dim 0.5");
  add(needs.window, "config override: sliding_window 8");
  add(needs.routed_scaling > 0, "config override: routed_scaling_factor 2.5 where it is 1");
  add(needs.variant == Variant::kLargeValues, "checkpoint variant: W_UV times 2^16, o_proj times 2^-16");
  add(needs.variant == Variant::kGqa, "checkpoint variant: grouped-query attention with random weights");
  add(needs.variant == Variant::kFp8Blocks, "checkpoint variant: kv_b_proj in fp8 with block scales");
  add(needs.variant == Variant::kInt4Groups, "checkpoint variant: o_proj in int4 with group scales");
  add(needs.float_run, "f32 or f64 arithmetic");
  add(needs.layers == LayerKind::kMla, "MLA");
  add(needs.layers == LayerKind::kMoe, "a MoE layer");
  add(needs.layers == LayerKind::kDense, "a dense FFN layer");
  return out;
}

std::string DescribeNeeds(const FaultNeeds& needs) {
  std::string out;
  for (const std::string& need : ListNeeds(needs)) {
    if (!out.empty()) out.append("; ");
    out.append(need);
  }
  return out;
}

std::string FaultPlan::first_bad_site() const {
  if (def == nullptr) return "";
  std::string site(def->first_bad);
  const size_t at = site.find(".N.");
  if (at != std::string::npos) site.replace(at + 1, 1, std::to_string(first_layer));
  return site;
}

Result<FaultPlan> PlanFault(EngineOptions* options, ModelConfig* config) {
  FaultPlan plan;
  std::string_view text = options->fault;
  if (text.empty()) return plan;
  const bool clean = text.starts_with("none:");
  if (clean) text.remove_prefix(5);
  const size_t at = text.find('@');
  const std::string_view name = text.substr(0, at);
  const FaultDef* def = FindFault(name);
  if (def == nullptr) {
    std::vector<std::string_view> names;
    for (const FaultDef& other : AllFaults()) names.push_back(other.name);
    const std::string_view nearest = NearestName(name, names);
    std::string message = "unknown fault \"" + std::string(name) + "\"";
    if (!nearest.empty()) message += "; did you mean " + std::string(nearest) + "?";
    return Status::Usage(message + " (--list-faults prints all)");
  }
  ASSAY_RETURN_IF_ERROR(SetUp(*def, options, config));
  plan.def = def;
  plan.id = clean ? FaultId::kNone : def->id;

  std::vector<int64_t> possible;
  const int64_t last = options->last_layer < 0 ? config->n_layers : options->last_layer;
  for (int64_t layer = options->first_layer; layer < last; ++layer) {
    if (Exists(*def, *config, layer)) possible.push_back(layer);
  }
  if (def->needs.layers == LayerKind::kNoLayer) {
    if (at != std::string_view::npos) {
      return Status::Usage("fault " + std::string(name) + " is outside the layers; leave \"@layer\" out");
    }
    return plan;
  }
  if (possible.empty()) {
    return Status::Usage("fault " + std::string(name) +
                         " cannot be planted: none of the layers run has what it needs (" + DescribeNeeds(def->needs) +
                         ")");
  }
  // By default the last layer that can have it: everything before it is right, so the first wrong site is unique.
  plan.layer = plan.first_layer = possible.back();
  if (at == std::string_view::npos) return plan;
  const std::string_view where = text.substr(at + 1);
  if (where == "all") {
    plan.layer = -1;
    plan.first_layer = possible.front();
    return plan;
  }
  int64_t layer = -1;
  const auto [end, error] = std::from_chars(where.data(), where.data() + where.size(), layer);
  if (error != std::errc() || end != where.data() + where.size()) {
    std::string message(where);
    message += " is not a layer: write " + std::string(name) + "@NUMBER or @all";
    return Status::Usage(std::move(message));
  }
  if (std::find(possible.begin(), possible.end(), layer) == possible.end()) {
    std::string list;
    for (int64_t p : possible) {
      if (!list.empty()) list.append(", ");
      list.append(std::to_string(p));
    }
    return Status::Usage("fault " + std::string(name) + " cannot be planted in layer " + std::to_string(layer) +
                         "; possible: " + list);
  }
  plan.layer = plan.first_layer = layer;
  return plan;
}

// The reversed prompt has the same length and other rows at every position.
void PrepareInputs(const FaultPlan& plan, EngineOptions* options, std::vector<PromptInput>* prompts) {
  if (plan.def == nullptr || prompts->empty()) return;
  const FaultNeeds& needs = plan.def->needs;
  if (needs.second_prompt && prompts->size() == 1) {
    PromptInput second;
    second.tokens = prompts->front().tokens;
    if (needs.prefix_cache) {
      second.tokens.push_back(second.tokens.back());  // shares every full block, and has rows of its own
      second.tokens.push_back(second.tokens.front());
    } else {
      std::reverse(second.tokens.begin(), second.tokens.end());
    }
    prompts->push_back(std::move(second));
  }
  if (!needs.chunk) return;
  size_t longest = 0;
  for (const PromptInput& p : *prompts) longest = std::max(longest, p.tokens.size());
  const auto fit = static_cast<int64_t>(longest);
  // At least two pieces; staggered: the second request gets half a piece a step, so that its context falls behind.
  if (options->chunk == 0 || options->chunk * 2 > fit) options->chunk = std::max<int64_t>(1, fit / 4);
  if (needs.staggered) {
    options->chunk = std::max<int64_t>(2, options->chunk);
    options->max_batch_tokens = options->chunk + options->chunk / 2;
  }
}

}  // namespace assay
