// Tensors that should be what another one holds: values of their projection, embedding rows of generated tokens.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "verdicts.h"

namespace assay {
namespace {

using testing::Judge;
using testing::Noise;
using testing::Put;
using testing::SmallTrace;
using Values = std::vector<float>;

constexpr size_t kRows = 6, kHeads = 3, kDim = 8;

enum class Fault { kNone, kNormed, kRounded, kRotated, kHeadsExchanged, kScaled, kOneRow };

// attn.v of one request, made of attn.v_proj with one fault.
CheckResult ValuesWith(Fault fault) {
  SmallTrace t;
  const uint64_t request = t.Request({3, 1, 4, 1, 5, 9});
  const Put rows{.rows = {{request, 0, kRows, 0, false}}, .meta = {{"rope.theta", "10000"}, {"eps", "1e-6"}}};
  const Values projected = Noise(kRows * kHeads * kDim, 7);
  Values v = projected;
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t h = 0; h < kHeads; ++h) {
      const float* from = &projected[(r * kHeads + h) * kDim];
      float* to = &v[(r * kHeads + h) * kDim];
      double square = 0;
      for (size_t c = 0; c < kDim; ++c) square += double{from[c]} * double{from[c]};
      for (size_t c = 0; c < kDim; ++c) {
        const size_t half = kDim / 2, i = c % half;
        const double angle = static_cast<double>(r) * std::pow(1e4, -2.0 * static_cast<double>(i) / kDim);
        const double turned =
            double{from[c]} * std::cos(angle) + double{from[(c + half) % kDim]} * (c < half ? -1 : 1) * std::sin(angle);
        if (fault == Fault::kNormed) to[c] = static_cast<float>(double{from[c]} / std::sqrt(square / kDim + 1e-6));
        if (fault == Fault::kRounded) to[c] = std::nextafter(std::nextafter(from[c], 9.0f), 9.0f);
        if (fault == Fault::kRotated) to[c] = static_cast<float>(turned);
        if (fault == Fault::kHeadsExchanged) to[c] = projected[(r * kHeads + (h + 1) % kHeads) * kDim + c];
        if (fault == Fault::kScaled) to[c] = 0.5f * from[c];
        if (fault == Fault::kOneRow && r == 4) to[c] = 0;
      }
    }
  }
  t.Record("layers.1.attn.v_proj", "T H d", {kRows, kHeads, kDim}, projected, rows);
  t.Record("layers.1.attn.v", "T H d", {kRows, kHeads, kDim}, v, rows);
  return Judge(t, {"values"});
}

TEST(ValueCheck, ValuesOfTheirProjectionAreRuledOut) { EXPECT_RULED_OUT(ValuesWith(Fault::kNone)); }

// An engine that runs the norm of its keys over the values as well.
TEST(ValueCheck, NormedValuesThatNobodyDeclaredAreKernel) {
  EXPECT_FIRST(ValuesWith(Fault::kNormed), "layers.1.attn.v", "KERNEL");
}

// Their own order is no other order, and position 0 is not rotated.
TEST(ValueCheck, RoundingIsNeitherAnOrderOfHeadsNorARotation) {
  const CheckResult result = ValuesWith(Fault::kRounded);
  ASSERT_FALSE(result.findings.empty());
  EXPECT_NE(result.findings[0].cls, "TP-SHARD");
  EXPECT_NE(result.findings[0].cls, "ROPE-FORM");
}

TEST(ValueCheck, RotatedValuesAreRopeForm) {
  EXPECT_FIRST(ValuesWith(Fault::kRotated), "layers.1.attn.v", "ROPE-FORM");
}

TEST(ValueCheck, HeadsInAnotherOrderAreTpShard) {
  const CheckResult result = ValuesWith(Fault::kHeadsExchanged);
  ASSERT_FALSE(result.findings.empty());
  EXPECT_EQ(result.findings[0].name, "layers.1.attn.v");
  EXPECT_EQ(result.findings[0].cls, "TP-SHARD");
}

TEST(ValueCheck, ScaledValuesGiveTheConstant) {
  const CheckResult result = ValuesWith(Fault::kScaled);
  EXPECT_FIRST(result, "layers.1.attn.v", "SCALE");
  EXPECT_NEAR(result.findings[0].constant_value, 0.5, 1e-6);
}

TEST(ValueCheck, OneRowOfAnotherValueIsFound) {
  const CheckResult result = ValuesWith(Fault::kOneRow);
  ASSERT_FALSE(result.findings.empty());
  EXPECT_EQ(result.findings[0].name, "layers.1.attn.v");
}

// Decode rows of a request whose prompt alone is announced. fed: the tokens that embed shows; chosen: next_token.
CheckResult Decode(const std::vector<int64_t>& chosen, const std::vector<int64_t>& fed, float disturbed) {
  constexpr size_t kVocab = 12, kHidden = 16;
  SmallTrace t;
  const uint64_t request = t.Request({3, 1});
  const Values table = Noise(kVocab * kHidden, 21);
  t.Record("embed_tokens.weight", "vocab h", {kVocab, kHidden}, table, {.phase = Phase::kLoad});
  for (size_t step = 0; step < fed.size(); ++step) {
    const auto position = static_cast<int64_t>(step) + 2;
    Put put{.rows = {{request, 0, 1, position, false}}, .step = static_cast<int64_t>(step) + 1};
    put.phase = Phase::kDecode;
    Put before = put;
    before.rows[0].first_position = position - 1;
    before.step = static_cast<int64_t>(step);
    t.Record("next_token", "T", {1}, std::vector<int64_t>{chosen[step]}, before);
    const auto at = static_cast<ptrdiff_t>(fed[step]) * static_cast<ptrdiff_t>(kHidden);
    Values row(table.begin() + at, table.begin() + at + kHidden);
    if (step == 1) row[5] += disturbed;
    t.Record("embed", "T h", {1, kHidden}, row, put);
  }
  return Judge(t, {"embedding"});
}

TEST(GeneratedTokens, RowsOfTheChosenTokensAreRuledOut) { EXPECT_RULED_OUT(Decode({4, 7, 2}, {4, 7, 2}, 0)); }

// A run that follows another's tokens feeds others than it chose: neither right nor wrong, and said.
TEST(GeneratedTokens, GivenTokensAreNotJudged) {
  const CheckResult result = Decode({4, 7, 2}, {4, 9, 2}, 0);
  EXPECT_TRUE(result.findings.empty());
  ASSERT_EQ(result.ledger.size(), 1u);
  EXPECT_EQ(result.ledger[0].judged, 2u);
  EXPECT_EQ(result.ledger[0].not_judged, 1u);
}

TEST(GeneratedTokens, ARowOfNoTokenIsFound) {
  const CheckResult result = Decode({4, 7, 2}, {4, 7, 2}, 0.25f);
  ASSERT_FALSE(result.findings.empty());
  EXPECT_EQ(result.findings[0].name, "embed");
}

}  // namespace
}  // namespace assay
