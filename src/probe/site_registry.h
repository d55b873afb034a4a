// The sites that one recorder has met: names, what the filters say about each, how often each fired. Filters run once
// a site, so a record costs one look-up, or none with a handle.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "probe/settings.h"
#include "trace/event.h"

namespace assay {

// What "T H d" says: how many axes, and the places of T and H (-1: none).
struct AxesText {
  int count = 0;
  int row_axis = -1;
  int head_axis = -1;
};
// Names separated by spaces; the first T and the first H count.
AxesText ReadAxes(std::string_view axes);

// Everything but the counters and writer_id is written once, before the registry publishes the site, so reading it
// needs no lock.
struct ProbeSite {
  uint32_t number = 0;  // in its registry, from 0
  std::string name;     // canonical or the engine's own
  std::string engine_name;
  std::string axes;                // as given, or the canonical table's; empty when neither knows
  bool axes_given = false;         // by the caller: then its number of axes must be the tensor's rank
  int n_axes = 0;                  // names in axes
  int row_axis = -1;               // place of "T" in axes
  int head_axis = -1;              // place of "H"
  bool wanted = false;             // include, exclude and layers; ranks and steps are the event's
  bool token_ids = false;          // the tensor holds token ids: content
  bool minus_inf_is_fine = false;  // log-sum-exp of nothing is -inf: no anomaly

  // recorded: written, printed or put into the ring. What the ring cannot write later, or a payload beyond its
  // budget, counts as dropped.
  std::atomic<uint64_t> recorded{0};
  std::atomic<uint64_t> skipped{0};  // turned away by a filter
  std::atomic<uint64_t> dropped{0};
  // Id in the trace file plus 1, 0: not written yet. A child's file gets the same sites from the writer.
  std::atomic<uint64_t> writer_id{0};
};

class SiteRegistry {
 public:
  explicit SiteRegistry(const Settings& settings) : settings_(settings) {}

  // May throw std::bad_alloc; the registry stays as it was. Thread-safe. Pointers stay valid.
  ProbeSite* Find(std::string_view name, std::string_view engine_name, std::string_view axes);

  // Whether the filters let a name through that nobody has described yet; remembered, for Coverage too. May throw
  // std::bad_alloc.
  bool Wants(std::string_view name);
  ProbeSite* At(uint32_t number) const;  // nullptr beyond the last

  // Remembers the first reason for which an observation of the site was lost.
  void CountDrop(ProbeSite* site, const std::string& reason);

  // Patterns that matched nothing, sites that never fired, were skipped or lost observations. *not_found: number of
  // include patterns without any site.
  std::vector<CoverageNote> Coverage(int* not_found) const;

  // fork(): the child owns no lock that another thread of its parent held.
  void LockForFork() { mutex_.lock(); }
  void UnlockInParent() { mutex_.unlock(); }
  void ResetInChild();

 private:
  // The recorder's own, which outlives the registry.
  const Settings& settings_;
  mutable std::shared_mutex mutex_;
  std::deque<ProbeSite> sites_;                               // never moves an element
  std::unordered_map<std::string_view, ProbeSite*> by_name_;  // keys are ProbeSite::name
  // Names that Wants was asked about and Find was not, with the answer. A site must not be made of them: its first
  // description brings the engine's name and the axes.
  std::map<std::string, bool, std::less<>> asked_;
  // First reason of each site that lost something; under mutex_.
  std::unordered_map<const ProbeSite*, std::string> drop_reasons_;
};

}  // namespace assay
