#include <gtest/gtest.h>

#include "probe/anomaly_ring.h"

namespace assay {
namespace {

PendingEvent At(int64_t step, uint64_t sequence) {
  PendingEvent pending;
  pending.event.step = step;
  pending.event.sequence = sequence;
  return pending;
}

std::vector<uint64_t> Sequences(const std::vector<PendingEvent>& events) {
  std::vector<uint64_t> out;
  for (const PendingEvent& e : events) out.push_back(e.event.sequence);
  return out;
}

// Two steps are kept; when step 10 shows an anomaly, 9 and 10 are written, and what step 10 still brings.
TEST(AnomalyRing, AnomalyYieldsTheLastStepsAndTheRestOfItsOwn) {
  AnomalyRing ring(2, uint64_t{1} << 30);
  for (int64_t step = 0; step < 10; ++step) {
    EXPECT_TRUE(ring.Push(At(step, static_cast<uint64_t>(step) * 10), 0, false).empty());
    EXPECT_TRUE(ring.Push(At(step, static_cast<uint64_t>(step) * 10 + 1), 0, false).empty());
  }
  // Step 10 begins: steps 9 and 10 are kept.
  EXPECT_TRUE(ring.Push(At(10, 100), 0, false).empty());
  EXPECT_EQ(Sequences(ring.Push(At(10, 101), 0, true)), (std::vector<uint64_t>{90, 91, 100, 101}));
  EXPECT_EQ(Sequences(ring.Push(At(10, 102), 0, false)), (std::vector<uint64_t>{102}));
  EXPECT_TRUE(ring.Push(At(11, 110), 0, false).empty());
  EXPECT_EQ(ring.triggers(), 1u);
}

// Hosts that know no steps: each time the site fires is one.
TEST(AnomalyRing, WithoutStepsTheOccurrenceOfTheSiteIsTheStep) {
  AnomalyRing ring(3, uint64_t{1} << 30);
  for (uint64_t i = 0; i < 100; ++i) ring.Push(At(-1, i), i, false);
  EXPECT_EQ(Sequences(ring.Trigger()), (std::vector<uint64_t>{97, 98, 99}));
}

// Payloads count: five events, room for two.
TEST(AnomalyRing, MemoryCapEvictsTheOldestAndCountsThem) {
  PendingEvent big = At(0, 1);
  big.payload.resize(1000);
  AnomalyRing ring(5, 2 * ApproximateBytes(big));
  for (uint64_t i = 1; i <= 5; ++i) {
    big.event.sequence = i;
    ring.Push(big, 0, false);
  }
  EXPECT_EQ(ring.size(), 2u);
  EXPECT_EQ(ring.evicted(), 3u);
  EXPECT_EQ(Sequences(ring.Trigger()), (std::vector<uint64_t>{4, 5}));
}

TEST(AnomalyRing, ZeroStepsIsNoRing) { EXPECT_FALSE(AnomalyRing(0, 100).enabled()); }

}  // namespace
}  // namespace assay
