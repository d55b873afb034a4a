#include "oracle/embedding.h"
#include "oracle/linear.h"
#include "oracle/oracle_testing.h"
#include "oracle/sampling.h"

namespace assay::oracle {
namespace {

TEST(Embed, RowsOfTheTableTimesTheScale) {
  const Array table = Random({7, 4}, 1);
  const std::vector<int64_t> tokens{6, 0, 6};
  const Computed c = Embed(tokens, table, 2).value();
  for (int64_t i = 0; i < 4; ++i) {
    EXPECT_EQ(c.value[i], 2 * table[24 + i]);
    EXPECT_EQ(c.value[4 + i], 2 * table[i]);
  }
  EXPECT_EQ(Embed(tokens, table).value().k, 0);  // a copy is exact
  const Result<Computed> outside = Embed(std::vector<int64_t>{1, 7}, table);
  ASSERT_FALSE(outside.ok());
  EXPECT_NE(outside.status().message().find("token 7 in row 1"), std::string::npos);
}

// Logits without scale and cap are not taken for right ones, even at the bound of bf16.
TEST(Head, ScaleAndSoftCapFollowTheProduct) {
  const Array x = Random({3, 16}, 2), w = Random({20, 16}, 3);
  const Array plain = Linear(x, w, {}).value().value;
  const Computed c = Head(x, w, {}, 0.5, 3).value();
  Array engine = plain;
  for (int64_t i = 0; i < plain.size(); ++i) {
    EXPECT_NEAR(c.value[i], 3 * std::tanh(0.5 * plain[i] / 3), 1e-14);
    engine[i] = 3 * std::tanh(static_cast<float>(plain[i]) * 0.5F / 3);
  }
  ExpectWithin(engine, c, kF32);
  EXPECT_FALSE(Compare(plain, c, kBf16)->ok());
}

// Rows: a clear choice; a tie (the first wins, margin 0); NaN, all -inf: no choice; one finite logit: infinite margin.
TEST(Greedy, LargestWithItsMargin) {
  const Array logits = MakeArray({5, 3}, {1, 4, 2, 5, 5, 1, kNaN, 1, 2, -kInf, -kInf, -kInf, -kInf, 0, -kInf}).value();
  const std::vector<GreedyChoice> g = Greedy(logits).value();
  EXPECT_EQ(g[0].token, 1);
  EXPECT_EQ(g[0].margin, 2);
  EXPECT_EQ(g[1].token, 0);
  EXPECT_EQ(g[1].margin, 0);
  EXPECT_EQ(g[2].token, -1);
  EXPECT_EQ(g[3].token, -1);
  EXPECT_EQ(g[4].token, 1);
  EXPECT_EQ(g[4].margin, kInf);
}

// Probabilities 0.5, 0.25, 0.15, 0.1 under temperature, top-k, top-p and min-p; the token that crosses top-p is kept.
TEST(TokenProbability, FiltersCutAndRenormalise) {
  std::vector<double> logits;
  for (const double p : {0.5, 0.25, 0.15, 0.1}) logits.push_back(std::log(p));
  EXPECT_NEAR(TokenProbability(logits, 2, {}).value(), 0.15, 1e-14);
  EXPECT_NEAR(TokenProbability(logits, 1, {1, 2, 1, 0}).value(), 0.25 / 0.75, 1e-14);
  EXPECT_EQ(TokenProbability(logits, 2, {1, 2, 1, 0}).value(), 0);
  EXPECT_NEAR(TokenProbability(logits, 1, {1, 0, 0.7, 0}).value(), 0.25 / 0.75, 1e-14);
  EXPECT_EQ(TokenProbability(logits, 2, {1, 0, 0.7, 0}).value(), 0);
  EXPECT_EQ(TokenProbability(logits, 1, {1, 0, 0.4, 0}).value(), 0);
  EXPECT_EQ(TokenProbability(logits, 0, {1, 0, 0.4, 0}).value(), 1);
  EXPECT_EQ(TokenProbability(logits, 3, {1, 0, 1, 0.25}).value(), 0);
  EXPECT_NEAR(TokenProbability(logits, 2, {1, 0, 1, 0.25}).value(), 0.15 / 0.9, 1e-14);
  EXPECT_NEAR(TokenProbability(logits, 0, {0.5, 0, 1, 0}).value(), 0.25 / (0.25 + 0.0625 + 0.0225 + 0.01), 1e-14);
  EXPECT_EQ(TokenProbability(logits, 0, {0, 0, 1, 0}).value(), 1);
  EXPECT_EQ(TokenProbability(logits, 1, {0, 0, 1, 0}).value(), 0);
  EXPECT_FALSE(TokenProbability(logits, 4, {}).ok());
  EXPECT_FALSE(TokenProbability(logits, 0, {-1, 0, 1, 0}).ok());
  logits[3] = kNaN;
  EXPECT_TRUE(std::isnan(TokenProbability(logits, 0, {}).value()));
}

TEST(TokenProbability, ProbabilitiesOfAllTokensSumToOne) {
  const Array logits = Random({200}, 4, 3);
  for (const SamplingSpec& spec : {SamplingSpec{}, SamplingSpec{0.7, 20, 0.9, 0.01}, SamplingSpec{2, 0, 0.5, 0}}) {
    double sum = 0;
    for (int64_t t = 0; t < 200; ++t) sum += TokenProbability(logits.values, t, spec).value();
    EXPECT_NEAR(sum, 1, 1e-12);
  }
}

}  // namespace
}  // namespace assay::oracle
