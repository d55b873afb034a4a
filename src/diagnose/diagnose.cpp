#include "diagnose/diagnose.h"

#include <algorithm>

namespace assay {
namespace {

// Both names of one attention call: its output and its log-sum-exp.
std::string CallOf(std::string name) {
  if (name.ends_with(".lse")) name.replace(name.size() - 4, 4, ".out");
  return name;
}

// The step of a goes before that of b, or the site does within one step.
bool IsEarlier(const Capture& capture, const FirstBad& a, const FirstBad& b) {
  // An event that the finding speaks of: of its site, in its step where it names one.
  const auto first = [&](const FirstBad& f) {
    for (const EventId id : capture.EventsOf(f.name)) {
      if (f.step < 0 || capture.trace().event(id).step() == f.step) return id;
    }
    return kNoEvent;
  };
  const EventId x = first(a), y = first(b);
  return x != kNoEvent && y != kNoEvent && capture.Earlier(x, y);
}

// Whether the first finding of the checks goes before the place where the runs part, on a tensor that the comparison
// left out (slots, block tables, pools, audited buffers), and the checks on the trusted run find nothing of its kind.
bool IsOwnFault(const Trace& trusted, const Capture& capture, const Diagnosis& d, const DiffResult& diff) {
  if (d.findings.empty()) return false;
  const FirstBad& own = d.findings[0];
  FirstBad parted = diff.findings[0];
  // Rows read from a cache are recorded in every step, and the comparison knows them by their positions: the step of
  // the first of them says nothing of the one that was wrong.
  if (parted.name.ends_with("_read")) {
    const auto same = [&](const FirstBad& f) { return f.name == parted.name; };
    const auto seen = std::find_if(d.findings.begin(), d.findings.end(), same);
    if (seen != d.findings.end()) parted.step = std::max(parted.step, seen->step);
  }
  const auto compared = [&](const SiteComparison& site) { return site.rows > 0 && site.name == own.name; };
  if (CallOf(own.name) == CallOf(parted.name) || !IsEarlier(capture, own, parted) ||
      std::any_of(diff.sites.begin(), diff.sites.end(), compared)) {
    return false;
  }
  const auto before = RunChecks(Capture(trusted), {});
  if (!before.ok()) return false;
  const auto same = [&](const FirstBad& f) { return f.name == own.name && f.cls == own.cls; };
  return std::none_of(before->findings.begin(), before->findings.end(), same) &&
         std::none_of(before->consequences.begin(), before->consequences.end(), same);
}

// judged: at least one hypothesis could be decided, either way.
Result<Diagnosis> FromChecks(const Capture& capture) {
  ASSAY_ASSIGN_OR_RETURN(CheckResult checked, RunChecks(capture, {}));
  Diagnosis d;
  d.findings = std::move(checked.findings);
  d.consequences = std::move(checked.consequences);
  d.ledger = std::move(checked.ledger);
  d.coverage = checked.coverage;
  d.judged = !d.findings.empty() || std::any_of(d.ledger.begin(), d.ledger.end(), [](const LedgerEntry& e) {
    return e.state != CheckState::kNotTestable;
  });
  return d;
}

}  // namespace

Result<Diagnosis> Diagnose(const Trace& trace) { return FromChecks(Capture(trace)); }

Result<Diagnosis> Diagnose(const Trace& a, const Trace& b) {
  ASSAY_ASSIGN_OR_RETURN(DiffResult diff, Diff(a, b, {}));
  const Capture capture(b);
  ASSAY_ASSIGN_OR_RETURN(Diagnosis d, FromChecks(capture));
  d.compared = true;
  d.comparison = diff.verdict;
  d.comparison_summary = diff.summary;
  d.judged = d.judged || diff.verdict != Verdict::kIncomparable;
  if (diff.verdict != Verdict::kFault || diff.findings.empty()) return d;

  // Where the runs part. What the checks found there says what it is; without that the comparison's own finding stands.
  const FirstBad& parted = diff.findings[0];
  if (IsOwnFault(a, capture, d, diff)) {
    d.findings[0].evidence.push_back("the runs part behind this, at " + parted.name + ": " + diff.summary);
    return d;
  }
  const auto named = std::find_if(d.findings.begin(), d.findings.end(),
                                  [&](const FirstBad& f) { return CallOf(f.name) == CallOf(parted.name); });
  if (named != d.findings.end()) {
    named->evidence.push_back("the runs part here: " + diff.summary);
    std::rotate(d.findings.begin(), named, named + 1);
    return d;
  }
  const std::string line = "the runs part at " + parted.name + ": " + diff.summary;
  if (d.findings.empty() || IsEarlier(capture, parted, d.findings[0])) {
    // Where nothing was found by itself the difference is the root; what is wrong behind it may be another fault.
    d.findings.insert(d.findings.begin(), parted);
  } else {
    // An operation that is wrong by itself is the root of a difference behind it.
    d.findings[0].evidence.push_back(line);
    d.consequences.push_back(parted);
  }
  return d;
}

}  // namespace assay
