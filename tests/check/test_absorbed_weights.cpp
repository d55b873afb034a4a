// W_UK_T and W_UV at load beside the kv_b_proj that they are cut out of.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>

#include "check/check.h"
#include "small_trace.h"
#include "verdicts.h"

namespace assay {
namespace {

using testing::Judge;
using testing::Noise;
using testing::Put;
using testing::SmallTrace;

constexpr size_t kHeads = 3, kNope = 4, kValue = 6, kLatent = 5, kOwn = kNope + kValue;
using Values = std::vector<float>;

const Put kAtLoad{.step = -1, .phase = Phase::kLoad};

Put OnRank(int32_t rank, int32_t count) {
  return {.step = -1, .rank = rank, .phase = Phase::kLoad, .shard = {rank, count, 0, 0}};
}

// Head h of `heads`, row r of kv_b_proj.
using Pick = std::function<std::pair<size_t, size_t>(size_t h, size_t r)>;
Values Cut(const Values& kv_b, size_t heads, size_t d, const Pick& pick, float factor = 1) {
  Values out;
  for (size_t h = 0; h < heads; ++h) {
    for (size_t r = 0; r < d; ++r) {
      const auto [head, row] = pick(h, r);
      for (size_t c = 0; c < kLatent; ++c) out.push_back(factor * kv_b[(head * kOwn + row) * kLatent + c]);
    }
  }
  return out;
}
std::pair<size_t, size_t> Key(size_t h, size_t r) { return {h, r}; }
std::pair<size_t, size_t> ValueRow(size_t h, size_t r) { return {h, kNope + r}; }

// [H, d, c] as [H, c, d].
Values Transposed(const Values& w, size_t d) {
  Values out;
  for (size_t h = 0; h < w.size() / (d * kLatent); ++h)
    for (size_t c = 0; c < kLatent; ++c)
      for (size_t r = 0; r < d; ++r) out.push_back(w[(h * d + r) * kLatent + c]);
  return out;
}

class AbsorbedWeights : public ::testing::Test {
 protected:
  // Both layers; layer 0 has these cuts.
  CheckResult Of(const Values& keys, const Values& values) {
    SmallTrace t;
    for (int layer = 0; layer < 2; ++layer) {
      const std::string at = "layers." + std::to_string(layer) + ".attn.";
      const Values& kv_b = layer == 0 ? kv_b_ : other_;
      t.Record(at + "kv_b_proj.weight", "N K", {kHeads * kOwn, kLatent}, kv_b, kAtLoad);
      t.Record(at + "W_UK_T", "H dn c", {kHeads, kNope, kLatent}, layer == 0 ? keys : Cut(kv_b, kHeads, kNope, Key),
               kAtLoad);
      t.Record(at + "W_UV", "H dv c", {kHeads, kValue, kLatent},
               layer == 0 ? values : Cut(kv_b, kHeads, kValue, ValueRow), kAtLoad);
    }
    return Judge(t, {"absorption"});
  }

  const Values kv_b_ = Noise(kHeads * kOwn * kLatent, 1), other_ = Noise(kHeads * kOwn * kLatent, 2);
  const Values keys_ = Cut(kv_b_, kHeads, kNope, Key), values_ = Cut(kv_b_, kHeads, kValue, ValueRow);
};

TEST_F(AbsorbedWeights, CutsOfTheirHeadsAreRuledOut) { EXPECT_RULED_OUT(Of(keys_, values_)); }

TEST_F(AbsorbedWeights, RoundedToBf16InAWiderRecordingAreRuledOut) {
  Values rounded = keys_;
  for (float& x : rounded) {
    uint32_t bits = 0;
    std::memcpy(&bits, &x, 4);
    bits = (bits + 0x8000u) & 0xFFFF0000u;
    std::memcpy(&x, &bits, 4);
  }
  EXPECT_RULED_OUT(Of(rounded, values_));
}

TEST_F(AbsorbedWeights, InEightBitsOfTheirOwnAreNotJudged) {
  Values steps = keys_;
  for (float& x : steps) x = std::nearbyint(x * 127) / 127;
  const CheckResult r = Of(steps, values_);
  EXPECT_TRUE(r.findings.empty());
  EXPECT_GT(r.coverage.results_not_judged, 0u);
}

TEST_F(AbsorbedWeights, ScaledOnesAreFoundWithTheFactor) {
  const CheckResult r = Of(Cut(kv_b_, kHeads, kNope, Key, 3), values_);
  EXPECT_FIRST(r, "layers.0.attn.W_UK_T", fault_class::kScale);
  EXPECT_NEAR(r.findings[0].constant_value, 3, 1e-6);
}

TEST_F(AbsorbedWeights, RolledHeadsAreThoseOfOtherHeads) {
  const auto next = [](size_t h, size_t r) { return ValueRow((h + 1) % kHeads, r); };
  const CheckResult r = Of(keys_, Cut(kv_b_, kHeads, kValue, next));
  EXPECT_FIRST(r, "layers.0.attn.W_UV", fault_class::kTpShard);
  EXPECT_EQ(r.findings[0].heads, (std::vector<int32_t>{0, 1, 2}));
}

TEST_F(AbsorbedWeights, OneHeadInPlaceOfAnotherIsNamed) {
  const auto first = [](size_t h, size_t r) { return ValueRow(h == 2 ? 0 : h, r); };
  const CheckResult r = Of(keys_, Cut(kv_b_, kHeads, kValue, first));
  EXPECT_FIRST(r, "layers.0.attn.W_UV", fault_class::kTpShard);
  EXPECT_EQ(r.findings[0].heads, (std::vector<int32_t>{2}));
}

TEST_F(AbsorbedWeights, TransposedMemoryUnderTheOldShapeIsFound) {
  EXPECT_FIRST(Of(Transposed(keys_, kNope), values_), "layers.0.attn.W_UK_T", fault_class::kLoad);
}

TEST_F(AbsorbedWeights, RowsFromTheWrongEndOfTheHeadAreFound) {
  const auto last = [](size_t h, size_t r) { return std::pair(h, kValue + r); };
  EXPECT_FIRST(Of(Cut(kv_b_, kHeads, kNope, last), values_), "layers.0.attn.W_UK_T", fault_class::kLoad);
}

TEST_F(AbsorbedWeights, CutsOfAnotherLayerAreFound) {
  const CheckResult r = Of(keys_, Cut(other_, kHeads, kValue, ValueRow));
  EXPECT_FIRST(r, "layers.0.attn.W_UV", fault_class::kLoad);
  EXPECT_NE(r.findings[0].evidence[0].find("layers.1.attn.kv_b_proj.weight"), std::string::npos);
}

TEST_F(AbsorbedWeights, LatentFirstUnderItsOwnShapeIsRuledOut) {
  SmallTrace t;
  t.Record("layers.0.attn.kv_b_proj.weight", "N K", {kHeads * kOwn, kLatent}, kv_b_, kAtLoad);
  t.Record("layers.0.attn.W_UK_T", "H c dn", {kHeads, kLatent, kNope}, Transposed(keys_, kNope), kAtLoad);
  EXPECT_RULED_OUT(Judge(t, {"absorption"}));
}

// Four heads on two ranks; each has its rows of kv_b_proj, or all of them where `whole`.
CheckResult OfRanks(size_t heads_of_rank_1, bool whole) {
  SmallTrace t(2);
  const Values kv_b = Noise(4 * kOwn * kLatent, 5);
  for (int32_t rank = 0; rank < 2; ++rank) {
    const size_t first = rank == 0 ? 0 : heads_of_rank_1, rows = 2 * kOwn * kLatent;
    const auto begin = kv_b.begin() + static_cast<int64_t>(rank) * static_cast<int64_t>(rows);
    const Values own = whole ? kv_b : Values(begin, begin + static_cast<int64_t>(rows));
    Put put = OnRank(rank, whole ? 1 : 2);
    put.shard.index = whole ? 0 : rank;
    t.Record("layers.0.attn.kv_b_proj.weight", "N K", {static_cast<int64_t>(own.size() / kLatent), kLatent}, own, put);
    t.Record("layers.0.attn.W_UK_T", "H dn c", {2, kNope, kLatent},
             Cut(kv_b, 2, kNope, [&](size_t h, size_t r) { return Key(first + h, r); }), OnRank(rank, 2));
  }
  return Judge(t, {"absorption"});
}

TEST_F(AbsorbedWeights, ShardsOfTheirOwnRankAreRuledOut) {
  EXPECT_RULED_OUT(OfRanks(2, false));
  EXPECT_RULED_OUT(OfRanks(2, true));
}

TEST_F(AbsorbedWeights, ShardsOfAnotherRankAreFound) {
  for (const bool whole : {false, true}) {
    const CheckResult r = OfRanks(0, whole);
    EXPECT_FIRST(r, "layers.0.attn.W_UK_T", fault_class::kTpShard);
    EXPECT_EQ(r.findings[0].ranks, (std::vector<int32_t>{1}));
  }
}

// kv_b_proj as codes with a scale a row; the cut is of values, of codes alone, or with scales of the next row.
CheckResult OfCodes(int way) {
  SmallTrace t;
  std::vector<int8_t> codes;
  const Values noise = Noise(kHeads * kOwn * kLatent, 7);
  for (float x : noise) codes.push_back(static_cast<int8_t>(std::nearbyint(x * 120)));
  Values scale = Noise(kHeads * kOwn, 8), kv_b;
  for (float& s : scale) s = 0.01f * (2 + s);
  for (size_t i = 0; i < codes.size(); ++i) {
    const float s = way == 0 ? scale[i / kLatent] : way == 1 ? 1 : scale[(i / kLatent + 1) % scale.size()];
    kv_b.push_back(static_cast<float>(codes[i]) * s);
  }
  Put put = kAtLoad;
  put.meta = {{"quant", "int8_channel"}};
  t.Record("layers.0.attn.kv_b_proj.weight.codes", "N K", {kHeads * kOwn, kLatent}, codes, put);
  t.Record("layers.0.attn.kv_b_proj.weight.scale", "N one", {kHeads * kOwn, 1}, scale, kAtLoad);
  t.Record("layers.0.attn.W_UK_T", "H dn c", {kHeads, kNope, kLatent}, Cut(kv_b, kHeads, kNope, Key), kAtLoad);
  return Judge(t, {"absorption"});
}

TEST_F(AbsorbedWeights, CutsOfCodesTimesScalesAreRuledOut) { EXPECT_RULED_OUT(OfCodes(0)); }

TEST_F(AbsorbedWeights, CutsOfTheCodesAloneLackTheirScales) {
  const CheckResult r = OfCodes(1);
  EXPECT_FIRST(r, "layers.0.attn.W_UK_T", fault_class::kQScale);
  EXPECT_EQ(r.findings[0].evidence.back(), "it holds the codes without their scales");
}

TEST_F(AbsorbedWeights, CutsUnderOtherScalesAreFound) {
  EXPECT_FIRST(OfCodes(2), "layers.0.attn.W_UK_T", fault_class::kQScale);
}

}  // namespace
}  // namespace assay
