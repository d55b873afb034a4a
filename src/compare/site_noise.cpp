#include "compare/site_noise.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "compare/bounds.h"

namespace assay {

double Quantile90(std::vector<float>* values) {
  if (values->empty()) return 0;
  const size_t k = (values->size() * 9 + 9) / 10 - 1;
  std::nth_element(values->begin(), values->begin() + static_cast<ptrdiff_t>(k), values->end());
  return (*values)[k];
}

double Median(std::vector<float>* values) {
  if (values->empty()) return 0;
  const size_t k = values->size() / 2;
  std::nth_element(values->begin(), values->begin() + static_cast<ptrdiff_t>(k), values->end());
  return (*values)[k];
}

std::string Format(const char* format, double x) {
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, format, x);
  return buffer;
}

std::string SiteNoise::Basis() const {
  return "rounding " + Format("%.1e", relative) + " (u " + Format("%.1e", roundoff[kA]) + " and " +
         Format("%.1e", roundoff[kB]) + ", " + Format("%.0f", roundings) + " roundings" +
         (products > 0 ? ", " + std::to_string(products) + " products" : std::string()) + ")";
}

SiteNoise NoiseOf(const GraphNode& node, const std::vector<JudgedSite>& judged, const double roundoff[2],
                  int64_t longest_request) {
  // K of the contraction: columns of the widest input, and the keys that attention sums over.
  int64_t products = 1;
  for (const GraphEdge& edge : node.edges) products = std::max(products, judged[edge.site].cols);
  if (node.op == SiteOp::kAttention || node.op == SiteOp::kMerge) products += longest_request;
  SiteNoise noise;
  noise.roundings = node.roundings;
  noise.products = node.contracts ? products : 0;
  for (int side : {kA, kB}) {
    // Rows read from the cache were rounded to its codes before they were written: a scale's product is all that may
    // round behind that, to bf16 at the coarsest.
    double& u = noise.roundoff[side];
    u = node.dequantised ? std::min(roundoff[side], UnitRoundoff(DType::kBF16)) : roundoff[side];
    noise.relative =
        std::hypot(noise.relative, RoundingNoise(u, node.roundings, node.contracts, static_cast<double>(products)));
  }
  return noise;
}

int64_t LongestRequest(const JointIndex& index) {
  int64_t longest = 1;
  for (const RowInterval& interval : index.intervals) longest = std::max(longest, int64_t{interval.count});
  return longest;
}

double TypicalGain(const GraphNode& node, const std::vector<JudgedSite>& judged, uint32_t s) {
  if ((node.op != SiteOp::kLinear && node.op != SiteOp::kCombine) || node.edges.empty()) return 0;
  std::vector<float> gains;
  const std::vector<Cell>& in = judged[node.edges[0].site].cells;
  const std::vector<Cell>& out = judged[s].cells;
  if (in.empty()) return 0;
  for (size_t row = 0; row < out.size(); ++row) {
    if (out[row].state != CellState::kAbsent && in[row].state != CellState::kAbsent && in[row].norm > 0) {
      gains.push_back(out[row].norm / in[row].norm);
    }
  }
  return Median(&gains);
}

double NoiseOfRight(const std::vector<Cell>& cells) {
  std::vector<float> within;
  for (const Cell& cell : cells) {
    if (cell.state == CellState::kOk) within.push_back(static_cast<float>(std::min(cell.relative(), 1e30)));
  }
  return Quantile90(&within);
}

}  // namespace assay
