// Operands of shapes that do not belong together, as a damaged trace or a wrong hook has them: the result is judged
// without a read or write outside of what was recorded. What only a sanitizer sees is here for the sanitized build.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>

#include "check/check.h"
#include "small_trace.h"
#include "trace/trace_bytes.h"
#include "verdicts.h"

namespace assay {
namespace {

using testing::Judge;
using testing::Noise;
using testing::Put;
using testing::SmallTrace;
using Values = std::vector<float>;

constexpr int64_t kRows = 5, kHeads = 2, kWidth = 8;

// Biases of another length than what they are added to.
TEST(DamagedOperands, BiasesOfAnotherLengthAreNotAdded) {
  for (const int64_t length : {int64_t{0}, int64_t{1}}) {
    SmallTrace t(2);
    const Put put{.rows = {{t.Request({1, 2, 3, 4, 5}), 0, kRows, 0, false}},
                  .meta = {{"scoring", "sigmoid"}, {"world_size", "2"}}};
    const Put load{.step = -1, .phase = Phase::kLoad};
    const Values bias(static_cast<size_t>(length), 0.5f);
    t.Record("layers.1.mlp.gate.e_score_correction_bias", "E", {length}, bias, load);
    t.Record("layers.1.moe.router_logits", "T E", {kRows, 64}, Noise(kRows * 64, 1), put);
    std::vector<int64_t> ids;
    for (int64_t r = 0; r < kRows; ++r) ids.insert(ids.end(), {r, r + 1});
    t.Record("layers.1.moe.topk_ids", "T k", {kRows, 2}, ids, put);
    t.Record("layers.1.moe.topk_weights", "T k", {kRows, 2}, Noise(kRows * 2, 2), put);
    t.Record("layers.1.mlp.down_proj.bias", "h", {length}, bias, load);
    Put other = put;
    other.rank = 1;
    t.Record("layers.1.mlp.down.partial", "T h", {kRows, kWidth}, Noise(kRows * kWidth, 3), put);
    t.Record("layers.1.mlp.down.partial", "T h", {kRows, kWidth}, Noise(kRows * kWidth, 4), other);
    t.Record("layers.1.mlp.down", "T h", {kRows, kWidth}, Noise(kRows * kWidth, 5), put);
    const CheckResult result = Judge(t, {"router", "reductions"});
    for (const char* name : {"layers.1.moe.topk_weights", "layers.1.mlp.down"}) {  // wrong, whatever the biases
      EXPECT_TRUE(std::any_of(result.findings.begin(), result.findings.end(),
                              [&](const FirstBad& bad) { return bad.name == name; }))
          << length << " " << name;
    }
  }
}

// Heads of no size, ranges up to the last number, and a merge whose name says nothing of an output.
TEST(DamagedOperands, OddAttentionEndsNothing) {
  SmallTrace t;
  const uint64_t request = t.Request(std::vector<int64_t>(40, 1));
  const Put put{.rows = {{request, 0, 40, 0, false}},
                .meta = {{"softmax_scale", "0.35"},
                         {"window", "9223372036854775807"},
                         {"attention_chunk", "9223372036854775807"},
                         {"prefix_len", "9223372036854775807"}}};
  const Values part = Noise(40 * 2 * 8, 1);
  t.Record("layers.0.attn.q", "T H d", {40, 2, 0}, Values(), put);
  for (const char* layer : {"layers.0.", "layers.1."}) {
    if (layer[7] == '1') t.Record("layers.1.attn.q", "T H d", {40, 2, 8}, part, put);
    t.Record(std::string(layer) + "attn.k", "T Hkv d", {40, 2, 8}, part, put);
    t.Record(std::string(layer) + "attn.v", "T Hkv d", {40, 2, 8}, part, put);
    t.Record(std::string(layer) + "attn.out", "T H d", {40, 2, 8}, Noise(40 * 2 * 8, 2), put);
  }
  Put merge = put;
  merge.meta = {{"op", "merge"}, {"inputs", "x,x"}};
  t.Record("x", "T h", {40, 8}, Noise(40 * 8, 3), merge);
  const CheckResult result = Judge(t, {});
  EXPECT_TRUE(std::any_of(result.findings.begin(), result.findings.end(),
                          [](const FirstBad& bad) { return bad.name == "layers.1.attn.out"; }));
}

// Queries rotated two positions ahead of their own, with three drafts of the step before of which one was accepted.
std::string ClassOfRotatedAhead(int64_t counts) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3, 4, 5});
  const Values x = Noise(kRows * kWidth, 1);
  Values y = x;
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t i = 0; i < kWidth / 2; ++i) {
      const double angle = static_cast<double>(10 + r) * std::pow(10000.0, -2.0 * static_cast<double>(i) / kWidth);
      const size_t first = r * kWidth + i, second = first + kWidth / 2;
      y[first] = static_cast<float>(double{x[first]} * std::cos(angle) - double{x[second]} * std::sin(angle));
      y[second] = static_cast<float>(double{x[second]} * std::cos(angle) + double{x[first]} * std::sin(angle));
    }
  }
  t.Record("spec.accepted", "T k", {1, counts}, std::vector<int64_t>(static_cast<size_t>(counts), 1),
           {.rows = {{a, 0, 1, 7, false}}, .meta = {{"drafts", "3"}}});
  const Put put{.rows = {{a, 0, kRows, 8, false}}, .step = 1, .meta = {{"rope.theta", "10000"}}};
  t.Record("layers.0.attn.q_proj", "T H d", {kRows, 1, kWidth}, x, put);
  t.Record("layers.0.attn.q", "T H d", {kRows, 1, kWidth}, y, put);
  const CheckResult result = Judge(t, {"rotation"});
  return result.findings.empty() || result.findings[0].name != "layers.0.attn.q" ? "" : result.findings[0].cls;
}
TEST(DamagedOperands, DraftsWithoutANumberOfAcceptedOnesExplainNoPositions) {
  EXPECT_EQ(ClassOfRotatedAhead(1), "SPEC");
  EXPECT_EQ(ClassOfRotatedAhead(0), "ROPE-POS");
  EXPECT_EQ(ClassOfRotatedAhead(2), "ROPE-POS");  // of two numbers none is known to be it
}

// What attention gives and what was recorded have other heads: nothing can be compared.
TEST(DamagedOperands, AttentionOutputOfAnotherShapeIsNotJudged) {
  for (const int64_t heads : {int64_t{1}, int64_t{9}}) {
    SmallTrace t;
    const Put put{.rows = {{t.Request({1, 2, 3, 4, 5}), 0, kRows, 0, false}}, .meta = {{"softmax_scale", "0.35"}}};
    const Values part = Noise(kRows * kHeads * kWidth, 1);
    t.Record("layers.0.attn.q", "T H d", {kRows, kHeads, kWidth}, part, put);
    t.Record("layers.0.attn.k", "T Hkv d", {kRows, kHeads, kWidth}, part, put);
    t.Record("layers.0.attn.v", "T Hkv d", {kRows, kHeads, kWidth}, part, put);
    t.Record("layers.0.attn.out", "T H d", {kRows, heads, kWidth},
             Noise(static_cast<size_t>(kRows * heads * kWidth), 2), put);
    const CheckResult result = Judge(t, {"attention"});
    EXPECT_TRUE(result.findings.empty()) << heads;
    ASSERT_EQ(result.ledger.size(), 1u);
    EXPECT_EQ(result.ledger[0].state, CheckState::kNotTestable);
  }
}

TEST(DamagedOperands, ChunkOfAnotherRequestWithMoreSumsIsNotTakenForOneLeftThere) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3, 4, 5}), b = t.Request({6, 7, 8, 9, 10});
  const std::vector<RowRun> others = {{a, 0, kRows, 0, false}}, own = {{b, 0, kRows, 0, false}};
  const Values out = Noise(kRows * kHeads * kWidth, 1);
  t.Record("layers.0.attn.chunk.0.out", "T H dv", {kRows, kHeads, kWidth}, out, {.rows = others});
  t.Record("layers.0.attn.chunk.0.lse", "T H", {kRows, 20000}, Noise(kRows * 20000, 2), {.rows = others});
  t.Record("layers.0.attn.chunk.0.out", "T H dv", {kRows, kHeads, kWidth}, out, {.rows = own, .step = 1});
  t.Record("layers.0.attn.chunk.0.lse", "T H", {kRows, kHeads}, Noise(kRows * kHeads, 3), {.rows = own, .step = 1});
  t.Record("layers.0.attn.out", "T H dv", {kRows, kHeads, kWidth}, Noise(kRows * kHeads * kWidth, 4),
           {.rows = own, .step = 1});
  const CheckResult r = Judge(t, {"chunks"});
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].name, "layers.0.attn.out");
}

TEST(DamagedOperands, ChunksWithoutTokenRowsAreJudgedWithoutAStrideOfHeads) {
  SmallTrace t;
  t.Record("layers.0.attn.chunk.0.out", "n H dv", {kRows, kHeads, kWidth}, Noise(kRows * kHeads * kWidth, 1));
  t.Record("layers.0.attn.chunk.0.lse", "n H", {kRows, kHeads}, Noise(kRows * kHeads, 2));
  t.Record("layers.0.attn.out", "n H dv", {kRows, kHeads, kWidth}, Noise(kRows * kHeads * kWidth, 3));
  const CheckResult r = Judge(t, {"chunks"});
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].name, "layers.0.attn.out");
}

// Experts' results [7, 6] of 7 rows and the weights of one of them, or of all.
CheckResult Combined(int64_t weighed) {
  constexpr int64_t kTokens = 400, kHidden = 3;
  SmallTrace t;
  const uint64_t a = t.Request(std::vector<int64_t>(kTokens, 1));
  const std::vector<RowRun> rows = {{a, 0, kTokens, 0, false}};
  const Values experts = Noise(kTokens * kHidden, 1);
  t.Record("layers.0.moe.topk_ids", "T k", {kTokens, 1}, std::vector<int64_t>(kTokens, 0), {.rows = rows});
  t.Record("layers.0.moe.topk_weights", "T k", {weighed, 1}, Values(static_cast<size_t>(weighed), 1));
  t.Record("layers.0.moe.expert_out", "R h", {kTokens, kHidden}, experts);
  t.Record("layers.0.moe.routed", "T h", {kTokens, kHidden}, experts, {.rows = rows});
  return Judge(t, {"experts"});
}

TEST(DamagedOperands, WeightsOfFewerRowsThanIdsAreNotTestable) {
  const CheckResult r = Combined(1);
  EXPECT_TRUE(r.findings.empty());
  EXPECT_EQ(r.coverage.results_judged, 0u);
}
TEST(DamagedOperands, WeightsOfAllRowsAreJudged) { EXPECT_EQ(Combined(400).coverage.results_judged, 1u); }

// A product that is wrong, so that other orders of gate and up are tried on it.
TEST(DamagedOperands, GateAndUpOfAnOddWidthAreJudgedWithoutOtherOrders) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3, 4, 5});
  const std::vector<RowRun> rows = {{a, 0, kRows, 0, false}};
  t.Record("layers.0.mlp.experts.gate_up_proj", "E out in", {1, 5, 4}, Noise(20, 1),
           {.step = -1, .phase = Phase::kLoad});
  t.Record("layers.0.moe.topk_ids", "T k", {kRows, 1}, std::vector<int64_t>(kRows, 0), {.rows = rows});
  t.Record("layers.0.moe.dispatched", "R h", {kRows, 4}, Noise(kRows * 4, 2));
  t.Record("layers.0.moe.gate_up", "R 2f", {kRows, 5}, Noise(kRows * 5, 3));
  const CheckResult r = Judge(t, {"experts"});
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].name, "layers.0.moe.gate_up");
  EXPECT_NE(r.findings[0].cls, "MOE-LAYOUT");
}

// Closes the recording, writes `forged` over the shard of the only event that has `recorded`, and runs the check: the
// recorder refuses what a damaged file may say.
CheckResult JudgeForged(SmallTrace& t, const std::string& check, const Shard& recorded, const Shard& forged) {
  const auto group = [](const Shard& s) { return format::ShardGroup{s.index, s.count, s.col_offset, s.full_cols}; };
  const format::ShardGroup from = group(recorded), to = group(forged);
  const std::string folder = t.Open()->trace().path();
  int found = 0;
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    if (file.path().extension() != ".assay") continue;
    testing::Bytes bytes = testing::ReadBytes(file.path());
    for (const testing::RecordSpan& record : testing::RecordsOf(bytes)) {
      for (uint64_t at = record.offset; at + sizeof from <= record.offset + record.size_bytes; at += 8) {
        if (std::memcmp(bytes.data() + at, &from, sizeof from) != 0) continue;
        testing::Poke(&bytes, at, to);
        testing::Reseal(&bytes, record.offset);
        ++found;
      }
    }
    testing::WriteBytes(file.path(), bytes);
  }
  EXPECT_EQ(found, 1);
  const auto capture = Capture::Open(folder);
  EXPECT_TRUE(capture.ok()) << capture.status().message();
  auto result = RunChecks(**capture, {.only = {check}});
  EXPECT_TRUE(result.ok()) << result.status().message();
  return std::move(result).value();
}

// Attention of one head of four, with slopes of all: its shard says which one is its own.
CheckResult SlopesOfShard(int64_t col_offset) {
  const Shard shard{1, 4, kWidth, 4 * kWidth};
  SmallTrace t(4);
  const uint64_t a = t.Request({1, 2, 3, 4, 5});
  const std::vector<RowRun> rows = {{a, 0, kRows, 0, false}};
  t.Record("layers.0.attn.alibi_slopes", "H", {4}, Noise(4, 1));
  t.Record("layers.0.attn.q", "T H d", {kRows, 1, kWidth}, Noise(kRows * kWidth, 2), {.rows = rows});
  t.Record("layers.0.attn.k", "T Hkv d", {kRows, 1, kWidth}, Noise(kRows * kWidth, 3), {.rows = rows});
  t.Record("layers.0.attn.v", "T Hkv d", {kRows, 1, kWidth}, Noise(kRows * kWidth, 4), {.rows = rows});
  t.Record("layers.0.attn.out", "T H dv", {kRows, 1, kWidth}, Noise(kRows * kWidth, 5), {.rows = rows, .shard = shard});
  return JudgeForged(t, "attention", shard, {1, 4, col_offset, 4 * kWidth});
}
TEST(DamagedOperands, SlopesOutsideOfTheRecordedOnesAreNotRead) {
  constexpr int64_t kFar = int64_t{1} << 50;
  EXPECT_EQ(SlopesOfShard(3 * kWidth).coverage.results_judged, 1u);
  for (const int64_t first : {-kFar, -kWidth, 4 * kWidth, kFar}) {
    EXPECT_EQ(SlopesOfShard(first).coverage.results_judged, 0u) << first;
  }
}

// The latent query of heads 2 and 3 of four; weights of all, as both paths keep them.
CheckResult LatentOfShard(const std::string& weight, int64_t weight_rows, const Shard& forged) {
  constexpr int64_t kLatent = 4, kNope = 3;
  const Shard shard{1, 2, kHeads * kLatent, 2 * kHeads * kLatent};
  SmallTrace t(2);
  const uint64_t a = t.Request({1, 2, 3, 4, 5});
  const std::vector<RowRun> rows = {{a, 0, kRows, 0, false}};
  const Put load{.step = -1, .phase = Phase::kLoad};
  const Values w = Noise(static_cast<size_t>(4 * weight_rows * kLatent), 1);
  if (weight_rows == kNope) {
    t.Record(weight, "H d c", {4, weight_rows, kLatent}, w, load);
  } else {
    t.Record(weight, "out in", {4 * weight_rows, kLatent}, w, load);
  }
  t.Record("layers.0.attn.q_nope", "T H dn", {kRows, kHeads, kNope}, Noise(kRows * kHeads * kNope, 2), {.rows = rows});
  t.Record("layers.0.attn.q_latent", "T H c", {kRows, kHeads, kLatent}, Noise(kRows * kHeads * kLatent, 3),
           {.rows = rows, .shard = shard});
  return JudgeForged(t, "absorption", shard, forged);
}
TEST(DamagedOperands, WeightsOfHeadsBeyondAllAreNotRead) {
  constexpr int64_t kAll = 4 * 4, kFar = int64_t{1} << 50;
  EXPECT_EQ(LatentOfShard("layers.0.attn.W_UK_T", 3, {1, 2, kAll / 2, kAll}).coverage.results_judged, 1u);
  for (const int64_t first : {-kFar, int64_t{-4}, int64_t{12}, kFar}) {
    EXPECT_EQ(LatentOfShard("layers.0.attn.W_UK_T", 3, {1, 2, first, kAll}).coverage.results_judged, 0u) << first;
    EXPECT_EQ(LatentOfShard("layers.0.attn.kv_b_proj.weight", 6, {1, 2, first, kAll}).coverage.results_judged, 0u);
  }
}

// Keys of kv_b_proj [heads * 6, 4] whose shard has fewer columns than one head, or that have no heads.
TEST(DamagedOperands, KeysOfNoHeadAreNotJudged) {
  for (const int64_t heads : {int64_t{0}, int64_t{2}}) {
    SmallTrace t(2);
    const uint64_t a = t.Request({1, 2, 3, 4, 5});
    const std::vector<RowRun> rows = {{a, 0, kRows, 0, false}};
    const Shard shard{1, 2, 6, 12};
    t.Record("layers.0.attn.kv_b_proj.weight", "out in", {24, 4}, Noise(24 * 4, 1),
             {.step = -1, .phase = Phase::kLoad});
    t.Record("layers.0.attn.kv_c_normed", "T c", {kRows, 4}, Noise(kRows * 4, 2), {.rows = rows});
    t.Record("layers.0.attn.k_nope", "T H dn", {kRows, heads, 3}, Noise(static_cast<size_t>(kRows * heads * 3), 3),
             {.rows = rows, .shard = heads > 0 ? shard : Shard{}});
    const CheckResult r = heads > 0 ? JudgeForged(t, "absorption", shard, {1, 2, 0, 2}) : Judge(t, {"absorption"});
    EXPECT_EQ(r.coverage.results_judged, 0u) << heads;
  }
}

// Keys and values of different numbers of heads beside each other in one flat row; values `shift` heads on.
CheckResult WrittenHeads(int64_t key_heads, int64_t value_heads, int64_t shift, int64_t d) {
  SmallTrace t;
  const std::vector<RowRun> rows = {{t.Request({1, 2, 3, 4}), 0, 4, 0, false}};
  const auto size = [&](int64_t heads) { return static_cast<size_t>(heads * d); };
  const Values k = Noise(4 * size(key_heads), 1), v = Noise(4 * size(value_heads), 2);
  Values written;
  for (int64_t r = 0; r < 4; ++r) {
    written.insert(written.end(), k.begin() + r * key_heads * d, k.begin() + (r + 1) * key_heads * d);
    for (int64_t h = 0; h < value_heads; ++h) {
      const auto from = v.begin() + (r * value_heads + (h + shift) % value_heads) * d;
      written.insert(written.end(), from, from + d);
    }
  }
  if (shift == 0) written = Noise(written.size(), 3);  // nothing of either
  t.Record("layers.0.attn.k", "T Hkv d", {4, key_heads, d}, k, {.rows = rows});
  t.Record("layers.0.attn.v", "T Hkv dv", {4, value_heads, d}, v, {.rows = rows});
  t.Record("layers.0.attn.kv_write", "T Hkv d", {4, 1, (key_heads + value_heads) * d}, written, {.rows = rows});
  return Judge(t, {"cache-write"});
}

TEST(DamagedOperands, FewerHeadsOfValuesThanOfKeysAreNotMovedBeyondTheirRows) {
  EXPECT_FIRST(WrittenHeads(8, 2, 0, 4096), "layers.0.attn.kv_write", "KV-IDENT");
}
TEST(DamagedOperands, MoreHeadsOfValuesThanOfKeysAreFoundSomeOn) {
  const CheckResult r = WrittenHeads(2, 8, 5, 4);
  EXPECT_FIRST(r, "layers.0.attn.kv_write", "KV-IDENT");
  EXPECT_NE(r.findings[0].evidence[0].find("5 heads on"), std::string::npos) << r.findings[0].evidence[0];
}

TEST(DamagedOperands, ScalarsInThePlaceOfQueriesOrRowsReadEndNoCheck) {
  SmallTrace t;
  const std::vector<RowRun> rows = {{t.Request({1, 2, 3, 4}), 0, 4, 0, false}};
  for (const char* stem : {"q", "q_latent", "q_pe", "k_read"})
    t.Record("layers.0.attn." + std::string(stem), "", {}, Values{3});
  t.Record("layers.0.attn.k", "T Hkv d", {4, 2, 8}, Noise(64, 1), {.rows = rows});
  t.Record("layers.0.attn.lse", "T H", {4, 2}, Noise(8, 2), {.rows = rows});
  EXPECT_TRUE(Judge(t, {"lse_range", "cache-read"}).findings.empty());
}

TEST(DamagedOperands, ValuesWithoutHeadsAreNoValuesOfAHead) {
  SmallTrace t;
  const std::vector<RowRun> rows = {{t.Request({1, 2, 3, 4, 5, 6}), 0, 6, 0, false}};
  Values out = Noise(6 * 32, 1);
  for (int64_t r = 1; r < 6; ++r) std::copy_n(out.begin(), 8, out.begin() + r * 32);
  t.Record("layers.0.attn.v", "T Hkv dv", {6, 0, 8}, Values{}, {.rows = rows});
  t.Record("layers.0.attn.out", "T H dv", {6, 4, 8}, out, {.rows = rows});
  EXPECT_TRUE(Judge(t, {"heads"}).findings.empty());
}

// A wrong output of six rows from position `first` on over gathered keys, and a pool to look for others in.
CheckResult WrongOverGathered(int64_t first, int64_t entry, std::string_view block_size, int64_t pool_width = 4) {
  SmallTrace t;
  const std::vector<RowRun> rows = {{t.Request({1, 2, 3, 4, 5, 6}), 0, 6, first, false}};
  uint64_t seed = 0;
  for (const char* stem : {"q", "k_read", "v_read"})
    t.Record("layers.0.attn." + std::string(stem), "T H d", {6, 1, 4}, Noise(24, ++seed), {.rows = rows});
  t.Record<int64_t>("block_table", "T n", {1, 2}, {entry, entry},
                    {.rows = {{rows[0].request, 0, 1, first + 5, false}}, .meta = {{"block_size", block_size}}});
  for (const char* stem : {"k_cache", "v_cache"})
    t.Record("layers.0.attn." + std::string(stem), "S H d", {12, 1, pool_width},
             Noise(static_cast<size_t>(12 * pool_width), ++seed));
  t.Record("layers.0.attn.out", "T H dv", {6, 1, 4}, Noise(24, ++seed), {.rows = rows});
  return Judge(t, {"attention"});
}

TEST(DamagedOperands, PlacesInThePoolAreLookedForWithinItAlone) {
  constexpr int64_t kFar = int64_t{1} << 62;
  for (const CheckResult& r :
       {WrongOverGathered(kFar, 1, "1"), WrongOverGathered(kFar, 1, "4611686018427387904"),
        WrongOverGathered(0, kFar >> 10, "4611686018427387904"), WrongOverGathered(0, 1, "2", 1)}) {
    ASSERT_FALSE(r.findings.empty());
    EXPECT_EQ(r.findings[0].name, "layers.0.attn.out");
  }
}

// A running state whose size changes between steps, or whose values have other heads than its keys.
TEST(DamagedOperands, StatesOfOtherSizesAreNotFitted) {
  for (const bool grows : {true, false}) {
    SmallTrace t;
    const uint64_t a = t.Request({1, 2, 3, 4});
    for (int64_t step = 0; step < 2; ++step) {
      const int64_t heads = grows && step == 0 ? 2000 : 2, n = 4 - step, value_heads = grows ? 2 : 1;
      const Put all{.rows = {{a, 0, n, 4 * step, false}}, .step = step};
      const Put last{.rows = {{a, 0, 1, 4 * step + n - 1, false}}, .step = step, .meta = {{"drafts", "2"}}};
      const auto noise = [](int64_t size, uint64_t seed) { return Noise(static_cast<size_t>(size), seed); };
      t.Record("layers.0.attn.k", "T Hkv d", {n, 2, 4}, noise(n * 8, 1), all);
      t.Record("layers.0.attn.v", "T Hkv dv", {n, value_heads, 8}, noise(n * value_heads * 8, 2), all);
      t.Record("layers.0.attn.state", "T H d dv", {1, heads, 4, 8}, noise(heads * 32, 3), last);
      t.Record("spec.accepted", "T", {1}, std::vector<int64_t>{INT64_MAX}, last);
    }
    const CheckResult r = Judge(t, {"speculation"});
    for (const FirstBad& bad : r.findings) EXPECT_NE(bad.name, "layers.0.attn.state") << bad.evidence[0];
    EXPECT_FALSE(r.findings.empty());  // the number accepted
  }
}

// Rows of nothing: experts without columns, a scale without elements.
TEST(DamagedOperands, AxesOfNoSizeAreNotTestable) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3, 4});
  const Put put{.rows = {{a, 0, 4, 0, false}}};
  t.Record("layers.0.moe.topk_ids", "T k", {4, 2}, std::vector<int64_t>{0, 1, 1, 2, 2, 0, 0, 1}, put);
  t.Record("layers.0.moe.topk_weights", "T k", {4, 2}, Noise(8, 1), put);
  t.Record("layers.0.moe.act", "E C f", {3, 4, 0}, Values());
  t.Record("layers.0.moe.expert_out", "T k h", {4, 2, 0}, Values(), put);
  t.Record("layers.0.moe.routed", "T h", {4, 8}, Noise(32, 2), put);
  t.Record("layers.0.attn.k", "T Hkv d", {4, 2, 8}, Noise(64, 3), put);
  Put scale = put;
  scale.meta = {{"scale_rule", "dynamic"}, {"scale_of", "layers.0.attn.k"}, {"kv_cache_dtype", "fp8_e4m3"}};
  t.Record("layers.0.attn.k_scale", "T g", {4, 0}, Values(), scale);
  const CheckResult r = Judge(t, {});
  EXPECT_TRUE(r.findings.empty());
  const bool said = std::any_of(r.ledger.begin(), r.ledger.end(), [](const LedgerEntry& e) {
    return std::any_of(e.evidence.begin(), e.evidence.end(),
                       [](const std::string& text) { return text.find("has no elements: axis") != std::string::npos; });
  });
  EXPECT_TRUE(said);
}

// One wrong number is a constant times the right one whatever made it.
TEST(DamagedOperands, OneNumberTellsNoConstant) {
  for (const int64_t n : {int64_t{1}, int64_t{8}}) {
    SmallTrace t;
    const uint64_t a = t.Request({1});
    const Put put{.rows = {{a, 0, 1, 0, false}}};
    const Values x = Noise(16, 1), w = Noise(static_cast<size_t>(n) * 16, 2);
    Values y;
    for (int64_t i = 0; i < n; ++i) {
      double sum = 0;
      for (int64_t c = 0; c < 16; ++c)
        sum += double{x[static_cast<size_t>(c)]} * double{w[static_cast<size_t>(i * 16 + c)]};
      y.push_back(static_cast<float>(1.7 * sum));
    }
    t.Record("layers.0.mlp.down_proj.weight", "out in", {n, 16}, w, {.step = -1, .phase = Phase::kLoad});
    t.Record("layers.0.mlp.act", "T f", {1, 16}, x, put);
    t.Record("layers.0.mlp.down", "T h", {1, n}, y, put);
    EXPECT_FIRST(Judge(t, {"linear"}), "layers.0.mlp.down", n == 1 ? "KERNEL" : "SCALE");
  }
}

// NaN for NaN is right and shows nothing; weights that are not finite were not loaded.
TEST(DamagedOperands, NothingButNaNRulesNothingOut) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3, 4});
  const Put put{.rows = {{a, 0, 4, 0, false}}};
  const Put load{.step = -1, .phase = Phase::kLoad};
  const auto nan = [](size_t n) { return Values(n, std::nanf("")); };
  t.Record("layers.0.mlp.down_proj.weight", "out in", {8, 16}, nan(128), load);
  t.Record("layers.0.mlp.act", "T f", {4, 16}, nan(64), put);
  t.Record("layers.0.mlp.down", "T h", {4, 8}, nan(32), put);
  const CheckResult r = Judge(t, {"linear", "nonfinite"});
  EXPECT_EQ(r.findings.at(0).name, "layers.0.mlp.down_proj.weight");
  EXPECT_EQ(r.findings.at(0).cls, "LOAD");
  for (const LedgerEntry& e : r.ledger) {
    if (e.hypothesis == hypothesis::kQuantised || e.hypothesis == hypothesis::kWeights) {
      EXPECT_NE(e.state, CheckState::kRuledOut) << e.evidence[0];
    }
  }
}

// Experts whose gate and up are of other widths, and a bias that is not one number a row.
TEST(DamagedOperands, ExpertsThatDoNotFitEachOtherAreNotTestable) {
  for (const bool bias : {false, true}) {
    for (const int64_t n : {int64_t{2}, int64_t{11}}) {
      SmallTrace t;
      const uint64_t a = t.Request({1, 2, 3, 4});
      const Put put{.rows = {{a, 0, 4, 0, false}}};
      const Put load{.step = -1, .phase = Phase::kLoad};
      for (int64_t e = 0; e < 4; ++e) {
        const std::string expert = "layers.0.mlp.experts." + std::to_string(e);
        const int64_t width = bias || e > 0 ? 8 : n * 1000;
        t.Record(expert + ".gate_proj.weight", "out in", {6, 8}, Noise(48, 1), load);
        t.Record(expert + ".up_proj.weight", "out in", {6, width}, Noise(static_cast<size_t>(6 * width), 2), load);
      }
      if (bias) t.Record("layers.0.mlp.experts.gate_up_proj_bias", "n", {n}, Noise(static_cast<size_t>(n), 3), load);
      t.Record("layers.0.moe.topk_ids", "T k", {4, 1}, std::vector<int64_t>{0, 1, 2, 3}, put);
      t.Record("layers.0.moe.dispatched", "R h", {4, 8}, Noise(32, 4), {});
      t.Record("layers.0.moe.gate_up", "R f", {4, 12}, Noise(48, 5), {});
      const CheckResult r = Judge(t, {"experts"});
      for (const FirstBad& bad : r.findings) EXPECT_NE(bad.name, "layers.0.moe.gate_up") << bad.evidence[0];
    }
  }
}

// Parts of a fused weight with fewer rows than none, or more than there are.
TEST(DamagedOperands, PartsThatAreNoRowsOfTheWeightAreNotTaken) {
  for (const char* parts : {"q_proj:16,k_proj:-8", "q_proj:-8,k_proj:8",
                            "q_proj:9223372036854775807,k_proj:9223372036854775807", "q_proj:8,k_proj:17"}) {
    SmallTrace t;
    const uint64_t a = t.Request({1, 2, 3, 4});
    const Put put{.rows = {{a, 0, 4, 0, false}}};
    Put load{.step = -1, .phase = Phase::kLoad};
    t.Record("layers.0.attn.qkv_proj.bias", "out", {24}, Noise(24, 1), load);
    load.meta = {{"parts", parts}};
    t.Record("layers.0.attn.qkv_proj.weight", "out in", {24, 8}, Noise(192, 2), load);
    t.Record("layers.0.input_norm", "T h", {4, 8}, Noise(32, 3), put);
    t.Record("layers.0.attn.k_proj", "T h", {4, 8}, Noise(32, 4), put);
    EXPECT_TRUE(Judge(t, {"linear"}).findings.empty()) << parts;
  }
}

// Slopes of so many heads as a number of ranks from the file would make.
TEST(DamagedOperands, RanksBeyondCountMakeNoSlopes) {
  SmallTrace t;
  const uint64_t a = t.Request(std::vector<int64_t>(6, 1));
  Put put{.rows = {{a, 0, 6, 0, false}}, .shard = {0, INT32_MAX, 0, int64_t{INT32_MAX} * 16}};
  for (const char* name : {"layers.0.attn.q", "layers.0.attn.k", "layers.0.attn.v"})
    t.Record(name, "T H d", {6, 2, 8}, Noise(96, static_cast<uint64_t>(name[14])), put);
  t.Record("layers.0.attn.alibi_slopes", "H", {2}, Values{0.5F, 0.25F}, {});
  t.Record("layers.0.attn.out", "T H dv", {6, 2, 8}, Noise(96, 4), put);
  EXPECT_EQ(Judge(t, {"attention"}).findings.at(0).cls, "KERNEL");
}

}  // namespace
}  // namespace assay
