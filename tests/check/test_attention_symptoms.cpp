// What attention shows without being recomputed: heads, sums of probabilities, and how its weight is spread.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>
#include <vector>

#include "small_trace.h"
#include "verdicts.h"

namespace assay {
namespace {

using testing::Judge;
using testing::Noise;
using testing::Put;
using testing::SmallTrace;

CheckResult Heads(bool zero, int64_t position = 1) {
  SmallTrace t(1, Level::kStats);
  const uint64_t a = t.Request({1, 2, 3, 4});
  std::vector<float> out = Noise(64, 2);
  for (size_t r = 0; r < 2 && zero; ++r) std::fill_n(out.begin() + static_cast<int64_t>(r * 32 + 8), 8, 0.0f);
  const Put put{.rows = {{a, 0, 2, position, false}}};
  t.Record("layers.0.attn.q", "T H d", {2, 4, 8}, Noise(64, 1), put);
  t.Record("layers.0.attn.out", "T H dv", {2, 4, 8}, out, put);
  return Judge(t, {"heads"});
}

TEST(CheckHeads, HeadOfZerosIsNamed) {
  const CheckResult r = Heads(true);
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].heads, std::vector<int32_t>{1});
}
TEST(CheckHeads, HeadOfZerosIsNamedInAPromptFromItsFirstRow) {
  const CheckResult r = Heads(true, 0);
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].heads, std::vector<int32_t>{1});
  EXPECT_RULED_OUT(Heads(false, 0));
}
// A prompt of 8 rows with stored values, 4 heads of 8 over 2 heads of values. Head 2 holds `stuck` behind position 0.
CheckResult StuckHead(const std::vector<float>& stuck, size_t n_stuck = 1) {
  SmallTrace t;
  const Put put{.rows = {{t.Request({1, 2, 3, 4, 5, 6, 7, 8}), 0, 8, 0, false}}};
  std::vector<float> out = Noise(8 * 32, 2);
  for (size_t r = 1; r < 8 && !stuck.empty(); ++r) {
    for (size_t h = 2; h < 2 + n_stuck; ++h)
      std::copy(stuck.begin(), stuck.end(), out.begin() + static_cast<int64_t>(r * 32 + h % 4 * 8));
  }
  t.Record("layers.0.attn.q", "T H d", {8, 4, 8}, Noise(8 * 32, 1), put);
  t.Record("layers.0.attn.v", "T Hkv dv", {8, 2, 8}, Noise(8 * 16, 3), put);
  t.Record("layers.0.attn.out", "T H dv", {8, 4, 8}, out, put);
  return Judge(t, {"heads"});
}

TEST(CheckHeads, HeadThatIsStuckBehindItsFirstRowIsNamed) {
  const std::vector<float> other = Noise(8, 4), one(8, 0.5F), zero(8, 0.0F);
  for (const std::vector<float>& stuck : {other, one, zero}) {
    const CheckResult r = StuckHead(stuck);
    ASSERT_FALSE(r.findings.empty());
    EXPECT_EQ(r.findings[0].name, "layers.0.attn.out");
    EXPECT_EQ(r.findings[0].heads, std::vector<int32_t>{2});
  }
  EXPECT_RULED_OUT(StuckHead({}));
}
// Head 2 reads the second head of values; it may look at one key all the time.
TEST(CheckHeads, HeadThatHoldsOneOfItsValuesIsRight) {
  const std::vector<float> values = Noise(8 * 16, 3);
  EXPECT_RULED_OUT(StuckHead({values.begin() + 8, values.begin() + 16}));
}
// Head 2 holds `sink` in all rows: the value of position 0, which it looks at alone. Six rows behind a prefix of
// another request, or all rows of a prompt; `written`: rows read back behind the cache write, of which the sink's value
// is one.
CheckResult SinkHead(const std::vector<float>& sink, int64_t first, const std::vector<float>& written = {}) {
  SmallTrace t;
  const Put put{.rows = {{t.Request(std::vector<int64_t>(14, 1)), 0, 6, first, false}}};
  std::vector<float> out = Noise(6 * 32, 2);
  for (size_t r = 0; r < 6; ++r) std::copy(sink.begin(), sink.end(), out.begin() + static_cast<int64_t>(r * 32 + 16));
  t.Record("layers.0.attn.q", "T H d", {6, 4, 8}, Noise(6 * 32, 1), put);
  t.Record("layers.0.attn.v", "T Hkv dv", {6, 2, 8}, Noise(6 * 16, 3), put);
  if (!written.empty()) t.Record("layers.0.attn.kv_write", "T Hkv d", {6, 2, 16}, written, put);
  t.Record("layers.0.attn.out", "T H dv", {6, 4, 8}, out, put);
  return Judge(t, {"heads"});
}

// Nobody recorded under this request what lies in the blocks that it took over.
TEST(CheckHeads, HeadThatHoldsAValueOfItsPrefixIsRight) {
  EXPECT_RULED_OUT(SinkHead(Noise(8, 4), 8));
  EXPECT_FALSE(SinkHead(Noise(8, 4), 0).findings.empty());
}
TEST(CheckHeads, HeadThatHoldsAValueAsTheCacheRoundedItIsRight) {
  const std::vector<float> v = Noise(6 * 16, 3);
  std::vector<float> rounded(v.begin() + 8, v.begin() + 16);
  for (float& x : rounded) x *= x > 0 ? 1.06F : 0.94F;  // as codes of three bits of mantissa do
  EXPECT_RULED_OUT(SinkHead(rounded, 0));
  // Codes so small that nothing of the value is left but what was read back: [key, value] of each head.
  const std::vector<float> small = Noise(8, 5);
  std::vector<float> written = Noise(6 * 32, 6);
  std::copy(small.begin(), small.end(), written.begin() + 24);
  EXPECT_RULED_OUT(SinkHead(small, 0, written));
  EXPECT_FALSE(SinkHead(Noise(8, 7), 0, written).findings.empty());
}
// Equal tokens have equal values in every head.
TEST(CheckHeads, HeadsThatAllStayTheSameAreRight) { EXPECT_RULED_OUT(StuckHead(Noise(8, 4), 4)); }

TEST(CheckHeads, HeadsThatDifferAreRight) { EXPECT_RULED_OUT(Heads(false)); }

CheckResult Probabilities(float factor) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2});
  t.Record<float>("layers.0.attn.probs", "T H K", {2, 1, 4}, {1, 0, 0, 0, 0.25f * factor, 0.75f * factor, 0, 0},
                  {.rows = {{a, 0, 2, 0, false}}});
  return Judge(t, {"softmax_sums"});
}

TEST(CheckSoftmaxSums, RowThatDoesNotSumToOneIsNamed) {
  EXPECT_FIRST(Probabilities(1.01f), "layers.0.attn.probs", "KERNEL");
}
TEST(CheckSoftmaxSums, RowsThatSumToOneAreRight) { EXPECT_RULED_OUT(Probabilities(1)); }

CheckResult Entropy(float scale) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2});
  std::vector<float> q = Noise(64 * 4 * 8, 1);
  for (float& v : q) v *= scale;
  const Put put{.rows = {{a, 0, 64, 0, false}}};
  t.Record("layers.0.attn.q", "T H d", {64, 4, 8}, q, put);
  t.Record("layers.0.attn.k", "T H d", {64, 2, 8}, Noise(64 * 2 * 8, 2), put);
  t.Record("layers.0.attn.out", "T H dv", {64, 4, 8}, Noise(64 * 4 * 8, 3), put);
  return Judge(t, {"entropy"});
}

TEST(CheckEntropy, UniformAttentionIsNamed) {
  const CheckResult r = Entropy(1e-6f);
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].name, "layers.0.attn.out");
}
TEST(CheckEntropy, CollapsedAttentionIsNamed) {
  const CheckResult r = Entropy(1e6f);
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].name, "layers.0.attn.out");
}
// Queries at 48 to 63 with a window of 16 see keys that are all zero; those before 32 are not.
TEST(CheckEntropy, UniformWithinTheWindowIsNamed) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2});
  std::vector<float> k = Noise(64 * 8, 2);
  for (float& v : k) v *= 100;
  std::fill(k.begin() + 32 * 8, k.end(), 0.0F);
  const Put all{.rows = {{a, 0, 64, 0, false}}};
  Put late{.rows = {{a, 0, 16, 48, false}}, .step = 1};
  t.Record("layers.0.attn.k", "T H d", {64, 1, 8}, k, all);
  t.Record("layers.0.attn.v", "T H dv", {64, 1, 8}, Noise(64 * 8, 3), all);
  t.Record("layers.0.attn.q", "T H d", {16, 4, 8}, Noise(16 * 4 * 8, 1), late);
  late.meta = {{"window", "16"}};
  t.Record("layers.0.attn.out", "T H dv", {16, 4, 8}, Noise(16 * 4 * 8, 4), late);
  const CheckResult r = Judge(t, {"entropy"});
  ASSERT_FALSE(r.findings.empty());
  EXPECT_NE(r.findings[0].evidence[0].find("uniform"), std::string::npos);
}

// Latents: queries of this size against latents and rotated keys.
CheckResult LatentEntropy(float scale) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2});
  const Put put{.rows = {{a, 0, 64, 0, false}}};
  std::vector<float> q = Noise(64 * 4 * 8, 1), pe = Noise(64 * 4 * 4, 2);
  for (std::vector<float>* x : {&q, &pe}) {
    for (float& v : *x) v *= scale;
  }
  t.Record("layers.0.attn.q_latent", "T H c", {64, 4, 8}, q, put);
  t.Record("layers.0.attn.q_pe", "T H dr", {64, 4, 4}, pe, put);
  t.Record("layers.0.attn.kv_c_normed", "T c", {64, 8}, Noise(64 * 8, 3), put);
  t.Record("layers.0.attn.k_pe", "T dr", {64, 4}, Noise(64 * 4, 4), put);
  Put result = put;
  result.meta = {{"softmax_scale", "0.5"}};
  t.Record("layers.0.attn.latent_out", "T H c", {64, 4, 8}, Noise(64 * 4 * 8, 5), result);
  return Judge(t, {"entropy"});
}

TEST(CheckEntropy, UniformAttentionOnLatentsIsNamed) {
  const CheckResult r = LatentEntropy(1e-6F);
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].name, "layers.0.attn.latent_out");
  EXPECT_RULED_OUT(LatentEntropy(1));
}

TEST(CheckEntropy, AttentionInBetweenIsRight) { EXPECT_RULED_OUT(Entropy(1)); }

// Statistics alone: 64 rows, queries and keys of this size, and log-sum-exps of scores near 0 times `factor`.
CheckResult LseRange(float size, float factor, bool keys = true, std::string_view cap = "0", bool causal = true) {
  SmallTrace t(1, Level::kStats);
  Put put{.rows = {{t.Request({1, 2}), 0, 64, 0, false}}};
  std::vector<float> q = Noise(64 * 16, 1), k = Noise(64 * 8, 2), lse;
  for (float& v : q) v *= size;
  for (float& v : k) v *= size;
  for (int i = 0; i < 128; ++i) lse.push_back(factor * std::log(static_cast<float>(i / 2 + 1)));
  t.Record("layers.0.attn.q", "T H d", {64, 2, 8}, q, put);
  if (keys) t.Record("layers.0.attn.k", "T Hkv d", {64, 1, 8}, k, put);
  put.meta = {};
  t.Record("layers.0.attn.out", "T H dv", {64, 2, 8}, Noise(64 * 16, 3), put);
  put.meta = {{"soft_cap", cap}, {"causal", causal ? "1" : "0"}};
  t.Record("layers.0.attn.lse", "T H", {64, 2}, lse, put);
  return Judge(t, {"lse_range"});
}
constexpr float kLog2E = std::numbers::log2e_v<float>;

TEST(CheckLseRange, BaseTwoOfSmallScoresIsNamed) {
  const CheckResult r = LseRange(0.01F, kLog2E);
  EXPECT_FIRST(r, "layers.0.attn.lse", "LSE");
  EXPECT_NEAR(r.findings[0].constant_value, std::numbers::log2e, 1e-9);
}
TEST(CheckLseRange, SizeThatNoScoresGiveIsNamed) {
  EXPECT_FIRST(LseRange(0.01F, 1000), "layers.0.attn.lse", "LSE");
  EXPECT_FIRST(LseRange(1, -1000), "layers.0.attn.lse", "LSE");
}
// Queries and keys of size 10 allow log-sum-exps of 20 ln(keys), a cap of 1 on the scores does not.
TEST(CheckLseRange, SoftCapThatWasLeftOutIsNamed) {
  EXPECT_FIRST(LseRange(10, 20, true, "1"), "layers.0.attn.lse", "MASK");
  EXPECT_RULED_OUT(LseRange(10, 1, true, "1"));
}
// Like every other key of the call, on the log-sum-exp beside an output that says nothing.
TEST(CheckLseRange, CallWithoutACausalBoundIsNotJudged) {
  const CheckResult r = LseRange(0.01F, 1000, true, "0", false);
  EXPECT_TRUE(r.findings.empty());
  ASSERT_EQ(r.ledger.size(), 1U);
  EXPECT_EQ(r.ledger[0].state, CheckState::kNotTestable);
  EXPECT_NE(r.ledger[0].evidence[0].find("without a causal bound"), std::string::npos) << r.ledger[0].evidence[0];
}
// Scores that are large beside ln(keys) allow both bases: the ledger says that the range does not tell.
TEST(CheckLseRange, BaseIsNotToldWhereScoresAreLarge) {
  const CheckResult r = LseRange(10, 1);
  EXPECT_RULED_OUT(r);
  EXPECT_NE(r.ledger[0].evidence[0].find("the base is not told"), std::string::npos) << r.ledger[0].evidence[0];
  EXPECT_RULED_OUT(LseRange(10, kLog2E));
}
TEST(CheckLseRange, RangeOfItsScoresIsRight) { EXPECT_RULED_OUT(LseRange(0.01F, 1)); }
// Three requests in one step, the second with queries of size 10, and log-sum-exps that only those allow.
CheckResult LseOfRequests(size_t large, bool all_queries = true, std::string_view scale = "1") {
  SmallTrace t(1, Level::kStats);
  Put put;
  for (int32_t i = 0; i < 3; ++i) put.rows.push_back({t.Request({1, 2, i}), i * 4, 4, 0, false});
  std::vector<float> q(12 * 8, 0.01F), lse(12, 0);
  std::fill_n(q.begin() + 32, 32, 10.0F);
  std::fill_n(lse.begin() + static_cast<int64_t>(4 * large), 4, 25.0F);
  Put queries = put;
  if (!all_queries) queries.rows.pop_back();
  const int64_t n = all_queries ? 12 : 8;
  q.resize(static_cast<size_t>(n) * 8);
  t.Record("layers.0.attn.q", "T H d", {n, 1, 8}, q, queries);
  t.Record("layers.0.attn.k", "T Hkv d", {12, 1, 8}, std::vector<float>(12 * 8, 1), put);
  put.meta = {{"softmax_scale", scale}};
  t.Record("layers.0.attn.lse", "T H", {12, 1}, lse, put);
  return Judge(t, {"lse_range"});
}
TEST(CheckLseRange, EachRequestIsHeldAgainstItsOwnQueries) {
  EXPECT_RULED_OUT(LseOfRequests(1));
  EXPECT_FIRST(LseOfRequests(2), "layers.0.attn.lse", "LSE");
}
TEST(CheckLseRange, RequestWithoutQueriesIsNotTestable) { EXPECT_TRUE(LseOfRequests(2, false).findings.empty()); }
TEST(CheckLseRange, ScaleThatIsNoNumberIsTheDefault) {
  EXPECT_RULED_OUT(LseOfRequests(1, true, "nan"));
  EXPECT_RULED_OUT(LseOfRequests(1, true, "inf"));
}
TEST(CheckLseRange, KeysThatWereNotRecordedAreNotTestable) {
  const CheckResult r = LseRange(0.01F, kLog2E, false);
  EXPECT_TRUE(r.findings.empty());
  ASSERT_EQ(r.ledger.size(), 1U);
  EXPECT_EQ(r.ledger[0].state, CheckState::kNotTestable);
}

}  // namespace
}  // namespace assay
