// Inside of Capture: events by site and step, and what has been decoded already.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "capture/capture.h"

namespace assay {

// Keeps the values used last, up to `limit` units of cost; a value above the limit is kept alone.
template <class T>
class LruCache {
 public:
  explicit LruCache(uint64_t limit) : limit_(limit) {}

  // nullptr when it is not there; valid until the next Put.
  const T* Find(EventId id) {
    const auto found = where_.find(id);
    if (found == where_.end()) return nullptr;
    entries_.splice(entries_.begin(), entries_, found->second);
    return &found->second->value;
  }
  // REQUIRES: id is not there. Drops the values that were used longest ago until the new one fits.
  void Put(EventId id, T value, uint64_t cost) {
    while (!entries_.empty() && used_ + cost > limit_) {
      used_ -= entries_.back().cost;
      where_.erase(entries_.back().id);
      entries_.pop_back();
    }
    entries_.push_front({id, std::move(value), cost});
    where_[id] = entries_.begin();
    used_ += cost;
  }

 private:
  struct Entry {
    EventId id;
    T value;
    uint64_t cost;
  };
  uint64_t limit_;
  uint64_t used_ = 0;
  std::list<Entry> entries_;
  std::unordered_map<EventId, typename std::list<Entry>::iterator> where_;
};

struct Capture::Index {
  // One pass over the trace's events; the trace must outlive the index.
  explicit Index(const Trace& trace);
  // Order of execution: inside a process as recorded, between processes by step and number in the step.
  bool Earlier(const Trace& trace, EventId a, EventId b) const;
  // Events of a site in one step, in order of execution.
  std::span<const EventId> OfStep(const Trace& trace, uint32_t site, int64_t step) const;

  std::vector<SiteName> sites;                           // by global site number
  std::map<std::string, uint32_t, std::less<>> site_of;  // canonical name to global site number
  std::map<std::string, std::vector<uint32_t>> by_stem;  // name without the layer: its sites
  std::vector<std::vector<EventId>> events;              // by site, in order of execution
  mutable std::vector<std::vector<EventId>> by_step;     // the same, sorted by step, made when first asked for
  std::vector<std::pair<int64_t, uint32_t>> order;       // several processes: step, number in process and step
  std::map<uint64_t, const RequestInfo*> requests;       // by key; the first process that announced it
  uint64_t payloads = 0;                                 // events that have one
  std::set<int32_t> ranks;                               // that events name

  mutable LruCache<std::shared_ptr<const EventInfo>> infos{4096};
  mutable LruCache<TensorPtr> tensors{kCacheBytes};
};

// Metadata `repeat` of an event, -1 without.
int64_t RepeatOf(const EventView& view);

}  // namespace assay
