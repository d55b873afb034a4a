// Rows that attention gathers from a cache: which order of heads and rows is a cause, and what looks like one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "small_trace.h"
#include "verdicts.h"

namespace assay {
namespace {

using testing::Judge;
using testing::Noise;
using testing::SmallTrace;
using Values = std::vector<float>;

constexpr int64_t kRows = 4, kHeads = 2, kWidth = 8;

// Keys of four rows as written, and rows gathered with one of padding behind them.
CheckResult Gathered(Values read, const Values& k = Noise(kRows * kHeads * kWidth, 1)) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3, 4});
  t.Record("layers.0.attn.k", "T Hkv d", {kRows, kHeads, kWidth}, k, {.rows = {{a, 0, kRows, 0, false}}});
  read.resize((kRows + 1) * kHeads * kWidth, 0);
  t.Record("layers.0.attn.k_read", "T Hkv d", {kRows + 1, kHeads, kWidth}, read,
           {.rows = {{a, 0, kRows, 0, false}, {0, kRows, 1, 0, true}}});
  return Judge(t, {"cache-read"});
}

// [rows, heads] as [heads, rows].
Values HeadsFirst(const Values& k) {
  Values out;
  for (int64_t h = 0; h < kHeads; ++h) {
    for (int64_t r = 0; r < kRows; ++r) {
      const auto from = k.begin() + (r * kHeads + h) * kWidth;
      out.insert(out.end(), from, from + kWidth);
    }
  }
  return out;
}

TEST(CacheReads, PageReadByHeadsFirstIsAStride) {
  const Values k = Noise(kRows * kHeads * kWidth, 1);
  EXPECT_RULED_OUT(Gathered(k));
  EXPECT_FIRST(Gathered(HeadsFirst(k)), "layers.0.attn.k_read", "STRIDE");
}

// NaN was written, and is what has to be read; it has no place in an order of doubles.
TEST(CacheReads, NanThatWasWrittenIsReadAndHasAPlace) {
  Values k = Noise(kRows * kHeads * kWidth, 1);
  for (size_t i = 0; i < k.size(); i += 5) k[i] = NAN;
  EXPECT_RULED_OUT(Gathered(k, k));
  EXPECT_FIRST(Gathered(HeadsFirst(k), k), "layers.0.attn.k_read", "STRIDE");
}

TEST(CacheReads, PoolThatNobodyFilledIsNoOtherOrderOfHeads) {
  const CheckResult r = Gathered({});
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].name, "layers.0.attn.k_read");
  EXPECT_NE(r.findings[0].cls, "STRIDE");
}

}  // namespace
}  // namespace assay
