// What a softmax has beside its scores: slopes, sinks and keys of no position other than the declared ones; masks that
// have the causal bound in them; chunks whose log-sum-exps were left out or kept coarsely.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "check/check.h"
#include "small_trace.h"
#include "verdicts.h"

namespace assay {
namespace {

using testing::Bf16;
using testing::Judge;
using testing::Noise;
using testing::Put;
using testing::SmallTrace;

constexpr int64_t kHeads = 3, kWidth = 8, kRows = 11, kPadding = 3;

// What the kernel does; the default is what is declared.
struct Kernel {
  std::vector<double> slopes = std::vector<double>(kHeads);
  std::vector<double> sinks;
  int zero_keys = 0;
  bool padding = false;  // rows of padding before the request's own are keys of every query
  std::function<bool(int64_t, int64_t)> sees = [](int64_t q, int64_t p) { return p <= q; };
};
struct Declared {
  std::vector<float> slopes = {}, sinks = {}, mask = {};
};

double At(const std::vector<float>& x, int64_t i) { return double{x[static_cast<size_t>(i)]}; }

// One prompt of kRows rows behind kPadding rows of padding, one key head to a query head.
CheckResult Attention(const Kernel& kernel, const Declared& declared) {
  SmallTrace t;
  const uint64_t a = t.Request(std::vector<int64_t>(kRows, 1));
  const int64_t all = kRows + kPadding, row = kHeads * kWidth;
  const std::vector<float> q = Noise(static_cast<size_t>(all * row), 1), k = Noise(static_cast<size_t>(all * row), 2),
                           v = Noise(static_cast<size_t>(all * row), 3);
  std::vector<float> out(static_cast<size_t>(all * row));
  for (int64_t i = 0; i < kRows; ++i) {
    for (int64_t h = 0; h < kHeads; ++h) {
      const auto head = static_cast<size_t>(h);
      double total = kernel.zero_keys, sum[kWidth] = {};
      if (!kernel.sinks.empty()) total += std::exp(kernel.sinks[head]);
      const auto add = [&](int64_t key, double bias) {
        double score = bias;
        for (int64_t c = 0; c < kWidth; ++c)
          score += At(q, (kPadding + i) * row + h * kWidth + c) * At(k, key * row + h * kWidth + c) / 2;
        total += std::exp(score);
        for (int64_t c = 0; c < kWidth; ++c) sum[c] += std::exp(score) * At(v, key * row + h * kWidth + c);
      };
      for (int64_t p = 0; p < kRows; ++p) {
        if (kernel.sees(i, p)) add(kPadding + p, kernel.slopes[head] * static_cast<double>(p - i));
      }
      for (int64_t p = 0; kernel.padding && p < kPadding; ++p) add(p, 0);
      for (int64_t c = 0; c < kWidth; ++c)
        out[static_cast<size_t>((kPadding + i) * row + h * kWidth + c)] = static_cast<float>(sum[c] / total);
    }
  }
  const Put put{.rows = {{0, 0, kPadding, -1, true}, {a, kPadding, kRows, 0, false}}};
  t.Record("layers.0.attn.q", "T H d", {all, kHeads, kWidth}, q, put);
  t.Record("layers.0.attn.k", "T Hkv d", {all, kHeads, kWidth}, k, put);
  t.Record("layers.0.attn.v", "T Hkv d", {all, kHeads, kWidth}, v, put);
  if (!declared.slopes.empty()) t.Record("layers.0.attn.alibi_slopes", "H", {kHeads}, declared.slopes, {});
  if (!declared.sinks.empty()) t.Record("layers.0.attn.sinks", "H", {kHeads}, declared.sinks, {});
  if (!declared.mask.empty()) t.Record("layers.0.attn.mask", "T n", {all, kRows}, declared.mask, put);
  Put result = put;
  result.meta = {{"softmax_scale", "0.5"}};
  t.Record("layers.0.attn.out", "T H dv", {all, kHeads, kWidth}, out, result);
  return Judge(t, {"attention"});
}

void ExpectCause(const CheckResult& r, std::string_view cls, std::string_view text) {
  EXPECT_FIRST(r, "layers.0.attn.out", cls);
  EXPECT_EQ(r.findings[0].evidence[0].find(text), 0U) << r.findings[0].evidence[0];
}

// ---- slopes --------------------------------------------------------------------------------------------------------

// Three heads: 2^-4 and 2^-8 of the power of two below, then the first of the power above.
const std::vector<double> kSlopes = {0.0625, 0.00390625, 0.25};
const std::vector<float> kSlopesDeclared = {0.0625F, 0.00390625F, 0.25F};

Kernel Sloped(std::vector<double> slopes) {
  Kernel kernel;
  kernel.slopes = std::move(slopes);
  return kernel;
}

TEST(AttentionTerms, DeclaredSlopesAreRight) {
  EXPECT_RULED_OUT(Attention(Sloped(kSlopes), {.slopes = kSlopesDeclared}));
}
TEST(AttentionTerms, OtherSlopesAreAMaskByTheirFormulaOrFactor) {
  const Declared declared{.slopes = kSlopesDeclared};
  ExpectCause(Attention(Sloped({std::exp2(-8.0 / 3), std::exp2(-16.0 / 3), std::exp2(-8.0)}), declared), "MASK",
              "fits ALiBi slopes of one geometric row");
  const CheckResult r = Attention(Sloped({0.0625 * 1.7, 0.00390625 * 1.7, 0.25 * 1.7}), declared);
  ExpectCause(r, "MASK", "fits the ALiBi slopes times 1.7");
  EXPECT_NEAR(r.findings[0].constant_value, 1.7, 1e-3);
  ExpectCause(Attention({}, declared), "MASK", "fits without the ALiBi slopes");
}
TEST(AttentionTerms, SlopesOfNoRuleStayWithoutACause) {
  const CheckResult r = Attention(Sloped({0.3, 0.01, 0.02}), {.slopes = kSlopesDeclared});
  EXPECT_FIRST(r, "layers.0.attn.out", "KERNEL");
}

// ---- sinks ---------------------------------------------------------------------------------------------------------

Kernel Sunk(std::vector<double> sinks) {
  Kernel kernel;
  kernel.sinks = std::move(sinks);
  return kernel;
}
const Declared kSinks{.sinks = {1.5F, -0.75F, 2.25F}};

TEST(AttentionTerms, DeclaredSinksAreRight) { EXPECT_RULED_OUT(Attention(Sunk({1.5, -0.75, 2.25}), kSinks)); }
TEST(AttentionTerms, SinksTimesAConstantAreAMask) {
  const CheckResult r = Attention(Sunk({0.75, -0.375, 1.125}), kSinks);
  ExpectCause(r, "MASK", "fits the sinks times 0.5");
  EXPECT_NEAR(r.findings[0].constant_value, 0.5, 1e-3);
}
TEST(AttentionTerms, OtherSinksAreAMask) {
  ExpectCause(Attention(Sunk({2.5, 0.25, 3.25}), kSinks), "MASK", "fits the sinks plus 1");
  ExpectCause(Attention(Sunk({2.25, 1.5, -0.75}), kSinks), "MASK",
              "fits other sinks than declared, by head: 2.25 1.5 -0.75");
  ExpectCause(Attention({}, kSinks), "MASK", "fits without the sinks");
  ExpectCause(Attention(Sunk({1.5, -0.75, 2.25}), {}), "MASK", "fits sinks where none are declared");
}

// ---- keys of no position -------------------------------------------------------------------------------------------

TEST(AttentionTerms, KeysOfZerosArePaddingWithTheirNumber) {
  Kernel kernel;
  kernel.zero_keys = 5;
  const CheckResult r = Attention(kernel, {});
  ExpectCause(r, "PADREAD", "fits keys of zeros behind the newest one, to the end of its block of 16");
  EXPECT_NE(r.findings[0].evidence[0].find("(5 of them"), std::string::npos);
}
TEST(AttentionTerms, RowsOfPaddingAmongTheKeysAreNamed) {
  Kernel kernel;
  kernel.padding = true;
  ExpectCause(Attention(kernel, {}), "PADREAD", "fits the rows of padding before the request's own among the keys");
}
TEST(AttentionTerms, RowsOfPaddingThatNobodyReadsAreRight) { EXPECT_RULED_OUT(Attention({}, {})); }

// ---- masks ---------------------------------------------------------------------------------------------------------

// Rows of `sees`, and none for padding.
std::vector<float> MaskOf(const std::function<bool(int64_t, int64_t)>& sees) {
  std::vector<float> mask(kPadding * kRows, 0);
  for (int64_t q = 0; q < kRows; ++q) {
    for (int64_t p = 0; p < kRows; ++p) mask.push_back(sees(q, p) ? 1.0F : 0.0F);
  }
  return mask;
}
// Positions 3 to 6 are one image, whose patches see each other.
bool Image(int64_t q, int64_t p) { return p <= q || (q >= 3 && p <= 6); }

TEST(AttentionTerms, MaskThatHasTheCausalBoundInItMayLiftIt) {
  Kernel kernel;
  kernel.sees = [](int64_t q, int64_t p) { return Image(q, p) && !(q > 6 && p > q); };
  const Declared declared{.mask = MaskOf(kernel.sees)};
  EXPECT_RULED_OUT(Attention(kernel, declared));
  ExpectCause(Attention({}, declared), "MASK", "fits with a causal bound where none is declared");
}
TEST(AttentionTerms, MaskOfPaddingAloneKeepsTheCausalBound) {
  const auto kept = [](int64_t, int64_t p) { return p != 4; };
  Kernel kernel;
  kernel.sees = [&](int64_t q, int64_t p) { return p <= q && kept(q, p); };
  const Declared declared{.mask = MaskOf(kept)};
  EXPECT_RULED_OUT(Attention(kernel, declared));
  kernel.sees = kept;
  ExpectCause(Attention(kernel, declared), "MASK", "fits without the causal bound");
}

// ---- chunks --------------------------------------------------------------------------------------------------------

// Two chunks of any values, merged by their log-sum-exps, or as a mean.
CheckResult Merged(bool mean) {
  SmallTrace t;
  const uint64_t a = t.Request(std::vector<int64_t>(kRows, 1));
  const Put put{.rows = {{a, 0, kRows, 0, false}}};
  const size_t n = kRows * kHeads;
  const std::vector<float> lse[2] = {Noise(n, 5), Noise(n, 6)}, part[2] = {Noise(n * kWidth, 7), Noise(n * kWidth, 8)};
  std::vector<float> out;
  for (size_t i = 0; i < n * kWidth; ++i) {
    const double e0 = mean ? 1 : std::exp(double{lse[0][i / kWidth]}),
                 e1 = mean ? 1 : std::exp(double{lse[1][i / kWidth]});
    out.push_back(static_cast<float>((e0 * double{part[0][i]} + e1 * double{part[1][i]}) / (e0 + e1)));
  }
  for (int j = 0; j < 2; ++j) {
    const std::string name = "layers.0.attn.chunk." + std::to_string(j) + ".";
    t.Record(name + "out", "T H dv", {kRows, kHeads, kWidth}, part[j], put);
    t.Record(name + "lse", "T H", {kRows, kHeads}, lse[j], put);
  }
  t.Record("layers.0.attn.out", "T H dv", {kRows, kHeads, kWidth}, out, put);
  return Judge(t, {"chunks"});
}
TEST(AttentionTerms, MeanOfChunksIsAMatterOfLogSumExps) {
  EXPECT_RULED_OUT(Merged(false));
  ExpectCause(Merged(true), "LSE", "fits the mean of the chunks");
}

// The second of two chunks has no keys for the request; its rows are zeros, or hold anything.
CheckResult EmptyChunk(bool written) {
  SmallTrace t;
  const uint64_t a = t.Request(std::vector<int64_t>(kRows, 1));
  Put put{.rows = {{a, 0, kRows, 0, false}}};
  const std::vector<float> q = Noise(kRows * kWidth, 1), k = Noise(kRows * kWidth, 2), v = Noise(kRows * kWidth, 3);
  t.Record("layers.0.attn.q", "T H d", {kRows, 1, kWidth}, q, put);
  t.Record("layers.0.attn.k", "T Hkv d", {kRows, 1, kWidth}, k, put);
  t.Record("layers.0.attn.v", "T Hkv d", {kRows, 1, kWidth}, v, put);
  put.meta = {{"softmax_scale", "0.5"}, {"keys", "0:0"}, {"causal", "0"}};
  t.Record("layers.0.attn.chunk.0.out", "T H dv", {kRows, 1, kWidth},
           written ? std::vector<float>(kRows * kWidth, 0.0F) : Noise(kRows * kWidth, 4), put);
  t.Record("layers.0.attn.chunk.0.lse", "T H", {kRows, 1}, std::vector<float>(kRows, -INFINITY), put);
  return Judge(t, {"chunks"});
}
TEST(AttentionTerms, RowsWithoutKeysThatAreNoZerosAreUnwritten) {
  EXPECT_RULED_OUT(EmptyChunk(true));
  const CheckResult r = EmptyChunk(false);
  ASSERT_EQ(r.findings.size(), 1U);
  EXPECT_EQ(r.findings[0].cls, "UNWRITTEN");
}

// A right output, and log-sum-exps kept in bf16 or a third too large.
CheckResult Lse(bool coarse) {
  SmallTrace t;
  const uint64_t a = t.Request(std::vector<int64_t>(kRows, 1));
  const Put put{.rows = {{a, 0, kRows, 0, false}}};
  const std::vector<float> q = Noise(kRows * kWidth, 1), k = Noise(kRows * kWidth, 2), v(kRows * kWidth, 1.0F);
  std::vector<float> lse;
  for (int64_t i = 0; i < kRows; ++i) {
    double total = 0;
    for (int64_t p = 0; p <= i; ++p) {
      double score = 0;
      for (int64_t c = 0; c < kWidth; ++c) score += At(q, i * kWidth + c) * At(k, p * kWidth + c) / 2;
      total += std::exp(score);
    }
    lse.push_back(coarse ? static_cast<float>(Bf16(std::log(total))) : static_cast<float>(std::log(total) + 1.0 / 3));
  }
  t.Record("layers.0.attn.q", "T H d", {kRows, 1, kWidth}, q, put);
  t.Record("layers.0.attn.k", "T Hkv d", {kRows, 1, kWidth}, k, put);
  t.Record("layers.0.attn.v", "T Hkv d", {kRows, 1, kWidth}, v, put);
  t.Record("layers.0.attn.lse", "T H", {kRows, 1}, lse, put);
  Put out = put;
  out.meta = {{"softmax_scale", "0.5"}};
  t.Record("layers.0.attn.out", "T H dv", {kRows, 1, kWidth}, v, out);
  return Judge(t, {"attention"});
}
TEST(AttentionTerms, LogSumExpsKeptInBf16AreAMatterOfPrecision) {
  EXPECT_FIRST(Lse(true), "layers.0.attn.lse", "PRECISION");
  EXPECT_FIRST(Lse(false), "layers.0.attn.lse", "LSE");
}

}  // namespace
}  // namespace assay
