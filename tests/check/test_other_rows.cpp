// Rows of a weight taken by another rule: fused weights head by head, heads that do not divide among the ranks.
#include <gtest/gtest.h>

#include "small_trace.h"
#include "verdicts.h"

namespace assay {
namespace {

using testing::Judge;
using testing::Noise;
using testing::SmallTrace;
using Values = std::vector<float>;

constexpr int64_t kRows = 14, kIn = 40, kSize = 12, kKeyHeads = 2, kGroup = 2;
constexpr int64_t kHeads = kKeyHeads * kGroup, kAll = kHeads + 2 * kKeyHeads;

Values Times(const Values& x, const Values& w, const std::vector<int64_t>& rows) {
  Values y;
  for (int64_t t = 0; t < kRows; ++t) {
    for (const int64_t r : rows) {
      double sum = 0;
      for (int64_t k = 0; k < kIn; ++k)
        sum += double{x[static_cast<size_t>(t * kIn + k)]} * double{w[static_cast<size_t>(r * kIn + k)]};
      y.push_back(static_cast<float>(sum));
    }
  }
  return y;
}
// Rows of these heads (blocks of kSize rows).
std::vector<int64_t> Blocks(const std::vector<int64_t>& heads) {
  std::vector<int64_t> rows;
  for (const int64_t h : heads)
    for (int64_t i = 0; i < kSize; ++i) rows.push_back(h * kSize + i);
  return rows;
}

CheckResult Fused(const std::vector<int64_t>& q, const std::vector<int64_t>& k) {
  const Values x = Noise(kRows * kIn, 1), w = Noise(kAll * kSize * kIn, 2);
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3});
  const std::vector<RowRun> rows = {{a, 0, kRows, 0, false}};
  t.Record("layers.0.attn.qkv_proj.weight", "out in", {kAll * kSize, kIn}, w,
           {.phase = Phase::kLoad, .meta = {{"parts", "q_proj:48,k_proj:24,v_proj:24"}}});
  t.Record("layers.0.input_norm", "T h", {kRows, kIn}, x, {.rows = rows});
  t.Record("layers.0.attn.q_proj", "T H d", {kRows, kHeads, kSize}, Times(x, w, Blocks(q)), {.rows = rows});
  t.Record("layers.0.attn.k_proj", "T Hkv d", {kRows, kKeyHeads, kSize}, Times(x, w, Blocks(k)), {.rows = rows});
  return Judge(t, {"linear"});
}

TEST(OtherRows, FusedWeightThatLiesHeadByHeadIsALoadFault) {
  EXPECT_RULED_OUT(Fused({0, 1, 2, 3}, {4, 5}));
  // [Hkv, g + 2, d]: heads 0 1 | 2 | 3, then 4 5 | 6 | 7.
  EXPECT_FIRST(Fused({0, 1, 4, 5}, {4, 5}), "layers.0.attn.q_proj", "LOAD");
  EXPECT_FIRST(Fused({0, 1, 2, 3}, {2, 6}), "layers.0.attn.k_proj", "LOAD");
}

CheckResult Uneven(int64_t first_of_rank1) {
  constexpr int64_t kFirst = 5, kHeadsOfAll = 9;
  const Values x = Noise(kRows * kIn, 3), w = Noise(kHeadsOfAll * kSize * kIn, 4);
  SmallTrace t(2);
  const uint64_t a = t.Request({1, 2, 3});
  const std::vector<RowRun> rows = {{a, 0, kRows, 0, false}};
  for (int32_t rank = 0; rank < 2; ++rank) {
    const int64_t begin = rank == 0 ? 0 : kFirst, n = rank == 0 ? kFirst : kHeadsOfAll - kFirst;
    const Values own(w.begin() + begin * kSize * kIn, w.begin() + (begin + n) * kSize * kIn);
    Shard by_rows;
    by_rows.index = rank;
    by_rows.count = 2;
    t.Record("layers.0.attn.q_proj.weight", "out in", {n * kSize, kIn}, own,
             {.rank = rank, .phase = Phase::kLoad, .shard = by_rows, .meta = {{"shard_axis", "0"}}});
    t.Record("layers.0.input_norm", "T h", {kRows, kIn}, x, {.rows = rows, .rank = rank});
    std::vector<int64_t> heads;
    for (int64_t h = 0; h < n; ++h) heads.push_back((rank == 0 ? 0 : first_of_rank1) + h);
    Shard by_columns = by_rows;
    by_columns.col_offset = begin * kSize;
    by_columns.full_cols = kHeadsOfAll * kSize;
    t.Record("layers.0.attn.q_proj", "T H d", {kRows, n, kSize}, Times(x, w, Blocks(heads)),
             {.rows = rows, .rank = rank, .shard = by_columns});
  }
  return Judge(t, {"linear"});
}

TEST(OtherRows, HeadsThatBeginOneTooEarlyAreAShardFault) {
  EXPECT_RULED_OUT(Uneven(5));
  EXPECT_FIRST(Uneven(4), "layers.0.attn.q_proj", "TP-SHARD");
}

}  // namespace
}  // namespace assay
