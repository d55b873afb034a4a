// What rounding makes of one site, beside what its inputs differ by: the noise of the operation itself, the size its
// inputs give rows, and what the rows that are right show of it. Nothing is judged here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "compare/joint_index.h"
#include "compare/row_inputs.h"
#include "compare/site_graph.h"

namespace assay {

// The value below which 90 % of the values lie, and the median (the upper one of an even count); 0 for none. Both
// reorder the values.
double Quantile90(std::vector<float>* values);
double Median(std::vector<float>* values);
// format has one %-conversion of a double; at most 63 bytes come of it.
std::string Format(const char* format, double x);

// Rounding noise of an operation on both sides, relative to its output (L2 of a row), and what it is made of.
struct SiteNoise {
  double relative = 0;
  double roundoff[2] = {0, 0};  // unit roundoffs of A and B
  double roundings = 0;         // roundings of one side
  int64_t products = 0;         // terms of the sums; 0: the operation sums over nothing
  std::string Basis() const;    // "rounding 1.2e-03 (u …, … roundings, … products)", of `relative` as it is now
};

// roundoff: coarsest of the rows of A and B. longest_request in rows, which attention sums over.
SiteNoise NoiseOf(const GraphNode& node, const std::vector<JudgedSite>& judged, const double roundoff[2],
                  int64_t longest_request);
// Rows of the longest request, at least 1.
int64_t LongestRequest(const JointIndex& index);
// Median of |out| / |in| over the rows of site s: a row that comes out unusually small has its error from its input's
// size. 0 where the operation has no one input that gives its size.
double TypicalGain(const GraphNode& node, const std::vector<JudgedSite>& judged, uint32_t s);
// What 90 % of the rows that are right stay below: a fault must not widen the bounds of the sites behind it.
double NoiseOfRight(const std::vector<Cell>& cells);

}  // namespace assay
