// Rotations that are left out by declaration, angles that were rounded on their way, and norms in front of a rotation.
#include <gtest/gtest.h>

#include <cmath>

#include "check/check.h"
#include "small_trace.h"
#include "verdicts.h"

namespace assay {
namespace {

using testing::Judge;
using testing::Noise;
using testing::SmallTrace;

constexpr int64_t kRows = 24, kHeads = 3, kSize = 8, kFirst = 600;
using Meta = std::vector<std::pair<std::string_view, std::string_view>>;

float Coarse(double x) {  // bf16
  int exponent = 0;
  const double m = std::frexp(x, &exponent);
  return static_cast<float>(std::ldexp(std::nearbyint(std::ldexp(m, 8)), exponent - 8));
}

// Pairs (i, i + d / 2), positions from kFirst on.
std::vector<float> Turned(const std::vector<float>& x, bool coarse_angles = false, double times = 1) {
  std::vector<float> y(x.size());
  for (size_t at = 0; at < x.size(); at += kSize) {
    const double position = static_cast<double>(kFirst) + static_cast<double>(at / (kHeads * kSize));
    for (size_t i = 0; i < kSize / 2; ++i) {
      const double inverse = times * std::pow(10000.0, -2.0 * static_cast<double>(i) / kSize);
      const double angle =
          coarse_angles ? double{Coarse(double{Coarse(position)} * double{Coarse(inverse)})} : position * inverse;
      const double a = double{x[at + i]}, b = double{x[at + i + kSize / 2]};
      y[at + i] = static_cast<float>(a * std::cos(angle) - b * std::sin(angle));
      y[at + i + kSize / 2] = static_cast<float>(b * std::cos(angle) + a * std::sin(angle));
    }
  }
  return y;
}

CheckResult Layer(const std::vector<float>& projected, const std::vector<float>& q, Meta meta) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3});
  const std::vector<RowRun> rows = {{a, 0, kRows, kFirst, false}};
  t.Record("layers.2.attn.q_proj", "T H d", {kRows, kHeads, kSize}, projected, {.rows = rows});
  t.Record("layers.2.attn.q", "T H d", {kRows, kHeads, kSize}, q, {.rows = rows, .meta = std::move(meta)});
  return Judge(t, {"rotation", "declared"});
}
const std::vector<float>& Projected() {
  static const std::vector<float> x = Noise(kRows * kHeads * kSize, 1);
  return x;
}
const Meta kWays[] = {
    {{"rope.type", "none"}}, {{"rope.dim", "0"}}, {{"op", "copy"}, {"inputs", "layers.2.attn.q_proj"}}};

TEST(LayerWithoutRope, CopyIsRightInEveryWayOfSayingSo) {
  for (const Meta& meta : kWays) {
    const CheckResult r = Layer(Projected(), Projected(), meta);
    EXPECT_TRUE(r.findings.empty());
    EXPECT_EQ(r.coverage.results_judged, 1U);
  }
}
TEST(LayerWithoutRope, RotatedRowsAreNamed) {
  for (const Meta& meta : kWays)
    EXPECT_FIRST(Layer(Projected(), Turned(Projected()), meta), "layers.2.attn.q", "ROPE-FORM");
}
TEST(LayerWithRope, RowsThatAreNotRotatedAreStillNamed) {
  EXPECT_FIRST(Layer(Projected(), Projected(), {{"rope.theta", "10000"}}), "layers.2.attn.q", "ROPE-FORM");
}

TEST(Rotation, AnglesOfACoarseFloatArePrecision) {
  const CheckResult r = Layer(Projected(), Turned(Projected(), true), {{"rope.theta", "10000"}});
  EXPECT_FIRST(r, "layers.2.attn.q", "PRECISION");
  EXPECT_NE(r.findings[0].evidence[0].find("bf16"), std::string::npos) << r.findings[0].evidence[0];
  EXPECT_TRUE(Layer(Projected(), Turned(Projected()), {{"rope.theta", "10000"}}).findings.empty());
}
TEST(Rotation, FactorThatMultipliesWhereItShouldDivideIsNamed) {
  const Meta linear = {{"rope.theta", "10000"}, {"rope.type", "linear"}, {"rope.factor", "4"}};
  const CheckResult r = Layer(Projected(), Turned(Projected(), false, 4), linear);
  EXPECT_FIRST(r, "layers.2.attn.q", "ROPE-FORM");
  EXPECT_EQ(r.findings[0].constant_value, 16);
  EXPECT_TRUE(Layer(Projected(), Turned(Projected(), false, 0.25), linear).findings.empty());
}
TEST(Rotation, ConstantOffsetOfPositionsIsNoPrecision) {
  std::vector<float> x(Projected().begin(), Projected().end());
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3});
  // Rows of positions 601 to 624 turned by 600 to 623.
  const std::vector<RowRun> rows = {{a, 0, kRows, kFirst + 1, false}};
  t.Record("layers.2.attn.q_proj", "T H d", {kRows, kHeads, kSize}, x, {.rows = rows});
  t.Record("layers.2.attn.q", "T H d", {kRows, kHeads, kSize}, Turned(x),
           {.rows = rows, .meta = {{"rope.theta", "10000"}}});
  EXPECT_FIRST(Judge(t, {"rotation"}), "layers.2.attn.q", "ROPE-POS");
}

// Queries normed by one of two weights before they are turned.
CheckResult Normed(uint64_t weight) {
  const std::vector<float> x = Projected(), own = Noise(kSize, 5), other = Noise(kSize, 6);
  const std::vector<float>& used = weight == 5 ? own : other;
  std::vector<float> y(x.size());
  for (size_t at = 0; at < x.size(); at += kSize) {
    double square = 0;
    for (size_t i = 0; i < kSize; ++i) square += double{x[at + i]} * double{x[at + i]} / kSize;
    for (size_t i = 0; i < kSize; ++i)
      y[at + i] = static_cast<float>(double{x[at + i]} / std::sqrt(square + 1e-6) * double{used[i]});
  }
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3});
  const std::vector<RowRun> rows = {{a, 0, kRows, kFirst, false}};
  const testing::Put load{.step = -1, .phase = Phase::kLoad};
  t.Record("layers.2.attn.q_norm.weight", "d", {kSize}, own, load);
  t.Record("layers.2.attn.k_norm.weight", "d", {kSize}, other, load);
  t.Record("layers.2.attn.q_proj", "T H d", {kRows, kHeads, kSize}, x, {.rows = rows});
  t.Record("layers.2.attn.q", "T H d", {kRows, kHeads, kSize}, Turned(y),
           {.rows = rows, .meta = {{"rope.theta", "10000"}}});
  return Judge(t, {"rotation"});
}
TEST(Rotation, WeightOfAnotherNormBeforeItIsALoad) {
  EXPECT_FIRST(Normed(6), "layers.2.attn.q", "LOAD");
  EXPECT_RULED_OUT(Normed(5));
}

}  // namespace
}  // namespace assay
