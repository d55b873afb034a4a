// Operands of shapes that do not belong together, as a damaged trace or a wrong hook has them: the result is judged
// without a read or write outside of what was recorded. What only a sanitizer sees is here for the sanitized build.
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
using Values = std::vector<float>;

constexpr int64_t kRows = 5, kHeads = 2, kWidth = 8;

TEST(DamagedOperands, ChunkOfAnotherRequestWithMoreSumsIsNotTakenForOneLeftThere) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3, 4, 5}), b = t.Request({6, 7, 8, 9, 10});
  const std::vector<RowRun> others = {{a, 0, kRows, 0, false}}, own = {{b, 0, kRows, 0, false}};
  const Values out = Noise(kRows * kHeads * kWidth, 1);
  t.Record("layers.0.attn.chunk.0.out", "T H dv", {kRows, kHeads, kWidth}, out, {.rows = others});
  t.Record("layers.0.attn.chunk.0.lse", "T H", {kRows, 20000}, Noise(kRows * 20000, 2), {.rows = others});
  t.Record("layers.0.attn.chunk.0.out", "T H dv", {kRows, kHeads, kWidth}, out, {.rows = own, .step = 1});
  t.Record("layers.0.attn.chunk.0.lse", "T H", {kRows, kHeads}, Noise(kRows * kHeads, 3), {.rows = own, .step = 1});
  t.Record("layers.0.attn.out", "T H dv", {kRows, kHeads, kWidth}, Noise(kRows * kHeads * kWidth, 4),
           {.rows = own, .step = 1});
  const CheckResult r = Judge(t, {"chunks"});
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].name, "layers.0.attn.out");
}

TEST(DamagedOperands, ChunksWithoutTokenRowsAreJudgedWithoutAStrideOfHeads) {
  SmallTrace t;
  t.Record("layers.0.attn.chunk.0.out", "n H dv", {kRows, kHeads, kWidth}, Noise(kRows * kHeads * kWidth, 1));
  t.Record("layers.0.attn.chunk.0.lse", "n H", {kRows, kHeads}, Noise(kRows * kHeads, 2));
  t.Record("layers.0.attn.out", "n H dv", {kRows, kHeads, kWidth}, Noise(kRows * kHeads * kWidth, 3));
  const CheckResult r = Judge(t, {"chunks"});
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].name, "layers.0.attn.out");
}

// Experts' results [7, 6] of 7 rows and the weights of one of them, or of all.
CheckResult Combined(int64_t weighed) {
  constexpr int64_t kTokens = 400, kHidden = 3;
  SmallTrace t;
  const uint64_t a = t.Request(std::vector<int64_t>(kTokens, 1));
  const std::vector<RowRun> rows = {{a, 0, kTokens, 0, false}};
  const Values experts = Noise(kTokens * kHidden, 1);
  t.Record("layers.0.moe.topk_ids", "T k", {kTokens, 1}, std::vector<int64_t>(kTokens, 0), {.rows = rows});
  t.Record("layers.0.moe.topk_weights", "T k", {weighed, 1}, Values(static_cast<size_t>(weighed), 1));
  t.Record("layers.0.moe.expert_out", "R h", {kTokens, kHidden}, experts);
  t.Record("layers.0.moe.routed", "T h", {kTokens, kHidden}, experts, {.rows = rows});
  return Judge(t, {"experts"});
}

TEST(DamagedOperands, WeightsOfFewerRowsThanIdsAreNotTestable) {
  const CheckResult r = Combined(1);
  EXPECT_TRUE(r.findings.empty());
  EXPECT_EQ(r.coverage.results_judged, 0u);
}
TEST(DamagedOperands, WeightsOfAllRowsAreJudged) { EXPECT_EQ(Combined(400).coverage.results_judged, 1u); }

// A product that is wrong, so that other orders of gate and up are tried on it.
TEST(DamagedOperands, GateAndUpOfAnOddWidthAreJudgedWithoutOtherOrders) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3, 4, 5});
  const std::vector<RowRun> rows = {{a, 0, kRows, 0, false}};
  t.Record("layers.0.mlp.experts.gate_up_proj", "E out in", {1, 5, 4}, Noise(20, 1),
           {.step = -1, .phase = Phase::kLoad});
  t.Record("layers.0.moe.topk_ids", "T k", {kRows, 1}, std::vector<int64_t>(kRows, 0), {.rows = rows});
  t.Record("layers.0.moe.dispatched", "R h", {kRows, 4}, Noise(kRows * 4, 2));
  t.Record("layers.0.moe.gate_up", "R 2f", {kRows, 5}, Noise(kRows * 5, 3));
  const CheckResult r = Judge(t, {"experts"});
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].name, "layers.0.moe.gate_up");
  EXPECT_NE(r.findings[0].cls, "MOE-LAYOUT");
}

}  // namespace
}  // namespace assay
