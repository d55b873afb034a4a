// Softmax and its logarithm over the last axis.
//
// A row with NaN or +inf is NaN throughout, as in every engine. A row of -inf alone (or without elements) has no
// softmax: NaN. Attention, which defines such rows as zeros, does so itself.
#pragma once

#include "oracle/bound.h"

namespace assay::oracle {

// Both in the shape of x; a scalar is one row of one element.
Result<Computed> Softmax(const Array& x);
Result<Computed> LogSoftmax(const Array& x);

// Largest element and log(Σ exp), natural. Empty rows and rows of -inf: -inf both; +inf or NaN in the row: NaN sum.
struct LogSum {
  double max;
  double lse;
  double drift;  // Σ p |x - max|: what rounding of the exponents' arguments adds up to
};
LogSum LogSumExp(std::span<const double> row);

}  // namespace assay::oracle
