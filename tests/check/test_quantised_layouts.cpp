// Products of quantised weights whose layout the kernel took otherwise: orders of codes, places and axes of scales,
// groups by a list, differences that wrap.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "check/check.h"
#include "small_trace.h"
#include "verdicts.h"

namespace assay {
namespace {

using testing::Judge;
using testing::Noise;
using testing::SmallTrace;

// One code an element [out, in], a scale [out, groups] and, with zeros, a zero point beside each.
struct Layer {
  int64_t rows = 40, in = 64, out = 24, groups = 2;
  std::string quant = "gptq_v2";
  bool zeros = true;
  std::vector<int64_t> g_idx = {};  // empty: columns in order
  std::vector<float> code = {}, scale = {}, zero = {};

  Layer& Fill() {
    for (float v : Noise(out * in, 3)) code.push_back(static_cast<float>(static_cast<int>(v * 997) & 15));
    for (float v : Noise(out * groups, 2)) scale.push_back(0.02F + 0.01F * v * v);
    for (float v : Noise(out * groups, 5))
      zero.push_back(zeros ? static_cast<float>(5 + (static_cast<int>(v * 1009) & 3)) : 0);
    return *this;
  }
  double Code(int64_t n, int64_t k) const { return double{code[static_cast<size_t>(n * in + k)]}; }
  double Scale(int64_t n, int64_t g) const { return double{scale[static_cast<size_t>(n * groups + g)]}; }
  double Zero(int64_t n, int64_t g) const { return double{zero[static_cast<size_t>(n * groups + g)]}; }
  int64_t Place(int64_t k) const { return k / (in / groups); }
  int64_t Group(int64_t k) const { return g_idx.empty() ? Place(k) : g_idx[static_cast<size_t>(k)]; }
  double Right(int64_t n, int64_t k) const { return (Code(n, k) - Zero(n, Group(k))) * Scale(n, Group(k)); }
};
// Value of element (n, k) as the kernel takes it.
using Decode = std::function<double(const Layer&, int64_t n, int64_t k)>;
double Right(const Layer& l, int64_t n, int64_t k) { return l.Right(n, k); }

CheckResult Recorded(const Layer& l, const Decode& decode) {
  SmallTrace t;
  std::vector<int64_t> tokens(static_cast<size_t>(l.rows));
  std::iota(tokens.begin(), tokens.end(), 1);
  const uint64_t a = t.Request(tokens);
  const std::vector<float> x = Noise(l.rows * l.in, 1);
  std::vector<float> y;
  for (int64_t r = 0; r < l.rows; ++r) {
    for (int64_t n = 0; n < l.out; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < l.in; ++k) sum += double{x[static_cast<size_t>(r * l.in + k)]} * decode(l, n, k);
      y.push_back(static_cast<float>(sum));
    }
  }
  const std::string name = "layers.3.mlp.down_proj.weight.", size = std::to_string(l.in / l.groups);
  const testing::Put load{.step = -1, .phase = Phase::kLoad};
  testing::Put codes = load;
  codes.meta = {{"quant", l.quant}, {"packed", "0"}};
  if (l.groups > 1) codes.meta.emplace_back("group_size", size);
  t.Record(name + "codes", "out in", {l.out, l.in}, l.code, codes);
  t.Record(name + "scale", "out g", {l.out, l.groups}, l.scale, load);
  if (l.zeros) t.Record(name + "zero", "out g", {l.out, l.groups}, l.zero, load);
  if (!l.g_idx.empty()) t.Record(name + "g_idx", "in", {l.in}, l.g_idx, load);
  const std::vector<RowRun> rows = {{a, 0, static_cast<int32_t>(l.rows), 0, false}};
  t.Record("layers.3.mlp.act", "T f", {l.rows, l.in}, x, {.rows = rows});
  t.Record("layers.3.mlp.down", "T h", {l.rows, l.out}, y, {.rows = rows});
  return Judge(t, {"linear"});
}

void ExpectSilent(const CheckResult& r) {
  EXPECT_TRUE(r.findings.empty()) << r.findings[0].evidence[0];
  EXPECT_EQ(r.coverage.results_judged, 1U);
}

void ExpectFault(const CheckResult& r, std::string_view cls, const std::string& text,
                 double constant = std::numeric_limits<double>::quiet_NaN()) {
  ASSERT_EQ(r.findings.size(), 1U);
  const FirstBad& bad = r.findings[0];
  EXPECT_EQ(bad.name, "layers.3.mlp.down");
  EXPECT_EQ(bad.cls, cls) << bad.evidence[0];
  EXPECT_NE(bad.evidence[0].find(text), std::string::npos) << bad.evidence[0];
  if (!std::isnan(constant)) {
    EXPECT_NEAR(bad.constant_value, constant, 1e-3 * std::abs(constant)) << bad.evidence[0];
  }
}

// Column k in group 7k mod groups: every group has columns everywhere.
Layer Listed() {
  Layer l{.in = 96, .groups = 3};
  for (int64_t k = 0; k < 96; ++k) l.g_idx.push_back(k * 7 % 96 % 3);
  return l.Fill();
}

TEST(QuantisedLayout, ListOfGroupsBesideSingleCodesIsHonoured) { ExpectSilent(Recorded(Listed(), Right)); }

TEST(QuantisedLayout, IgnoredListOfGroupsIsNamed) {
  ExpectFault(
      Recorded(Listed(), [](const Layer& l, int64_t n,
                            int64_t k) { return (l.Code(n, k) - l.Zero(n, l.Place(k))) * l.Scale(n, l.Place(k)); }),
      fault_class::kQLayout, "g_idx was ignored");
}

TEST(QuantisedLayout, ColumnsSortedByGroupUnderAnUnsortedInputAreNamed) {
  ExpectFault(Recorded(Listed(),
                       [](const Layer& l, int64_t n, int64_t k) {
                         std::vector<int64_t> order(static_cast<size_t>(l.in));
                         std::iota(order.begin(), order.end(), 0);
                         std::stable_sort(order.begin(), order.end(),
                                          [&](int64_t a, int64_t b) { return l.Group(a) < l.Group(b); });
                         return l.Right(n, order[static_cast<size_t>(k)]);
                       }),
              fault_class::kQLayout, "sorted by their group");
}

TEST(QuantisedLayout, ScaleOfOneListedGroupHalvedIsItsConstant) {
  ExpectFault(Recorded(Listed(), [](const Layer& l, int64_t n,
                                    int64_t k) { return l.Right(n, k) * (l.Group(k) == 1 ? 0.5 : 1); }),
              fault_class::kQScale, "0.5 times", 0.5);
}

TEST(QuantisedLayout, ListBeyondTheScalesIsBadInput) {
  Layer l = Listed();
  l.g_idx[5] = 3;
  const CheckResult r = Recorded(l, [](const Layer&, int64_t, int64_t) { return 1.0; });
  EXPECT_TRUE(r.findings.empty());
  EXPECT_EQ(r.coverage.results_judged, 0U);
}

TEST(QuantisedLayout, DifferenceWrappedInAByteIs256Scales) {
  ExpectFault(Recorded(Layer{}.Fill(),
                       [](const Layer& l, int64_t n, int64_t k) {
                         return l.Right(n, k) + (l.Right(n, k) < 0 ? 256 * l.Scale(n, l.Place(k)) : 0);
                       }),
              fault_class::kQZero, "unsigned type of 8 bits", 256);
}

TEST(QuantisedLayout, DifferenceWrappedInFourBitsIs16Scales) {
  ExpectFault(Recorded(Layer{}.Fill(),
                       [](const Layer& l, int64_t n, int64_t k) {
                         return l.Right(n, k) + (l.Right(n, k) < 0 ? 16 * l.Scale(n, l.Place(k)) : 0);
                       }),
              fault_class::kQZero, "unsigned type of 4 bits", 16);
}

// Nothing is below its zero point: the unsigned type holds every difference.
TEST(QuantisedLayout, UnsignedDifferenceThatNeverWrapsIsRight) {
  Layer l = Layer{}.Fill();
  std::fill(l.zero.begin(), l.zero.end(), 0.0F);
  ExpectSilent(Recorded(l, [](const Layer& w, int64_t n, int64_t k) {
    return w.Right(n, k) + (w.Right(n, k) < 0 ? 256 * w.Scale(n, w.Place(k)) : 0);
  }));
}

TEST(QuantisedLayout, OrderOfCodesInATileIsReadOffTheResult) {
  static constexpr int64_t kFrom[16] = {0, 1, 8, 9, 4, 5, 12, 13, 2, 3, 10, 11, 6, 7, 14, 15};
  const Layer l = Layer{.groups = 1, .quant = "int8_channel", .zeros = false}.Fill();
  ExpectFault(Recorded(l, [](const Layer& w, int64_t n,
                             int64_t k) { return w.Code(n, k / 16 * 16 + kFrom[k % 16]) * w.Scale(n, 0); }),
              fault_class::kQLayout, "of every 16 columns the codes are taken in the order 0 1 8 9 4 5 12 13");
}

TEST(QuantisedLayout, LongOrderOfCodesIsReadOffTheResult) {
  const Layer l = Layer{.rows = 60, .in = 128, .out = 40, .groups = 1, .quant = "int8_channel", .zeros = false}.Fill();
  ExpectFault(Recorded(l, [](const Layer& w, int64_t n,
                             int64_t k) { return w.Code(n, k / 64 * 64 + k * 29 % 64) * w.Scale(n, 0); }),
              fault_class::kQLayout, "of every 64 columns the codes are taken in the order 0 29 58 23");
}

// Equal codes in each run of 16: their order says nothing, and nothing is wrong.
TEST(QuantisedLayout, OrderAmongEqualCodesIsRight) {
  static constexpr int64_t kFrom[16] = {0, 1, 8, 9, 4, 5, 12, 13, 2, 3, 10, 11, 6, 7, 14, 15};
  Layer l = Layer{.groups = 1, .quant = "int8_channel", .zeros = false}.Fill();
  for (int64_t i = 0; i < l.out * l.in; ++i) l.code[static_cast<size_t>(i)] = l.code[static_cast<size_t>(i / 16 * 16)];
  ExpectSilent(Recorded(
      l, [](const Layer& w, int64_t n, int64_t k) { return w.Code(n, k / 16 * 16 + kFrom[k % 16]) * w.Scale(n, 0); }));
}

TEST(QuantisedLayout, OrderOfWordsOnCodesAndZeroPointsTogetherIsNamed) {
  static constexpr int64_t kFrom[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  ExpectFault(Recorded(Layer{}.Fill(),
                       [](const Layer& l, int64_t n, int64_t k) {
                         const int64_t other = n / 8 * 8 + kFrom[n % 8];
                         return (l.Code(other, k) - l.Zero(other, l.Place(k))) * l.Scale(n, l.Place(k));
                       }),
              fault_class::kQLayout, "codes and zero points in the order 0 2 4 6 1 3 5 7 of words, along its rows");
}

TEST(QuantisedLayout, AnyOrderOfRowsOnCodesAndZeroPointsTogetherIsNamed) {
  static constexpr int64_t kFrom[8] = {3, 0, 6, 1, 7, 2, 5, 4};
  ExpectFault(Recorded(Layer{}.Fill(),
                       [](const Layer& l, int64_t n, int64_t k) {
                         const int64_t other = n / 8 * 8 + kFrom[n % 8];
                         return (l.Code(other, k) - l.Zero(other, l.Place(k))) * l.Scale(n, l.Place(k));
                       }),
              fault_class::kQLayout, "of every 8 rows the codes are taken in the order 3 0 6 1 7 2 5 4, zero points");
}

// Five groups a row, written one behind another, and read with a pitch of eight: what lies behind is `padding`.
Decode Padded(double padding) {
  return [padding](const Layer& l, int64_t n, int64_t k) {
    const auto at = static_cast<size_t>(n * 8 + l.Place(k));
    return l.Code(n, k) * (at < l.scale.size() ? double{l.scale[at]} : padding);
  };
}

TEST(QuantisedLayout, PitchOfScalesPaddedOnOneSideIsNamed) {
  const Layer l = Layer{.in = 80, .out = 48, .groups = 5, .quant = "int8_group", .zeros = false}.Fill();
  for (const double padding : {0.0, 1.0, 0.37}) {
    ExpectFault(Recorded(l, Padded(padding)), fault_class::kQLayout, "written with pitch 5 and read with pitch 8");
  }
  ExpectSilent(Recorded(l, Right));
}

// Scales that do not fill a padded row leave no trace when all are one number.
TEST(QuantisedLayout, PitchOfEqualScalesIsRight) {
  Layer l = Layer{.in = 80, .out = 48, .groups = 5, .quant = "int8_group", .zeros = false}.Fill();
  std::fill(l.scale.begin(), l.scale.end(), 0.25F);
  ExpectSilent(Recorded(l, Padded(0.25)));
}

TEST(QuantisedLayout, ScaleOfRowsBroadcastAlongColumnsIsNamed) {
  const Layer l = Layer{.in = 48, .out = 48, .groups = 1, .quant = "fp8_channel", .zeros = false}.Fill();
  ExpectFault(Recorded(l, [](const Layer& w, int64_t n, int64_t k) { return w.Code(n, k) * w.Scale(k, 0); }),
              fault_class::kQLayout, "broadcast along the other axis");
  ExpectSilent(Recorded(l, Right));
}

// A scale that is another one in a few rows alone is no matter of axes.
TEST(QuantisedLayout, ScaleOfFewRowsIsNoMatterOfAxes) {
  const Layer l = Layer{.in = 48, .out = 48, .groups = 1, .quant = "fp8_channel", .zeros = false}.Fill();
  ExpectFault(
      Recorded(l, [](const Layer& w, int64_t n, int64_t k) { return w.Right(n, k) * (n >= 4 && n < 9 ? 2 : 1); }),
      fault_class::kQScale, "2 times", 2);
}

// ---- rows read back from a cache of four-bit codes ----

// v [T, 2, 32] in groups of 16 under scales of their own, and read under `scale_of` (row, group of the row).
CheckResult ReadBack(const std::function<float(const std::vector<float>&, int64_t, int64_t)>& scale_of) {
  constexpr int64_t kT = 24, kHeads = 2, kCols = 32, kGroup = 16, kOfRow = kHeads * kCols / kGroup;
  constexpr float kE2m1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  SmallTrace t;
  std::vector<int64_t> tokens(kT);
  std::iota(tokens.begin(), tokens.end(), 1);
  const uint64_t a = t.Request(tokens);
  const std::vector<float> noise = Noise(kT * kHeads * kCols, 7);
  std::vector<float> scale = Noise(kT * kOfRow, 9), write, read;
  for (float& s : scale) s = 0.05F + s * s;
  for (int64_t i = 0; i < kT * kHeads * kCols; ++i) {
    // Each group has the largest code once, as a dynamic scale makes it.
    const float v = noise[static_cast<size_t>(i)];
    const float code = i % kGroup == 3 ? 6 : std::copysign(kE2m1[static_cast<int>(std::abs(v) * 7.99F)], v);
    const int64_t row = i / (kHeads * kCols), g = i % (kHeads * kCols) / kGroup;
    write.push_back(code * scale[static_cast<size_t>(row * kOfRow + g)]);
    read.push_back(code * scale_of(scale, row, g));
  }
  const std::vector<RowRun> rows = {{a, 0, kT, 0, false}};
  testing::Put put{.rows = rows};
  put.meta = {{"kv_cache_dtype", "f4_e2m1"}};
  t.Record("layers.3.attn.kv_write", "T Hkv dv", {kT, kHeads, kCols}, write, put);
  t.Record("layers.3.attn.v_read", "T Hkv dv", {kT, kHeads, kCols}, read, {.rows = rows, .step = 1});
  return Judge(t, {"cache-read"});
}

TEST(CacheGroups, ScalesOfOtherPlacesAreAMatterOfLayout) {
  const CheckResult r = ReadBack([](const std::vector<float>& s, int64_t row, int64_t g) {
    return s[static_cast<size_t>((row / 4 * 4 + g) * 4 + row % 4)];  // swapped within 4 rows by 4 groups
  });
  ASSERT_EQ(r.findings.size(), 1U);
  EXPECT_EQ(r.findings[0].name, "layers.3.attn.v_read");
  EXPECT_EQ(r.findings[0].cls, fault_class::kQLayout) << r.findings[0].evidence[0];
}

TEST(CacheGroups, ScalesOfTheirOwnAreNoLayout) {
  const CheckResult r = ReadBack([](const std::vector<float>& s, int64_t row, int64_t g) {
    return s[static_cast<size_t>(row * 4 + g)] * (1.0F + 0.01F * static_cast<float>(row + g));
  });
  ASSERT_EQ(r.findings.size(), 1U);
  EXPECT_EQ(r.findings[0].cls, fault_class::kKvScale) << r.findings[0].evidence[0];
}

TEST(CacheGroups, ScalesOfTheirPlacesAreRight) {
  const CheckResult r =
      ReadBack([](const std::vector<float>& s, int64_t row, int64_t g) { return s[static_cast<size_t>(row * 4 + g)]; });
  EXPECT_TRUE(r.findings.empty());
}

}  // namespace
}  // namespace assay
