// A step of prefill and decode: the decoded row alone goes through the latent space.
#include <gtest/gtest.h>

#include "check/check.h"
#include "small_trace.h"
#include "verdicts.h"

namespace assay {
namespace {

using testing::Judge;
using testing::Noise;
using testing::SmallTrace;

constexpr size_t kHeads = 2, kNope = 3, kLatent = 4;

// Rows 0 to 2 are a prompt, row 3 is decoded and stands at position 5. The latent is that of `row` of the queries.
CheckResult Recorded(size_t row) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3}), b = t.Request({4, 5, 6, 7, 8});
  const std::vector<float> q = Noise(4 * kHeads * kNope, 1), w = Noise(kHeads * kNope * kLatent, 2);
  std::vector<float> latent;
  for (size_t h = 0; h < kHeads; ++h) {
    for (size_t c = 0; c < kLatent; ++c) {
      double sum = 0;
      for (size_t d = 0; d < kNope; ++d)
        sum += double{q[(row * kHeads + h) * kNope + d]} * double{w[(h * kNope + d) * kLatent + c]};
      latent.push_back(static_cast<float>(sum));
    }
  }
  t.Record("layers.0.attn.W_UK_T", "H d c", {kHeads, kNope, kLatent}, w, {.step = -1, .phase = Phase::kLoad});
  t.Record("layers.0.attn.q_nope", "T H dn", {4, kHeads, kNope}, q,
           {.rows = {{a, 0, 3, 0, false}, {b, 3, 1, 5, false}}, .phase = Phase::kMixed});
  t.Record("layers.0.attn.q_latent", "T H c", {1, kHeads, kLatent}, latent,
           {.rows = {{b, 0, 1, 5, false}}, .phase = Phase::kMixed});
  return Judge(t, {"absorption"});
}

TEST(AbsorbedRows, TheDecodedRowIsJudgedByItsOwnQuery) {
  const CheckResult r = Recorded(3);
  EXPECT_TRUE(r.findings.empty()) << r.findings[0].evidence[0];
  EXPECT_EQ(r.coverage.results_judged, 1U);
}

TEST(AbsorbedRows, TheLatentOfAnotherRowIsFound) {
  const CheckResult r = Recorded(0);
  ASSERT_EQ(r.findings.size(), 1U);
  EXPECT_EQ(r.findings[0].name, "layers.0.attn.q_latent");
  EXPECT_EQ(r.findings[0].positions, (std::vector<std::pair<int64_t, int64_t>>{{5, 5}}));
}

}  // namespace
}  // namespace assay
