// The frame of the checks on one trace. A check is a function over a Capture that says what it looked at: findings,
// results that it judged right, and what it could not judge for want of a recording. One file a check; registry.cpp
// lists them. docs/checks.md describes each.
//
// The frame turns this into findings in the order of execution, consequences left out, and a ledger of hypotheses:
// confirmed, ruled out or not testable.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "capture/capture.h"
#include "finding/finding.h"

namespace assay {

// The rungs of the ladder, in the order in which they are printed.
namespace hypothesis {
inline constexpr std::string_view kWeights = "weights";
inline constexpr std::string_view kAbsorption = "absorption";
inline constexpr std::string_view kQuantised = "quantised layers";
inline constexpr std::string_view kBackend = "autotune and backend";
inline constexpr std::string_view kShapes = "shapes and broadcast";
inline constexpr std::string_view kPadding = "padding";
inline constexpr std::string_view kRope = "rope";
inline constexpr std::string_view kAttention = "attention";
inline constexpr std::string_view kCacheWrite = "cache write";
inline constexpr std::string_view kCacheRead = "cache read";
inline constexpr std::string_view kCacheIds = "slot and block ids";
inline constexpr std::string_view kChunks = "chunked prefill and merge";
inline constexpr std::string_view kOutputBuffer = "output buffer";
inline constexpr std::string_view kGraphs = "captured graphs";
inline constexpr std::string_view kReductions = "reductions and shards";
inline constexpr std::string_view kMoe = "moe";
inline constexpr std::string_view kNorm = "norm";
inline constexpr std::string_view kLinear = "linear layers";
inline constexpr std::string_view kResidual = "residual stream";
inline constexpr std::string_view kRange = "range";
inline constexpr std::string_view kLogits = "logits";
inline constexpr std::string_view kSampling = "sampling";
inline constexpr std::string_view kSpeculation = "speculation";
}  // namespace hypothesis
std::span<const std::string_view> AllHypotheses();

enum class CheckState : uint8_t { kConfirmed, kRuledOut, kNotTestable };
std::string_view NameOf(CheckState state);  // "confirmed", "ruled out", "not testable"

struct LedgerEntry {
  std::string hypothesis;
  CheckState state = CheckState::kNotTestable;
  std::vector<std::string> evidence;  // one line a check, with numbers
  std::string capture;                // what to record, when something was missing
  // Results that the hypothesis was held against, and those that could not be judged: ruled out speaks of the former.
  uint64_t judged = 0, not_judged = 0;
};

// Something wrong that a check saw.
struct Suspicion {
  EventId event = kNoEvent;  // where; gives name, layer, step and rank when `bad` leaves them open
  FirstBad bad;              // cls, positions, heads, constant, measured, bound, evidence … filled by the check
  // Judged from recorded operands (an oracle, an invariant of the call): wrong whatever came before. false: a symptom,
  // which is a consequence when something earlier is wrong.
  bool local = true;
  std::string_view hypothesis = {};  // that it confirms, when not the check's own
  // Which of two verdicts on the same tensor is printed: the higher one. 0 symptom, 1 not equal to the oracle, 2 an
  // explanation fits, 3 the explanation that also excludes its neighbours.
  int rank = 1;
};

// What one check writes to while it runs.
class CheckReport {
 public:
  void Found(Suspicion suspicion) { found_.push_back(std::move(suspicion)); }
  // One result was judged and is right. measured/bound: relative distance from the right value and what is allowed
  // (0, 0 for exact rules); the worst share of the bound stands in the evidence.
  void Right(EventId event, double measured = 0, double bound = 0);
  // Results (one, if not said) that could not be judged: why, and what to record.
  void Missing(std::string why, std::string capture, uint64_t results = 1);
  // A result was judged by some of its rows: which. The first one stands in the evidence, with the number of others.
  void Sampled(std::string which);
  // So many results speak against another hypothesis than the check's own. The line says how, in the evidence of both.
  void Speaks(std::string_view against, uint64_t n, std::string line) {
    notes_.push_back(line);
    spoken_.push_back({against, n, std::move(line)});
  }
  // A line for the evidence of the hypothesis ("largest exponent 7 of 8").
  void Note(std::string line) { notes_.push_back(std::move(line)); }

  const std::vector<Suspicion>& found() const { return found_; }
  uint64_t n_right() const { return n_right_; }

 private:
  friend class Assembly;
  std::vector<Suspicion> found_;    // in the order of reporting
  uint64_t n_right_ = 0;            // results judged right
  EventId worst_event_ = kNoEvent;  // the right result nearest to its bound
  double worst_share_ = 0, worst_measured_ = 0, worst_bound_ = 0;
  std::string missing_why_, missing_capture_;  // the first of them
  uint64_t n_missing_ = 0;                     // results that could not be judged
  std::string sampled_;
  uint64_t n_sampled_ = 0;
  std::vector<std::string> notes_;
  struct Spoken {
    std::string_view against;  // hypothesis
    uint64_t n;
    std::string line;
  };
  std::vector<Spoken> spoken_;
};

// A check that needs statistics alone. All of them share one pass over the events: Segment() is called for each segment
// in the order of recording, then Finish() once. Looks "before" an operation (audit=before) and events of the phases
// warm-up, dummy, capture and load are left out. Keep per-event work small: a trace may have millions of them.
class ScanCheck {
 public:
  struct Item {
    EventId id = kNoEvent;
    const EventView* view = nullptr;
    uint32_t site = 0;  // index into Trace::site_names()
    int32_t index = 0;  // of the segment in its event
    bool last = false;  // last segment of the event
    const SegmentSummary* segment = nullptr;
    std::string_view audit;  // metadata `audit` of the event
  };
  virtual ~ScanCheck() = default;
  // Sites that the check wants to see; asked once a site.
  virtual bool Wants(const SiteName& site, std::string_view name) = 0;
  virtual void Segment(const Item& item) = 0;
  virtual void Finish(const Capture& capture, CheckReport* report) = 0;
};

struct CheckDef {
  std::string_view name;        // "nonfinite"
  std::string_view hypothesis;  // one of hypothesis::
  std::string_view what;        // one line: what holds when the check passes
  std::string_view needs;       // what has to be recorded, for `not testable`
  // One of the two.
  void (*run)(const Capture& capture, CheckReport* report) = nullptr;
  std::unique_ptr<ScanCheck> (*scan)() = nullptr;
};
std::span<const CheckDef> AllChecks();

struct CheckOptions {
  std::vector<std::string> only = {};  // names of checks; empty: all
  std::vector<std::string> skip = {};
};

// Counts of what the trace held and of what became of it; results_* are summed over the checks.
struct CheckCoverage {
  uint64_t events = 0, sites = 0, processes = 0, payloads = 0, damages = 0, dropped = 0;
  uint64_t checks_run = 0, results_judged = 0, results_not_judged = 0;
};

struct CheckResult {
  std::vector<FirstBad> findings;      // in order of execution, consequences left out; findings[0] is first_bad
  std::vector<FirstBad> consequences;  // symptoms behind an earlier finding
  std::vector<LedgerEntry> ledger;     // one a hypothesis that a check exists for, in the order of AllHypotheses
  CheckCoverage coverage;
};

// kUsage: an unknown check in the options.
Result<CheckResult> RunChecks(const Capture& capture, const CheckOptions& options);

}  // namespace assay
