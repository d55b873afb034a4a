#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "compare/bounds.h"

namespace assay {
namespace {

TEST(SpreadAbove, AgreesWithTabulatedQuantiles) {
  // Upper quantiles of chi square: 4 degrees 13.2767 at 1 %, 64 degrees 93.217 at 1 %, 16 degrees 39.252 at 0.1 %.
  EXPECT_NEAR(SpreadAbove(4, 0.01), std::sqrt(13.2767 / 4), 1e-4);
  EXPECT_NEAR(SpreadAbove(64, 0.01), std::sqrt(93.217 / 64), 1e-3);
  EXPECT_NEAR(SpreadAbove(16, 0.001), std::sqrt(39.252 / 16), 1e-4);
}

TEST(SpreadAbove, FewerThanPOfRandomSketchesExceedIt) {
  std::mt19937_64 random(7);
  std::normal_distribution<double> normal;
  const double factor = SpreadAbove(4, 1e-3);
  int above = 0;
  constexpr int kTrials = 200000;
  for (int i = 0; i < kTrials; ++i) {
    double sum = 0;
    for (int j = 0; j < 4; ++j) {
      const double x = normal(random);
      sum += x * x;
    }
    above += std::sqrt(sum / 4) > factor;
  }
  EXPECT_NEAR(above, kTrials * 1e-3, 5 * std::sqrt(kTrials * 1e-3));
}

// u of the result, and sqrt(n) u of the accumulation, in float32 or finer, added in quadrature; integers have neither.
TEST(RoundingNoise, AccumulatesInF32AtLeast) {
  EXPECT_DOUBLE_EQ(RoundingNoise(0x1p-8, 1, false, 1e6), 0x1p-8);
  EXPECT_NEAR(RoundingNoise(0x1p-8, 1, true, 1 << 20), std::hypot(0x1p-8, 0x1p-14), 1e-12);
  EXPECT_NEAR(RoundingNoise(0x1p-53, 0, true, 4), 0x1p-52, 1e-20);
  EXPECT_EQ(RoundingNoise(0, 4, true, 100), 0);
}

// Softmax over random keys and values, queries disturbed in a random direction: what the condition promises, in truth.
TEST(AttentionCondition, GrowthOfADifferenceStaysWithinIt) {
  constexpr int kDim = 64, kKeys = 48;
  constexpr double kUsual = 4;  // the gain of attention
  std::mt19937_64 random(9);
  std::normal_distribution<double> normal;
  double last = 0;
  for (const double size : {0.5, 1.0, 4.0, 16.0}) {
    double largest = 0;
    for (int trial = 0; trial < 300; ++trial) {
      std::vector<double> q(kDim), dq(kDim), k(kKeys * kDim), v(kKeys * kDim);
      double q_sq = 0, dq_sq = 0;
      for (int i = 0; i < kDim; ++i) {
        q[i] = size * normal(random);
        dq[i] = normal(random);
        q_sq += q[i] * q[i];
        dq_sq += dq[i] * dq[i];
      }
      const double e = 1e-6;
      for (double& x : dq) x *= e * std::sqrt(q_sq / dq_sq);
      for (double& x : k) x = normal(random);
      for (double& x : v) x = normal(random);
      // Softmax of q kᵀ / sqrt(d) over the keys, times v, in double.
      const auto attend = [&](double with) {
        std::vector<double> p(kKeys), out(kDim);
        double top = -1e300, total = 0;
        for (int j = 0; j < kKeys; ++j) {
          for (int i = 0; i < kDim; ++i) p[j] += (q[i] + with * dq[i]) * k[j * kDim + i] / std::sqrt(double{kDim});
          top = std::max(top, p[j]);
        }
        for (double& x : p) total += x = std::exp(x - top);
        for (int j = 0; j < kKeys; ++j) {
          for (int i = 0; i < kDim; ++i) out[i] += p[j] / total * v[j * kDim + i];
        }
        return out;
      };
      const std::vector<double> a = attend(0), b = attend(1);
      double diff = 0, norm = 0;
      for (int i = 0; i < kDim; ++i) {
        diff += (b[i] - a[i]) * (b[i] - a[i]);
        norm += a[i] * a[i];
      }
      largest = std::max(largest, std::sqrt(diff / norm) / e);
    }
    EXPECT_LT(largest, kUsual * AttentionCondition(size, 1)) << size;
    EXPECT_GT(largest, last) << "sharper attention makes more of a difference";
    last = largest;
  }
  EXPECT_EQ(AttentionCondition(0.1, 1), 1) << "and flat attention is held to the gain";
  EXPECT_GT(last, kUsual) << "which alone would not do";
}

// How much the gap between two chosen logits can change when the row moved by a norm: all of it in two columns at
// worst, the spread of a random row's extremes for many.
TEST(PairChange, IsAllOfTheNormForFewColumnsAndAPartOfItForMany) {
  EXPECT_DOUBLE_EQ(PairChange(3, 8, 1, 1e-8), 3 * std::sqrt(2.0));
  EXPECT_DOUBLE_EQ(PairChange(3, 1, 1, 1e-8), 3 * std::sqrt(2.0));
  EXPECT_DOUBLE_EQ(PairChange(3, 8, 2, 1e-8), 6);
  EXPECT_EQ(PairChange(0, 2048, 1, 1e-8), 0);
  double last = 1;
  for (int64_t cols = 64; cols <= 1 << 20; cols *= 4) {
    const double part = PairChange(1, cols, 1, 1e-8) / std::sqrt(2.0);
    EXPECT_LT(part, last) << cols;
    last = part;
  }
  EXPECT_LT(last, 0.012);
}

TEST(PairChange, FewerThanPOfNoiseRowsExceedIt) {
  std::mt19937_64 random(8);
  std::normal_distribution<double> normal;
  constexpr int kCols = 256, kRows = 4000;
  constexpr double kP = 0.05;
  int above = 0;
  for (int row = 0; row < kRows; ++row) {
    double low = 0, high = 0, sum_sq = 0;
    for (int i = 0; i < kCols; ++i) {
      const double x = normal(random);
      low = std::min(low, x);
      high = std::max(high, x);
      sum_sq += x * x;
    }
    above += high - low > PairChange(std::sqrt(sum_sq), kCols, 1, kP);
  }
  EXPECT_LE(above, kRows * kP);
  EXPECT_GT(above, 0) << "the bound is not loose by much";
}

TEST(RoundoffOf, TheCoarserOfBothCounts) {
  EXPECT_EQ(RoundoffOf(DType::kF32, DType::kBF16), UnitRoundoff(DType::kBF16));
  EXPECT_EQ(RoundoffOf(DType::kF32, DType::kInvalid), UnitRoundoff(DType::kF32));
  EXPECT_EQ(RoundoffOf(DType::kI64, DType::kInvalid), 0);
}

TEST(Tolerance, LastMatchingEntryHolds) {
  auto tolerance = Tolerance::Parse("1e-5,layers.*.q:1e-3,layers.3.*:0");
  ASSERT_TRUE(tolerance.ok());
  EXPECT_EQ(tolerance->of("embed"), 1e-5);
  EXPECT_EQ(tolerance->of("layers.0.attn.q"), 1e-3);
  EXPECT_EQ(tolerance->of("layers.3.attn.q"), 0);
  auto only_pattern = Tolerance::Parse("attn.?:2");
  ASSERT_TRUE(only_pattern.ok());
  EXPECT_EQ(only_pattern->of("embed"), -1);
}

TEST(Tolerance, PatternWithoutASiteIsAUsageError) {
  const std::vector<std::string> sites = {"embed", "layers.0.attn.q"};
  EXPECT_TRUE(Tolerance::Parse("1e-5,layers.*.q:1e-3")->CheckPatterns(sites).ok());
  const Status refused = Tolerance::Parse("layers.*.q:1e-3,layers.*.qq:1")->CheckPatterns(sites);
  EXPECT_EQ(refused.code(), Code::kUsage);
  EXPECT_NE(refused.message().find("layers.*.qq"), std::string::npos);
}

// The recorder's filters and tolerances read one pattern in one way.
TEST(Tolerance, SetsAreThoseOfFilters) {
  const auto tolerance = Tolerance::Parse("layers.[^0].q:1e-3,a[b:1e-2");
  ASSERT_TRUE(tolerance.ok());
  EXPECT_EQ(tolerance->of("layers.1.q"), 1e-3);
  EXPECT_EQ(tolerance->of("layers.0.q"), -1);
  EXPECT_EQ(tolerance->of("a[b"), 1e-2);
}

// A tolerance that parses to something else than was meant would hide faults.
TEST(Tolerance, NonsenseIsAUsageError) {
  for (const char* text : {"x", "1e-5,", ",", "q:", ":1", "q:nan", "-1", "1e-5 ", "inf"}) {
    auto tolerance = Tolerance::Parse(text);
    ASSERT_FALSE(tolerance.ok()) << text;
    EXPECT_EQ(tolerance.status().code(), Code::kUsage) << text;
  }
  EXPECT_TRUE(Tolerance::Parse("").ok());
}

}  // namespace
}  // namespace assay
