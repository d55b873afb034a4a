// Which finding comes first where two recordings are diagnosed: that of the comparison, or of the checks on what the
// comparison leaves out.
#include <gtest/gtest.h>

#include "check/small_trace.h"
#include "diagnose/diagnose.h"

namespace assay {
namespace {

using testing::Noise;
using testing::SmallTrace;

// A step whose slots may be given twice, and whose attention may give something else behind them.
// The recording lies on disk as long as this lives.
struct Step {
  SmallTrace t;
  std::unique_ptr<Capture> capture;
  Step(int64_t last_slot, uint64_t seed_of_out) {
    const uint64_t a = t.Request({1, 2, 3}), b = t.Request({4, 5});
    const std::vector<RowRun> rows = {{a, 0, 3, 0, false}, {b, 3, 2, 0, false}};
    t.Record<int64_t>("slot_mapping", "T", {5}, {2, 3, 6, 4, last_slot}, {.rows = rows});
    t.Record<int64_t>("block_table", "T n", {2, 2}, {1, 3, 2, -1},
                      {.rows = {{a, 0, 1, 2, false}, {b, 1, 1, 1, false}}, .meta = {{"block_size", "2"}}});
    t.Record("layers.0.attn.q", "T H d", {5, 2, 8}, Noise(80, 1), {.rows = rows});
    t.Record("layers.0.attn.out", "T H dv", {5, 2, 8}, Noise(80, seed_of_out), {.rows = rows});
    capture = t.Open();
  }
};
Diagnosis Of(const Step& a, const Step& b) {
  auto d = Diagnose(a.capture->trace(), b.capture->trace());
  EXPECT_TRUE(d.ok()) << d.status().message();
  return std::move(d).value();
}

TEST(TwoTraces, FaultOfATensorThatIsNotComparedGoesBeforeWhatFollowsFromIt) {
  const Step clean(5, 7), faulty(2, 8);
  const Diagnosis d = Of(clean, faulty);
  ASSERT_FALSE(d.findings.empty());
  EXPECT_EQ(d.findings[0].name, "slot_mapping");
  EXPECT_EQ(d.findings[0].cls, "KV-IDENT");
}
TEST(TwoTraces, PlaceWhereTheyPartComesFirstWithoutOne) {
  const Step clean(5, 7), faulty(5, 8);
  const Diagnosis d = Of(clean, faulty);
  ASSERT_FALSE(d.findings.empty());
  EXPECT_EQ(d.findings[0].name, "layers.0.attn.out");
}
// Seen by the checks on either run, so it is not what the runs part by.
TEST(TwoTraces, FaultOfBothRunsIsNotWhatTheyPartBy) {
  const Step clean(2, 7), faulty(2, 8);
  const Diagnosis d = Of(clean, faulty);
  ASSERT_FALSE(d.findings.empty());
  const auto says = [](const FirstBad& f, const std::string& what) {
    for (const std::string& line : f.evidence) {
      if (line.find(what) != std::string::npos) return true;
    }
    return false;
  };
  EXPECT_FALSE(says(d.findings[0], "part behind this"));
}

}  // namespace
}  // namespace assay
