// The one machine-readable table of canonical site names: axes, definition point, inputs on each attention path,
// shard axis. Printed by `assay sites`, frozen with format version 1. Profiles map engine names onto it.
//
// It does not know engines, and it does not say which sites a given model has: a site that a trace lacks is bridged to
// its own inputs, recursively, by whoever walks the table (compare/site_graph.h).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace assay {

enum class SiteOp : uint8_t {  // what computes the site from its inputs; decides how an input difference may grow
  kSource,                     // given from outside
  kEmbed,                      // rows of a table
  kNorm,                       // RMSNorm or LayerNorm of a row
  kLinear,                     // product with a weight
  kRope,                       // rotation by position
  kAttention,                  // softmax over the keys a query sees, times values
  kMerge,                      // attention in one piece, or pieces joined by their log-sum-exp
  kAdd,                        // sum of its inputs: residual adds
  kActivation,                 // gate and up of an FFN
  kRoute,                      // continuous results of scores: expert weights, margins
  kSelect,                     // experts: a discrete choice
  kCombine,                    // weighted sum of experts
  kCopy,                       // the same values elsewhere, perhaps rounded: a cache write, a part of a query
  kReduce,                     // sum over ranks
  kArgmax,                     // token from logits: a discrete choice
};
std::string_view NameOf(SiteOp op);  // "linear", "attention" …

struct SiteDef {
  std::string_view name;  // without "layers.N." ; "attn.chunk.J.out" has J for the chunk number
  std::string_view axes;  // "T H dn"
  std::string_view what;  // definition point, one line
  SiteOp op;
  bool per_layer;
  std::string_view paths;  // "both", "materialised", "absorbed"
  // Canonical names, comma-separated; "prev.out" is the residual stream that enters (the out of the layer before, embed
  // for layer 0; for final_norm the out of the last layer). "ctx:" before a name: read over all earlier positions of
  // the request as well (attention keys and values). Alternatives are separated by "|": the one of which most
  // names are recorded holds, the first of equals ("attn.q_nope,attn.q_pe|attn.q_proj": MLA or not).
  std::string_view inputs_materialised;
  std::string_view inputs_absorbed;
  std::string_view shard_axis;  // axis letter split by tensor parallelism, "" replicated
  bool default_preset;          // shown to leave the results bit-identical under compilation
};

std::span<const SiteDef> AllSites();  // in order of execution inside a step and layer

// A name taken apart. Everything that is not canonical is kept, so that FormatSiteName gives the text again.
struct SiteName {
  int32_t layer = -1;            // -1: not a layer's site
  int32_t chunk = -1;            // of attn.chunk.J.*
  bool partial = false;          // ".partial": a sharded result before its reduction
  const SiteDef* def = nullptr;  // nullptr: not a canonical name (weights and foreign names)
  std::string stem;              // name without layer, chunk number kept, without ".partial"
};
// Never fails: what is not canonical keeps its text in stem.
SiteName ParseSiteName(std::string_view name);
std::string FormatSiteName(int32_t layer, std::string_view stem);
// Order of execution: (layer, index in the table, chunk), ".partial" just before its sum. Embedding first, final norm
// and behind it last; foreign names of a layer sort behind the layer's canonical ones, all others behind everything.
int64_t ExecutionOrder(const SiteName& name);

// One entry of an input list.
struct SiteInput {
  std::string_view name;  // "attn.k", "prev.out"
  bool context = false;   // "ctx:"
};
// The alternatives of inputs_materialised or inputs_absorbed, in order of preference; no alternative for a source.
std::vector<std::vector<SiteInput>> ParseSiteInputs(std::string_view inputs);

}  // namespace assay
