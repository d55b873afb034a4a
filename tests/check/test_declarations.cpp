// Faults that show against what was declared or written beside an operation: a tied head, drafts that were rejected,
// slots behind the newest key.
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

// Two requests; the first had one of three drafts accepted, the second all. The step behind drafts one token.
CheckResult StepBehindDrafts(int64_t advanced) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3, 4, 5}), b = t.Request({7, 8, 9});
  t.Record<int64_t>("spec.accepted", "T", {2}, {1, 3},
                    {.rows = {{a, 0, 1, 8, false}, {b, 1, 1, 6, false}}, .step = 1, .meta = {{"drafts", "3"}}});
  t.Record<int64_t>("positions", "T", {4}, {7 + advanced, 8 + advanced, 7, 8},
                    {.rows = {{a, 0, 2, 7, false}, {b, 2, 2, 7, false}}, .step = 2, .meta = {{"drafts", "1"}}});
  return Judge(t, {"ids"});
}

TEST(CheckIds, DraftsOfTheVerifyingStepExplainPositions) {
  const CheckResult r = StepBehindDrafts(2);
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].name, "positions");
  EXPECT_EQ(r.findings[0].cls, "SPEC");
}
TEST(CheckIds, OffsetThatIsNotTheRejectedDraftsStaysAPosition) {
  const CheckResult r = StepBehindDrafts(1);
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].cls, "ROPE-POS");
}
TEST(CheckIds, PositionsBehindAcceptedDraftsAreRight) { EXPECT_TRUE(StepBehindDrafts(0).findings.empty()); }

CheckResult TiedHead(uint64_t head_seed, float first_embedding = 0.5f) {
  constexpr int64_t kVocab = 11, kHidden = 5, kRows = 3;
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3});
  std::vector<float> embedding = Noise(kVocab * kHidden, 1), head = Noise(kVocab * kHidden, head_seed);
  const std::vector<float> x = Noise(kRows * kHidden, 3);
  embedding[0] = first_embedding;
  if (head_seed == 1) head[0] = 0.5f;
  std::vector<float> logits;
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t c = 0; c < kVocab; ++c) {
      double sum = 0;
      for (int64_t i = 0; i < kHidden; ++i)
        sum += double{x[static_cast<size_t>(r * kHidden + i)]} * double{head[static_cast<size_t>(c * kHidden + i)]};
      logits.push_back(static_cast<float>(sum));
    }
  }
  t.Record("embed_tokens.weight", "vocab h", {kVocab, kHidden}, embedding, {.phase = Phase::kLoad});
  t.Record("lm_head.weight", "vocab h", {kVocab, kHidden}, head, {.phase = Phase::kLoad});
  t.Record("final_norm", "T h", {kRows, kHidden}, x, {.rows = {{a, 0, kRows, 0, false}}});
  t.Record("logits", "T vocab", {kRows, kVocab}, logits,
           {.rows = {{a, 0, kRows, 0, false}}, .meta = {{"tie_word_embeddings", "1"}}});
  return Judge(t, {"linear"});
}

TEST(CheckLinear, HeadUnlikeTheEmbeddingItIsTiedToIsNamed) {
  const CheckResult r = TiedHead(2);
  ASSERT_EQ(r.findings.size(), 1u);
  EXPECT_EQ(r.findings[0].name, "lm_head.weight");
  EXPECT_EQ(r.findings[0].cls, "LOAD");
}
TEST(CheckLinear, HeadEqualToTheEmbeddingIsRight) { EXPECT_TRUE(TiedHead(1).findings.empty()); }
TEST(CheckLinear, EmbeddingThatIsNoNumberDoesNotMakeTheHeadAnother) { EXPECT_TRUE(TiedHead(1, NAN).findings.empty()); }

// One head of 4, blocks of 4 slots; six keys in blocks 2 and 1. The newest query reads `over` slots too far. The first
// row stands at position `first`.
CheckResult OverTheEnd(size_t over, int64_t first = 0, std::string_view block_size = "4") {
  constexpr size_t kKeys = 6, kWidth = 4, kPool = 12;
  constexpr size_t kSlots[kKeys + 2] = {8, 9, 10, 11, 4, 5, 6, 7};
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3, 4, 5, 6});
  const std::vector<float> q = Noise(kKeys * kWidth, 1), pool_k = Noise(kPool * kWidth, 2),
                           pool_v = Noise(kPool * kWidth, 3);
  std::vector<float> k, v, out;
  std::vector<int64_t> slots;
  for (size_t i = 0; i < kKeys; ++i) {
    slots.push_back(static_cast<int64_t>(kSlots[i]));
    for (size_t c = 0; c < kWidth; ++c) {
      k.push_back(pool_k[kSlots[i] * kWidth + c]);
      v.push_back(pool_v[kSlots[i] * kWidth + c]);
    }
  }
  for (size_t row = 0; row < kKeys; ++row) {
    double total = 0, sum[kWidth] = {};
    for (size_t key = 0; key <= row + (row + 1 == kKeys ? over : 0); ++key) {
      double score = 0;
      for (size_t c = 0; c < kWidth; ++c) score += double{q[row * kWidth + c]} * pool_k[kSlots[key] * kWidth + c];
      const double e = std::exp(score / 2);
      total += e;
      for (size_t c = 0; c < kWidth; ++c) sum[c] += e * pool_v[kSlots[key] * kWidth + c];
    }
    for (const double x : sum) out.push_back(static_cast<float>(x / total));
  }
  const std::vector<RowRun> rows = {{a, 0, 6, first, false}}, newest = {{a, 0, 1, first + 5, false}};
  t.Record("slot_mapping", "T", {6}, slots, {.rows = rows});
  t.Record<int64_t>("block_table", "T n", {1, 2}, {2, 1}, {.rows = newest, .meta = {{"block_size", block_size}}});
  t.Record("layers.0.attn.q", "T H d", {6, 1, 4}, q, {.rows = rows});
  t.Record("layers.0.attn.k", "T H d", {6, 1, 4}, k, {.rows = rows});
  t.Record("layers.0.attn.v", "T H d", {6, 1, 4}, v, {.rows = rows});
  t.Record("layers.0.attn.k_cache", "S H d", {12, 1, 4}, pool_k);
  t.Record("layers.0.attn.v_cache", "S H d", {12, 1, 4}, pool_v);
  t.Record("layers.0.attn.out", "T H dv", {6, 1, 4}, out, {.rows = rows, .meta = {{"softmax_scale", "0.5"}}});
  return Judge(t, {"attention"});
}

TEST(CheckAttention, SlotsBehindTheNewestKeyAreNamed) {
  const CheckResult r = OverTheEnd(2);
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].name, "layers.0.attn.out");
  EXPECT_EQ(r.findings[0].cls, "PADREAD");
}
TEST(CheckAttention, FullPoolAroundRightRowsIsRight) { EXPECT_TRUE(OverTheEnd(0).findings.empty()); }
TEST(CheckAttention, PositionsBelowZeroLeadToNoPlaceInTheBlockTable) {
  const CheckResult r = OverTheEnd(2, -(int64_t{1} << 40), "1");
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].name, "layers.0.attn.out");
}

}  // namespace
}  // namespace assay
