// Attention whose accumulator leaves the range of its type, and log-sum-exps.
#include <algorithm>
#include <cmath>

#include "check/op_attention.h"
#include "check/op_explain.h"
#include "check/op_fitted.h"

namespace assay::op {

using oracle::Array;

// Where the running maximum of a row jumps between tiles by more than a declared float16 accumulator can hold as a
// factor (2^-14 its smallest normal number).
std::optional<Explanation> LeavesRange(const Subject& out, const AttentionCall& call) {
  const DType accum = ParseDType(Capture::OwnText(out.info(), "accum_dtype").value_or("f32"));
  if (accum != DType::kF16) return std::nullopt;
  const int64_t tile = out.Integer("kv_tile", 0);
  for (const AttentionBatch& b : call.batches) {
    if (tile <= 0 || b.key_positions.empty()) continue;
    auto scores = oracle::Scores(InputOf(b, call), call.spec);
    if (!scores.ok()) continue;
    const int64_t n = scores->value.cols();
    for (int64_t r = 0; r < scores->value.rows(); ++r) {
      double top = -INFINITY;
      for (int64_t s = 0; s < n; s += tile) {
        const double before = top;
        for (int64_t j = s; j < std::min(n, s + tile); ++j) top = std::max(top, scores->value[r * n + j]);
        if (std::isfinite(before) && before - top < std::log(0x1p-14)) {
          return Explanation{fault_class::kRange,
                             "the running maximum jumps by " + std::to_string(top - before) +
                                 " between tiles: the factor is below the smallest normal float16 number"};
        }
      }
    }
  }
  return std::nullopt;
}

// right: of the call; right.max_score and right.lse_of_keys are the two shortcuts that engines take for the whole sum.
Explanation ExplainLse(const Subject& lse, const AttentionValues& right) {
  Explanation why{fault_class::kLse, "the output of the call is right, its log-sum-exp is not"};
  if (const double c = ConstantRatio(lse.actual(), right.lse.value, lse.judged(), 1e-3); !std::isnan(c)) {
    why.constant = c;
    why.meaning = "log-sum-exp returned / true";
    return WeighedFactor(lse, right.lse, why);
  }
  if (auto coarse = ExplainPrecision(lse, right.lse)) return *coarse;
  const auto close = [&](const Array& other) {
    oracle::Computed c = right.lse;
    c.value = other;
    return Fits(lse, c);
  };
  // Written head by head and read row by row: element (row, head) lies where (head, row) is looked for.
  const int64_t rows = right.lse.value.rows(), heads = right.lse.value.cols();
  Array turned = right.lse.value;
  for (int64_t i = 0; i < turned.size(); ++i) turned[(i % heads) * rows + i / heads] = right.lse.value[i];
  const bool all = std::all_of(lse.judged().begin(), lse.judged().end(), [](char c) { return c != 0; });
  if (all && rows > 1 && heads > 1 && close(turned)) {
    why.text += ": it lies head by head where it is read row by row";
  } else if (close(right.max_score)) {
    why.text += ": it is the largest score alone";
  } else if (close(right.lse_of_keys)) {
    why.text += ": the sink is missing from it";
  } else if (auto kept = ExplainUnwritten(lse)) {
    why.text += ": " + kept->text + ", it was written by other strides";
  } else {
    why.rank = 2;
  }
  return why;
}

}  // namespace assay::op
