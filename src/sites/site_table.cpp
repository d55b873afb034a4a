#include "sites/site_table.h"

#include <algorithm>
#include <array>
#include <charconv>

namespace assay {
namespace {

// Attention reads the latent cache on the absorbed path; on the materialised path new rows come from k and v, rows of
// earlier chunks and steps from the cache.
constexpr std::string_view kContextMaterialised = "attn.q,ctx:attn.k,ctx:attn.v,ctx:attn.kv_write";
constexpr std::string_view kContextAbsorbed = "attn.q_latent,attn.q_pe,ctx:attn.kv_write";
// Partial results, when prefill was cut into chunks, and what they are computed from: rows of one piece have no chunks.
constexpr std::string_view kMergedMaterialised =
    "attn.chunk.J.out,attn.chunk.J.lse,attn.q,ctx:attn.k,ctx:attn.v,ctx:attn.kv_write";
constexpr std::string_view kMergedAbsorbed =
    "attn.chunk.J.out,attn.chunk.J.lse,attn.q_latent,attn.q_pe,ctx:attn.kv_write";

// name, axes, what, op, per_layer, paths, inputs on the materialised and on the absorbed path, shard axis, preset.
// GEMM results that only feed a residual add are out of the preset: a probe there was measured to split the fusion and
// so to move a rounding.
constexpr SiteDef kSites[] = {
    {"embed", "T h", "token embedding", SiteOp::kEmbed, false, "both", "", "", "", true},
    {"input_norm", "T h", "norm before attention", SiteOp::kNorm, true, "both", "prev.out", "prev.out", "", true},
    {"attn.q_a", "T q_lora", "query latent, before its norm (MLA with q_lora)", SiteOp::kLinear, true, "both",
     "input_norm", "input_norm", "", true},
    {"attn.q_a_normed", "T q_lora", "query latent after its norm", SiteOp::kNorm, true, "both", "attn.q_a", "attn.q_a",
     "", true},
    {"attn.q_proj", "T H d", "query projection as it comes out, before q norm and RoPE", SiteOp::kLinear, true, "both",
     "attn.q_a_normed|input_norm", "attn.q_a_normed|input_norm", "H", true},
    {"attn.k_proj", "T H d", "key projection as it comes out, before k norm and RoPE", SiteOp::kLinear, true,
     "materialised", "input_norm", "input_norm", "H", true},
    {"attn.v_proj", "T H d", "value projection as it comes out", SiteOp::kLinear, true, "materialised", "input_norm",
     "input_norm", "H", true},
    {"attn.kv_a", "T c+dr", "joint key/value latent and un-rotated k_pe (MLA)", SiteOp::kLinear, true, "both",
     "input_norm", "input_norm", "", true},
    {"attn.kv_c_normed", "T c", "key/value latent after its norm", SiteOp::kNorm, true, "both", "attn.kv_a",
     "attn.kv_a", "", true},
    {"attn.k_pe", "T 1 dr", "shared rotary key, after RoPE", SiteOp::kRope, true, "both", "attn.kv_a", "attn.kv_a", "",
     true},
    {"attn.q_nope", "T H dn", "part of the query without position", SiteOp::kCopy, true, "both", "attn.q_proj",
     "attn.q_proj", "H", true},
    {"attn.q_pe", "T H dr", "rotary part of the query, after RoPE", SiteOp::kRope, true, "both", "attn.q_proj",
     "attn.q_proj", "H", true},
    {"attn.q", "T H d", "query that enters attention, after norm and RoPE", SiteOp::kRope, true, "both",
     "attn.q_nope,attn.q_pe|attn.q_proj", "attn.q_nope,attn.q_pe|attn.q_proj", "H", true},
    {"attn.k_nope", "T H dn", "keys without position, materialised from the latent", SiteOp::kLinear, true,
     "materialised", "attn.kv_c_normed", "attn.kv_c_normed", "H", true},
    {"attn.k", "T H d", "key that enters attention, after norm and RoPE", SiteOp::kRope, true, "materialised",
     "attn.k_nope,attn.k_pe|attn.k_proj", "attn.k_nope,attn.k_pe|attn.k_proj", "H", true},
    {"attn.v", "T H d", "value that enters attention", SiteOp::kLinear, true, "materialised",
     "attn.v_proj|attn.kv_c_normed", "attn.v_proj|attn.kv_c_normed", "H", true},
    {"attn.kv_write", "T c+dr", "rows read back from the cache after the write, dequantised", SiteOp::kCopy, true,
     "both", "attn.kv_c_normed,attn.k_pe|attn.k,attn.v", "attn.kv_c_normed,attn.k_pe|attn.k,attn.v", "", true},
    {"attn.q_latent", "T H c", "q_nope through W_UK", SiteOp::kLinear, true, "absorbed", "attn.q_nope", "attn.q_nope",
     "H", true},
    {"attn.chunk.J.out", "T H dv", "attention over key chunk J alone (T H c before W_UV on the absorbed path)",
     SiteOp::kAttention, true, "both", kContextMaterialised, kContextAbsorbed, "H", true},
    {"attn.chunk.J.lse", "T H", "natural log of the softmax denominator over key chunk J", SiteOp::kAttention, true,
     "both", kContextMaterialised, kContextAbsorbed, "H", true},
    {"attn.latent_out", "T H c", "attention output in the latent space, before W_UV", SiteOp::kMerge, true, "absorbed",
     kMergedAbsorbed, kMergedAbsorbed, "H", true},
    {"attn.out", "T H dv", "attention output per head, merged and unpadded, before o_proj", SiteOp::kMerge, true,
     "both", kMergedMaterialised, "attn.latent_out", "H", true},
    {"attn.lse", "T H", "natural log of the softmax denominator over all keys", SiteOp::kMerge, true, "both",
     kMergedMaterialised, kMergedAbsorbed, "H", true},
    {"attn.o_proj", "T h", "output projection", SiteOp::kLinear, true, "both", "attn.out", "attn.out", "", false},
    {"post_norm", "T h", "norm before the FFN, of prev.out + attn.o_proj", SiteOp::kNorm, true, "both",
     "prev.out,attn.o_proj", "prev.out,attn.o_proj", "", true},
    {"mlp.gate", "T f", "gate projection", SiteOp::kLinear, true, "both", "post_norm", "post_norm", "f", true},
    {"mlp.up", "T f", "up projection", SiteOp::kLinear, true, "both", "post_norm", "post_norm", "f", true},
    {"mlp.act", "T f", "activation(gate) * up", SiteOp::kActivation, true, "both", "mlp.gate,mlp.up", "mlp.gate,mlp.up",
     "f", true},
    {"mlp.down", "T h", "down projection", SiteOp::kLinear, true, "both", "mlp.act", "mlp.act", "", false},
    {"moe.router_logits", "T E", "router scores before sigmoid or softmax", SiteOp::kLinear, true, "both", "post_norm",
     "post_norm", "", true},
    {"moe.topk_ids.margin", "T", "smallest gap between consecutive selection scores among the first k+1",
     SiteOp::kRoute, true, "both", "moe.router_logits", "moe.router_logits", "", true},
    {"moe.topk_ids", "T k", "experts chosen", SiteOp::kSelect, true, "both", "moe.router_logits", "moe.router_logits",
     "", true},
    {"moe.topk_weights", "T k", "combine weights of the chosen experts, scaled", SiteOp::kRoute, true, "both",
     "moe.router_logits,moe.topk_ids", "moe.router_logits,moe.topk_ids", "", true},
    {"moe.routed", "T h", "weighted sum of the routed experts", SiteOp::kCombine, true, "both",
     "post_norm,moe.topk_ids,moe.topk_weights", "post_norm,moe.topk_ids,moe.topk_weights", "", false},
    {"moe.shared", "T h", "shared experts", SiteOp::kCombine, true, "both", "post_norm", "post_norm", "", false},
    {"moe.out", "T h", "routed + shared", SiteOp::kAdd, true, "both", "moe.routed,moe.shared", "moe.routed,moe.shared",
     "", false},
    {"out", "T h", "residual stream after the layer: prev.out + attn.o_proj + FFN", SiteOp::kAdd, true, "both",
     "prev.out,attn.o_proj,mlp.down|prev.out,attn.o_proj,moe.out",
     "prev.out,attn.o_proj,mlp.down|prev.out,attn.o_proj,moe.out", "", true},
    {"final_norm", "T h", "norm after the last layer", SiteOp::kNorm, false, "both", "prev.out", "prev.out", "", true},
    {"logits", "T vocab", "language-model head", SiteOp::kLinear, false, "both", "final_norm", "final_norm", "vocab",
     true},
    {"next_token.margin", "T", "largest logit minus the second largest", SiteOp::kRoute, false, "both", "logits",
     "logits", "", true},
    {"next_token", "T", "token chosen for the next position", SiteOp::kArgmax, false, "both", "logits", "logits", "",
     true},
};

// At most 127: ExecutionOrder gives the index seven bits.
constexpr int kSiteCount = static_cast<int>(std::size(kSites));
constexpr int kFirstLayerSite = 1;  // sites before it come before layer 0
constexpr std::string_view kLayers = "layers.";
constexpr std::string_view kPartial = ".partial";
constexpr std::string_view kChunk = "attn.chunk.";

// Reads a decimal number of at most nine digits at the start of text and cuts it off; false when there is none.
bool TakeNumber(std::string_view* text, int32_t* out) {
  size_t digits = 0;
  while (digits < text->size() && (*text)[digits] >= '0' && (*text)[digits] <= '9') ++digits;
  if (digits == 0 || digits > 9) return false;
  std::from_chars(text->data(), text->data() + digits, *out);
  text->remove_prefix(digits);
  return true;
}

// per_layer must fit too: "embed" inside a layer is somebody else's tensor.
const SiteDef* Find(std::string_view stem, bool per_layer) {
  for (const SiteDef& def : kSites) {
    if (def.per_layer == per_layer && def.name == stem) return &def;
  }
  return nullptr;
}

}  // namespace

std::string_view NameOf(SiteOp op) {
  static constexpr std::array<std::string_view, 15> kNames = {"source",    "embed",   "norm", "linear",     "rope",
                                                              "attention", "merge",   "add",  "activation", "route",
                                                              "select",    "combine", "copy", "reduce",     "argmax"};
  const auto i = static_cast<size_t>(op);
  return i < kNames.size() ? kNames[i] : "unknown";
}

std::span<const SiteDef> AllSites() { return kSites; }

// Layer, then ".partial", then the chunk's number are taken off; the table has "J" where that stood.
SiteName ParseSiteName(std::string_view name) {
  SiteName out;
  std::string_view rest = name;
  if (rest.starts_with(kLayers)) {
    std::string_view tail = rest.substr(kLayers.size());
    int32_t layer = -1;
    // "layers.3" and "layers.3." name no site of the layer: the whole text stays the stem of a foreign name.
    if (TakeNumber(&tail, &layer) && tail.size() > 1 && tail[0] == '.') {
      out.layer = layer;
      rest = tail.substr(1);
    }
  }
  if (rest.ends_with(kPartial) && rest.size() > kPartial.size()) {
    out.partial = true;
    rest.remove_suffix(kPartial.size());
  }
  out.stem = std::string(rest);
  std::string table_name = out.stem;
  if (rest.starts_with(kChunk)) {
    std::string_view tail = rest.substr(kChunk.size());
    int32_t chunk = -1;
    if (TakeNumber(&tail, &chunk) && tail.starts_with('.')) {
      out.chunk = chunk;
      table_name = std::string(kChunk) + "J" + std::string(tail);
    }
  }
  out.def = Find(table_name, out.layer >= 0);
  if (out.def != nullptr && out.chunk < 0 && out.def->name.starts_with(kChunk)) out.def = nullptr;  // a literal "J"
  return out;
}

std::string FormatSiteName(int32_t layer, std::string_view stem) {
  if (layer < 0) return std::string(stem);
  return std::string(kLayers) + std::to_string(layer) + "." + std::string(stem);
}

int64_t ExecutionOrder(const SiteName& name) {
  // Layer bands: 0 before the layers, layer + 1, then the tail, then foreign names. Inside a band: index, chunk, sum.
  constexpr int64_t kTailBand = int64_t{1} << 31;
  constexpr int64_t kForeignBand = kTailBand + 1;
  const int64_t index = name.def == nullptr ? kSiteCount : name.def - kSites;
  int64_t band = 0;
  if (name.layer >= 0) {
    band = int64_t{name.layer} + 1;
  } else if (name.def == nullptr) {
    band = kForeignBand;
  } else if (index >= kFirstLayerSite) {
    band = kTailBand;
  }
  // 31 bits of chunk would not fit beside the band; chunks beyond 2^20 share a place.
  const int64_t chunk = name.chunk < 0 ? 0 : std::min<int64_t>(name.chunk, (1 << 20) - 1);
  // From the top: 32 bits of band, 7 of index, 21 of chunk (20 used), 1 for the sum behind its partial results.
  return (band << 29) | (index << 22) | (chunk << 1) | (name.partial ? 0 : 1);
}

// The grammar of SiteDef::inputs_*; names point into `inputs`, which is the table's own text.
std::vector<std::vector<SiteInput>> ParseSiteInputs(std::string_view inputs) {
  std::vector<std::vector<SiteInput>> alternatives;
  if (inputs.empty()) return alternatives;
  alternatives.emplace_back();
  size_t begin = 0;
  for (size_t i = 0; i <= inputs.size(); ++i) {
    // The end of the text ends the last name as a separator does.
    if (i < inputs.size() && inputs[i] != ',' && inputs[i] != '|') continue;
    SiteInput input{inputs.substr(begin, i - begin)};
    if (input.name.starts_with("ctx:")) {
      input.name.remove_prefix(4);
      input.context = true;
    }
    if (!input.name.empty()) alternatives.back().push_back(input);
    if (i < inputs.size() && inputs[i] == '|') alternatives.emplace_back();
    begin = i + 1;
  }
  return alternatives;
}

}  // namespace assay
