// Small explanations of wrong rows, each tested on the row grids of both sides. What a test says is exact where it
// rests on digests, and within the sketch's resolution where it fits a constant (then the residual is checked).
#pragma once

#include <string>
#include <vector>

#include "compare/joint_index.h"
#include "compare/site_graph.h"
#include "finding/finding.h"

namespace assay {

struct RowCause {
  std::string cls{fault_class::kUnknown};
  std::string constant;  // fitted constant with its meaning, or empty
  std::vector<std::string> evidence;
};

// rows: wrong row numbers of the site, ascending. nonfinite: the masks of non-finite values differ. noise: the relative
// difference that right rows may have; a fit may leave that much, and 1e-3 at least.
RowCause ExplainRows(const JointIndex& index, const SiteGraph& graph, uint32_t site, const std::vector<uint32_t>& rows,
                     bool nonfinite, double noise);

}  // namespace assay
