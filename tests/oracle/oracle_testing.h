// What the tests of the oracles share: seeded arrays, and engines that compute in float32 and bf16 to be judged.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

#include "base/hash.h"
#include "oracle/bound.h"

namespace assay::oracle {

inline constexpr double kInf = HUGE_VAL;
inline const double kNaN = std::nan("");

// Roughly normal, unit variance, representable in float32: four uniforms added.
inline Array Random(std::vector<int64_t> shape, uint64_t seed, double size = 1) {
  Array a = Array::Filled(std::move(shape));
  SplitMix64 random(seed);
  for (double& v : a.values) {
    double sum = 0;
    for (int i = 0; i < 4; ++i) sum += random.NextDouble() - 0.5;
    v = static_cast<float>(sum * std::sqrt(3.0) * size);
  }
  return a;
}

inline Array Vector(std::vector<double> values) {
  const int64_t n = static_cast<int64_t>(values.size());
  return MakeArray({n}, std::move(values)).value();
}

// Nearest bf16 of a finite number, ties to even.
inline double ToBf16(double x) {
  uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(x));
  bits += 0x7fff + ((bits >> 16) & 1);
  return std::bit_cast<float>(bits & 0xffff0000u);
}

inline const Precision kF32 = PrecisionOf(DType::kF32, DType::kF32);
inline const Precision kBf16 = PrecisionOf(DType::kF32, DType::kBF16);
// The oracle itself, as judged by long double.
inline const Precision kF64{0x1p-53, 0x1p-53, 0, 0, false};

// Fails unless every element lies within its bound; worst_at is -1 only where all elements are equal.
inline void ExpectWithin(const Array& actual, const Computed& computed, const Precision& precision) {
  const Result<Agreement> a = Compare(actual, computed, precision);
  ASSERT_TRUE(a.ok()) << a.status().message();
  ASSERT_GT(a->count, 0);
  if (a->worst_at >= 0) {
    EXPECT_TRUE(a->ok()) << a->over << " of " << a->count << " over, worst " << a->worst << " at " << a->worst_at
                         << ": " << actual[a->worst_at] << " for " << computed.value[a->worst_at];
  }
}

}  // namespace assay::oracle
