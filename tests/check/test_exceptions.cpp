// Results that are right by an exception to their bound: the ledger says by how much of what they were judged with.
#include <gtest/gtest.h>

#include <cmath>

#include "check/check.h"
#include "small_trace.h"

namespace assay {
namespace {

using testing::Noise;
using testing::SmallTrace;

// Evidence of the one check, which finds nothing.
std::string Evidence(SmallTrace& t, const char* check) {
  const auto capture = t.Open();
  const auto result = RunChecks(*capture, {.only = {check}});
  EXPECT_TRUE(result.ok()) << result.status().message();
  EXPECT_TRUE(result->findings.empty()) << result->findings[0].evidence[0];
  EXPECT_EQ(result->coverage.results_judged, 1u);
  return result->ledger.empty() ? "" : result->ledger[0].evidence[0];
}

// A row of the largest codes and one element half as large again, cut.
TEST(Exceptions, CutElementsOfACacheRowAreHeldAgainstTheCutRow) {
  for (const char* scale : {"1", "-1"}) {
    std::vector<float> k(16, 448);
    k[5] = 672;
    SmallTrace u;
    const uint64_t b = u.Request({1});
    const std::vector<RowRun> own = {{b, 0, 1, 0, false}};
    u.Record("layers.0.attn.k", "T d", {1, 16}, k, {.rows = own});
    k[5] = 448;
    u.Record("layers.0.attn.kv_write", "T d", {1, 16}, k,
             {.rows = own, .meta = {{"kv_cache_dtype", "f8_e4m3fn"}, {"k_scale", scale}}});
    EXPECT_EQ(Evidence(u, "cache-write").find("of the bound"), std::string::npos);
  }
}

// Codes times scales, rounded to bf16 and recorded as f32.
TEST(Exceptions, WeightKeptInACoarserTypeIsHeldAgainstThatType) {
  SmallTrace t;
  std::vector<int8_t> codes;
  std::vector<float> weight;
  const std::vector<float> scale = {0.37f, 0.11f, 0.93f, 0.51f};
  for (size_t i = 0; i < 4 * 64; ++i) {
    codes.push_back(static_cast<int8_t>(static_cast<int>(i * 37 % 255) - 127));
    const double x = static_cast<double>(codes.back()) * double{scale[i / 64]};
    int exponent = 0;
    const double m = std::frexp(x, &exponent);
    weight.push_back(static_cast<float>(std::ldexp(std::nearbyint(std::ldexp(m, 8)), exponent - 8)));
  }
  const testing::Put load{.step = -1, .phase = Phase::kLoad, .meta = {{"quant", "int8_channel"}}};
  t.Record("layers.0.mlp.down_proj.weight", "out in", {4, 64}, weight, load);
  t.Record("layers.0.mlp.down_proj.weight.codes", "out in", {4, 64}, codes, load);
  t.Record("layers.0.mlp.down_proj.weight.scale", "out g", {4, 1}, scale, load);
  const std::string said = Evidence(t, "decoded-weights");
  EXPECT_NE(said.find("at most 0."), std::string::npos) << said;
}

}  // namespace
}  // namespace assay
