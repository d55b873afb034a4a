#include "check/check.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <set>

#include "check/assembly.h"

namespace assay {
namespace {

// In the order of the ladder, from what is loaded to what comes out.
constexpr std::array kHypotheses = {
    hypothesis::kWeights,      hypothesis::kAbsorption, hypothesis::kQuantised,  hypothesis::kBackend,
    hypothesis::kShapes,       hypothesis::kPadding,    hypothesis::kRope,       hypothesis::kAttention,
    hypothesis::kCacheWrite,   hypothesis::kCacheRead,  hypothesis::kCacheIds,   hypothesis::kChunks,
    hypothesis::kOutputBuffer, hypothesis::kGraphs,     hypothesis::kReductions, hypothesis::kMoe,
    hypothesis::kNorm,         hypothesis::kLinear,     hypothesis::kResidual,   hypothesis::kRange,
    hypothesis::kLogits,       hypothesis::kSampling,   hypothesis::kSpeculation};

bool Contains(const std::vector<std::string>& list, std::string_view name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

// Values of these phases are computed from made-up inputs.
bool IsReal(Phase phase) {
  return phase != Phase::kWarmup && phase != Phase::kDummy && phase != Phase::kCapture && phase != Phase::kLoad;
}

// A fresh check with its state of this pass.
struct RunningScan {
  size_t check = 0;  // index into the checks selected
  std::unique_ptr<ScanCheck> scan;
};

// The one pass over all segments for all checks that need statistics alone.
// Sites are asked about once, so that an event of a site that nobody wants costs one look-up.
void Scan(const Trace& trace, const std::vector<RunningScan>& scans) {
  if (scans.empty()) return;
  const std::vector<std::string>& names = trace.site_names();
  std::vector<std::vector<ScanCheck*>> wanting(names.size());
  for (size_t site = 0; site < names.size(); ++site) {
    const SiteName parsed = ParseSiteName(names[site]);
    for (const RunningScan& s : scans) {
      if (s.scan->Wants(parsed, names[site])) wanting[site].push_back(s.scan.get());
    }
  }
  const uint64_t n = trace.event_count();
  for (EventId id = 0; id < n; ++id) {
    const EventView view = trace.event(id);
    const std::vector<ScanCheck*>& checks = wanting[view.global_site()];
    if (checks.empty() || !IsReal(view.phase())) continue;
    const std::string_view audit = view.meta("audit");
    if (audit == "before") continue;
    const int32_t n_segments = view.n_segments();
    for (int32_t i = 0; i < n_segments; ++i) {
      const SegmentSummary segment = view.segment(i);
      const ScanCheck::Item item{id, &view, view.global_site(), i, i + 1 == n_segments, &segment, audit};
      for (ScanCheck* check : checks) check->Segment(item);
    }
  }
}

}  // namespace

std::span<const std::string_view> AllHypotheses() { return kHypotheses; }

std::string_view NameOf(CheckState state) {
  switch (state) {
    case CheckState::kConfirmed:
      return "confirmed";
    case CheckState::kRuledOut:
      return "ruled out";
    case CheckState::kNotTestable:
      break;
  }
  return "not testable";
}

// Of all right results the one nearest to its bound is kept: how much room the checks had.
void CheckReport::Right(EventId event, double measured, double bound) {
  ++n_right_;
  const double share = bound > 0 ? measured / bound : 0;
  if (share > worst_share_) {
    worst_share_ = share;
    worst_measured_ = measured;
    worst_bound_ = bound;
    worst_event_ = event;
  }
}

void CheckReport::Missing(std::string why, std::string capture, uint64_t results) {
  const bool first = n_missing_ == 0;
  n_missing_ += results;
  if (!first) return;
  missing_why_ = std::move(why);
  missing_capture_ = std::move(capture);
}

void CheckReport::Sampled(std::string which) {
  if (n_sampled_++ == 0) sampled_ = std::move(which);
}

// Statistics first, in one pass, then the checks that load values. The order does not matter for the result: Assembly
// puts findings in order of execution.
Result<CheckResult> RunChecks(const Capture& capture, const CheckOptions& options) {
  std::vector<const CheckDef*> selected;
  std::set<std::string_view> known;
  for (const CheckDef& def : AllChecks()) {
    known.insert(def.name);
    const bool wanted = options.only.empty() || Contains(options.only, def.name);
    if (wanted && !Contains(options.skip, def.name)) selected.push_back(&def);
  }
  for (const auto* list : {&options.only, &options.skip}) {
    for (const std::string& name : *list) {
      if (!known.contains(name)) {
        return Status::Usage("there is no check \"" + name + "\": `assay check --list` prints all of them");
      }
    }
  }

  std::vector<CheckReport> reports(selected.size());
  std::vector<RunningScan> scans;
  for (size_t i = 0; i < selected.size(); ++i) {
    if (selected[i]->scan != nullptr) scans.push_back({i, selected[i]->scan()});
  }
  Scan(capture.trace(), scans);
  for (const RunningScan& s : scans) s.scan->Finish(capture, &reports[s.check]);
  for (size_t i = 0; i < selected.size(); ++i) {
    if (selected[i]->run != nullptr) selected[i]->run(capture, &reports[i]);
  }
  return Assembly(capture, selected, reports).Result();
}

}  // namespace assay
