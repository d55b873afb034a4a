#include <algorithm>

#include "oracle/linear_attention.h"
#include "oracle/moe.h"
#include "oracle/oracle_testing.h"

namespace assay::oracle {
namespace {

TEST(Route, SoftmaxWeightsOfTheLargest) {
  const Array logits = MakeArray({1, 4}, {1, 3, 2, 0}).value();
  RouterSpec spec;
  spec.top_k = 2;
  Routing r = Route(logits, {}, spec).value();
  EXPECT_EQ(r.ids, (std::vector<int64_t>{1, 2}));
  const double sum = std::exp(1) + std::exp(3) + std::exp(2) + 1;
  EXPECT_NEAR(r.weights.value[0], std::exp(3) / sum, 1e-15);
  EXPECT_NEAR(r.margin[0], (std::exp(2) - std::exp(1)) / sum, 1e-15);
  spec.renormalise = true;
  spec.scaling = 2.5;
  r = Route(logits, {}, spec).value();
  EXPECT_NEAR(r.weights.value[0] + r.weights.value[1], 2.5, 1e-14);
  EXPECT_NEAR(r.weights.value[0] / r.weights.value[1], std::exp(1), 1e-14);
}

// DeepSeek-V3, section 2.1.2: expert 2 is chosen for its bias of 5, but weighs sigmoid(-1).
TEST(Route, TheBiasChoosesAndDoesNotWeigh) {
  const Array logits = MakeArray({1, 4}, {2, 0, -1, 1}).value(), bias = Vector({0, 0, 5, 0});
  RouterSpec spec;
  spec.scoring = Scoring::kSigmoid;
  spec.top_k = 2;
  const Routing r = Route(logits, bias, spec).value();
  EXPECT_EQ(r.ids, (std::vector<int64_t>{2, 0}));
  EXPECT_NEAR(r.weights.value[0], 1 / (1 + std::exp(1)), 1e-15);
  EXPECT_NEAR(r.weights.value[1], 1 / (1 + std::exp(-2)), 1e-15);
}

TEST(Route, GroupsLimitTheChoice) {
  // Group scores: max picks group 1 (0.9), the sum of two picks group 0 (0.8 + 0.7).
  const Array scores = MakeArray({1, 6}, {0.8, 0.7, 0.1, 0.9, 0.2, 0.1}).value();
  Array logits = scores;
  for (double& v : logits.values) v = std::log(v / (1 - v));
  RouterSpec spec;
  spec.scoring = Scoring::kSigmoid;
  spec.top_k = 2;
  spec.n_group = 2;
  spec.topk_group = 1;
  Routing r = Route(logits, {}, spec).value();
  EXPECT_EQ(r.ids, (std::vector<int64_t>{3, 4}));
  EXPECT_NEAR(r.margin[0], 0.1, 1e-12);  // of groups and of 0.2 over 0.1
  spec.group_score = GroupScore::kTop2Sum;
  r = Route(logits, {}, spec).value();
  EXPECT_EQ(r.ids, (std::vector<int64_t>{0, 1}));
  EXPECT_NEAR(r.set_margin[0], 0.4, 1e-12);  // 1.5 over 1.1
  EXPECT_NEAR(r.margin[0], 0.1, 1e-12);      // their order
}

// A margin of 0 says that another engine may choose otherwise.
TEST(Route, TiesTakeTheLowerIndexWithoutMargin) {
  RouterSpec spec;
  spec.top_k = 2;
  const Routing r = Route(Array::Filled({1, 5}, 1.0), {}, spec).value();
  EXPECT_EQ(r.ids, (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(r.margin[0], 0);
  EXPECT_EQ(r.set_margin[0], 0);
}

TEST(Route, NaNRowsChooseNothingAndOthersAreUntouched) {
  Array logits = Random({3, 8}, 1);
  logits[8 + 2] = kNaN;
  RouterSpec spec;
  spec.top_k = 3;
  const Routing r = Route(logits, {}, spec).value();
  for (int64_t j = 0; j < 3; ++j) {
    EXPECT_EQ(r.ids[static_cast<size_t>(3 + j)], -1);
    EXPECT_TRUE(std::isnan(r.weights.value[3 + j]));
    EXPECT_GE(r.ids[static_cast<size_t>(j)], 0);
    EXPECT_TRUE(std::isfinite(r.weights.value[6 + j]));
  }
}

// Ids are the oracle's, so that weights alone are judged; logits of 15 saturate both scorings.
TEST(Route, FloatEnginesMeetTheBound) {
  for (const Scoring scoring : {Scoring::kSoftmax, Scoring::kSigmoid}) {
    for (const double size : {0.1, 2.0, 15.0}) {
      const Array logits = Random({20, 64}, 2, size);
      RouterSpec spec;
      spec.scoring = scoring;
      spec.top_k = 6;
      spec.renormalise = true;
      spec.scaling = 2.5;
      const Routing r = Route(logits, {}, spec).value();
      Array engine = r.weights.value;
      for (int64_t t = 0; t < 20; ++t) {
        std::vector<float> w;
        float max = -HUGE_VALF, all = 0, sum = 0;
        for (const double v : logits.row(t)) max = std::max(max, static_cast<float>(v));
        for (const double v : logits.row(t)) all += std::exp(static_cast<float>(v) - max);
        for (int64_t j = 0; j < 6; ++j) {
          const float z = static_cast<float>(logits[t * 64 + r.ids[static_cast<size_t>(t * 6 + j)]]);
          w.push_back(scoring == Scoring::kSigmoid ? 1 / (1 + std::exp(-z)) : std::exp(z - max) / all);
          sum += w.back();
        }
        for (int64_t j = 0; j < 6; ++j) engine[t * 6 + j] = w[static_cast<size_t>(j)] / sum * 2.5F;
      }
      ExpectWithin(engine, r.weights, kF32);
      ExpectWithin(WeightsOf(logits, r.ids, spec).value().value, r.weights, kF64);
      ExpectWithin(WeightsFromScores(r.scores.value, r.ids, spec).value().value, r.weights, kF64);
    }
  }
}

TEST(Route, WrongShapesAreRefused) {
  RouterSpec spec;
  spec.top_k = 9;
  EXPECT_FALSE(Route(Random({2, 8}, 1), {}, spec).ok());
  spec.top_k = 2;
  EXPECT_FALSE(Route(Random({2, 8}, 1), Random({7}, 1), spec).ok());
  spec.n_group = 3;
  EXPECT_FALSE(Route(Random({2, 8}, 1), {}, spec).ok());
  EXPECT_FALSE(WeightsOf(Random({2, 8}, 1), std::vector<int64_t>{0, 8}, RouterSpec{}).ok());
}

// row_of -1: the choice was dropped (capacity), which is not an error of the sum.
TEST(Combine, DroppedChoicesAddNothing) {
  const Array experts = Random({5, 6}, 3), weights = Random({2, 2}, 4);
  const std::vector<int64_t> row_of{4, 0, -1, 2};
  const Computed c = Combine(experts, row_of, weights).value();
  for (int64_t i = 0; i < 6; ++i) {
    EXPECT_DOUBLE_EQ(c.value[i], weights[0] * experts[24 + i] + weights[1] * experts[i]);
    EXPECT_DOUBLE_EQ(c.value[6 + i], weights[3] * experts[12 + i]);
    EXPECT_DOUBLE_EQ(c.scale[6 + i], std::abs(weights[3] * experts[12 + i]));
  }
  EXPECT_FALSE(Combine(experts, std::vector<int64_t>{5, 0, 0, 0}, weights).ok());
  EXPECT_FALSE(Combine(experts, std::vector<int64_t>{0}, weights).ok());
}

// The state [H, dk, dv] after six tokens is not taken for that after two.
TEST(LinearAttention, StateIsTheSumOfOuterProducts) {
  const Array state = Random({4, 3, 5}, 5), k = Random({6, 2, 3}, 6), v = Random({6, 4, 5}, 7);
  const Computed all = UpdateState(state, k, v).value();
  const Computed two = UpdateState(state, k, v, 2).value();
  Array exact = state, engine = state, of_two = state;
  for (int64_t t = 0; t < 6; ++t) {
    for (int64_t i = 0; i < 60; ++i) {
      const int64_t h = i / 15, a = i / 5 % 3, b = i % 5;
      const double term = k[(t * 2 + h / 2) * 3 + a] * v[(t * 4 + h) * 5 + b];
      exact[i] += term;
      if (t < 2) of_two[i] += term;
      engine[i] = static_cast<float>(engine[i]) + static_cast<float>(term);
    }
  }
  ExpectWithin(exact, all, kF64);
  ExpectWithin(engine, all, kF32);
  ExpectWithin(of_two, two, kF64);
  EXPECT_FALSE(Compare(all.value, two, kBf16)->ok());
  EXPECT_EQ(UpdateState({}, k, v, 0).value().value.values, std::vector<double>(60));
  EXPECT_FALSE(UpdateState(state, k, v, 7).ok());
  EXPECT_FALSE(UpdateState(Random({4, 5, 3}, 1), k, v).ok());
}

}  // namespace
}  // namespace assay::oracle
