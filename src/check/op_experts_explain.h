// Why the sum of experts' rows, or the product of one expert, is wrong: which weights were used, whose matrix, for
// which experts.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "check/op_common.h"

namespace assay::op {

// The combine weights that each token's result was made with, by least squares over its columns: one expert left out,
// weights in another order, equal ones, others. experts [n, h]; row_of [T k] rows of it, -1: none; weights [T, k].
std::optional<Explanation> ExplainCombine(const Subject& subject, const oracle::Array& experts,
                                          const std::vector<int64_t>& row_of, const oracle::Array& weights,
                                          const oracle::Computed& right);

// For each expert the one whose weights (biases, scales, ...) its rows were computed with: `product` gives all rows
// with those of expert f. `what` they are, for the text: "weights".
std::optional<Explanation> ExplainExperts(const Subject& subject, const std::vector<int64_t>& expert, int64_t n_experts,
                                          const oracle::Computed& right, const Explanation& what,
                                          const std::function<Result<oracle::Computed>(int64_t f)>& product);

// Causes of all rows, or of all rows of those experts that have wrong ones while the rows of the others are right: one
// expert was loaded or computed otherwise.
class ByExpert {
 public:
  // expert: of each row of the result, all axes but the last together; empty: not known, all rows are tried.
  ByExpert(const Subject& subject, std::span<const int64_t> expert, const oracle::Computed& right);

  // `why` with how surely it fits, and the experts it holds for.
  std::optional<Explanation> Try(const Result<oracle::Computed>& candidate, Explanation why) const;
  // One constant in all rows of the wrong experts.
  std::optional<Explanation> TryConstant(Explanation why) const;
  // Experts with wrong rows, the one with most rows first.
  const std::vector<int64_t>& wrong() const { return wrong_; }
  // Rows of the expert that count.
  std::vector<int64_t> RowsOf(int64_t expert) const;

 private:
  std::string Names() const;
  bool IsWrong(int64_t expert) const;

  const Subject& subject_;
  const oracle::Computed& right_;
  std::vector<int64_t> expert_;  // -1: the row does not count
  std::vector<int64_t> wrong_;
  bool some_ = false;  // others are right
};

}  // namespace assay::op
