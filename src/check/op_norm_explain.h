// Why a normed row is not what its input and weight give.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "check/op_common.h"

namespace assay::op {

// One norm as declared. Rows are [rows, cols] of the input as it is normed (sums taken, heads apart).
struct NormCall {
  std::string weight_name;
  oracle::Array x, weight, bias;  // bias: no values without one
  double eps = 0;
  bool layer_norm = false;
};

// Another eps (solved for), eps outside of the root, a weight with 1 added or none or another norm's, the mean
// subtracted or not, a sum in place of the mean, a bias left out: what fits, with its constant.
std::optional<Explanation> ExplainNorm(const Subject& subject, const NormCall& call, const oracle::Computed& right);

}  // namespace assay::op
