#include "oracle/softmax.h"

#include <cmath>
#include <limits>

namespace assay::oracle {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Zeros of x's shape; k and k_inner are the caller's to set.
Computed EmptyLike(const Array& x) {
  return {Array::Filled(x.shape), Array::Filled(x.shape), Array::Filled(x.shape), 0, 0, 1};
}

}  // namespace

LogSum LogSumExp(std::span<const double> row) {
  LogSum s{-kInfinity, -kInfinity, 0};
  for (const double v : row) {
    if (!(v <= s.max)) s.max = v;  // a NaN gets in and stays: nothing compares with it
    if (std::isnan(v)) break;
  }
  if (s.max == -kInfinity) return s;
  double sum = 0;
  for (const double v : row) {
    const double e = std::exp(v - s.max);
    sum += e;
    // 0 · inf would be NaN: a score of -inf has no weight and adds nothing.
    if (e > 0) s.drift += e * (s.max - v);
  }
  s.lse = s.max + std::log(sum);
  s.drift /= sum;
  return s;
}

Result<Computed> Softmax(const Array& x) {
  Computed c = EmptyLike(x);
  c.k = 4;  // exponential, quotient
  c.k_inner = static_cast<double>(x.cols() + 4);
  for (int64_t r = 0; x.size() > 0 && r < x.rows(); ++r) {
    const std::span<const double> row = x.row(r);
    const LogSum s = LogSumExp(row);
    for (int64_t i = 0; i < x.cols(); ++i) {
      const double below = s.max - row[static_cast<size_t>(i)];
      const double p = std::exp(row[static_cast<size_t>(i)] - s.lse);
      c.value.row(r)[static_cast<size_t>(i)] = p;
      c.scale.row(r)[static_cast<size_t>(i)] = p;
      // Relative: the argument's own rounding, and that of the sum.
      c.inner.row(r)[static_cast<size_t>(i)] = p > 0 ? p * (1 + below + s.drift + std::abs(s.lse - s.max)) : p;
    }
  }
  return c;
}

// Absolute errors, not relative ones: a log-probability near 0 is a difference of larger numbers.
Result<Computed> LogSoftmax(const Array& x) {
  Computed c = EmptyLike(x);
  c.k = 2;
  c.k_inner = static_cast<double>(x.cols() + 4);
  for (int64_t r = 0; x.size() > 0 && r < x.rows(); ++r) {
    const std::span<const double> row = x.row(r);
    const LogSum s = LogSumExp(row);
    for (int64_t i = 0; i < x.cols(); ++i) {
      const double v = row[static_cast<size_t>(i)], y = v - s.lse;
      c.value.row(r)[static_cast<size_t>(i)] = y;
      if (v == -kInfinity) continue;  // stays -inf exactly
      c.scale.row(r)[static_cast<size_t>(i)] = std::abs(y);
      c.inner.row(r)[static_cast<size_t>(i)] = std::abs(v) + std::abs(s.max) + std::abs(s.lse) + 1 + s.drift;
    }
  }
  return c;
}

}  // namespace assay::oracle
