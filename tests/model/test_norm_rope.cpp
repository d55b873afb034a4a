// RMSNorm, rotation and bf16 rounding against long double and closed forms.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "model/norm.h"
#include "model/numerics.h"
#include "model/rope.h"

namespace assay {
namespace {

template <class T>
class NormAndRope : public ::testing::Test {};
using Types = ::testing::Types<float, double>;
TYPED_TEST_SUITE(NormAndRope, Types);

TYPED_TEST(NormAndRope, RmsNormAgreesWithLongDouble) {
  const double u = std::numeric_limits<TypeParam>::epsilon() / 2;
  std::mt19937 random(1);
  std::normal_distribution<double> normal;
  for (const int64_t n : {1, 2, 3, 7, 64, 257}) {
    for (const double eps : {1e-6, 0.5}) {
      std::vector<TypeParam> x(static_cast<size_t>(2 * (n + 3))), w(static_cast<size_t>(n)), y(x.size());
      for (TypeParam& v : x) v = static_cast<TypeParam>(normal(random) * 3);
      for (TypeParam& v : w) v = static_cast<TypeParam>(normal(random));
      RmsNorm(x.data(), n + 3, w.data(), eps, y.data(), n + 3, 2, n, Numerics{});
      for (int64_t r = 0; r < 2; ++r) {
        long double sum = 0;
        for (int64_t i = 0; i < n; ++i) {
          const long double v = x[static_cast<size_t>(r * (n + 3) + i)];
          sum += v * v;
        }
        for (int64_t i = 0; i < n; ++i) {
          const auto at = static_cast<size_t>(r * (n + 3) + i);
          const long double exact = x[at] / std::sqrt(sum / n + eps) * w[static_cast<size_t>(i)];
          // The scale: n roundings of 2^-53 in the sum, four after it, one to T; then two products.
          const double bound = (3 * u + static_cast<double>(n + 8) * 0x1p-53) * 1.01;
          EXPECT_NEAR(y[at], static_cast<double>(exact), bound * std::fabs(static_cast<double>(exact)));
        }
      }
    }
  }
}

// Closed form for both pairings, times the table's magnitude; angles are computed in double for both types.
TYPED_TEST(NormAndRope, RotationKeepsPairNormsAndTurnsByTheAngle) {
  const double u = std::numeric_limits<TypeParam>::epsilon() / 2;
  RopeTable table;
  table.rotary_dim = 8;
  table.inv_freq = {1.0, 0.5, 0.1, 0.01};
  table.scaling = 1.25;
  RopeRows<TypeParam> rope;
  rope.Build(table, {0, 3, 1000});
  for (const bool interleaved : {false, true}) {
    for (int64_t r = 0; r < 3; ++r) {
      const double position = r == 0 ? 0 : r == 1 ? 3 : 1000;
      std::vector<TypeParam> head = {1, 2, 3, 4, 5, 6, 7, 8, 9};
      const std::vector<TypeParam> before = head;
      rope.Rotate(head.data(), r, interleaved);
      EXPECT_EQ(head[8], 9);  // behind the rotated channels
      for (int64_t i = 0; i < 4; ++i) {
        const auto a = static_cast<size_t>(interleaved ? 2 * i : i),
                   b = static_cast<size_t>(interleaved ? 2 * i + 1 : i + 4);
        const double angle = position * table.inv_freq[static_cast<size_t>(i)];
        const double x = before[a], y = before[b], size = std::fabs(x) + std::fabs(y);
        EXPECT_NEAR(head[a], 1.25 * (x * std::cos(angle) - y * std::sin(angle)), 4 * u * 1.25 * size);
        EXPECT_NEAR(head[b], 1.25 * (y * std::cos(angle) + x * std::sin(angle)), 4 * u * 1.25 * size);
      }
    }
  }
}

// All 32768 positive patterns: the value itself, the midpoint to the next, and one ulp to either side of it.
TEST(RoundToBf16, IsNearestEvenForEveryUpperHalf) {
  for (uint32_t upper = 0; upper < 0x8000; ++upper) {
    const float low = std::bit_cast<float>(upper << 16);
    EXPECT_EQ(std::bit_cast<uint32_t>(RoundToBf16(low)), std::isnan(low) ? (upper | 0x40u) << 16 : upper << 16);
    if (upper >= 0x7f80) continue;
    const uint32_t half = (upper << 16) | 0x8000u;
    const uint32_t up = (upper + 1) << 16;
    EXPECT_EQ(std::bit_cast<uint32_t>(RoundToBf16(std::bit_cast<float>(half))), upper % 2 == 0 ? upper << 16 : up);
    EXPECT_EQ(std::bit_cast<uint32_t>(RoundToBf16(std::bit_cast<float>(half - 1))), upper << 16);
    EXPECT_EQ(std::bit_cast<uint32_t>(RoundToBf16(std::bit_cast<float>(half + 1))), up);
    EXPECT_EQ(std::bit_cast<uint32_t>(RoundToBf16(std::bit_cast<float>((half + 1) | 0x80000000u))), up | 0x80000000u);
  }
}

// Rounding the pattern as a number would carry the payload away and leave an infinity.
TEST(RoundToBf16, NanWithALowPayloadStaysNan) {
  EXPECT_TRUE(std::isnan(RoundToBf16(std::bit_cast<float>(0x7f800001u))));
  EXPECT_TRUE(std::isinf(RoundToBf16(std::numeric_limits<float>::max())));
}

}  // namespace
}  // namespace assay
