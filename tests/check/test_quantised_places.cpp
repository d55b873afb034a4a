// Codes, scales and zero points of quantised operands in other places, and caches of four-bit codes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "check/check.h"
#include "small_trace.h"
#include "verdicts.h"

namespace assay {
namespace {

using testing::Judge;
using testing::Noise;
using testing::Put;
using testing::SmallTrace;

constexpr int64_t kRows = 40, kIn = 32, kOut = 32, kGroup = 8, kGroups = kIn / kGroup;

struct Parts {
  std::vector<float> code, scale, zero, order;  // order: group of each column
  double Value(int64_t n, int64_t k) const { return Value(n, k, n, static_cast<int64_t>(At(order, k))); }
  // The code of (n, k) under the scale and zero point of row m and group g.
  double Value(int64_t n, int64_t k, int64_t m, int64_t g) const {
    return (At(code, n * kIn + k) - At(zero, m * kGroups + g)) * At(scale, m * kGroups + g);
  }
  static double At(const std::vector<float>& x, int64_t i) { return double{x[static_cast<size_t>(i)]}; }
};
// What the kernel takes for element (n, k).
using Decode = std::function<double(const Parts&, int64_t n, int64_t k)>;

// A product with integer codes one an element; act_order: columns belong to groups in turn.
CheckResult Product(const Decode& decode, bool act_order = false) {
  SmallTrace t;
  const uint64_t a = t.Request(std::vector<int64_t>(static_cast<size_t>(kRows), 1));
  const std::vector<float> x = Noise(kRows * kIn, 1), s = Noise(kOut * kGroups, 2), c = Noise(kOut * kIn, 3);
  Parts p;
  for (float v : c) p.code.push_back(static_cast<float>(static_cast<int>(v * 997) & 15));
  for (float v : s) p.scale.push_back(0.02F + 0.01F * v * v);
  for (float v : s) p.zero.push_back(static_cast<float>(5 + (static_cast<int>(v * 1009) & 3)));
  for (int64_t k = 0; k < kIn; ++k) p.order.push_back(static_cast<float>(act_order ? k % kGroups : k / kGroup));
  std::vector<float> y;
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t n = 0; n < kOut; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < kIn; ++k) sum += Parts::At(x, r * kIn + k) * decode(p, n, k);
      y.push_back(static_cast<float>(sum));
    }
  }
  const std::string name = "layers.3.mlp.down_proj.weight.";
  const Put load{.step = -1, .phase = Phase::kLoad};
  Put codes = load;
  codes.meta = {{"quant", "gptq_v2"}, {"group_size", "8"}, {"packed", "0"}};
  t.Record(name + "codes", "out in", {kOut, kIn}, p.code, codes);
  t.Record(name + "scale", "out g", {kOut, kGroups}, p.scale, load);
  t.Record(name + "zero", "out g", {kOut, kGroups}, p.zero, load);
  if (act_order) t.Record(name + "g_idx", "in", {kIn}, p.order, load);
  t.Record("layers.3.mlp.act", "T f", {kRows, kIn}, x, {.rows = {{a, 0, kRows, 0, false}}});
  t.Record("layers.3.mlp.down", "T h", {kRows, kOut}, y, {.rows = {{a, 0, kRows, 0, false}}});
  return Judge(t, {"linear"});
}
double AsDeclared(const Parts& p, int64_t n, int64_t k) { return p.Value(n, k); }
// Row n of a tensor packed along its rows in the word order of AWQ, taken as if it were packed in turn.
int64_t Word(int64_t n) {
  constexpr int64_t kOrder[] = {0, 2, 4, 6, 1, 3, 5, 7};
  return n / 8 * 8 + kOrder[n % 8];
}

TEST(QuantisedPlaces, RightProductsAreRuledOut) {
  EXPECT_RULED_OUT(Product(AsDeclared));
  EXPECT_RULED_OUT(Product(AsDeclared, true));
}
TEST(QuantisedPlaces, ActOrderThatIsNotLookedAtIsALayout) {
  EXPECT_FIRST(Product([](const Parts& p, int64_t n, int64_t k) { return p.Value(n, k, n, k / kGroup); }, true),
               "layers.3.mlp.down", "Q-LAYOUT");
}
TEST(QuantisedPlaces, DifferenceBelowZeroInAnUnsignedTypeIsAZeroPoint) {
  const CheckResult r = Product([](const Parts& p, int64_t n, int64_t k) {
    const double value = p.Value(n, k);
    return value < 0 ? value + 256 * Parts::At(p.scale, n * kGroups + k / kGroup) : value;
  });
  EXPECT_FIRST(r, "layers.3.mlp.down", "Q-ZERO");
  EXPECT_EQ(r.findings[0].constant_value, 256);
}
TEST(QuantisedPlaces, WordsOfCodesAndZeroPointsInAnotherOrderAreALayout) {
  EXPECT_FIRST(Product([](const Parts& p, int64_t n, int64_t k) {
                 const int64_t m = Word(n);
                 return (Parts::At(p.code, m * kIn + k) - Parts::At(p.zero, m * kGroups + k / kGroup)) *
                        Parts::At(p.scale, n * kGroups + k / kGroup);
               }),
               "layers.3.mlp.down", "Q-LAYOUT");
}
TEST(QuantisedPlaces, CodesInTheOrderOfTensorCoresAreALayout) {
  EXPECT_FIRST(Product([](const Parts& p, int64_t n, int64_t k) {
                 constexpr int64_t kOrder[] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
                 return p.Value(n, k / 16 * 16 + kOrder[k % 16], n, k / kGroup);
               }),
               "layers.3.mlp.down", "Q-LAYOUT");
}
TEST(QuantisedPlaces, ScalesReadWithAPaddedPitchAreALayout) {
  EXPECT_FIRST(Product([](const Parts& p, int64_t n, int64_t k) {
                 const int64_t at = n * 8 + k / kGroup;  // of a buffer with rows of kGroups, ones behind it
                 const double own = Parts::At(p.scale, n * kGroups + k / kGroup);
                 return p.Value(n, k) / own * (at < kOut * kGroups ? Parts::At(p.scale, at) : 1);
               }),
               "layers.3.mlp.down", "Q-LAYOUT");
}

// A square weight of one scale a row: values times it, or times the scale of the row that has the column's number.
CheckResult Channels(bool of_columns) {
  SmallTrace t;
  const uint64_t a = t.Request(std::vector<int64_t>(static_cast<size_t>(kRows), 1));
  const std::vector<float> x = Noise(kRows * kIn, 1), code = Noise(kOut * kIn, 3);
  std::vector<float> scale, y;
  for (float v : Noise(kOut, 2)) scale.push_back(1.5F + v);
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t n = 0; n < kOut; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < kIn; ++k)
        sum += Parts::At(x, r * kIn + k) * Parts::At(code, n * kIn + k) * Parts::At(scale, of_columns ? k : n);
      y.push_back(static_cast<float>(sum));
    }
  }
  const Put load{.step = -1, .phase = Phase::kLoad};
  Put codes = load;
  codes.meta = {{"quant", "fp8_channel"}};
  t.Record("layers.3.mlp.down_proj.weight.codes", "out in", {kOut, kIn}, code, codes);
  t.Record("layers.3.mlp.down_proj.weight.scale", "out g", {kOut, 1}, scale, load);
  t.Record("layers.3.mlp.act", "T f", {kRows, kIn}, x, {.rows = {{a, 0, kRows, 0, false}}});
  t.Record("layers.3.mlp.down", "T h", {kRows, kOut}, y, {.rows = {{a, 0, kRows, 0, false}}});
  return Judge(t, {"linear"});
}
TEST(QuantisedPlaces, ScaleOfARowOnAColumnIsALayout) {
  EXPECT_FIRST(Channels(true), "layers.3.mlp.down", "Q-LAYOUT");
  EXPECT_RULED_OUT(Channels(false));
}

// An activation with a scale for 8 elements of each row, called a group or, as it is one row high, a block.
CheckResult Activation(std::string_view quant, double code_times) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12});
  const std::vector<float> x = Noise(12 * kIn, 1);
  std::vector<float> code, scale;
  for (size_t g = 0; g < x.size() / 8; ++g) {
    float top = 0;
    for (size_t i = g * 8; i < g * 8 + 8; ++i) top = std::max(top, std::abs(x[i]));
    scale.push_back(top / 448);
    for (size_t i = g * 8; i < g * 8 + 8; ++i)
      code.push_back(std::nearbyint(x[i] / scale.back() * static_cast<float>(code_times)));
  }
  const std::vector<RowRun> rows = {{a, 0, 12, 0, false}};
  t.Record("layers.3.mlp.act", "T f", {12, kIn}, x, {.rows = rows});
  t.Record("layers.3.mlp.act.q", "T f", {12, kIn}, code,
           {.rows = rows, .meta = {{"quant", quant}, {"group_size", "8"}}});
  t.Record("layers.3.mlp.act.q_scale", "T g", {12, kGroups}, scale, {.rows = rows});
  return Judge(t, {"quantised-inputs"});
}
TEST(QuantisedPlaces, GroupsOfAnActivationsRowsAreKnownByBothNames) {
  for (std::string_view quant : {"fp8_group", "fp8_block"}) {
    EXPECT_RULED_OUT(Activation(quant, 1));
    ASSERT_FALSE(Activation(quant, 0.5).findings.empty());
    EXPECT_EQ(Activation(quant, 0.5).findings[0].cls, "Q-SCALE");
  }
}

// ---- four-bit caches -----------------------------------------------------------------------------------------------

constexpr int64_t kTokens = 16, kHeads = 2, kWidth = 32, kBlock = 16, kBlocks = kWidth / kBlock;

enum class Fault { kNone, kPowersOfTwo, kHalved, kScalesMoved, kHeadsMoved };

// Values written through e2m1 codes with a scale for 16 of them; read back in the next step. Right with kPowersOfTwo:
// one scale for the heads of a row, rounded up to a power of two.
CheckResult FourBit(Fault fault, bool scales_recorded, std::string_view format = "f4_e2m1") {
  SmallTrace t;
  const uint64_t a = t.Request(std::vector<int64_t>(static_cast<size_t>(kTokens), 1));
  std::vector<float> v = Noise(kTokens * kHeads * kWidth, 4), size = Noise(kTokens * kHeads * kBlocks, 5), code, scale;
  for (size_t i = 0; i < v.size(); ++i) v[i] *= std::exp(2 * size[i / kBlock]);
  constexpr float kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (size_t g = 0; g < size.size(); ++g) {
    float top = 0;
    for (size_t i = g * kBlock; i < (g + 1) * kBlock; ++i) top = std::max(top, std::abs(v[i]));
    scale.push_back(top / 6);
    if (fault == Fault::kPowersOfTwo) {
      const auto row = v.begin() + static_cast<int64_t>(g) / (kHeads * kBlocks) * kHeads * kWidth;
      std::for_each(row, row + kHeads * kWidth, [&](float x) { top = std::max(top, std::abs(x)); });
      scale.back() = std::exp2(std::ceil(std::log2(top / 6)));
    }
    for (size_t i = g * kBlock; i < (g + 1) * kBlock; ++i) {
      float best = 0;
      for (float c : kValues) {
        if (std::abs(std::abs(v[i]) / scale[g] - c) < std::abs(std::abs(v[i]) / scale[g] - best)) best = c;
      }
      code.push_back(std::copysign(best, v[i]));
    }
  }
  std::vector<float> written, read;
  for (size_t i = 0; i < v.size(); ++i)
    written.push_back(code[i] * scale[i / kBlock] * (fault == Fault::kHalved ? 0.5F : 1));
  for (size_t i = 0; i < v.size(); ++i) {
    const size_t cell = i / kBlock, cells = size.size();
    read.push_back(fault == Fault::kScalesMoved ? code[i] * scale[(cell + 5) % cells] : written[i]);
  }
  if (fault == Fault::kHeadsMoved) {  // [heads, tokens] read as [tokens, heads]
    for (int64_t at = 0; at < kTokens * kHeads; ++at) {
      const int64_t from = at % kTokens * kHeads + at / kTokens;
      std::copy_n(written.begin() + from * kWidth, kWidth, read.begin() + at * kWidth);
    }
  }
  const std::vector<RowRun> rows = {{a, 0, kTokens, 0, false}};
  t.Record("layers.0.attn.k", "T Hkv d", {kTokens, kHeads, kWidth}, v, {.rows = rows});
  if (scales_recorded) t.Record("layers.0.attn.k_scale", "T Hkv g", {kTokens, kHeads, kBlocks}, scale, {.rows = rows});
  t.Record("layers.0.attn.kv_write", "T Hkv d", {kTokens, kHeads, kWidth}, written,
           {.rows = rows, .meta = {{"kv_cache_dtype", format}}});
  t.Record("layers.0.attn.k_read", "T Hkv d", {kTokens, kHeads, kWidth}, read, {.rows = rows, .step = 1});
  const bool read_wrong = fault == Fault::kScalesMoved || fault == Fault::kHeadsMoved;
  return Judge(t, {read_wrong ? "cache-read" : "cache-write"});
}
TEST(FourBitCache, RightRowsAreRuledOutWithScalesAndWithout) {
  EXPECT_RULED_OUT(FourBit(Fault::kNone, true));
  EXPECT_RULED_OUT(FourBit(Fault::kNone, false));
  EXPECT_RULED_OUT(FourBit(Fault::kNone, false, "nvfp4"));
}
TEST(FourBitCache, PowersOfTwoForAWholeRowAreRight) { EXPECT_RULED_OUT(FourBit(Fault::kPowersOfTwo, false)); }
TEST(FourBitCache, RowsOfHalfTheScaleAreFoundWithoutTheScales) {
  EXPECT_FIRST(FourBit(Fault::kHalved, false), "layers.0.attn.kv_write", "KV-SCALE");
}
TEST(FourBitCache, RowsOfHalfTheScaleAreNamed) {
  const CheckResult r = FourBit(Fault::kHalved, true);
  EXPECT_FIRST(r, "layers.0.attn.kv_write", "KV-SCALE");
  EXPECT_NEAR(r.findings[0].constant_value, 0.5, 0.02);
}
TEST(FourBitCache, ScalesInOtherPlacesAreALayout) {
  EXPECT_FIRST(FourBit(Fault::kScalesMoved, true), "layers.0.attn.k_read", "Q-LAYOUT");
}
TEST(FourBitCache, HeadsInTheOrderOfAnotherPageLayoutAreAStride) {
  EXPECT_FIRST(FourBit(Fault::kHeadsMoved, true), "layers.0.attn.k_read", "STRIDE");
}

}  // namespace
}  // namespace assay
