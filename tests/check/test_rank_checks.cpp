// Checks of what several ranks recorded, each where it is confirmed and where it is ruled out.
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

CheckResult Replicas(bool replica_differs, bool shards_equal) {
  SmallTrace t(2, Level::kStats);
  const uint64_t a = t.Request({1, 2});
  for (int32_t rank = 0; rank < 2; ++rank) {
    t.Record("layers.0.attn.o_proj", "T h", {2, 8}, Noise(16, replica_differs ? 1 + static_cast<uint64_t>(rank) : 1),
             {.rows = {{a, 0, 2, 0, false}}, .rank = rank});
    t.Record("layers.0.attn.o_proj.weight", "out in", {4, 4},
             Noise(16, shards_equal ? 7 : 7 + static_cast<uint64_t>(rank)),
             {.step = -1, .rank = rank, .phase = Phase::kLoad, .shard = {rank, 2, rank * 4, 8}});
  }
  return Judge(t, {"replicas"});
}

TEST(CheckReplicas, ReplicaThatDiffersIsNamed) {
  EXPECT_FIRST(Replicas(true, false), "layers.0.attn.o_proj", "TP-SHARD");
}
TEST(CheckReplicas, ShardsThatAreEqualAreNamed) {
  EXPECT_FIRST(Replicas(false, true), "layers.0.attn.o_proj.weight", "TP-SHARD");
}
TEST(CheckReplicas, EqualReplicasAndOwnShardsAreRight) { EXPECT_RULED_OUT(Replicas(false, false)); }

CheckResult Reductions(float shared_times, bool reduced) {
  SmallTrace t(2);
  const uint64_t a = t.Request({1, 2});
  const std::vector<RowRun> rows = {{a, 0, 2, 0, false}};
  const std::vector<float> p[2] = {Noise(16, 1), Noise(16, 2)}, shared = Noise(16, 3);
  std::vector<float> routed(16), out(16);
  for (size_t i = 0; i < 16; ++i) routed[i] = reduced ? p[0][i] + p[1][i] : p[0][i];
  for (size_t i = 0; i < 16; ++i) out[i] = routed[i] + shared_times * shared[i];
  for (int32_t rank = 0; rank < 2; ++rank)
    t.Record("layers.1.moe.routed.partial", "T h", {2, 8}, p[rank], {.rows = rows, .rank = rank});
  t.Record("layers.1.moe.routed", "T h", {2, 8}, routed, {.rows = rows});
  t.Record("layers.1.moe.shared", "T h", {2, 8}, shared, {.rows = rows});
  t.Record("layers.1.moe.out", "T h", {2, 8}, out, {.rows = rows});
  return Judge(t, {"reductions"});
}

TEST(CheckReductions, SharedExpertAddedTwiceIsNamedWithItsCount) {
  const CheckResult r = Reductions(2, true);
  EXPECT_FIRST(r, "layers.1.moe.out", "REDUCE");
  EXPECT_NEAR(r.findings[0].constant_value, 2, 1e-4);
}
TEST(CheckReductions, PartialSumInPlaceOfTheSumIsNamed) {
  EXPECT_FIRST(Reductions(1, false), "layers.1.moe.routed", "REDUCE");
}
TEST(CheckReductions, RightSumsAreRuledOut) { EXPECT_RULED_OUT(Reductions(1, true)); }

// What two ranks put into a reduction and what came out on rank 1, as statistics alone: factor x (mine + other x
// theirs).
CheckResult PartialSums(float factor, float other, int32_t n_ranks = 2) {
  SmallTrace t(2, Level::kStats);
  const uint64_t a = t.Request({1, 2, 3});
  const std::vector<RowRun> rows = {{a, 0, 3, 0, false}};
  const std::vector<float> parts[2] = {Noise(192, 1), Noise(192, 2)};
  std::vector<float> sum(192);
  for (size_t i = 0; i < sum.size(); ++i) sum[i] = factor * (parts[1][i] + other * parts[0][i]);
  for (int32_t rank = 0; rank < n_ranks; ++rank) {
    t.Record("layers.0.attn.o_proj.partial", "T h", {3, 64}, parts[rank], {.rows = rows, .rank = rank});
    t.Record("layers.0.attn.o_proj", "T h", {3, 64}, sum, {.rows = rows, .rank = rank});
  }
  return Judge(t, {"partial_sums"});
}

TEST(CheckPartialSums, ResultWithoutTheOtherRanksPartIsNamedFromSketches) {
  const CheckResult r = PartialSums(1, 0);
  EXPECT_FIRST(r, "layers.0.attn.o_proj", "REDUCE");
  EXPECT_NE(r.findings[0].evidence[0].find("equals what rank 1 put in alone"), std::string::npos);
}
TEST(CheckPartialSums, SumTimesAConstantIsNamedWithIt) {
  const CheckResult r = PartialSums(2, 1);
  EXPECT_FIRST(r, "layers.0.attn.o_proj", "REDUCE");
  EXPECT_NE(r.findings[0].evidence[0].find("2 x the sum is nearest"), std::string::npos) << r.findings[0].evidence[0];
}
TEST(CheckPartialSums, ASmallShareOfAPartThatIsMissingIsNamed) {
  EXPECT_FIRST(PartialSums(1, 0.999f), "layers.0.attn.o_proj", "REDUCE");
}
TEST(CheckPartialSums, RightSumIsRuledOut) { EXPECT_RULED_OUT(PartialSums(1, 1)); }
TEST(CheckPartialSums, OneRankOfTwoIsNotTestable) {
  const CheckResult r = PartialSums(1, 1, 1);
  EXPECT_TRUE(r.findings.empty());
  ASSERT_EQ(r.ledger.size(), 1u);
  EXPECT_EQ(r.ledger[0].state, CheckState::kNotTestable);
}

// Roundings of bf16 that all go one way are still roundings: each part but the first is nearly half a unit of the sum.
TEST(CheckPartialSums, RoundingsOfABf16SumOverEightRanksAreRight) {
  SmallTrace t(8, Level::kStats);
  const uint64_t a = t.Request({1, 2, 3});
  const std::vector<RowRun> rows = {{a, 0, 3, 0, false}};
  std::vector<float> sum = Noise(192, 1), small;
  for (float& v : sum) {
    v = v < 0 ? -1.0F : 1.0F;
    small.push_back(v * 0.98828125F * 0x1p-8F);
  }
  for (int32_t rank = 0; rank < 8; ++rank) {
    const Put put{.rows = rows, .rank = rank, .compute = DType::kBF16};
    t.Record("layers.0.attn.o_proj.partial", "T h", {3, 64}, rank == 0 ? sum : small, put);
    t.Record("layers.0.attn.o_proj", "T h", {3, 64}, sum, put);
  }
  EXPECT_RULED_OUT(Judge(t, {"partial_sums"}));
}

// Two stages of a pipeline with two ranks each; the layer is on ranks 0 and 1.
CheckResult PartialSumsOfAStage(std::string_view group, bool reduced, int32_t n_ranks = 2) {
  SmallTrace t(4, Level::kStats);
  const uint64_t a = t.Request({1, 2, 3});
  const std::vector<RowRun> rows = {{a, 0, 3, 0, false}};
  std::vector<float> sum = Noise(192, 1);
  const std::vector<float> second = Noise(192, 2);
  for (size_t i = 0; reduced && i < sum.size(); ++i) sum[i] += second[i];
  for (int32_t rank = 0; rank < n_ranks; ++rank) {
    Put put{.rows = rows, .rank = rank};
    t.Record("layers.0.attn.o_proj.partial", "T h", {3, 64}, Noise(192, 1 + static_cast<uint64_t>(rank)), put);
    if (!group.empty()) put.meta = {{"world_size", group}};
    t.Record("layers.0.attn.o_proj", "T h", {3, 64}, sum, put);
  }
  return Judge(t, {"partial_sums"});
}

TEST(CheckPartialSums, GroupOfAPipelineStageIsJudgedWhereItsSizeIsDeclared) {
  EXPECT_RULED_OUT(PartialSumsOfAStage("2", true));
  EXPECT_FIRST(PartialSumsOfAStage("2", false), "layers.0.attn.o_proj", "REDUCE");
}
TEST(CheckPartialSums, GroupOfUnknownSizeOrThatIsNotWholeIsNotTestable) {
  const std::pair<CheckResult, std::string> results[] = {
      {PartialSumsOfAStage("", false), "declare world_size"},
      {PartialSumsOfAStage("2", false, 1), "record every rank"},
      {PartialSumsOfAStage("2", false, 4), "record the ranks of one group"},
  };
  for (const auto& [r, advice] : results) {
    EXPECT_TRUE(r.findings.empty()) << advice;
    ASSERT_EQ(r.ledger.size(), 1U);
    EXPECT_EQ(r.ledger[0].state, CheckState::kNotTestable) << advice;
    EXPECT_NE(r.ledger[0].capture.find(advice), std::string::npos) << r.ledger[0].capture;
  }
}

}  // namespace
}  // namespace assay
