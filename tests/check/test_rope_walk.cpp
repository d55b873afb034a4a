// A rotation in place that steps through memory by another stride than that of its rows.
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

constexpr int64_t kRows = 12, kHeads = 3, kNope = 4, kRope = 8, kHead = kNope + kRope;

// The kernel: rotates `heads` heads a row of interleaved pairs in place; row j begins at x + j * row_stride.
void Rotate(float* x, size_t size, int64_t row_stride, int64_t heads, const std::vector<int64_t>& positions) {
  for (size_t j = 0; j < positions.size(); ++j) {
    for (int64_t g = 0; g < heads; ++g) {
      const size_t at = j * static_cast<size_t>(row_stride) + static_cast<size_t>(g * kHead);
      for (size_t i = 0; i < kRope / 2; ++i) {
        if (at + 2 * i + 1 >= size) return;
        const double angle =
            static_cast<double>(positions[j]) * std::pow(10000.0, -static_cast<double>(i) * 2.0 / kRope);
        float &a = x[at + 2 * i], &b = x[at + 2 * i + 1];
        const double c = std::cos(angle), s = std::sin(angle), left = a, right = b;
        a = static_cast<float>(left * c - right * s);
        b = static_cast<float>(right * c + left * s);
      }
    }
  }
}

struct Kernel {
  int64_t q_stride = kHeads * kHead, q_heads = kHeads, k_stride = 24;
};

// A step of one request: queries [T, H, 12] whose last 8 columns are rotated, keys the last 8 of rows of 24.
void RecordStep(SmallTrace* t, int64_t step, RowRun run, const Kernel& kernel) {
  const std::vector<RowRun> rows = {run};
  const int64_t n = run.n_rows;
  std::vector<int64_t> positions;
  for (int64_t i = 0; i < n; ++i) positions.push_back(run.first_position + i);
  constexpr std::pair<std::string_view, std::string_view> kTheta{"rope.theta", "10000"},
      kPairing{"rope.pairing", "interleaved"};

  std::vector<float> q = Noise(static_cast<size_t>(n * kHeads * kHead), 3), kv = Noise(static_cast<size_t>(n) * 24, 4);
  t->Record("layers.0.attn.q_proj", "T H d", {n, kHeads, kHead}, q, {.rows = rows, .step = step});
  t->Record("layers.0.attn.kv_a", "T c", {n, 24}, kv, {.rows = rows, .step = step});
  Rotate(q.data() + kNope, q.size() - kNope, kernel.q_stride, kernel.q_heads, positions);
  Rotate(kv.data() + 16, kv.size() - 16, kernel.k_stride, 1, positions);
  const std::vector<float> q_pe(q.begin() + kNope, q.end()), k_pe(kv.begin() + 16, kv.end());
  // The whole, recorded ahead of its part, is not a second finding.
  t->Record("layers.0.attn.q", "T H d", {n, kHeads, kHead}, q,
            {.rows = rows, .step = step, .meta = {kTheta, kPairing}});
  t->Record("layers.0.attn.q_pe", "T H d", {n, kHeads, kRope}, q_pe,
            {.rows = rows, .step = step, .strides = {kHeads * kHead, kHead, 1}, .meta = {kTheta, kPairing}});
  t->Record("layers.0.attn.k_pe", "T H d", {n, 1, kRope}, k_pe,
            {.rows = rows, .step = step, .strides = {24, kRope, 1}, .meta = {kTheta, kPairing}});
}

CheckResult Recorded(int64_t q_stride, int64_t q_heads, int64_t k_stride, int64_t first_position = 0) {
  SmallTrace t;
  const uint64_t request = t.Request(std::vector<int64_t>(64, 7));
  RecordStep(&t, 0, {request, 0, kRows, first_position, false}, {q_stride, q_heads, k_stride});
  return Judge(t, {"rotation"});
}

TEST(RopeWalk, RightStridesHaveNoFinding) {
  const CheckResult r = Recorded(kHeads * kHead, kHeads, 24);
  EXPECT_TRUE(r.findings.empty()) << r.findings[0].name;
  EXPECT_EQ(r.coverage.results_judged, 2U);
}

// [T, H, d] taken for [T H, d]: the stride before the last is that of the heads.
TEST(RopeWalk, StrideOfHeadsTakenForRowsIsNamedWithBothStrides) {
  const CheckResult r = Recorded(kHead, 1, 24);
  ASSERT_EQ(r.findings.size(), 1U);
  EXPECT_EQ(r.findings[0].name, "layers.0.attn.q_pe");
  EXPECT_EQ(r.findings[0].cls, fault_class::kStride);
  EXPECT_EQ(r.findings[0].constant_value, kHead);
  EXPECT_NE(r.findings[0].constant.find("the tensor's is 36"), std::string::npos) << r.findings[0].constant;
  ASSERT_FALSE(r.findings[0].evidence.empty());
  EXPECT_NE(r.findings[0].evidence[0].find("row 0 head 1 was turned by the position of row 1"), std::string::npos)
      << r.findings[0].evidence[0];
  EXPECT_NE(r.findings[0].evidence[0].find("24 of 36 heads of rows were not turned"), std::string::npos)
      << r.findings[0].evidence[0];
}

TEST(RopeWalk, HeadsOfOverlappingRowsAreTurnedSeveralTimes) {
  const CheckResult r = Recorded(kHead, kHeads, 24, 5);
  ASSERT_EQ(r.findings.size(), 1U);
  EXPECT_EQ(r.findings[0].cls, fault_class::kStride);
  EXPECT_EQ(r.findings[0].constant_value, kHead);
}

// Rows 24 apart stepped through by 8: every third step meets a row.
TEST(RopeWalk, RowsOfAWiderMatrixTakenForGaplessAreNamed) {
  const CheckResult r = Recorded(kHeads * kHead, kHeads, kRope);
  ASSERT_EQ(r.findings.size(), 1U);
  EXPECT_EQ(r.findings[0].name, "layers.0.attn.k_pe");
  EXPECT_EQ(r.findings[0].cls, fault_class::kStride);
  EXPECT_EQ(r.findings[0].constant_value, kRope);
}

// The step of two rows is not turned at all, which a missing rotation would explain as well; the longer one tells.
TEST(RopeWalk, StepTooShortToShowTheStrideIsExplainedByALongerOne) {
  SmallTrace t;
  const uint64_t a = t.Request(std::vector<int64_t>(64, 7)), b = t.Request(std::vector<int64_t>(64, 9));
  const Kernel kernel{.k_stride = kRope};
  RecordStep(&t, 0, {a, 0, 3, 0, false}, kernel);
  RecordStep(&t, 1, {b, 0, kRows, 0, false}, kernel);
  const CheckResult r = Judge(t, {"rotation"});
  ASSERT_EQ(r.findings.size(), 1U);
  EXPECT_EQ(r.findings[0].cls, fault_class::kStride);
  EXPECT_EQ(r.findings[0].constant_value, kRope);
  EXPECT_EQ(r.findings[0].step, 0);  // where it begins
  EXPECT_EQ(r.findings[0].request, a);
  EXPECT_EQ(r.findings[0].positions, (std::vector<std::pair<int64_t, int64_t>>{{1, 2}}));
}

}  // namespace
}  // namespace assay
