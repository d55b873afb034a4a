// The bound of a dequantised element against engines in float32 that multiply the scales in other orders.
#include <gtest/gtest.h>

#include <algorithm>

#include "base/hash.h"
#include "check/op_dequant.h"

namespace assay::op {
namespace {

// Codes of four bits with zero points, a scale for every 16 of them, under a global scale.
DequantParts Parts() {
  DequantParts parts;
  parts.rows = 8;
  parts.cols = 64;
  parts.global = static_cast<double>(0.037F);
  SplitMix64 random(1);
  for (int64_t i = 0; i < parts.rows * parts.cols / 16; ++i) {
    parts.scale.push_back(static_cast<double>(static_cast<float>(0.1 + random.NextDouble())));
  }
  for (int64_t i = 0; i < parts.rows * parts.cols; ++i) {
    parts.code.push_back(static_cast<float>(random.Next() >> 60));
    parts.zero.push_back(8);
    parts.group.push_back(static_cast<int32_t>(i / 16));
  }
  return parts;
}

TEST(DequantBound, EveryOrderOfTheProductsIsWithinItAndAnotherZeroIsNot) {
  const DequantParts parts = Parts();
  const oracle::Computed c = Decoded(parts.Values(), parts, {parts.rows, parts.cols});
  const oracle::Precision f32 = oracle::PrecisionOf(DType::kF32, DType::kF32);
  oracle::Array first = c.value, last = c.value, apart = c.value, wrong = c.value;
  for (int64_t i = 0; i < c.value.size(); ++i) {
    const float code = parts.code[static_cast<size_t>(i)], zero = parts.zero[static_cast<size_t>(i)],
                scale = static_cast<float>(parts.ScaleOf(i)), global = static_cast<float>(parts.global);
    const float both = scale * global, scaled_zero = zero * both;
    first[i] = (code - zero) * both;
    last[i] = (code - zero) * scale * global;
    apart[i] = code * both - scaled_zero;  // near the zero point it cancels
    wrong[i] = (code - 7) * both;
  }
  double worst = 0;
  for (const oracle::Array* engine : {&first, &last, &apart}) {
    const oracle::Agreement a = Compare(*engine, c, f32).value();
    EXPECT_TRUE(a.ok()) << a.worst << " times the bound at " << a.worst_at;
    worst = std::max(worst, a.worst);
  }
  EXPECT_GE(worst, 1.0 / 4) << "the bound is vacuous";
  EXPECT_EQ(Compare(wrong, c, f32)->over, c.value.size());
}

}  // namespace
}  // namespace assay::op
