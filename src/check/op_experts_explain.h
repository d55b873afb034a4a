// Why the sum of experts' rows, or the product of one expert, is wrong: which weights were used, whose matrix.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "check/op_common.h"

namespace assay::op {

// The combine weights that each token's result was made with, by least squares over its columns: one expert left out,
// weights in another order, equal ones, others. experts [n, h]; row_of [T k] rows of it, -1: none; weights [T, k].
std::optional<Explanation> ExplainCombine(const Subject& subject, const oracle::Array& experts,
                                          const std::vector<int64_t>& row_of, const oracle::Array& weights,
                                          const oracle::Computed& right);

// For each expert the one whose matrix its rows were multiplied by: `product` gives all rows through these experts.
std::optional<Explanation> ExplainExperts(
    const Subject& subject, const std::vector<int64_t>& expert, int64_t n_experts, const oracle::Computed& right,
    const std::function<Result<oracle::Computed>(const std::vector<int64_t>&)>& product);

}  // namespace assay::op
