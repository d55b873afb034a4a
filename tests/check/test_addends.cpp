// Addends of the residual stream: one that was left out is told from a factor.
#include <gtest/gtest.h>

#include "check/check.h"
#include "small_trace.h"
#include "verdicts.h"

namespace assay {
namespace {

using testing::Judge;
using testing::Noise;
using testing::Put;
using testing::SmallTrace;
using Values = std::vector<float>;

constexpr int64_t kRows = 7, kHidden = 8;

// out = stream + attention + FFN, each times its factor.
CheckResult Stream(float attention, float ffn, bool compiled) {
  SmallTrace t;
  const uint64_t request = t.Request({1, 2, 3, 4, 5, 6, 7});
  const Values x = Noise(kRows * kHidden, 8), o = Noise(kRows * kHidden, 9), f = Noise(kRows * kHidden, 10);
  Values out;
  for (size_t i = 0; i < x.size(); ++i) out.push_back(x[i] + attention * o[i] + ffn * f[i]);
  Put put{.rows = {{request, 0, kRows, 0, false}}};
  t.Record("layers.0.out", "T h", {kRows, kHidden}, x, put);
  t.Record("layers.1.attn.o_proj", "T h", {kRows, kHidden}, o, put);
  t.Record("layers.1.mlp.down", "T h", {kRows, kHidden}, f, put);
  if (compiled) put.meta = {{"compiled", "1"}, {"inplace", "1"}};
  t.Record("layers.1.out", "T h", {kRows, kHidden}, out, put);
  return Judge(t, {"residual"});
}

TEST(Addends, AllOfThemAreRuledOut) { EXPECT_RULED_OUT(Stream(1, 1, true)); }

TEST(Addends, OneLeftOutIsNoFactor) {
  EXPECT_FIRST(Stream(1, 0, false), "layers.1.out", fault_class::kKernel);
  EXPECT_FIRST(Stream(0, 1, false), "layers.1.out", fault_class::kKernel);
}

TEST(Addends, OneLeftOutOfCompiledCodeIsLostByIt) {
  EXPECT_FIRST(Stream(1, 0, true), "layers.1.out", fault_class::kCompile);
}

TEST(Addends, AFactorStaysAFactor) {
  const CheckResult r = Stream(1, 0.5F, true);
  ASSERT_EQ(r.findings.size(), 1u);
  EXPECT_EQ(r.findings[0].cls, fault_class::kRange);
  EXPECT_NEAR(r.findings[0].constant_value, 0.5, 1e-5);
}

}  // namespace
}  // namespace assay
