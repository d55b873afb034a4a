// Logits of the rows that are sampled from, judged against those rows of the final norm.
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

constexpr int64_t kHidden = 6, kVocab = 9;

// Two prompts of 3 and 2 tokens; logits of `row` of the first and of the last row of the second.
CheckResult Recorded(size_t row) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3}), b = t.Request({4, 5});
  const std::vector<float> x = Noise(5 * kHidden, 1), w = Noise(kVocab * kHidden, 2);
  std::vector<float> logits;
  for (const size_t r : {row, size_t{4}}) {
    for (size_t v = 0; v < kVocab; ++v) {
      double sum = 0;
      for (size_t c = 0; c < kHidden; ++c) sum += double{x[r * kHidden + c]} * double{w[v * kHidden + c]};
      logits.push_back(static_cast<float>(sum));
    }
  }
  t.Record("lm_head.weight", "out in", {kVocab, kHidden}, w, {.step = -1, .phase = Phase::kLoad});
  t.Record("final_norm", "T h", {5, kHidden}, x, {.rows = {{a, 0, 3, 0, false}, {b, 3, 2, 0, false}}});
  t.Record("logits", "T vocab", {2, kVocab}, logits, {.rows = {{a, 0, 1, 2, false}, {b, 1, 1, 1, false}}});
  return Judge(t, {"linear"});
}

TEST(LogitRows, RowsAreTakenByRequestAndPosition) {
  const CheckResult r = Recorded(2);
  EXPECT_TRUE(r.findings.empty()) << r.findings[0].evidence[0];
  EXPECT_EQ(r.coverage.results_judged, 1U);
}

TEST(LogitRows, LogitsOfAnotherRowAreFound) {
  const CheckResult r = Recorded(1);
  ASSERT_EQ(r.findings.size(), 1U);
  EXPECT_EQ(r.findings[0].name, "logits");
  EXPECT_EQ(r.findings[0].positions, (std::vector<std::pair<int64_t, int64_t>>{{2, 2}}));
}

// The input's codes were recorded, the product took the input itself: its rows of the result, and not its first ones.
TEST(LogitRows, InputBeforeItWasQuantisedIsSoughtInTheRowsOfTheResult) {
  SmallTrace t;
  const std::vector<float> x = Noise(5 * kHidden, 1), w = Noise(kVocab * kHidden, 2);
  std::vector<int8_t> codes;
  for (const float v : x) codes.push_back(static_cast<int8_t>(std::nearbyint(v * 127)));
  std::vector<float> logits;
  for (size_t v = 0; v < kVocab; ++v) {
    double sum = 0;
    for (size_t c = 0; c < kHidden; ++c) sum += double{x[4 * kHidden + c]} * double{w[v * kHidden + c]};
    logits.push_back(static_cast<float>(sum));
  }
  const uint64_t a = t.Request({1, 2, 3, 4, 5});
  t.Record("lm_head.weight", "out in", {kVocab, kHidden}, w, {.step = -1, .phase = Phase::kLoad});
  testing::Put put{.rows = {{a, 0, 5, 0, false}}};
  t.Record("final_norm", "T h", {5, kHidden}, x, put);
  put.meta = {{"quant", "int8_token"}};
  t.Record("final_norm.q", "T h", {5, kHidden}, codes, put);
  t.Record("final_norm.q_scale", "T s", {5, 1}, std::vector<float>(5, 1.0F / 127), put);
  t.Record("logits", "T vocab", {1, kVocab}, logits, {.rows = {{a, 0, 1, 4, false}}});
  const CheckResult r = Judge(t, {"linear"});
  ASSERT_EQ(r.findings.size(), 1U);
  EXPECT_EQ(r.findings[0].cls, "PRECISION") << r.findings[0].evidence[0];
}

}  // namespace
}  // namespace assay
