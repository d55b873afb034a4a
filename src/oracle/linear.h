// Linear layers, y = x wᵀ + bias: whole, chosen rows and columns, or probabilistically for large ones. Also sums of
// arrays with factors: residual streams and reductions across ranks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "oracle/bound.h"

namespace assay::oracle {

// x [.., K], w [N, K], bias [N] or empty; the result is x's shape with N in place of K. k = K + 1 roundings.
Result<Computed> Linear(const Array& x, const Array& w, const Array& bias);
// Chosen rows (of x's rows) and chosen columns (rows of w); empty: all. Result [rows, columns].
Result<Computed> LinearAt(const Array& x, const Array& w, const Array& bias, std::span<const int64_t> rows,
                          std::span<const int64_t> columns);

// Σ factor · array, all of one shape. k = number of terms + 1.
// The array is not owned.
struct Term {
  double factor;
  const Array* array;
};
Result<Computed> LinearCombination(std::span<const Term> terms);

// Freivalds' test: y r against x (wᵀ r) for vectors r of random signs, at N + K a row and probe in place of N K.
// E[probe²] is the squared norm of the row's error; a row whose error is e has a probe of at least e / 2 in magnitude
// with probability 3/16 each (Paley-Zygmund), so it escapes `probes` of them with 0.8125^probes at most.
struct RowCheck {
  double error = 0;    // root mean square of the probes: estimates the norm of the row's error
  double largest = 0;  // largest magnitude of a probe; NaN or infinite when the row or its product is not finite
  double bound = 0;    // what `largest` cannot pass in a right row: the sum of the elements' bounds
};
Result<std::vector<RowCheck>> CheckLinear(const Array& x, const Array& w, const Array& bias, const Array& y,
                                          const Precision& precision, uint64_t seed, int probes = 32);

}  // namespace assay::oracle
