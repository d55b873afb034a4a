// Constants by which a result is off are said by name, with how surely they are no accident.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numbers>
#include <string>

#include "check/check.h"
#include "small_trace.h"

namespace assay {
namespace {

using testing::Noise;
using testing::Put;
using testing::SmallTrace;
using Values = std::vector<float>;

constexpr size_t kRows = 24;
const Put kLoad{.step = -1, .phase = Phase::kLoad};

Put Prompt(SmallTrace& t) {
  std::vector<int64_t> tokens;
  for (size_t r = 0; r < kRows; ++r) tokens.push_back(static_cast<int64_t>(r) + 1);
  return {.rows = {{t.Request(tokens), 0, kRows, 0, false}}};
}

Values Times(Values values, double factor) {
  for (float& x : values) x = static_cast<float>(factor * double{x});
  return values;
}

// Causal attention of one head, size 8; the scale that the model asks for is `declared`, "" for that of the head size.
void Attention(SmallTrace& t, double used, std::vector<std::pair<std::string_view, std::string_view>> meta,
               double lse_factor = 1) {
  constexpr size_t d = 8;
  Put put = Prompt(t);
  const Values q = Times(Noise(kRows * d, 1), 2), k = Times(Noise(kRows * d, 2), 2), v = Noise(kRows * d, 3);
  Values out(kRows * d), lse(kRows);
  for (size_t r = 0; r < kRows; ++r) {
    double total = 0;
    std::vector<double> sum(d, 0);
    for (size_t j = 0; j <= r; ++j) {
      double score = 0;
      for (size_t c = 0; c < d; ++c) score += double{q[r * d + c]} * double{k[j * d + c]};
      const double e = std::exp(score * used);
      total += e;
      for (size_t c = 0; c < d; ++c) sum[c] += e * double{v[j * d + c]};
    }
    for (size_t c = 0; c < d; ++c) out[r * d + c] = static_cast<float>(sum[c] / total);
    lse[r] = static_cast<float>(lse_factor * std::log(total));
  }
  t.Record("layers.0.attn.q", "T H d", {kRows, 1, d}, q, put);
  t.Record("layers.0.attn.k", "T Hkv d", {kRows, 1, d}, k, put);
  t.Record("layers.0.attn.v", "T Hkv dv", {kRows, 1, d}, v, put);
  put.meta = std::move(meta);
  t.Record("layers.0.attn.out", "T H dv", {kRows, 1, d}, out, put);
  t.Record("layers.0.attn.lse", "T H", {kRows, 1}, lse, put);
}

void Product(SmallTrace& t, double factor) {
  const Put put = Prompt(t);
  const Values x = Noise(kRows * 6, 1), w = Noise(5 * 6, 2);
  Values y;
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t o = 0; o < 5; ++o) {
      double sum = 0;
      for (size_t c = 0; c < 6; ++c) sum += double{x[r * 6 + c]} * double{w[o * 6 + c]};
      y.push_back(static_cast<float>(factor * sum));
    }
  }
  t.Record("layers.0.mlp.down_proj.weight", "out in", {5, 6}, w, kLoad);
  t.Record("layers.0.mlp.act", "T f", {kRows, 6}, x, put);
  t.Record("layers.0.mlp.down", "T h", {kRows, 5}, y, put);
}

// 25 columns, so that the root of the hidden size is 5.
void Embedding(SmallTrace& t) {
  Put put = Prompt(t);
  const Values table = Noise((kRows + 1) * 25, 1);
  t.Record("embed_tokens.weight", "vocab h", {kRows + 1, 25}, table, kLoad);
  put.meta = {{"embed_scale", "5"}};
  t.Record("embed", "T h", {kRows, 25}, Values(table.begin() + 25, table.end()), put);
}

// Ranks whose sum was taken once more over all of them.
void Reduction(SmallTrace& t, int32_t ranks) {
  Put put = Prompt(t);
  Values sum(kRows * 6, 0);
  for (int32_t rank = 0; rank < ranks; ++rank) {
    const Values part = Noise(kRows * 6, static_cast<uint64_t>(rank) + 1);
    for (size_t i = 0; i < part.size(); ++i) sum[i] += part[i];
    put.rank = rank;
    t.Record("layers.0.mlp.down.partial", "T h", {kRows, 6}, part, put);
  }
  for (int32_t rank = 0; rank < ranks; ++rank) {
    put.rank = rank;
    t.Record("layers.0.mlp.down", "T h", {kRows, 6}, Times(sum, ranks), put);
  }
}

struct Constant {
  const char* name;
  const char* site;
  double value;
  const char* said;  // one of the names that the constant has
  std::function<void(SmallTrace&)> record;
  int32_t ranks = 1;
};

constexpr double kHead = 0.35355339059327373;  // 1 / sqrt(8)

const Constant kConstants[] = {
    {"SoftmaxInBaseTwo", "layers.0.attn.out", std::numbers::log2e, "(log2 e)",
     [](SmallTrace& t) { Attention(t, kHead * std::numbers::log2e, {}); }},
    {"SoftmaxScaleWithoutTheRoot", "layers.0.attn.out", kHead, "(1/sqrt(query head size))",
     [](SmallTrace& t) { Attention(t, 0.125, {}); }},
    {"SoftmaxScaleWithoutThatOfYarn", "layers.0.attn.out", 1 / std::pow(0.1 * std::log(40) + 1, 2), "(1/yarn mscale^2)",
     [](SmallTrace& t) {
       Attention(t, kHead, {{"rope.type", "yarn"}, {"rope.factor", "40"}, {"rope.mscale_all_dim", "1"}});
     }},
    {"LogSumExpInBaseTwo", "layers.0.attn.lse", std::numbers::log2e, "(log2 e)",
     [](SmallTrace& t) { Attention(t, kHead, {}, std::numbers::log2e); }},
    {"EmbeddingWithoutItsRoot", "embed", 0.2, "(1/sqrt(row size))", Embedding},
    {"SumTakenOnceMoreOverTheRanks", "layers.0.mlp.down", 4, "(ranks)", [](SmallTrace& t) { Reduction(t, 4); }, 4},
    {"SumTakenOnceMoreOverTwoRanks", "layers.0.mlp.down", 2, "(2 = ranks)", [](SmallTrace& t) { Reduction(t, 2); }, 2},
    {"ProductTwice", "layers.0.mlp.down", 2, "(2)", [](SmallTrace& t) { Product(t, 2); }},
    {"ProductByTheOtherLargestCode", "layers.0.mlp.down", 448.0 / 240, "(448/240)",
     [](SmallTrace& t) { Product(t, 448.0 / 240); }},
};

class Constants : public ::testing::TestWithParam<Constant> {};

TEST_P(Constants, IsNamedAndWeighed) {
  const Constant& c = GetParam();
  SmallTrace t(c.ranks);
  c.record(t);
  const auto capture = t.Open();
  const auto result = RunChecks(*capture, {});
  ASSERT_TRUE(result.ok()) << result.status().message();
  ASSERT_FALSE(result->findings.empty());
  const FirstBad& first = result->findings[0];
  EXPECT_EQ(first.name, c.site);
  EXPECT_NEAR(first.constant_value, c.value, 2e-3 * c.value);
  EXPECT_TRUE(first.constant.ends_with(c.said)) << first.constant;
  std::string said;
  for (const std::string& line : first.evidence) said += line + "\n";
  EXPECT_NE(said.find("bits beyond chance"), std::string::npos) << said;
  EXPECT_NE(said.find("residual "), std::string::npos) << said;
}

INSTANTIATE_TEST_SUITE_P(All, Constants, ::testing::ValuesIn(kConstants),
                         [](const auto& p) { return std::string(p.param.name); });

// A constant that is none of the known ones gets no name.
TEST(Constants, AnyOtherHasNoName) {
  SmallTrace t;
  Product(t, 1.1234);
  const auto capture = t.Open();
  const auto result = RunChecks(*capture, {});
  ASSERT_TRUE(result.ok()) << result.status().message();
  ASSERT_FALSE(result->findings.empty());
  EXPECT_EQ(result->findings[0].constant.find('('), std::string::npos) << result->findings[0].constant;
}

}  // namespace
}  // namespace assay
