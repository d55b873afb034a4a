#include "probe/anomaly_ring.h"

#include <algorithm>

namespace assay {

// Allocators' own overhead is left out; it is some 16 bytes for each vector and text.
uint64_t ApproximateBytes(const PendingEvent& event) {
  uint64_t bytes = sizeof(PendingEvent) + event.payload.size() + event.payload_rows.size() * sizeof(int64_t);
  bytes += (event.event.shape.size() + event.event.strides.size()) * sizeof(int64_t);
  for (const auto& [key, value] : event.event.meta) bytes += sizeof(key) + sizeof(value) + key.size() + value.size();
  for (const Segment& s : event.event.segments) {
    bytes += sizeof(Segment) + s.stats.histogram.size() * sizeof(ExponentBin) + s.rows.size() * sizeof(RowCell) +
             s.heads.size() * sizeof(HeadCell);
  }
  return bytes;
}

std::vector<PendingEvent> AnomalyRing::TakeAll() {
  std::vector<PendingEvent> out;
  out.reserve(held_.size() + 1);
  for (Held& held : held_) out.push_back(std::move(held.event));
  held_.clear();
  held_bytes_ = 0;
  return out;
}

// REQUIRES: something is held.
void AnomalyRing::DropOldest() {
  held_bytes_ -= held_.front().size_bytes;
  held_.pop_front();
}

// A step leaves the window as soon as one arrives that is steps_ further on; held_ is in order of arrival, so a late
// event of an old step stays until those before it have gone.
std::vector<PendingEvent> AnomalyRing::Push(PendingEvent event, uint64_t occurrence, bool anomaly) {
  int64_t step = event.event.step;
  if (step >= 0) {
    host_has_steps_ = true;
  } else {
    step = host_has_steps_ ? newest_ : static_cast<int64_t>(occurrence);
  }
  newest_ = std::max(newest_, step);
  while (!held_.empty() && held_.front().step <= newest_ - steps_) DropOldest();
  if (anomaly) {
    ++triggers_;
    written_through_ = std::max(written_through_, step);
    std::vector<PendingEvent> out = TakeAll();
    out.push_back(std::move(event));
    return out;
  }
  // The rest of the step in which something went wrong: it belongs to the picture and is written as it comes.
  if (step <= written_through_) {
    std::vector<PendingEvent> out;
    out.push_back(std::move(event));
    return out;
  }
  const uint64_t size_bytes = ApproximateBytes(event);
  held_.push_back({step, size_bytes, std::move(event)});
  held_bytes_ += size_bytes;
  // An event larger than the whole cap goes at once, and is counted like the others.
  while (!held_.empty() && held_bytes_ > memory_cap_) {
    DropOldest();
    ++evicted_;
  }
  return {};
}

// Called by a host that saw something itself: events of the newest step are written as after an anomaly.
std::vector<PendingEvent> AnomalyRing::Trigger() {
  ++triggers_;
  written_through_ = std::max(written_through_, newest_);
  return TakeAll();
}

void AnomalyRing::Clear() {
  held_.clear();
  held_bytes_ = 0;
}

}  // namespace assay
