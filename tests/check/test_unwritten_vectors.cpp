// Audited buffers of one element a row, where no vector tells what was not written.
#include <gtest/gtest.h>

#include "small_trace.h"
#include "verdicts.h"

namespace assay {
namespace {

using testing::Judge;
using testing::Noise;
using testing::SmallTrace;
using Values = std::vector<float>;
using Meta = std::vector<std::pair<std::string_view, std::string_view>>;

constexpr int64_t kRows = 12;

CheckResult Audited(const Values& before, const Values& after, bool poison = false) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3});
  const std::vector<RowRun> rows = {{a, 0, kRows, 0, false}};
  Meta look = {{"audit", "before"}};
  if (poison) look.push_back({"poison", "0x429a0000"});
  t.Record("layers.0.mlp.act.q_scale", "T one", {kRows, 1}, before, {.rows = rows, .meta = look});
  t.Record("layers.0.mlp.act.q_scale", "T one", {kRows, 1}, after, {.rows = rows, .meta = {{"audit", "after"}}});
  return Judge(t, {"unwritten"});
}
Values Scales() {
  Values s = Noise(kRows, 5);
  for (float& x : s) x = 0.02f + 0.01f * x;
  return s;
}

TEST(UnwrittenVectors, TailThatKeptAFillIsNamedThoughNobodySaidSo) {
  Values after = Scales();
  for (size_t i = 9; i < kRows; ++i) after[i] = 77;
  for (const bool poison : {true, false}) {
    const CheckResult r = Audited(Values(kRows, 77.0f), after, poison);
    EXPECT_FIRST(r, "layers.0.mlp.act.q_scale", "UNWRITTEN");
    EXPECT_EQ(r.findings[0].constant_value, 9);
  }
  EXPECT_RULED_OUT(Audited(Values(kRows, 77.0f), Scales()));
}
// A least scale that many rows have comes out again, and nothing tells it from a row that was left out: said, not
// judged.
TEST(UnwrittenVectors, LeastScaleThatComesOutAgainIsNotTestable) {
  Values after = Scales();
  for (size_t i = 9; i < kRows; ++i) after[i] = 0.001f;
  const CheckResult r = Audited(Values(kRows, 0.001f), after);
  EXPECT_TRUE(r.findings.empty());
  ASSERT_EQ(r.ledger.size(), 1u);
  EXPECT_EQ(r.ledger[0].state, CheckState::kNotTestable);
}

}  // namespace
}  // namespace assay
