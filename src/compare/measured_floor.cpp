#include "compare/measured_floor.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>

namespace assay {
namespace {

// Fewer rows say nothing of the largest one.
constexpr uint64_t kFloorRows = 8;

// Layers are alike where the site has the same name behind the layer, and as many inputs over the same operations.
using Kind = std::tuple<std::string, size_t, double>;

Kind KindOf(const JointSite& site, const GraphNode& node) {
  double gain = 0;
  for (const GraphEdge& edge : node.edges) gain = std::max(gain, edge.gain);
  const std::string prefix = "layers." + std::to_string(site.parsed.layer) + ".";
  return {site.name.substr(prefix.size()), node.edges.size(), gain};
}

}  // namespace

bool MayHaveFloor(const GraphNode& node) {
  switch (node.op) {
    case SiteOp::kSource:
    case SiteOp::kEmbed:
    case SiteOp::kAdd:
    case SiteOp::kReduce:
    case SiteOp::kSelect:
    case SiteOp::kArgmax:
      return false;
    default:
      return node.inputs_known && !node.by_step && !node.hides_choice;
  }
}

std::vector<MeasuredFloor> MeasureFloors(const JointIndex& index, const SiteGraph& graph,
                                         const std::vector<SiteRatios>& ratios) {
  std::map<Kind, std::vector<uint32_t>> layers;
  for (uint32_t s = 0; s < index.sites.size(); ++s) {
    if (index.sites[s].parsed.layer < 0 || ratios[s].rows < kFloorRows || !MayHaveFloor(graph.nodes[s])) continue;
    layers[KindOf(index.sites[s], graph.nodes[s])].push_back(s);
  }
  std::vector<MeasuredFloor> out(index.sites.size());
  for (const auto& [kind, sites] : layers) {
    if (sites.size() < 2) continue;
    // Of the other layers.
    const auto largest_but = [&, &sites = sites](uint32_t own, auto figure) {
      double largest = 0;
      for (const uint32_t s : sites) largest = s == own ? largest : std::max(largest, figure(ratios[s]));
      return largest;
    };
    for (const uint32_t s : sites) {
      if (ratios[s].worst_visible == 0 && ratios[s].median_visible[0] == 0 && ratios[s].median_visible[1] == 0 &&
          ratios[s].vacuous == 0) {
        continue;
      }
      MeasuredFloor& floor = out[s];
      floor.known = true;
      floor.row = largest_but(s, [](const SiteRatios& r) { return r.worst; });
      for (int d : {0, 1}) floor.median[d] = largest_but(s, [d](const SiteRatios& r) { return r.median[d]; });
    }
  }
  return out;
}

bool Exceeds(const SiteRatios& ratios, const MeasuredFloor& floor) {
  if (!floor.known) return false;
  if (ratios.worst_visible > kRowsOverFloor * floor.row) return true;
  for (int d : {0, 1}) {
    if (floor.median[d] > 0 && ratios.median_visible[d] > kMedianOverFloor * floor.median[d]) return true;
  }
  return false;
}

}  // namespace assay
