// RMSNorm (Zhang and Sennrich, arXiv 1910.07467): y = x / sqrt(mean(x^2) + eps) * weight, one row at a time, the sum of
// squares in double.
#pragma once

#include <cmath>
#include <cstdint>

#include "model/numerics.h"

namespace assay {

// x, y: rows of n elements, ldx and ldy apart (x == y allowed); weight [n], null for ones. In a bf16 run the normalised
// row is rounded before the weight is applied, as the families' reference code does, and again after.
// The double sum's error, n 2^-53 of itself, is far below the rounding of the float result.
template <class T>
void RmsNorm(const T* x, int64_t ldx, const T* weight, double eps, T* y, int64_t ldy, int64_t rows, int64_t n,
             const Numerics& numerics) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* in = x + r * ldx;
    T* out = y + r * ldy;
    double sum_sq = 0;
    for (int64_t i = 0; i < n; ++i) sum_sq += static_cast<double>(in[i]) * static_cast<double>(in[i]);
    const T scale = static_cast<T>(1.0 / std::sqrt(sum_sq / static_cast<double>(n) + eps));
    for (int64_t i = 0; i < n; ++i) out[i] = in[i] * scale;
    numerics.Round(out, n);
    if (weight == nullptr) continue;
    for (int64_t i = 0; i < n; ++i) out[i] *= weight[i];
    numerics.Round(out, n);
  }
}

}  // namespace assay
