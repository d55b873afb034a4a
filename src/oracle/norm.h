// RMSNorm and LayerNorm over the last axis.
#pragma once

#include <span>

#include "oracle/bound.h"

namespace assay::oracle {

// y = x / sqrt(mean(x²) + eps) · weight. weight [d], or empty: all ones. Rounds the normalised row and the product to
// the storing type (stores = 2).
Result<Computed> RmsNorm(const Array& x, const Array& weight, double eps);
// The same with mean squares given, one a row: those of another subset of columns (all ranks, one shard) or of another
// row.
Result<Computed> RmsNormGiven(const Array& x, const Array& weight, double eps, std::span<const double> mean_squares);
// Mean of the squares of each row, of columns [begin, end).
Result<std::vector<double>> MeanSquares(const Array& x, int64_t begin, int64_t end);

// y = (x - mean) / sqrt(variance + eps) · weight + bias, the variance divided by d. Empty weight: ones, bias: zeros.
// The bound holds for the one-pass variance E[x²] - mean² too, so it is wide where the mean is far larger than the
// spread.
Result<Computed> LayerNorm(const Array& x, const Array& weight, const Array& bias, double eps);

}  // namespace assay::oracle
