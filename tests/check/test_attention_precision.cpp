// Sums of attention in a coarse type, and errors of their bound's size that no sum makes.
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
using testing::SmallTrace;

constexpr int64_t kRows = 40, kHeads = 2, kWidth = 32;

// Sums of scores, weights and values through `keep`; the result through `spoil`.
CheckResult Attention(const std::function<double(double)>& keep, const std::function<double(double, size_t)>& spoil) {
  SmallTrace t;
  const uint64_t a = t.Request(std::vector<int64_t>(kRows, 1));
  testing::Put put{.rows = {{a, 0, kRows, 0, false}}};
  const std::vector<float> q = Noise(kRows * kHeads * kWidth, 1), k = Noise(kRows * kHeads * kWidth, 2),
                           v = Noise(kRows * kHeads * kWidth, 3);
  const auto at = [](const std::vector<float>& x, int64_t t_, int64_t h, int64_t c) {
    return double{x[static_cast<size_t>((t_ * kHeads + h) * kWidth + c)]};
  };
  std::vector<float> out;
  for (int64_t i = 0; i < kRows; ++i) {
    for (int64_t h = 0; h < kHeads; ++h) {
      double total = 0, sum[kWidth] = {};
      for (int64_t p = 0; p <= i; ++p) {
        double score = 0;
        for (int64_t c = 0; c < kWidth; ++c) score = keep(score + at(q, i, h, c) * at(k, p, h, c));
        const double weight = std::exp(score * 0.25);
        total = keep(total + weight);
        for (int64_t c = 0; c < kWidth; ++c) sum[c] = keep(sum[c] + weight * at(v, p, h, c));
      }
      for (double x : sum) out.push_back(static_cast<float>(spoil(x / total, out.size())));
    }
  }
  t.Record("layers.0.attn.q", "T H d", {kRows, kHeads, kWidth}, q, put);
  t.Record("layers.0.attn.k", "T Hkv d", {kRows, kHeads, kWidth}, k, put);
  t.Record("layers.0.attn.v", "T Hkv d", {kRows, kHeads, kWidth}, v, put);
  put.meta = {{"softmax_scale", "0.25"}};
  t.Record("layers.0.attn.out", "T H dv", {kRows, kHeads, kWidth}, out, put);
  return Judge(t, {"attention"});
}

double Exact(double x) { return x; }

TEST(AttentionPrecision, SumsInBf16AreNamed) {
  EXPECT_RULED_OUT(Attention(Exact, [](double x, size_t) { return x; }));
  EXPECT_FIRST(Attention(Bf16, [](double x, size_t) { return x; }), "layers.0.attn.out", "PRECISION");
}
// Within the bound of a sum in bf16, and ten times what such a sum amounts to.
TEST(AttentionPrecision, NoiseOfAFifthIsNoPrecision) {
  const std::vector<float> noise = Noise(kRows * kHeads * kWidth, 4);
  EXPECT_FIRST(Attention(Exact, [&](double x, size_t i) { return x * (1 + 0.2 * double{noise[i]}); }),
               "layers.0.attn.out", "KERNEL");
}

}  // namespace
}  // namespace assay
