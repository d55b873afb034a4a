// Steps, blocks and prefix hits of the scheduler; the choice of tokens.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "model/sampler.h"
#include "model/scheduler.h"

namespace assay {
namespace {

std::vector<int64_t> Tokens(int64_t n, int64_t first = 100) {
  std::vector<int64_t> out(static_cast<size_t>(n));
  std::iota(out.begin(), out.end(), first);
  return out;
}

TEST(Scheduler, PromptsRunTogetherThenOneRowEach) {
  Scheduler s({});
  s.Add(Tokens(5));
  s.Add(Tokens(3));
  StepPlan plan = s.Next();
  ASSERT_EQ(plan.sequences.size(), 2u);
  EXPECT_EQ(plan.rows, 8);
  EXPECT_EQ(plan.sequences[1].first_row, 5);
  EXPECT_TRUE(plan.sequences[0].samples && plan.sequences[1].samples);
  s.Append(0, 7);
  s.Finish(1);
  plan = s.Next();
  ASSERT_EQ(plan.sequences.size(), 1u);
  EXPECT_TRUE(plan.sequences[0].decode);
  EXPECT_EQ(plan.sequences[0].first_position, 5);
  s.Finish(0);
  EXPECT_EQ(s.Next().rows, 0);
}

TEST(Scheduler, ChunksCutAPromptAndOnlyTheLastSamples) {
  SchedulerOptions o;
  o.chunk = 4;
  Scheduler s(o);
  s.Add(Tokens(10));
  for (const int64_t n : {4, 4, 2}) {
    const StepPlan plan = s.Next();
    ASSERT_EQ(plan.rows, n);
    EXPECT_EQ(plan.sequences[0].samples, n == 2);
  }
}

TEST(Scheduler, DecodingRequestsGoBeforePromptsAndShareTheBudget) {
  SchedulerOptions o;
  o.chunk = 4;
  o.max_batch_tokens = 5;
  Scheduler s(o);
  s.Add(Tokens(2));
  s.Add(Tokens(9, 200));
  StepPlan plan = s.Next();
  EXPECT_EQ(plan.rows, 5);  // 2 + 3 of 4
  s.Append(0, 1);
  plan = s.Next();
  ASSERT_EQ(plan.sequences.size(), 2u);
  EXPECT_TRUE(plan.sequences[0].decode);
  EXPECT_EQ(plan.sequences[1].n_rows, 4);
  EXPECT_EQ(plan.sequences[1].first_position, 3);
}

// Without chunks a prompt is not cut, so the limit of the batch has to give way.
TEST(Scheduler, PromptAboveTheLimitWaitsAndRunsAloneInOnePiece) {
  SchedulerOptions o;
  o.max_batch_tokens = 6;
  Scheduler s(o);
  s.Add(Tokens(4));
  s.Add(Tokens(9));
  EXPECT_EQ(s.Next().rows, 4);
  s.Finish(0);
  EXPECT_EQ(s.Next().rows, 9);
}

TEST(Scheduler, SequentialRunsOneRequestToItsEnd) {
  SchedulerOptions o;
  o.sequential = true;
  Scheduler s(o);
  s.Add(Tokens(3));
  s.Add(Tokens(4));
  EXPECT_EQ(s.Next().rows, 3);
  s.Append(0, 1);
  EXPECT_EQ(s.Next().rows, 1);
  s.Finish(0);
  const StepPlan plan = s.Next();
  EXPECT_EQ(plan.rows, 4);
  EXPECT_EQ(plan.sequences[0].request, 1);
  EXPECT_EQ(s.table(1).front(), 0);  // the freed block again
}

TEST(Scheduler, PrefixHitSharesFullBlocksAndLeavesARow) {
  SchedulerOptions o;
  o.block_size = 4;
  o.prefix_cache = true;
  Scheduler s(o);
  s.Add(Tokens(8));
  s.Add(Tokens(8));   // equal: one block only, the last token has to be computed
  s.Add(Tokens(11));  // eight equal tokens: two blocks
  s.Add(Tokens(8, 300));
  const StepPlan plan = s.Next();
  EXPECT_EQ(plan.sequences[0].n_rows, 8);
  EXPECT_EQ(plan.sequences[1].n_rows, 4);
  EXPECT_EQ(plan.sequences[1].first_position, 4);
  EXPECT_TRUE(plan.sequences[1].prefix_hit);
  EXPECT_EQ(plan.sequences[2].n_rows, 3);
  EXPECT_EQ(plan.sequences[3].n_rows, 8);
  EXPECT_FALSE(plan.sequences[3].prefix_hit);
  EXPECT_EQ(s.table(1)[0], s.table(0)[0]);
  EXPECT_NE(s.table(1)[1], s.table(0)[1]);
  EXPECT_EQ(s.table(2)[1], s.table(0)[1]);
}

TEST(ChooseToken, GreedyTakesTheFirstOfTheLargest) {
  const float logits[] = {1, 5, 5, 2};
  const Choice c = ChooseToken(logits, 4, 0, 0, 0, 0);
  EXPECT_EQ(c.token, 1);
  EXPECT_EQ(c.margin, 0);
  const float others[] = {1, 2, 5, 3};
  EXPECT_EQ(ChooseToken(others, 4, 0, 0, 0, 0).margin, 2);
}

// A NaN compares as neither larger nor smaller; the choice has to be among the finite ones, greedy or drawn.
TEST(ChooseToken, NanIsNeverChosen) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double logits[] = {nan, 1, nan, 2};
  for (int64_t position = 0; position < 50; ++position) {
    EXPECT_EQ(ChooseToken(logits, 4, 0, 0, 0, position).token, 3);
    EXPECT_EQ(ChooseToken(logits, 4, 1.0, 3, 9, position).token % 2, 1);
  }
}

TEST(ChooseToken, DrawsHaveTheSoftmaxFrequencies) {
  const double logits[] = {0.0, std::log(2.0), std::log(5.0)};
  int counts[3] = {};
  constexpr int kDraws = 8000;
  for (int64_t position = 0; position < kDraws; ++position) {
    ++counts[ChooseToken(logits, 3, 1.0, 17, 4, position).token];
  }
  // Binomial: five standard deviations.
  const double expected[] = {0.125, 0.25, 0.625};
  for (int i = 0; i < 3; ++i) {
    EXPECT_NEAR(counts[i], kDraws * expected[i], 5 * std::sqrt(kDraws * expected[i] * (1 - expected[i])));
  }
}

}  // namespace
}  // namespace assay
