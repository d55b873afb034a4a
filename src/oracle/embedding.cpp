#include "oracle/embedding.h"

#include <cmath>

#include "oracle/linear.h"

namespace assay::oracle {

// Unscaled rows are copies: k 0, and one store.
Result<Computed> Embed(std::span<const int64_t> tokens, const Array& table, double scale) {
  if (table.rank() != 2) return Status::BadInput("an embedding of shape " + ShapeText(table.shape));
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >= table.shape[0]) {
      return Status::BadInput("token " + std::to_string(tokens[i]) + " in row " + std::to_string(i) +
                              " is outside of a vocabulary of " + std::to_string(table.shape[0]));
    }
  }
  ASSAY_ASSIGN_OR_RETURN(Array rows, TakeRows(table, tokens));
  for (double& v : rows.values) v *= scale;
  Computed c{rows, rows, {}, scale == 1 ? 0.0 : 1.0, 0, 1};
  for (double& v : c.scale.values) v = std::abs(v);
  // sqrt(h) is itself rounded to the storing type by engines that scale so.
  if (scale != 1) c.stores = 2;
  return c;
}

// The scale passes the error of the sum on unchanged in relative size; one rounding more, and one store.
Result<Computed> Head(const Array& x, const Array& w, const Array& bias, double logit_scale, double soft_cap) {
  ASSAY_ASSIGN_OR_RETURN(Computed c, Linear(x, w, bias));
  if (logit_scale != 1) {
    c.k += 1;
    c.stores += 1;
    for (double& v : c.value.values) v *= logit_scale;
    for (double& v : c.scale.values) v *= std::abs(logit_scale);
  }
  if (soft_cap != 0) {
    // tanh contracts, so errors pass undiminished at most; its own are relative to a value that is no larger.
    c.k += 8;
    c.stores += 2;
    for (double& v : c.value.values) v = soft_cap * std::tanh(v / soft_cap);
  }
  return c;
}

}  // namespace assay::oracle
