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

// Positions 2 and 3 are written as drafts in step 0 and again in step 1; step 2 gathers them. accepted: of the drafts.
CheckResult Drafts(bool stale, int64_t accepted) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2});
  const auto row = [](uint64_t seed) { return Noise(kHeads * kWidth, seed); };
  const auto rows = [&](std::vector<uint64_t> seeds) {
    Values out;
    for (const uint64_t seed : seeds) {
      const Values one = row(seed);
      out.insert(out.end(), one.begin(), one.end());
    }
    return out;
  };
  const std::vector<int64_t> two{2, kHeads, kWidth}, four{4, kHeads, kWidth};
  t.Record("layers.0.attn.k", "T Hkv d", four, rows({1, 2, 3, 4}), {.rows = {{a, 0, 4, 0, false}}, .step = 0});
  t.Record<int64_t>("spec.accepted", "T", {1}, {accepted},
                    {.rows = {{a, 0, 1, 0, false}}, .step = 0, .meta = {{"drafts", "3"}}});
  t.Record("layers.0.attn.k", "T Hkv d", two, rows({5, 6}), {.rows = {{a, 0, 2, 2, false}}, .step = 1});
  t.Record("layers.0.attn.k_read", "T Hkv d", four,
           rows(stale ? std::vector<uint64_t>{1, 2, 3, 4} : std::vector<uint64_t>{1, 2, 5, 6}),
           {.rows = {{a, 0, 4, 0, false}}, .step = 2});
  return Judge(t, {"cache-read"});
}

TEST(CacheReads, DraftsThatWereNotAcceptedAreAMatterOfSpeculation) {
  EXPECT_RULED_OUT(Drafts(false, 1));
  const CheckResult r = Drafts(true, 1);
  ASSERT_EQ(r.findings.size(), 1u);
  EXPECT_EQ(r.findings[0].name, "layers.0.attn.k_read");
  EXPECT_EQ(r.findings[0].cls, "SPEC");
  EXPECT_FIRST(Drafts(true, 3), "layers.0.attn.k_read", "KV-IDENT");  // all accepted: an old row all the same
}

}  // namespace
}  // namespace assay
