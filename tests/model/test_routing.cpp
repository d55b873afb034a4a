// Routing of MoE layers by hand-made scores: selection, groups, weights, margins.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "model/moe.h"

namespace assay {
namespace {

ModelConfig Softmax(int64_t experts, int64_t k) {
  ModelConfig c;
  c.n_routed_experts = experts;
  c.n_experts_per_tok = k;
  return c;
}

ModelConfig Sigmoid(int64_t experts, int64_t k) {
  ModelConfig c = Softmax(experts, k);
  c.scoring_sigmoid = true;
  c.correction_bias = true;
  c.norm_topk_prob = true;
  c.norm_topk_eps = 1e-20;
  c.group_top2_sum = true;
  return c;
}

double S(double x) { return 1 / (1 + std::exp(-x)); }

Routing RouteOf(const ModelConfig& c, const std::vector<double>& logits, const std::vector<double>& bias = {},
                const RoutingFaults& faults = {}) {
  Routing out;
  Route<double>(c, logits.data(), bias.empty() ? nullptr : bias.data(),
                static_cast<int64_t>(logits.size()) / c.n_routed_experts, faults, &out);
  return out;
}

TEST(Route, SoftmaxPicksTheLargestAndKeepsProbabilities) {
  const Routing r = RouteOf(Softmax(4, 2), {0, 3, 1, 2});
  EXPECT_EQ(r.ids, (std::vector<int64_t>{1, 3}));
  const double sum = 1 + std::exp(1) + std::exp(2) + std::exp(3);
  EXPECT_NEAR(r.weights[0], std::exp(3) / sum, 1e-15);
  EXPECT_NEAR(r.weights[1], std::exp(2) / sum, 1e-15);
  EXPECT_NEAR(r.margins[0], (std::exp(2) - std::exp(1)) / sum, 1e-7);  // the smaller of the two gaps
}

TEST(Route, RenormalisedWeightsAddUpToTheScaling) {
  ModelConfig c = Softmax(4, 3);
  c.norm_topk_prob = true;
  c.routed_scaling_factor = 2.5;
  const Routing r = RouteOf(c, {0, 3, 1, 2});
  EXPECT_NEAR(r.weights[0] + r.weights[1] + r.weights[2], 2.5, 1e-14);
}

TEST(Route, BiasChoosesAndDoesNotWeigh) {
  const Routing r = RouteOf(Sigmoid(4, 2), {2, 1, 0, -1}, {0, 0, 0, 5});
  EXPECT_EQ(r.ids, (std::vector<int64_t>{3, 0}));
  EXPECT_NEAR(r.weights[0], S(-1) / (S(-1) + S(2)), 1e-15);
  EXPECT_NEAR(r.weights[1], S(2) / (S(-1) + S(2)), 1e-15);
}

TEST(Route, GroupsAreChosenByTheirTwoBest) {
  ModelConfig c = Sigmoid(6, 2);
  c.n_group = 3;
  c.topk_group = 1;
  // Group 0 has the best expert, group 1 the best pair.
  const Routing pair = RouteOf(c, {4, -9, 2, 2, 0, 0});
  EXPECT_EQ(pair.ids, (std::vector<int64_t>{2, 3}));
  c.group_top2_sum = false;
  const Routing best = RouteOf(c, {4, -9, 2, 2, 0, 0});
  EXPECT_EQ(best.ids, (std::vector<int64_t>{0, 1}));
}

// The other group's best is 0.001 of a logit away, the own group's second a whole one: the nearer counts.
TEST(Route, GroupChoiceCountsInTheMargin) {
  ModelConfig c = Softmax(4, 1);
  c.n_group = 2;
  c.topk_group = 1;
  const Routing r = RouteOf(c, {1.0, 0.0, 0.999, 0.5});
  EXPECT_EQ(r.ids[0], 0);
  EXPECT_GT(r.margins[0], 0);
  EXPECT_LT(r.margins[0], 1e-3);
}

TEST(Route, TiesGoToTheLowerExpertWithMarginZero) {
  const Routing r = RouteOf(Softmax(3, 1), {1, 1, 1});
  EXPECT_EQ(r.ids[0], 0);
  EXPECT_EQ(r.margins[0], 0);
}

TEST(Route, NothingLeftOutHasAnInfiniteMarginForOneExpert) {
  EXPECT_TRUE(std::isinf(RouteOf(Softmax(1, 1), {1}).margins[0]));
}

TEST(Route, NanLogitsStillGiveValidExperts) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Routing r = RouteOf(Sigmoid(4, 2), {nan, 1, nan, 0});
  EXPECT_EQ(r.ids, (std::vector<int64_t>{1, 3}));
  for (const int64_t id : RouteOf(Softmax(4, 2), {nan, nan, nan, nan}).ids) {
    EXPECT_GE(id, 0);
    EXPECT_LT(id, 4);
  }
}

// Each planted fault against its own closed form, so that it is that fault and not another.
TEST(Route, EachFaultChangesWhatItsNameSays) {
  ModelConfig c = Sigmoid(4, 2);
  c.routed_scaling_factor = 2;
  const std::vector<double> logits = {2, 1, 0, -1}, bias = {0.25, 0.25, 0, 0};
  const Routing right = RouteOf(c, logits, bias);
  RoutingFaults f;
  f.skip_renormalise = true;
  EXPECT_NEAR(RouteOf(c, logits, bias, f).weights[0], 2 * S(2), 1e-15);
  f = {};
  f.bias_in_weights = true;
  EXPECT_NEAR(RouteOf(c, logits, bias, f).weights[0], 2 * (S(2) + 0.25) / (S(2) + S(1) + 0.5), 1e-15);
  f = {};
  f.skip_scaling = true;
  EXPECT_NEAR(RouteOf(c, logits, bias, f).weights[0], right.weights[0] / 2, 1e-15);
}

}  // namespace
}  // namespace assay
