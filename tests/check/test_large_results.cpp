// Results of more than 2^32 products: rows are sampled, the report says so, and a wrong row that is not in the sample
// is found all the same where random projections reach.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

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

constexpr size_t kRows = 1700, kIn = 1600, kOut = 1600;

// A weight of rank one, so that the product is soon made: w = a bᵀ, y = (x·b) a. Powers of two keep it exact.
CheckResult Product(const char* site, double factor, size_t first, size_t last,
                    std::vector<std::pair<std::string_view, std::string_view>> meta = {}, double head_factor = 1) {
  const bool head = std::string_view(site) == "logits";
  SmallTrace t;
  const uint64_t a = t.Request(std::vector<int64_t>(kRows, 1));
  Put put{.rows = {{a, 0, kRows, 0, false}}};
  const Values x = Noise(kRows * kIn, 1), column = Noise(kIn, 2);
  Values w(kOut * kIn), y(kRows * kOut);
  const auto of = [](size_t o) { return std::ldexp(o % 2 == 0 ? 1.0 : -1.0, -static_cast<int>(o % 3)); };
  for (size_t o = 0; o < kOut; ++o) {
    for (size_t c = 0; c < kIn; ++c) w[o * kIn + c] = static_cast<float>(of(o) * double{column[c]});
  }
  for (size_t r = 0; r < kRows; ++r) {
    double dot = 0;
    for (size_t c = 0; c < kIn; ++c) dot += double{x[r * kIn + c]} * double{column[c]};
    const double f = (r >= first && r < last ? factor : 1) * head_factor;
    for (size_t o = 0; o < kOut; ++o) y[r * kOut + o] = static_cast<float>(f * dot * of(o));
  }
  const Put load{.step = -1, .phase = Phase::kLoad};
  t.Record(head ? "lm_head.weight" : "layers.0.mlp.down_proj.weight", "out in", {kOut, kIn}, w, load);
  t.Record(head ? "final_norm" : "layers.0.mlp.act", head ? "T h" : "T f", {kRows, kIn}, x, put);
  put.meta = std::move(meta);
  t.Record(site, head ? "T vocab" : "T h", {kRows, kOut}, y, put);
  return Judge(t, {"linear"});
}

std::string Ledger(const CheckResult& r) {
  std::string text;
  for (const LedgerEntry& e : r.ledger) {
    for (const std::string& line : e.evidence) text += line + "\n";
  }
  return text;
}

TEST(LargeResults, RightProductSaysHowManyRowsWereSampled) {
  const CheckResult r = Product("layers.0.mlp.down", 1, 0, 0);
  EXPECT_TRUE(r.findings.empty());
  EXPECT_EQ(r.coverage.results_judged, 1U);
  EXPECT_NE(Ledger(r).find("64 of 1700 rows (seed 1) of layers.0.mlp.down"), std::string::npos) << Ledger(r);
}

TEST(LargeResults, OneDoubledRowIsFoundOutsideOfTheSample) {
  // Of three neighbours two at least are not in the sample, which has one row of 26.
  for (size_t row : {size_t{700}, size_t{701}}) {
    const CheckResult r = Product("layers.0.mlp.down", 2, row, row + 1);
    ASSERT_EQ(r.findings.size(), 1U);
    const auto at = static_cast<int64_t>(row);
    EXPECT_EQ(r.findings[0].positions, (std::vector<std::pair<int64_t, int64_t>>{{at, at}}));
  }
}

TEST(LargeResults, CauseOfAWhollyWrongProductIsNamed) {
  const CheckResult r = Product("layers.0.mlp.down", 2, 0, kRows);
  ASSERT_EQ(r.findings.size(), 1U);
  EXPECT_EQ(r.findings[0].cls, "SCALE");
  EXPECT_NEAR(r.findings[0].constant_value, 2, 1e-6);
}

TEST(LargeResults, LargeHeadWithAScaleIsJudged) {
  const CheckResult right = Product("logits", 1, 0, 0, {{"logit_scale", "0.5"}}, 0.5);
  EXPECT_TRUE(right.findings.empty());
  EXPECT_EQ(right.coverage.results_judged, 1U);
  const CheckResult wrong = Product("logits", 1, 0, 0, {{"logit_scale", "0.5"}});
  ASSERT_EQ(wrong.findings.size(), 1U);
  EXPECT_EQ(wrong.findings[0].cls, "SCALE");
}

// Keys all alike: the output is the mean of the values so far, whatever the queries are.
CheckResult Attention(double factor) {
  constexpr size_t rows = 2048, heads = 16, d = 64;
  SmallTrace t;
  const Put put{.rows = {{t.Request(std::vector<int64_t>(rows, 1)), 0, rows, 0, false}}};
  const Values q = Noise(rows * heads * d, 1), k(rows * d, 0.25F), v = Noise(rows * d, 2);
  Values out(rows * heads * d);
  std::vector<double> sum(d, 0);
  for (size_t r = 0; r < rows; ++r) {
    for (size_t c = 0; c < d; ++c) {
      sum[c] += double{v[r * d + c]};
      for (size_t h = 0; h < heads; ++h)
        out[(r * heads + h) * d + c] = static_cast<float>(factor * sum[c] / static_cast<double>(r + 1));
    }
  }
  t.Record("layers.0.attn.q", "T H d", {rows, heads, d}, q, put);
  t.Record("layers.0.attn.k", "T Hkv d", {rows, 1, d}, k, put);
  t.Record("layers.0.attn.v", "T Hkv dv", {rows, 1, d}, v, put);
  t.Record("layers.0.attn.out", "T H dv", {rows, heads, d}, out, put);
  return Judge(t, {"attention"});
}

TEST(LargeResults, AttentionSaysWhichQueriesWereSampled) {
  const CheckResult r = Attention(1);
  EXPECT_TRUE(r.findings.empty());
  EXPECT_NE(Ledger(r).find("64 of 2048 rows (seed 1) of layers.0.attn.out"), std::string::npos) << Ledger(r);
}

TEST(LargeResults, WrongAttentionIsFoundInTheSample) {
  const CheckResult r = Attention(1.5);
  ASSERT_EQ(r.findings.size(), 1U);
  std::string said;
  for (const std::string& line : r.findings[0].evidence) said += line + "\n";
  EXPECT_NE(said.find("64 of 2048 rows"), std::string::npos) << said;
}

// Three requests in one step, of which the second has no row in the sample and the third none of its first ones: 3
// rows, 3 rows, and 8192 behind 16 of an earlier step. Keys all alike, as above; what the third reads is the mean of
// rows [0, row + n) of `read`, or of its own values.
CheckResult Chunk(int64_t n, bool from_pool) {
  constexpr int64_t rows = 8192, earlier = 16, few = 3, heads = 2, d = 16, all = few + few + rows;
  constexpr size_t pool = 8300 * d;
  SmallTrace t;
  Put before, put{.step = 1};
  const uint64_t first = t.Request({1, 2, 3}), second = t.Request({4, 5, 6}), third = t.Request({7, 8, 9});
  put.rows = {{first, 0, few, 0, false}, {second, few, few, 0, false}, {third, 2 * few, rows, earlier, false}};
  before.rows = {{third, 0, earlier, 0, false}};
  const Values values = Noise((all + earlier) * d, 1), slots = Noise(pool, 2);
  const auto own = values.begin() + 2 * few * d;  // of the third request, from position 0 on
  const Values keys(static_cast<size_t>(all * d), 0.25F);
  Values now(values.begin(), own), out;
  now.insert(now.end(), own + earlier * d, values.end());
  const auto means = [&](Values::const_iterator read, int64_t n_rows, int64_t more) {
    std::vector<double> sum(d, 0);
    for (int64_t r = 0; r < n_rows + more; ++r) {
      for (int64_t c = 0; c < d; ++c) sum[static_cast<size_t>(c)] += double{read[r * d + c]};
      for (int64_t h = 0; h < heads && r >= more; ++h)
        for (int64_t c = 0; c < d; ++c)
          out.push_back(static_cast<float>(sum[static_cast<size_t>(c)] / static_cast<double>(r + 1)));
    }
  };
  means(values.begin(), few, 0);
  means(values.begin() + few * d, few, 0);
  means(from_pool ? slots.begin() + 2 * few * d : own, rows, n - 1);
  t.Record("layers.0.attn.k", "T Hkv d", {earlier, 1, d}, Values(earlier * d, 0.25F), before);
  t.Record("layers.0.attn.v", "T Hkv dv", {earlier, 1, d}, Values(own, own + earlier * d), before);
  t.Record("layers.0.attn.q", "T H d", {all, heads, d}, Noise(all * heads * d, 3), put);
  t.Record("layers.0.attn.k", "T Hkv d", {all, 1, d}, keys, put);
  t.Record("layers.0.attn.v", "T Hkv dv", {all, 1, d}, now, put);
  t.Record("layers.0.attn.k_cache", "S Hkv d", {8300, 1, d}, Values(pool, 0.25F), {.step = 1});
  t.Record("layers.0.attn.v_cache", "S Hkv dv", {8300, 1, d}, slots, {.step = 1});
  t.Record("layers.0.attn.out", "T H dv", {all, heads, d}, out, put);
  return Judge(t, {"attention"});
}

TEST(LargeResults, CausesCountFromTheFirstRowOfTheStepAndNotOfTheSample) {
  const CheckResult right = Chunk(17, false);
  EXPECT_TRUE(right.findings.empty());
  EXPECT_NE(Ledger(right).find("64 of 8198 rows (seed 1) of layers.0.attn.out"), std::string::npos) << Ledger(right);
  const CheckResult mask = Chunk(1, false), slots = Chunk(17, true);
  ASSERT_EQ(mask.findings.size(), 1U);
  EXPECT_EQ(mask.findings[0].cls, "MASK");
  EXPECT_EQ(mask.findings[0].constant_value, -16);
  ASSERT_EQ(slots.findings.size(), 1U);
  EXPECT_EQ(slots.findings[0].cls, "KV-IDENT");
  EXPECT_NE(slots.findings[0].evidence[0].find("the block table was not used"), std::string::npos)
      << slots.findings[0].evidence[0];
}

// One element of each query and key is not 0, so that the scores are soon made.
CheckResult Scores(float factor) {
  constexpr size_t rows = 512, heads = 2, d = 8448;
  SmallTrace t;
  Put put{.rows = {{t.Request(std::vector<int64_t>(rows, 1)), 0, rows, 0, false}}};
  Values q(rows * heads * d), k(rows * d), scores(rows * heads * rows, -INFINITY);
  for (size_t r = 0; r < rows; ++r) {
    k[r * d] = static_cast<float>(r % 7);
    for (size_t h = 0; h < heads; ++h) {
      q[(r * heads + h) * d] = static_cast<float>(h + 1);
      for (size_t j = 0; j <= r; ++j)
        scores[(r * heads + h) * rows + j] = factor * static_cast<float>(h + 1) * static_cast<float>(j % 7) / 16;
    }
  }
  t.Record("layers.0.attn.q", "T H d", {rows, heads, d}, q, put);
  t.Record("layers.0.attn.k", "T Hkv d", {rows, 1, d}, k, put);
  put.meta = {{"softmax_scale", "0.0625"}};
  t.Record("layers.0.attn.scores", "T H S", {rows, heads, rows}, scores, put);
  return Judge(t, {"attention"});
}

TEST(LargeResults, ScoresSayWhichQueriesWereSampled) {
  const CheckResult right = Scores(1);
  EXPECT_TRUE(right.findings.empty());
  EXPECT_NE(Ledger(right).find("64 of 512 rows (seed 1) of layers.0.attn.scores"), std::string::npos) << Ledger(right);
  const CheckResult wrong = Scores(2);
  ASSERT_EQ(wrong.findings.size(), 1U);
  EXPECT_EQ(wrong.findings[0].cls, "SCALE");
  EXPECT_NE(wrong.findings[0].evidence.back().find("64 of 512 rows"), std::string::npos);
}

}  // namespace
}  // namespace assay
