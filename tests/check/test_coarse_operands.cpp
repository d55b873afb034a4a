// Operands that were rounded before a product or a norm, against results that are right and errors of other kinds.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "small_trace.h"
#include "verdicts.h"

namespace assay {
namespace {

using testing::Judge;
using testing::Noise;
using testing::SmallTrace;
using Values = std::vector<float>;
using Change = std::function<double(double)>;

constexpr int64_t kRows = 12, kIn = 96, kOut = 20;

double Same(double x) { return x; }
// To so many significant bits.
Change Rounded(int bits) {
  return [bits](double x) {
    int exponent = 0;
    const double m = std::frexp(x, &exponent);
    return std::ldexp(std::nearbyint(std::ldexp(m, bits)), exponent - bits);
  };
}
double Tf32Cut(double x) {
  int exponent = 0;
  const double m = std::frexp(x, &exponent);
  return std::ldexp(std::trunc(std::ldexp(m, 11)), exponent - 11);
}

CheckResult Product(const Change& of_x, const Change& of_w, const Change& of_y = Same) {
  const Values x = Noise(kRows * kIn, 1), w = Noise(kOut * kIn, 2);
  Values y(kRows * kOut);
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t o = 0; o < kOut; ++o) {
      double sum = 0;
      for (size_t k = 0; k < kIn; ++k) sum += of_x(double{x[r * kIn + k]}) * of_w(double{w[o * kIn + k]});
      y[r * kOut + o] = static_cast<float>(of_y(sum));
    }
  }
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3});
  const std::vector<RowRun> rows = {{a, 0, kRows, 0, false}};
  t.Record("layers.0.mlp.down_proj.weight", "out in", {kOut, kIn}, w, {.phase = Phase::kLoad});
  t.Record("layers.0.mlp.act", "T f", {kRows, kIn}, x, {.rows = rows});
  t.Record("layers.0.mlp.down", "T h", {kRows, kOut}, y, {.rows = rows});
  return Judge(t, {"linear"});
}

TEST(CoarseOperands, ProductOfRoundedOperandsIsPrecision) {
  EXPECT_RULED_OUT(Product(Same, Same));
  for (const Change& change : {Rounded(11), Rounded(8), Change(Tf32Cut)}) {
    EXPECT_FIRST(Product(change, change), "layers.0.mlp.down", "PRECISION");
  }
  const CheckResult tf32 = Product(Rounded(11), Rounded(11));
  EXPECT_NE(tf32.findings[0].evidence[0].find("tf32"), std::string::npos) << tf32.findings[0].evidence[0];
  const CheckResult weight = Product(Same, Rounded(8));
  EXPECT_FIRST(weight, "layers.0.mlp.down", "PRECISION");
  EXPECT_EQ(weight.findings[0].evidence[0].find("mlp.act"), std::string::npos) << weight.findings[0].evidence[0];
}
// An error of that size which no rounding of the operands gives.
TEST(CoarseOperands, SmallErrorsOfAnotherKindAreNot) {
  const CheckResult r = Product(Same, Same, [](double y) { return y + 1e-3 * std::sin(1e4 * y); });
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].evidence[0].find("before the operation"), std::string::npos) << r.findings[0].evidence[0];
}

CheckResult Normed(const Change& of_sum) {
  constexpr size_t kSize = 48;
  const Values x = Noise(kRows * kSize, 3), o = Noise(kRows * kSize, 4), w = Noise(kSize, 5);
  Values y(x.size());
  for (size_t r = 0; r < kRows; ++r) {
    double square = 0;
    const auto at = [&](size_t c) { return of_sum(double{x[r * kSize + c]} + double{o[r * kSize + c]}); };
    for (size_t c = 0; c < kSize; ++c) square += at(c) * at(c) / kSize;
    for (size_t c = 0; c < kSize; ++c)
      y[r * kSize + c] = static_cast<float>(at(c) / std::sqrt(square + 1e-6) * double{w[c]});
  }
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3});
  const std::vector<RowRun> rows = {{a, 0, kRows, 0, false}};
  t.Record("layers.0.post_attention_layernorm.weight", "h", {kSize}, w, {.phase = Phase::kLoad});
  t.Record("embed", "T h", {kRows, kSize}, x, {.rows = rows});
  t.Record("layers.0.attn.o_proj", "T h", {kRows, kSize}, o, {.rows = rows});
  t.Record("layers.0.post_norm", "T h", {kRows, kSize}, y, {.rows = rows, .meta = {{"eps", "1e-6"}}});
  return Judge(t, {"norms"});
}

TEST(CoarseOperands, StreamKeptCoarselyBeforeANormIsPrecision) {
  EXPECT_RULED_OUT(Normed(Same));
  const CheckResult r = Normed(Rounded(8));
  EXPECT_FIRST(r, "layers.0.post_norm", "PRECISION");
  EXPECT_NE(r.findings[0].evidence[0].find("bf16"), std::string::npos) << r.findings[0].evidence[0];
}

}  // namespace
}  // namespace assay
