// The one machine-readable table of canonical site names: axes, definition point, inputs on each attention path,
// shard axis. Printed by `assay sites`, frozen with format version 1. Profiles map engine names onto it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace assay {

enum class SiteOp : uint8_t {  // what computes the site from its inputs; decides how an input difference may grow
  kSource, kEmbed, kNorm, kLinear, kRope, kAttention, kMerge, kAdd, kActivation, kRoute, kSelect, kCombine, kCopy, kReduce, kArgmax,
};

struct SiteDef {
  std::string_view name;   // without "layers.N." ; "attn.chunk.J.out" has J for the chunk number
  std::string_view axes;   // "T H dn"
  std::string_view what;   // definition point, one line
  SiteOp op;
  bool per_layer;
  std::string_view paths;  // "both", "materialised", "absorbed"
  // Canonical names, comma-separated; "prev.out" is the residual stream that enters the layer (embed for layer 0),
  // "ctx:" before a name: read over all earlier positions of the request (attention keys and values).
  std::string_view inputs_materialised;
  std::string_view inputs_absorbed;
  std::string_view shard_axis;  // axis letter split by tensor parallelism, "" replicated
  bool default_preset;          // shown to leave the results bit-identical under compilation
};

std::span<const SiteDef> AllSites();  // in order of execution inside a step and layer

struct SiteName {
  int32_t layer = -1;       // -1: not a layer's site
  int32_t chunk = -1;       // of attn.chunk.J.*
  bool partial = false;     // ".partial": a sharded result before its reduction
  const SiteDef* def = nullptr;  // nullptr: not a canonical name (weights and foreign names)
  std::string stem;         // name without layer, chunk number kept, without ".partial"
};
SiteName ParseSiteName(std::string_view name);
std::string FormatSiteName(int32_t layer, std::string_view stem);
// Order of execution: (layer, index in the table, chunk). Foreign names sort behind.
int64_t ExecutionOrder(const SiteName& name);

}  // namespace assay
