// Rows of a projection, or of the embedding, that come from other places of a memory shared with others.
#include <gtest/gtest.h>

#include <algorithm>

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

constexpr int64_t kRows = 7, kHidden = 8, kDim = 4;
const Put kAtLoad{.step = -1, .phase = Phase::kLoad};

// x [kRows, kHidden] times these rows of w.
Values Product(const Values& x, const Values& w, const std::vector<int64_t>& rows) {
  Values y;
  for (int64_t t = 0; t < kRows; ++t) {
    for (int64_t r : rows) {
      double sum = 0;
      for (int64_t c = 0; c < kHidden; ++c)
        sum += double{x[static_cast<size_t>(t * kHidden + c)]} * double{w[static_cast<size_t>(r * kHidden + c)]};
      y.push_back(static_cast<float>(sum));
    }
  }
  return y;
}

// Rows of these heads.
std::vector<int64_t> RowsOfHeads(const std::vector<int64_t>& heads) {
  std::vector<int64_t> rows;
  for (int64_t h : heads)
    for (int64_t i = 0; i < kDim; ++i) rows.push_back(h * kDim + i);
  return rows;
}

// Four query heads and two of keys and values each. q, k, v: heads of the fused weight that the results are made of.
CheckResult Fused(const std::vector<int64_t>& q, const std::vector<int64_t>& k, const std::vector<int64_t>& v) {
  SmallTrace t;
  const uint64_t request = t.Request({1, 2, 3, 4, 5, 6, 7});
  const Values x = Noise(kRows * kHidden, 1), w = Noise(8 * kDim * kHidden, 2);
  Put load = kAtLoad;
  load.meta = {{"parts", "q_proj:16,k_proj:8,v_proj:8"}};
  t.Record("layers.0.attn.qkv_proj.weight", "N K", {8 * kDim, kHidden}, w, load);
  const Put put{.rows = {{request, 0, kRows, 0, false}}};
  t.Record("layers.0.input_norm", "T h", {kRows, kHidden}, x, put);
  const auto result = [&](const char* name, const std::vector<int64_t>& heads) {
    t.Record(name, "T H d", {kRows, static_cast<int64_t>(heads.size()), kDim}, Product(x, w, RowsOfHeads(heads)), put);
  };
  result("layers.0.attn.q_proj", q);
  result("layers.0.attn.k_proj", k);
  result("layers.0.attn.v_proj", v);
  return Judge(t, {"linear"});
}

TEST(FusedRows, OneBehindTheOtherAsDeclaredAreRuledOut) { EXPECT_RULED_OUT(Fused({0, 1, 2, 3}, {4, 5}, {6, 7})); }

TEST(FusedRows, ReadAsGroupsOfHeadsAreFound) {
  const CheckResult r = Fused({0, 1, 4, 5}, {2, 6}, {3, 7});
  EXPECT_FIRST(r, "layers.0.attn.q_proj", fault_class::kLoad);
  EXPECT_NE(r.findings[0].evidence[0].find("[2, 4, 4]"), std::string::npos) << r.findings[0].evidence[0];
}

TEST(FusedRows, OfAnotherPartOfItAreFound) {
  EXPECT_FIRST(Fused({0, 1, 2, 3}, {5, 6}, {6, 7}), "layers.0.attn.k_proj", fault_class::kLoad);
}

// Groups of heads in memory, which were loaded apart and used as if they lay one behind the other.
TEST(FusedRows, GroupsOfHeadsReadOneBehindTheOtherAreFound) {
  SmallTrace t;
  const uint64_t request = t.Request({1, 2, 3, 4, 5, 6, 7});
  const Values x = Noise(kRows * kHidden, 3), w = Noise(6 * kDim * kHidden, 4);
  const auto part = [&](int64_t first) {
    return Values(w.begin() + first * kDim * kHidden, w.begin() + (first + 2) * kDim * kHidden);
  };
  t.Record("layers.0.attn.q_proj.weight", "N K", {2 * kDim, kHidden}, part(0), kAtLoad);
  t.Record("layers.0.attn.k_proj.weight", "N K", {2 * kDim, kHidden}, part(2), kAtLoad);
  t.Record("layers.0.attn.v_proj.weight", "N K", {2 * kDim, kHidden}, part(4), kAtLoad);
  const Put put{.rows = {{request, 0, kRows, 0, false}}};
  t.Record("layers.0.input_norm", "T h", {kRows, kHidden}, x, put);
  // [2, 3, d] holds q0 k0 v0 q1 k1 v1.
  t.Record("layers.0.attn.q_proj", "T H d", {kRows, 2, kDim}, Product(x, w, RowsOfHeads({0, 2})), put);
  EXPECT_FIRST(Judge(t, {"linear"}), "layers.0.attn.q_proj", fault_class::kLoad);
}

// Five heads on two ranks, three and two: those of rank 1 begin at `first`.
CheckResult Uneven(int64_t first) {
  SmallTrace t(2);
  const uint64_t request = t.Request({1, 2, 3, 4, 5, 6, 7});
  const Values x = Noise(kRows * kHidden, 5), w = Noise(5 * kDim * kHidden, 6);
  for (int32_t rank = 0; rank < 2; ++rank) {
    const int64_t begin = rank == 0 ? 0 : 3, heads = rank == 0 ? 3 : 2;
    Put load = kAtLoad, put{.rows = {{request, 0, kRows, 0, false}}};
    load.rank = put.rank = rank;
    load.shard = {rank, 2, 0, 0};
    t.Record("layers.0.attn.q_proj.weight", "N K", {heads * kDim, kHidden},
             Values(w.begin() + begin * kDim * kHidden, w.begin() + (begin + heads) * kDim * kHidden), load);
    t.Record("layers.0.input_norm", "T h", {kRows, kHidden}, x, put);
    put.shard = {rank, 2, begin * kDim, 5 * kDim};
    t.Record(
        "layers.0.attn.q_proj", "T H d", {kRows, heads, kDim},
        Product(x, w, RowsOfHeads(rank == 0 ? std::vector<int64_t>{0, 1, 2} : std::vector<int64_t>{first, first + 1})),
        put);
  }
  return Judge(t, {"linear"});
}

TEST(UnevenShards, OfTheirOwnRowsAreRuledOut) { EXPECT_RULED_OUT(Uneven(3)); }

TEST(UnevenShards, AtAnotherOffsetAreFound) {
  const CheckResult r = Uneven(2);
  EXPECT_FIRST(r, "layers.0.attn.q_proj", fault_class::kTpShard);
  EXPECT_NE(r.findings[0].evidence[0].find("rows 8 to 15 of all ranks' rows, 12 to 19 are due"), std::string::npos)
      << r.findings[0].evidence[0];
}

// Twelve tokens on two ranks. What rank 1 gives is the row of token + shift, cut to the last, and rows of others where
// `masked` is not kept.
CheckResult Shared(int64_t shift, bool masked) {
  SmallTrace t(2);
  const std::vector<int64_t> tokens{0, 7, 3, 6, 10, 5, 8};
  const uint64_t request = t.Request(tokens);
  const Values table = Noise(12 * kHidden, 7);
  for (int32_t rank = 0; rank < 2; ++rank) {
    Put load = kAtLoad, put{.rows = {{request, 0, kRows, 0, false}}};
    load.rank = put.rank = rank;
    load.shard = {rank, 2, 0, 0};
    t.Record("embed_tokens.weight", "V h", {6, kHidden},
             Values(table.begin() + rank * 6 * kHidden, table.begin() + (rank + 1) * 6 * kHidden), load);
    Values part;
    for (int64_t token : tokens) {
      const bool mine = token / 6 == rank;
      const int64_t row = mine ? std::min<int64_t>(token + (rank == 1 ? shift : 0), 11) : rank * 6;
      for (int64_t c = 0; c < kHidden; ++c)
        part.push_back(mine || (!masked && rank == 1) ? table[static_cast<size_t>(row * kHidden + c)] : 0.0f);
    }
    t.Record("embed.partial", "T h", {kRows, kHidden}, part, put);
  }
  return Judge(t, {"embedding"});
}

TEST(SharedEmbedding, RowsOfEachRanksTokensAreRuledOut) { EXPECT_RULED_OUT(Shared(0, true)); }

TEST(SharedEmbedding, RowsAtAnotherOffsetAreFoundWithTheOffset) {
  const CheckResult r = Shared(2, true);
  EXPECT_FIRST(r, "embed.partial", fault_class::kTpShard);
  EXPECT_EQ(r.findings[0].constant_value, -2);
  EXPECT_EQ(r.findings[0].ranks, (std::vector<int32_t>{1}));
}

TEST(SharedEmbedding, RowsOfOtherRanksTokensMustBeZeros) {
  EXPECT_FIRST(Shared(0, false), "embed.partial", fault_class::kTpShard);
}

}  // namespace
}  // namespace assay
