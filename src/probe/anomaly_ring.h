// The on-anomaly ring: measured events of the last N steps wait in memory and reach the trace only when something goes
// wrong. Not thread-safe; the recorder holds a lock around it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "trace/event.h"

namespace assay {

struct ProbeSite;

// An event with the copy of its tensor that would become its payload.
struct PendingEvent {
  ProbeSite* site = nullptr;
  Event event;  // site id and payload hash are filled in when it is written
  bool has_payload = false;
  std::vector<std::byte> payload;
  std::vector<int64_t> payload_rows;  // sampled rows; empty: all of the tensor
};

class AnomalyRing {
 public:
  // steps: how many of the newest steps to keep, 0: no ring. memory_cap: bytes held at most, oldest go first.
  AnomalyRing(int64_t steps, uint64_t memory_cap) : steps_(steps), memory_cap_(memory_cap) {}

  // Settings without ASSAY_RING give a ring of 0 steps, which nobody pushes into.
  bool enabled() const { return steps_ > 0; }

  // Takes the event; returns what must be written now, oldest first: nothing, or on an anomaly all that is held and
  // the event itself. Events of the step of the last anomaly, and of older ones, are returned at once.
  // occurrence: how often the event's site has fired, its step when the host gives none.
  std::vector<PendingEvent> Push(PendingEvent event, uint64_t occurrence, bool anomaly);
  // All that is held; the rest of the current step will be returned at once.
  std::vector<PendingEvent> Trigger();
  // In a forked child, and at Close: what is held belongs to the parent, or to a run in which nothing went wrong.
  void Clear();

  // Anomalies seen and calls of Trigger.
  uint64_t triggers() const { return triggers_; }
  uint64_t evicted() const { return evicted_; }  // of the last N steps, for want of memory
  size_t size() const { return held_.size(); }

 private:
  // step: the event's own, or what stands in for it (Push); size_bytes: as counted in held_bytes_.
  struct Held {
    int64_t step;
    uint64_t size_bytes;
    PendingEvent event;
  };
  // Empties the ring; oldest first.
  std::vector<PendingEvent> TakeAll();
  void DropOldest();

  int64_t steps_;
  uint64_t memory_cap_;
  uint64_t held_bytes_ = 0;
  // From the first event with a step on, events without one belong to the newest step; before, they count by
  // occurrence.
  bool host_has_steps_ = false;
  // Largest step seen. Ranks recorded by one process may interleave; a step behind it does not move it back.
  int64_t newest_ = -1;
  int64_t written_through_ = -1;  // last step of the latest anomaly
  uint64_t triggers_ = 0;
  uint64_t evicted_ = 0;
  std::deque<Held> held_;
};

// Memory of an event in the ring, roughly: used against memory_cap alone.
uint64_t ApproximateBytes(const PendingEvent& event);

}  // namespace assay
