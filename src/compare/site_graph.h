// The site table applied to the sites that two traces have in common: for each of them, which common sites it is
// computed from, over how many operations that were not observed, and how far a difference may grow on the way.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "compare/joint_index.h"
#include "sites/site_table.h"

namespace assay {

struct GraphEdge {
  uint32_t site = 0;     // index into JointIndex::sites
  bool context = false;  // all earlier rows of the request count as well
  double gain = 1;       // product of OpModel::gain on the way, capped at kMaxGain
};

struct GraphNode {
  bool comparable = false;  // on both sides, of one meaning and shape
  SiteOp op = SiteOp::kLinear;
  double roundings = 1;    // of the operation and of those bridged
  bool contracts = false;  // the operation sums over the columns of its input
  // All inputs of the table are there, none bridged: sums can be checked exactly.
  bool direct = false;
  bool inputs_known = false;  // false: no ancestor is common; the site is where the comparison begins
  bool dequantised = false;   // rows of a cache, which have been through its codes where they were written
  // A choice that was not recorded may lie between the inputs and the site: right runs may then differ by all of a row.
  bool hides_choice = false;
  bool by_step = false;  // no token rows, made by a step: comparable where both sides' steps held the same rows
  std::vector<GraphEdge> edges;
  uint32_t last_use = 0;     // last site that reads this one
  int64_t margin_site = -1;  // companion "NAME.margin", when it is common
};

// "attn.k_read", "attn.v_read", "attn.kv_read": rows as attention gathered them from the cache. No engine must record
// them; where both sides did, they stand between attn.kv_write and attention.
bool IsCacheRead(std::string_view stem);
// "attn.k_cache", "attn.v_cache", "attn.kv_cache": the whole pool of a layer.
bool IsCachePool(std::string_view stem);

struct SiteGraph {
  static constexpr double kMaxGain = 64;
  std::vector<GraphNode> nodes;  // one a site of the index

  // comparable[i]: site i is to be compared; the others are bridged.
  static SiteGraph Build(const JointIndex& index, const std::vector<uint8_t>& comparable);
};

}  // namespace assay
