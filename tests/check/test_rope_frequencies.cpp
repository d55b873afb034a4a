// Frequencies read off rotated rows: scalings with other values of their keys, frequencies of no formula, and what is
// none of them.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "oracle/rope.h"
#include "small_trace.h"
#include "verdicts.h"

namespace assay {
namespace {

using oracle::RopeScaling;
using oracle::RopeSpec;
using testing::Judge;
using testing::Noise;
using testing::SmallTrace;
using Meta = std::vector<std::pair<std::string_view, std::string_view>>;

constexpr int64_t kRows = 60, kHeads = 3, kSize = 32, kHalf = kSize / 2;

// Row p is turned by angle(p, pair).
CheckResult Rotated(const Meta& meta, const std::function<double(int64_t, int64_t)>& angle, double magnitude = 1) {
  const std::vector<float> x = Noise(kRows * kHeads * kSize, 7);
  std::vector<float> y(x.size());
  for (int64_t r = 0; r < kRows * kHeads; ++r) {
    for (int64_t i = 0; i < kHalf; ++i) {
      const auto at = static_cast<size_t>(r * kSize + i);
      const double by = angle(r / kHeads, i), a = double{x[at]}, b = double{x[at + kHalf]};
      y[at] = static_cast<float>(magnitude * (a * std::cos(by) - b * std::sin(by)));
      y[at + kHalf] = static_cast<float>(magnitude * (b * std::cos(by) + a * std::sin(by)));
    }
  }
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3});
  const std::vector<RowRun> rows = {{a, 0, kRows, 0, false}};
  t.Record("layers.0.attn.q_proj", "T H d", {kRows, kHeads, kSize}, x, {.rows = rows});
  t.Record("layers.0.attn.q", "T H d", {kRows, kHeads, kSize}, y, {.rows = rows, .meta = meta});
  return Judge(t, {"rotation"});
}
CheckResult Rotated(const Meta& meta, const RopeSpec& used) {
  const auto f = oracle::MakeFrequencies(used);
  return Rotated(
      meta, [&](int64_t p, int64_t i) { return static_cast<double>(p) * f->inverse[static_cast<size_t>(i)]; },
      f->magnitude);
}
std::string Said(const CheckResult& r) { return r.findings.empty() ? "" : r.findings[0].evidence[0]; }

const Meta kLlama3 = {
    {"rope.type", "llama3"}, {"rope.theta", "500000"}, {"rope.factor", "32"}, {"rope.original_max_position", "24"}};
RopeSpec Llama3() {
  RopeSpec s;
  s.scaling = RopeScaling::kLlama3;
  s.theta = 500000;
  s.dim = kSize;
  s.factor = 32;
  s.original_max_position = 24;
  return s;
}
const Meta kYarn = {
    {"rope.type", "yarn"}, {"rope.theta", "10000"}, {"rope.factor", "4"}, {"rope.original_max_position", "128"}};
RopeSpec Yarn() {
  RopeSpec s;
  s.scaling = RopeScaling::kYarn;
  s.dim = kSize;
  s.factor = 4;
  s.original_max_position = 128;
  return s;
}

TEST(RopeFrequencies, DeclaredScalingIsRight) {
  EXPECT_RULED_OUT(Rotated(kLlama3, Llama3()));
  EXPECT_RULED_OUT(Rotated(kYarn, Yarn()));
}
TEST(RopeFrequencies, OtherFactorOfLlama3IsNamedWithIt) {
  RopeSpec used = Llama3();
  used.factor = 8;
  const CheckResult r = Rotated(kLlama3, used);
  EXPECT_FIRST(r, "layers.0.attn.q", "ROPE-FORM");
  EXPECT_EQ(r.findings[0].constant_value, 8) << Said(r);
}
TEST(RopeFrequencies, ExchangedEndsOfTheRampAreNamed) {
  RopeSpec used = Yarn();
  std::swap(used.beta_fast, used.beta_slow);
  const CheckResult r = Rotated(kYarn, used);
  EXPECT_FIRST(r, "layers.0.attn.q", "ROPE-FORM");
  EXPECT_NE(Said(r).find("exchanged"), std::string::npos) << Said(r);
}
TEST(RopeFrequencies, AnotherScalingThanTheDeclaredOneIsNamed) {
  const auto f = oracle::MakeFrequencies(Yarn());
  const CheckResult r = Rotated(
      kYarn,
      [](int64_t p, int64_t i) {
        return static_cast<double>(p) / 4 * std::pow(10000.0, -2.0 * static_cast<double>(i) / kSize);
      },
      f->magnitude);
  EXPECT_FIRST(r, "layers.0.attn.q", "ROPE-FORM");
  EXPECT_NE(Said(r).find("linear"), std::string::npos) << Said(r);
}
TEST(RopeFrequencies, BaseOfNoModelIsSolvedFor) {
  RopeSpec used;
  used.dim = kSize;
  used.theta = 31415;
  const CheckResult r = Rotated({{"rope.theta", "10000"}}, used);
  EXPECT_FIRST(r, "layers.0.attn.q", "ROPE-FORM");
  EXPECT_NEAR(r.findings[0].constant_value, 31415, 3) << Said(r);
}
TEST(RopeFrequencies, FrequenciesOfNoFormulaAreReadOffPairByPair) {
  const auto f = oracle::MakeFrequencies(Yarn());
  const CheckResult r = Rotated(
      kYarn,
      [&](int64_t p, int64_t i) {
        const double own = f->inverse[static_cast<size_t>(i)];
        return static_cast<double>(p) * (i < 5 ? own : own * (0.3 + 0.11 * static_cast<double>(i)));
      },
      f->magnitude);
  EXPECT_FIRST(r, "layers.0.attn.q", "ROPE-FORM");
  EXPECT_NE(Said(r).find("pairs 5 to 15 of 16"), std::string::npos) << Said(r);
}
// A whole offset turns each pair by one frequency too, but not from the position's own.
TEST(RopeFrequencies, WrongPositionsAreNone) {
  const auto f = oracle::MakeFrequencies(Llama3());
  const auto by = [&](const std::function<double(double)>& used) {
    return Rotated(kLlama3, [&](int64_t p, int64_t i) {
      return used(static_cast<double>(p)) * f->inverse[static_cast<size_t>(i)];
    });
  };
  EXPECT_FIRST(by([](double p) { return p + 3; }), "layers.0.attn.q", "ROPE-POS");
  EXPECT_FIRST(by([](double p) { return std::min(p, 31.0); }), "layers.0.attn.q", "ROPE-POS");
  EXPECT_FIRST(by([](double p) { return p >= 16 ? p - 16 : p; }), "layers.0.attn.q", "ROPE-POS");
}
// A pair that turns by no frequency: half of its rows are late.
TEST(RopeFrequencies, AnglesThatFollowNoFrequencyAreNone) {
  const auto f = oracle::MakeFrequencies(Yarn());
  const CheckResult r = Rotated(
      kYarn,
      [&](int64_t p, int64_t i) {
        const double late = i == 2 && p % 2 == 1 ? 0.7 : 0;
        return static_cast<double>(p) * f->inverse[static_cast<size_t>(i)] + late;
      },
      f->magnitude);
  ASSERT_FALSE(r.findings.empty());
  EXPECT_NE(r.findings[0].cls, "ROPE-FORM");
}

}  // namespace
}  // namespace assay
