// Each check on a recording where it is confirmed and on one where it is ruled out.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "check/check.h"
#include "small_trace.h"
#include "verdicts.h"

namespace assay {
namespace {

using testing::Judge;
using testing::Noise;
using testing::Put;
using testing::SmallTrace;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

CheckResult Nonfinite(bool bad, bool bad_operand, bool bad_padding) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3});
  const std::vector<RowRun> rows = {{a, 0, 3, 0, false}, {0, 3, 1, 0, true}};
  std::vector<float> x = Noise(16, 1), y = Noise(16, 2);
  if (bad_operand) x[5] = kNaN;
  if (bad_padding) x[13] = kNaN;
  if (bad) y[6] = kNaN;
  t.Record("layers.0.attn.out", "T d", {4, 4}, x, {.rows = rows});
  t.Record("layers.0.attn.o_proj", "T h", {4, 4}, y, {.rows = rows});
  return Judge(t, {"nonfinite"});
}

TEST(CheckNonfinite, FirstResultOfFiniteOperandsIsNamed) {
  EXPECT_FIRST(Nonfinite(true, false, false), "layers.0.attn.o_proj", "RANGE");
}
TEST(CheckNonfinite, SourceIsNamedNotWhatFollows) {
  EXPECT_FIRST(Nonfinite(true, true, false), "layers.0.attn.out", "RANGE");
}
TEST(CheckNonfinite, PaddingThatReachesRealRowsIsNamed) {
  const CheckResult r = Nonfinite(true, false, true);
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].cls, "PADREAD");
}
TEST(CheckNonfinite, PaddingAloneMayHoldAnything) { EXPECT_RULED_OUT(Nonfinite(false, false, true)); }

CheckResult Unwritten(size_t from, std::string_view site) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3, 4});
  const std::vector<RowRun> rows = {{a, 0, 4, 0, false}};
  const float fill = std::bit_cast<float>(0xdeadbeefu);
  std::vector<float> out(16, fill);
  t.Record(site, "T d", {4, 4}, out, {.rows = rows, .meta = {{"audit", "before"}, {"poison", "0xdeadbeef"}}});
  const std::vector<float> right = Noise(16, 1);
  for (size_t i = 0; i < from; ++i) out[i] = right[i];
  t.Record(site, "T d", {4, 4}, out, {.rows = rows, .meta = {{"audit", "after"}}});
  return Judge(t, {"unwritten"});
}

TEST(CheckUnwritten, RowsThatKeptTheFillAreNamed) {
  const CheckResult r = Unwritten(8, "layers.0.attn.out");
  EXPECT_FIRST(r, "layers.0.attn.out", "UNWRITTEN");
  EXPECT_EQ(r.findings[0].constant_value, 2);
  EXPECT_EQ(r.findings[0].positions, (std::vector<std::pair<int64_t, int64_t>>{{2, 3}}));
}
TEST(CheckUnwritten, LogSumExpAloneIsALayoutFault) {
  EXPECT_FIRST(Unwritten(8, "layers.0.attn.lse"), "layers.0.attn.lse", "LSE");
}
TEST(CheckUnwritten, WrittenBufferIsRight) { EXPECT_RULED_OUT(Unwritten(16, "layers.0.attn.out")); }

CheckResult Pool(bool foreign) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3}), b = t.Request({4, 5, 6});
  t.Record<int64_t>("slot_mapping", "T", {4}, {0, 1, 4, 5},
                    {.rows = {{a, 0, 2, 0, false}, {b, 2, 2, 0, false}}, .step = 0});
  t.Record<int64_t>("slot_mapping", "T", {1}, {2}, {.rows = {{a, 0, 1, 2, false}}, .step = 1});
  std::vector<float> pool = Noise(32, 1);
  t.Record("layers.0.attn.kv_cache", "S c", {8, 4}, pool,
           {.step = 1, .meta = {{"audit", "before"}, {"block_size", "4"}}});
  for (size_t i = 8; i < 12; ++i) pool[i] = 3;
  if (foreign) pool[21] = 3;
  t.Record("layers.0.attn.kv_cache", "S c", {8, 4}, pool,
           {.step = 1, .meta = {{"audit", "after"}, {"block_size", "4"}}});
  return Judge(t, {"pool"});
}

TEST(CheckPool, SlotOfAnotherRequestThatChangedIsNamed) {
  EXPECT_FIRST(Pool(true), "layers.0.attn.kv_cache", "KV-IDENT");
}
TEST(CheckPool, MappedSlotsMayChange) { EXPECT_RULED_OUT(Pool(false)); }

CheckResult Ids(int64_t second_slot, int64_t second_block, int64_t length, int64_t position) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3}), b = t.Request({4, 5, 6});
  const std::vector<RowRun> rows = {{a, 0, 3, 0, false}, {b, 3, 2, 0, false}},
                            newest = {{a, 0, 1, 2, false}, {b, 1, 1, 1, false}};
  t.Record<int64_t>("slot_mapping", "T", {5}, {2, 3, 6, 4, second_slot}, {.rows = rows});
  t.Record<int64_t>("block_table", "T n", {2, 2}, {1, 3, second_block, -1},
                    {.rows = newest, .meta = {{"block_size", "2"}}});
  t.Record<int64_t>("seq_lens", "T", {2}, {3, length}, {.rows = newest});
  t.Record<int64_t>("positions", "T", {5}, {0, 1, 2, 0, position}, {.rows = rows});
  return Judge(t, {"ids"});
}

TEST(CheckIds, RightIdsAreRuledOut) { EXPECT_RULED_OUT(Ids(5, 2, 2, 1)); }
TEST(CheckIds, SlotGivenTwiceIsNamed) { EXPECT_FIRST(Ids(2, 2, 2, 1), "slot_mapping", "KV-IDENT"); }
TEST(CheckIds, TableEntryOfAnotherRequestIsNamed) { EXPECT_FIRST(Ids(5, 1, 2, 1), "block_table", "KV-IDENT"); }
TEST(CheckIds, LengthThatIsNotThePositionIsNamed) { EXPECT_FIRST(Ids(5, 2, 3, 1), "seq_lens", "KV-IDENT"); }
TEST(CheckIds, PositionThatIsNotTheRowsIsNamed) {
  const CheckResult r = Ids(5, 2, 2, 4);
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].cls, "ROPE-POS");
  EXPECT_EQ(r.findings[0].constant_value, 3);
}

// A pool of 8 slots, and the last row of the step in this one.
CheckResult SlotInPool(int64_t slot) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3});
  t.Record("layers.0.attn.kv_cache", "S c", {8, 2}, Noise(16, 1), {.meta = {{"block_size", "2"}}});
  t.Record<int64_t>("slot_mapping", "T", {3}, {2, 3, slot}, {.rows = {{a, 0, 3, 0, false}}});
  return Judge(t, {"ids"});
}

TEST(CheckIds, SlotBehindTheEndOfThePoolIsNamed) {
  const CheckResult r = SlotInPool(8);
  EXPECT_FIRST(r, "slot_mapping", "KV-IDENT");
  EXPECT_EQ(r.findings[0].positions, (std::vector<std::pair<int64_t, int64_t>>{{2, 2}}));
  EXPECT_FIRST(SlotInPool(INT64_MAX), "slot_mapping", "KV-IDENT");
}
TEST(CheckIds, LastSlotOfThePoolIsRight) { EXPECT_RULED_OUT(SlotInPool(7)); }
TEST(CheckIds, NegativeSlotIsNotWritten) { EXPECT_RULED_OUT(SlotInPool(-1)); }

// Decode steps from position `first` on; the last one holds the row of step `of` where it is stale.
CheckResult Stale(bool stale, bool embed = true, int64_t first = 2, uint64_t of = 2) {
  SmallTrace t(1, Level::kStats);
  const uint64_t a = t.Request({1, 2, 3, 4, 5, 6});
  for (int64_t step = 0; step < 4; ++step) {
    const uint64_t seed = static_cast<uint64_t>(step);
    const Put put{.rows = {{a, 0, 1, first + step, false}}, .step = step, .phase = Phase::kDecode};
    if (embed) t.Record("embed", "T h", {1, 32}, Noise(32, 50 + seed), put);
    t.Record("layers.0.attn.k", "T H d", {1, 4, 8}, Noise(32, 70 + seed), put);
    t.Record("layers.0.attn.q", "T H d", {1, 4, 8}, Noise(32, 10 + seed), put);
    t.Record("layers.0.attn.out", "T H dv", {1, 4, 8}, Noise(32, stale && step == 3 ? 30 + of : 30 + seed), put);
  }
  return Judge(t, {"stale_rows"});
}

TEST(CheckStaleRows, RowOfAnEarlierStepIsNamed) {
  const CheckResult r = Stale(true);
  EXPECT_FIRST(r, "layers.0.attn.out", "UNWRITTEN");
  EXPECT_EQ(r.findings[0].step, 3);
}
// The first position has one key; a later one has several, and its row is that one only by a buffer.
TEST(CheckStaleRows, RowOfPositionZeroInALaterStepIsNamed) {
  EXPECT_FIRST(Stale(true, true, 0, 0), "layers.0.attn.out", "UNWRITTEN");
  EXPECT_RULED_OUT(Stale(false, true, 0, 0));
}
TEST(CheckStaleRows, RowOfAnEarlierStepIsNotRuledOutWhenTokensAreUnknown) {
  const CheckResult r = Stale(true, false);
  EXPECT_TRUE(r.findings.empty());
  ASSERT_EQ(r.ledger.size(), 1u);
  EXPECT_EQ(r.ledger[0].state, CheckState::kNotTestable);
  EXPECT_RULED_OUT(Stale(false, false));
}
TEST(CheckStaleRows, RowsThatDifferAreRight) { EXPECT_RULED_OUT(Stale(false)); }

CheckResult Tokens(bool loops) {
  SmallTrace t(1, Level::kStats);
  const uint64_t a = t.Request({7, 8});
  for (int64_t step = 0; step < 60; ++step) {
    const int64_t token = loops && step >= 10 ? 100 + step % 3 : step * step;
    t.Record<int64_t>("next_token", "T", {1}, {token}, {.rows = {{a, 0, 1, 1 + step, false}}, .step = step});
  }
  return Judge(t, {"token_loops"});
}

TEST(CheckTokenLoops, LoopIsNamedWithItsPeriodAndFirstStep) {
  const CheckResult r = Tokens(true);
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].name, "next_token");
  EXPECT_EQ(r.findings[0].constant_value, 3);
  EXPECT_EQ(r.findings[0].step, 10);
}
TEST(CheckTokenLoops, TextWithoutLoopIsRight) { EXPECT_RULED_OUT(Tokens(false)); }

CheckResult Saturation(float top, int64_t stuck) {
  SmallTrace t(1, Level::kStats);
  const uint64_t a = t.Request({1, 2});
  std::vector<float> x = Noise(64, 1);
  for (float& v : x) v *= top;
  for (int64_t i = 0; i < stuck; ++i) x[static_cast<size_t>(i)] = i % 2 == 0 ? 448 : -448;
  t.Record("layers.0.attn.kv_write", "T H d", {2, 2, 16}, x,
           {.rows = {{a, 0, 2, 0, false}}, .meta = {{"kv_cache_dtype", "f8_e4m3fn"}}, .compute = DType::kF8E4M3FN});
  return Judge(t, {"saturation"});
}

TEST(CheckSaturation, CodesThatStickAtTheTopAreNamed) {
  const CheckResult r = Saturation(100, 40);
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].cls, "KV-SCALE");
}
TEST(CheckSaturation, OneCodeAtTheTopIsRight) { EXPECT_RULED_OUT(Saturation(100, 1)); }

// A float16 result of this size.
CheckResult HalfRange(float size, const char* site = "layers.0.mlp.act") {
  SmallTrace t(1, Level::kStats);
  const uint64_t a = t.Request({1, 2});
  std::vector<float> x = Noise(64, 1);
  for (float& v : x) v *= size;
  x[3] = size;
  t.Record(site, "T f", {2, 32}, x, {.rows = {{a, 0, 2, 0, false}}, .compute = DType::kF16});
  return Judge(t, {"saturation"});
}

TEST(CheckSaturation, HalfPrecisionAtItsLargestIsNamed) {
  const CheckResult r = HalfRange(65504);
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].cls, "RANGE");
}
TEST(CheckSaturation, HalfPrecisionBelowItsNormalNumbersIsNamed) {
  const CheckResult r = HalfRange(0x1p-15F);
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].cls, "RANGE");
  EXPECT_GT(r.findings[0].measured, 0.99);
}
TEST(CheckSaturation, HalfPrecisionInItsRangeIsRight) {
  EXPECT_RULED_OUT(HalfRange(1));
  EXPECT_RULED_OUT(HalfRange(30000));
  EXPECT_RULED_OUT(HalfRange(0x1p-10F));
}
TEST(CheckSaturation, SmallProbabilitiesAndParametersAreRight) {
  EXPECT_RULED_OUT(HalfRange(0x1p-15F, "layers.0.attn.probs"));
  EXPECT_RULED_OUT(HalfRange(0x1p-15F, "layers.0.attn.k_proj.bias"));
}

CheckResult KvScale(std::string_view dtype, std::string_view scale, float dynamic) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2});
  const Put put{.rows = {{a, 0, 2, 0, false}}, .meta = {{"kv_cache_dtype", dtype}, {"k_scale", scale}}};
  std::vector<float> k = Noise(16, 1);
  k[3] = -4;
  t.Record("layers.0.attn.k", "T d", {2, 8}, k, {.rows = {{a, 0, 2, 0, false}}});
  t.Record("layers.0.attn.kv_write", "T d", {2, 8}, Noise(16, 1), put);
  t.Record<float>(
      "layers.0.attn.k_scale", "", {1}, {dynamic},
      {.meta = {{"scale_of", "layers.0.attn.k"}, {"scale_rule", "dynamic"}, {"kv_cache_dtype", "f8_e4m3fn"}}});
  return Judge(t, {"kv_scale"});
}

TEST(CheckKvScale, ScaleOnAnUnscaledCacheIsNamed) {
  EXPECT_FIRST(KvScale("bf16", "0.5", 4.0f / 448), "layers.0.attn.kv_write", "KV-SCALE");
}
TEST(CheckKvScale, DynamicScaleOfOtherValuesIsNamed) {
  const CheckResult r = KvScale("f8_e4m3fn", "0.5", 8.0f / 448);
  EXPECT_FIRST(r, "layers.0.attn.k_scale", "KV-SCALE");
  EXPECT_NEAR(r.findings[0].constant_value, 2, 1e-6);
}
// Scale of an activation in codes of int8, `factor` times what it should be.
CheckResult ActivationScale(float factor, float size = 1, std::string_view limit = "", std::string_view value = "") {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2});
  const Put rows{.rows = {{a, 0, 2, 0, false}}};
  std::vector<float> x = Noise(32, 1);
  x[3] = -4;
  x[20] = 2;
  for (float& v : x) v *= size;
  testing::Put scale{.rows = rows.rows, .meta = {{"scale_of", "layers.0.mlp.act"}, {"scale_rule", "dynamic"}}};
  if (!limit.empty()) scale.meta.emplace_back(limit, value);
  t.Record("layers.0.mlp.act", "T f", {2, 16}, x, rows);
  t.Record<int8_t>("layers.0.mlp.act.q", "T f", {2, 16}, std::vector<int8_t>(32, 1), rows);
  t.Record<float>("layers.0.mlp.act.q_scale", "T 1", {2, 1}, {factor * size * 4 / 127, factor * size * 2 / 127}, scale);
  return Judge(t, {"kv_scale"});
}

TEST(CheckKvScale, ScaleOfAnActivationIsHeldAgainstItsOwnCodes) { EXPECT_RULED_OUT(ActivationScale(1)); }
TEST(CheckKvScale, WrongScaleOfAnActivationIsNoMatterOfTheCache) {
  const CheckResult r = ActivationScale(2);
  EXPECT_FIRST(r, "layers.0.mlp.act.q_scale", "Q-SCALE");
  EXPECT_NEAR(r.findings[0].constant_value, 2, 1e-6);
}
TEST(CheckKvScale, DeclaredLimitsOfADynamicScaleAreKept) {
  // 4 / 127 and 2 / 127 are 0.031 and 0.016: twice the right ones where both are clamped below or above.
  EXPECT_RULED_OUT(ActivationScale(1, 1, "scale_min", "0.01"));
  EXPECT_RULED_OUT(ActivationScale(1, 1, "scale_max", "0.04"));
  const CheckResult low = ActivationScale(1, 1, "scale_min", "0.1");
  EXPECT_FIRST(low, "layers.0.mlp.act.q_scale", "Q-SCALE");
  const CheckResult high = ActivationScale(1, 1, "scale_max", "0.001");
  EXPECT_FIRST(high, "layers.0.mlp.act.q_scale", "Q-SCALE");
}
// A row's magnitudes of 4e-4 with the least scale of e4m3.
CheckResult FlooredScale(float used, std::string_view declared, float largest = 4e-4F) {
  SmallTrace t;
  const uint64_t a = t.Request({1});
  const std::vector<RowRun> rows = {{a, 0, 1, 0, false}};
  std::vector<float> x = Noise(16, 1);
  for (float& v : x) v *= largest / 2;
  x[3] = largest;
  Put scale{.rows = rows, .meta = {{"scale_of", "layers.0.mlp.act"}, {"scale_rule", "dynamic"}}};
  if (!declared.empty()) scale.meta.emplace_back("scale_min", declared);
  t.Record("layers.0.mlp.act", "T f", {1, 16}, x, {.rows = rows});
  t.Record<int8_t>("layers.0.mlp.act.q", "T f", {1, 16}, std::vector<int8_t>(16, 1), {.rows = rows});
  t.Record<float>("layers.0.mlp.act.q_scale", "T 1", {1, 1}, {used}, scale);
  return Judge(t, {"kv_scale"});
}
TEST(CheckKvScale, LeastScaleOfATinyRowIsRightWhereDeclaredAndElseNoFinding) {
  EXPECT_RULED_OUT(FlooredScale(0x1p-12F, "0.000244140625"));
  const CheckResult unsaid = FlooredScale(0x1p-12F, "");
  EXPECT_TRUE(unsaid.findings.empty());
  ASSERT_EQ(unsaid.ledger.size(), 1U);
  EXPECT_EQ(unsaid.ledger[0].state, CheckState::kNotTestable);
  EXPECT_NE(unsaid.ledger[0].capture.find("scale_min"), std::string::npos);
}
TEST(CheckKvScale, ScaleThatSaturatesATinyRowOrIsTooLargeForAnotherIsNamed) {
  EXPECT_FIRST(FlooredScale(1e-7F, ""), "layers.0.mlp.act.q_scale", "Q-SCALE");
  EXPECT_FIRST(FlooredScale(0x1p-12F, "", 0.02F), "layers.0.mlp.act.q_scale", "Q-SCALE");
}
TEST(CheckKvScale, RightScalesAreRuledOut) { EXPECT_RULED_OUT(KvScale("f8_e4m3fn", "0.5", 4.0f / 448)); }

TEST(CheckActivation, UnknownWordIsToldAllKnownOnes) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2});
  const std::vector<RowRun> rows = {{a, 0, 2, 0, false}};
  t.Record("layers.0.mlp.gate", "T f", {2, 8}, Noise(16, 1), {.rows = rows});
  t.Record("layers.0.mlp.up", "T f", {2, 8}, Noise(16, 2), {.rows = rows});
  t.Record("layers.0.mlp.act", "T f", {2, 8}, Noise(16, 3), {.rows = rows, .meta = {{"activation", "mish"}}});
  const CheckResult r = Judge(t, {"experts"});
  ASSERT_EQ(r.ledger.size(), 1U);
  EXPECT_EQ(r.ledger[0].state, CheckState::kNotTestable);
  for (const char* word : {"silu", "swiglu_oai", "identity"})
    EXPECT_NE(r.ledger[0].capture.find(word), std::string::npos) << r.ledger[0].capture;
}

CheckResult MoeCounts(int64_t id, int64_t count) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2});
  t.Record("layers.1.moe.router_logits", "T E", {2, 4}, Noise(8, 1), {.rows = {{a, 0, 2, 0, false}}});
  t.Record<int64_t>("layers.1.moe.topk_ids", "T k", {2, 2}, {0, 2, 3, id}, {.rows = {{a, 0, 2, 0, false}}});
  t.Record<int64_t>("layers.1.moe.expert_counts", "E", {4}, {1, 0, count, 1});
  return Judge(t, {"moe_counts"});
}

TEST(CheckMoeCounts, ExpertOutOfRangeIsNamed) { EXPECT_FIRST(MoeCounts(4, 1), "layers.1.moe.topk_ids", "MOE-ROUTE"); }
TEST(CheckMoeCounts, CountThatIsNotTheIdsIsNamed) {
  EXPECT_FIRST(MoeCounts(2, 3), "layers.1.moe.expert_counts", "KERNEL");
}
TEST(CheckMoeCounts, RightCountsAreRuledOut) { EXPECT_RULED_OUT(MoeCounts(2, 2)); }

CheckResult Repeats(bool real, bool padding, std::vector<std::string> only = {"repeats"}) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2});
  const std::vector<RowRun> rows = {{a, 0, 2, 0, false}, {0, 2, 1, 0, true}};
  const std::string_view number[3] = {"0", "1", "2"};
  for (size_t i = 0; i < 3; ++i) {
    std::vector<float> x = Noise(24, 1), y = Noise(24, 2);
    if (padding) x[20] = static_cast<float>(i);
    if (real && i == 2) y[3] += 0.5f;
    t.Record("layers.0.attn.out", "T d", {3, 8}, x, {.rows = rows, .meta = {{"repeat", number[i]}}});
    t.Record("layers.0.attn.o_proj", "T h", {3, 8}, y, {.rows = rows, .meta = {{"repeat", number[i]}}});
  }
  return Judge(t, std::move(only));
}

TEST(CheckRepeats, OtherPaddingWithEqualRealRowsRulesPaddingOut) {
  const auto padding = [](const CheckResult& r) {
    const auto at = std::find_if(r.ledger.begin(), r.ledger.end(),
                                 [](const LedgerEntry& e) { return e.hypothesis == hypothesis::kPadding; });
    return at == r.ledger.end() ? LedgerEntry{} : *at;
  };
  const LedgerEntry held = padding(Repeats(false, true, {}));
  EXPECT_EQ(held.state, CheckState::kRuledOut);
  EXPECT_EQ(held.judged, 1U);  // the call
  EXPECT_EQ(padding(Repeats(false, false, {})).state, CheckState::kNotTestable);
  EXPECT_EQ(padding(Repeats(true, true, {})).state, CheckState::kConfirmed);
}
TEST(CheckRepeats, ResultThatChangesOnEqualOperandsIsNamed) {
  EXPECT_FIRST(Repeats(true, false), "layers.0.attn.o_proj", "NONDET");
}
TEST(CheckRepeats, RealRowsThatFollowPaddingAreNamed) {
  const CheckResult r = Repeats(true, true);
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].cls, "PADREAD");
}
TEST(CheckRepeats, EqualRepeatsAreRight) { EXPECT_RULED_OUT(Repeats(false, true)); }

CheckResult Graphs(bool moved) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2});
  for (int64_t step = 0; step < 3; ++step) {
    const Put put{.rows = {{a, 0, 1, step, false}},
                  .step = step,
                  .flags = kEventInGraph,
                  .address = moved && step == 2 ? 0x9000u : 0x8000u};
    t.Record("layers.0.attn.k", "T d", {1, 8}, Noise(8, static_cast<uint64_t>(step)), put);
    Put result = put;
    result.address = 0x20000;
    result.meta = {{"bound.layers.0.attn.k", "0x8000"}};
    t.Record("layers.0.attn.kv_write", "T d", {1, 8}, Noise(8, 9), result);
  }
  return Judge(t, {"graphs"});
}

TEST(CheckGraphs, OperandThatMovedUnderACapturedGraphIsNamed) {
  EXPECT_FIRST(Graphs(true), "layers.0.attn.kv_write", "GRAPH");
}
TEST(CheckGraphs, OperandThatStaysIsRight) { EXPECT_RULED_OUT(Graphs(false)); }

CheckResult Compiled(bool turned) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3});
  const std::vector<RowRun> rows = {{a, 0, 3, 0, false}};
  const std::vector<float> raw = Noise(24, 1);
  std::vector<float> q = raw;
  for (size_t p = 0; turned && p < 3; ++p) {
    for (size_t i = 0; i < 4; ++i) {
      const double angle = static_cast<double>(p) * std::pow(10000.0, -static_cast<double>(i) / 4);
      const double x = raw[p * 8 + i], y = raw[p * 8 + i + 4];
      q[p * 8 + i] = static_cast<float>(x * std::cos(angle) - y * std::sin(angle));
      q[p * 8 + i + 4] = static_cast<float>(y * std::cos(angle) + x * std::sin(angle));
    }
  }
  t.Record("layers.0.attn.q_proj", "T H d", {3, 1, 8}, raw, {.rows = rows});
  t.Record("layers.0.attn.q", "T H d", {3, 1, 8}, q, {.rows = rows, .meta = {{"compiled", "1"}}});
  return Judge(t, {"rotation"});
}

TEST(CheckCompiled, RotationThatWasThrownAwayIsNamed) {
  const CheckResult r = Compiled(false);
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].cls, "COMPILE");
}
TEST(CheckCompiled, RotatedRowsAreRight) { EXPECT_RULED_OUT(Compiled(true)); }

CheckResult Shapes(int64_t heads) {
  SmallTrace t(1, Level::kStats);
  const uint64_t a = t.Request({1, 2});
  for (int64_t step = 0; step < 2; ++step) {
    const int64_t h = step == 1 ? heads : 4;
    t.Record("layers.0.attn.k", "T H d", {1, h, 8}, Noise(static_cast<size_t>(h * 8), 1),
             {.rows = {{a, 0, 1, step, false}}, .step = step});
  }
  return Judge(t, {"shapes"});
}

TEST(CheckShapes, ExtentThatChangesBetweenStepsIsNamed) {
  const CheckResult r = Shapes(2);
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].cls, "STRIDE");
}
TEST(CheckShapes, ExtentThatStaysIsRight) { EXPECT_RULED_OUT(Shapes(4)); }

// A buffer looked at behind its write, as a view of these shape and strides.
CheckResult View(std::vector<int64_t> shape, std::vector<int64_t> strides) {
  SmallTrace t(1, Level::kStats);
  int64_t last = 0;
  std::string axes;
  for (size_t i = 0; i < shape.size(); ++i) {
    last += (shape[i] - 1) * strides[i];
    axes += i == 0 ? "T" : " h";
  }
  t.Record("layers.0.attn.out_buffer", axes, std::move(shape), Noise(static_cast<size_t>(last + 1), 1),
           {.strides = std::move(strides), .meta = {{"audit", "after"}}});
  return Judge(t, {"shapes"});
}

TEST(CheckShapes, ViewThatLiesOnItselfIsNamedAndOneThatInterleavesIsNot) {
  using Extents = std::vector<int64_t>;
  const std::pair<Extents, Extents> apart[] = {{{2, 3}, {3, 1}}, {{3, 2}, {1, 3}},       {{2, 3}, {3, 2}},
                                               {{3, 7}, {8, 6}}, {{2, 2, 2}, {9, 5, 3}}, {{1, 3}, {1, 0}}};
  for (const auto& [shape, strides] : apart) EXPECT_TRUE(View(shape, strides).findings.empty());
  const std::pair<Extents, Extents> folded[] = {{{2, 3}, {1, 1}}, {{2, 3}, {2, 1}},       {{3, 4}, {3, 2}},
                                                {{5, 7}, {6, 4}}, {{2, 2, 2}, {8, 5, 3}}, {{2000, 3000}, {1, 1}}};
  for (const auto& [shape, strides] : folded) EXPECT_FIRST(View(shape, strides), "layers.0.attn.out_buffer", "STRIDE");
}

// Rank 1 keeps the same result in another dtype.
CheckResult Dtypes(bool same) {
  SmallTrace t(2, Level::kStats);
  const uint64_t a = t.Request({1, 2});
  const Put put{.rows = {{a, 0, 1, 0, false}}}, other{.rows = {{a, 0, 1, 0, false}}, .rank = 1};
  const std::vector<float> x = Noise(8, 1);
  t.Record("layers.0.attn.o_proj", "T h", {1, 8}, x, put);
  if (same) {
    t.Record("layers.0.attn.o_proj", "T h", {1, 8}, x, other);
  } else {
    t.Record("layers.0.attn.o_proj", "T h", {1, 8}, std::vector<double>(x.begin(), x.end()), other);
  }
  return Judge(t, {"shapes"});
}

TEST(CheckShapes, DtypeThatDiffersBetweenRanksIsNamed) {
  const CheckResult r = Dtypes(false);
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].name, "layers.0.attn.o_proj");
  EXPECT_EQ(r.findings[0].cls, "PRECISION");
}
TEST(CheckShapes, OneDtypeIsRight) { EXPECT_RULED_OUT(Dtypes(true)); }

CheckResult Speculation(size_t kept) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2});
  const std::vector<float> k = Noise(6 * 4, 1), v = Noise(6 * 4, 2);
  std::vector<float> state(16, 0.0f);
  const auto add = [&](size_t row) {
    for (size_t i = 0; i < 4; ++i) {
      for (size_t j = 0; j < 4; ++j) state[i * 4 + j] += k[row * 4 + i] * v[row * 4 + j];
    }
  };
  const auto part = [](const std::vector<float>& x, size_t from, size_t n) {
    return std::vector<float>(x.begin() + static_cast<int64_t>(from * 4),
                              x.begin() + static_cast<int64_t>((from + n) * 4));
  };
  t.Record("layers.0.attn.k", "T H d", {2, 1, 4}, part(k, 0, 2), {.rows = {{a, 0, 2, 0, false}}, .step = 0});
  t.Record("layers.0.attn.v", "T H d", {2, 1, 4}, part(v, 0, 2), {.rows = {{a, 0, 2, 0, false}}, .step = 0});
  add(0), add(1);
  t.Record("layers.0.attn.state", "T H d dv", {1, 1, 4, 4}, state, {.rows = {{a, 0, 1, 1, false}}, .step = 0});
  t.Record<int64_t>("spec.accepted", "T", {1}, {1},
                    {.rows = {{a, 0, 1, 3, false}}, .step = 1, .meta = {{"drafts", "3"}}});
  t.Record("layers.0.attn.k", "T H d", {4, 1, 4}, part(k, 2, 4), {.rows = {{a, 0, 4, 2, false}}, .step = 1});
  t.Record("layers.0.attn.v", "T H d", {4, 1, 4}, part(v, 2, 4), {.rows = {{a, 0, 4, 2, false}}, .step = 1});
  for (size_t row = 2; row < 2 + kept; ++row) add(row);
  t.Record("layers.0.attn.state", "T H d dv", {1, 1, 4, 4}, state, {.rows = {{a, 0, 1, 3, false}}, .step = 1});
  return Judge(t, {"speculation"});
}

TEST(CheckSpeculation, RejectedTokensInTheStateAreCounted) {
  const CheckResult r = Speculation(4);
  EXPECT_FIRST(r, "layers.0.attn.state", "SPEC");
  EXPECT_EQ(r.findings[0].constant_value, 2);
}
TEST(CheckSpeculation, AcceptedTokensAloneAreRight) { EXPECT_RULED_OUT(Speculation(2)); }

TEST(RunChecks, UnknownCheckIsRefused) {
  SmallTrace t;
  t.Record("embed", "T h", {1, 4}, Noise(4, 1));
  const auto capture = t.Open();
  EXPECT_FALSE(RunChecks(*capture, {.only = {"nonfinites"}}).ok());
}

TEST(RunChecks, NothingRecordedIsNotTestableAndSaysWhatToRecord) {
  SmallTrace t(1, Level::kStats);
  t.Record("embed", "T h", {1, 4}, Noise(4, 1));
  const CheckResult r = Judge(t, {"unwritten", "moe_counts"});
  ASSERT_EQ(r.ledger.size(), 2u);
  for (const LedgerEntry& e : r.ledger) {
    EXPECT_EQ(e.state, CheckState::kNotTestable) << e.hypothesis;
    EXPECT_FALSE(e.capture.empty()) << e.hypothesis;
  }
}

TEST(RunChecks, SymptomBehindAFaultIsAConsequence) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2});
  const std::vector<RowRun> rows = {{a, 0, 2, 0, false}};
  std::vector<float> x = Noise(8, 1);
  x[2] = kNaN;
  t.Record<int64_t>("positions", "T", {2}, {0, 5}, {.rows = rows});
  t.Record("layers.0.foreign", "T h", {2, 4}, x, {.rows = rows});
  const CheckResult r = Judge(t, {"ids", "nonfinite"});
  ASSERT_EQ(r.findings.size(), 1u);
  EXPECT_EQ(r.findings[0].name, "positions");
  ASSERT_EQ(r.consequences.size(), 1u);
  EXPECT_EQ(r.consequences[0].name, "layers.0.foreign");
}

TEST(RunChecks, OutputStandsForItsLogSumExp) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2});
  const std::vector<RowRun> rows = {{a, 0, 2, 0, false}};
  for (const char* site : {"layers.0.attn.lse", "layers.0.attn.out"}) {
    t.Record(site, "T h", {2, 4}, std::vector<float>(8, 7.0f),
             {.rows = rows, .meta = {{"audit", "before"}, {"poison", "x"}}});
    t.Record(site, "T h", {2, 4}, std::vector<float>(8, 7.0f), {.rows = rows, .meta = {{"audit", "after"}}});
  }
  const CheckResult r = Judge(t, {"unwritten"});
  ASSERT_EQ(r.findings.size(), 1u);
  EXPECT_EQ(r.findings[0].name, "layers.0.attn.out");
}

}  // namespace
}  // namespace assay
