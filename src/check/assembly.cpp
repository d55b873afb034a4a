#include "check/assembly.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>

namespace assay {
namespace {

// Lines a finding: what is beyond them is in the other findings of the same site.
constexpr size_t kMaxEvidence = 12;

// Hypotheses that have no check of their own: whose right results speak against them, or what would.
struct Implied {
  std::string_view hypothesis;
  std::array<std::string_view, 2> checks;
  std::string_view text, capture;
  bool of_weights;  // a result that no cause was found for may be a weight's fault
};
constexpr Implied kImplied[] = {
    {hypothesis::kPadding,
     {"attention", ""},
     "results follow from the rows of their requests alone",
     "attention with its operands, padding rows marked as padding",
     false},
    {hypothesis::kWeights,
     {"linear", "norms"},
     "results follow from weights as they lie in memory",
     "NAME.weight in phase load beside inputs and results of linear layers and norms; assay weights CHECKPOINT --trace "
     "TRACE for the values",
     true},
};

// One finding for an output and its log-sum-exp.
std::string CallKey(std::string_view name) {
  std::string key(name);
  if (key.ends_with(".lse")) key.replace(key.size() - 4, 4, ".out");
  return key;
}

std::string Short(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", value);
  return text;
}

// Ranges that overlap or touch become one.
void Unite(std::vector<std::pair<int64_t, int64_t>>* ranges) {
  std::sort(ranges->begin(), ranges->end());
  std::vector<std::pair<int64_t, int64_t>> out;
  for (const auto& r : *ranges) {
    if (!out.empty() && r.first <= out.back().second + 1) {
      out.back().second = std::max(out.back().second, r.second);
    } else {
      out.push_back(r);
    }
  }
  *ranges = std::move(out);
}

template <class T>
// Sorted, without repetitions.
void AddAll(const std::vector<T>& from, std::vector<T>* to) {
  to->insert(to->end(), from.begin(), from.end());
  std::sort(to->begin(), to->end());
  to->erase(std::unique(to->begin(), to->end()), to->end());
}

}  // namespace

// All suspicions by the call that they are of, calls in order of execution.
std::vector<Assembly::Call> Assembly::Calls() const {
  std::map<std::string, Call> calls;
  for (size_t i = 0; i < reports_.size(); ++i) {
    for (const Suspicion& s : reports_[i].found()) {
      const std::string name = s.bad.name.empty() && s.event != kNoEvent ? capture_.Info(s.event)->name : s.bad.name;
      Call& call = calls[CallKey(name)];
      call.key = CallKey(name);
      if (call.first == kNoEvent || (s.event != kNoEvent && capture_.Earlier(s.event, call.first)))
        call.first = s.event;
      call.local = call.local || s.local;
      call.said.emplace_back(i, &s);
    }
  }
  std::vector<Call> out;
  for (auto& [key, call] : calls) out.push_back(std::move(call));
  std::sort(out.begin(), out.end(), [&](const Call& a, const Call& b) {
    // What has no event (a weight of the checkpoint) comes before everything that ran.
    if (a.first == kNoEvent || b.first == kNoEvent) return a.first == kNoEvent && b.first != kNoEvent;
    return capture_.Earlier(a.first, b.first);
  });
  return out;
}

// One finding out of everything said of a call: the sharpest verdict gives class and evidence, the earliest event gives
// the place, and what agrees with both adds its rows, heads and ranks.
FirstBad Assembly::Merged(const Call& call) const {
  // A wrong output stands for its log-sum-exp; then the sharper verdict, then the earlier event.
  std::vector<std::pair<size_t, const Suspicion*>> said = call.said;
  const auto is_lse = [&](const Suspicion* s) {
    return (s->bad.name.empty() ? capture_.Info(s->event)->name : s->bad.name).ends_with(".lse");
  };
  std::stable_sort(said.begin(), said.end(), [&](const auto& a, const auto& b) {
    if (is_lse(a.second) != is_lse(b.second)) return !is_lse(a.second);
    if (a.second->rank != b.second->rank) return a.second->rank > b.second->rank;
    if (a.second->event == kNoEvent || b.second->event == kNoEvent) return false;
    return capture_.Earlier(a.second->event, b.second->event);
  });
  const Suspicion& best = *said[0].second;
  FirstBad bad = best.bad;
  // A later event may show the cause more sharply; where it begins is told by the earliest one.
  const Suspicion* earliest = &best;
  for (const auto& [check, s] : said) {
    if (is_lse(s) == is_lse(&best) && s->event != kNoEvent && earliest->event != kNoEvent &&
        capture_.Earlier(s->event, earliest->event))
      earliest = s;
  }
  if (earliest != &best && earliest->local) {
    bad.request = earliest->bad.request;
    bad.positions = earliest->bad.positions;
    bad.heads = earliest->bad.heads;
    bad.ranks = earliest->bad.ranks;
    bad.measured = earliest->bad.measured;
    bad.bound = earliest->bad.bound;
    bad.bound_basis = earliest->bad.bound_basis;
  } else {
    earliest = &best;
  }
  if (bad.method.empty()) bad.method = "check: " + std::string(checks_[said[0].first]->name);
  if (best.event != kNoEvent) {
    const auto info = capture_.Info(earliest->event);
    if (bad.name.empty()) bad.name = info->name;
    if (bad.ranks.empty()) bad.ranks = {info->event.rank};
  }
  bad.layer = ParseSiteName(bad.name).layer;
  const EventId first = call.first == kNoEvent ? best.event : call.first;
  if (first != kNoEvent && bad.step < 0) bad.step = capture_.Info(first)->event.step;

  uint64_t elsewhere = 0;
  for (size_t i = 1; i < said.size(); ++i) {
    const Suspicion& s = *said[i].second;
    if (is_lse(&s) != is_lse(&best)) continue;
    const bool same_step = s.event != kNoEvent && earliest->event != kNoEvent &&
                           capture_.trace().event(s.event).step() == capture_.trace().event(earliest->event).step();
    if (s.bad.cls == bad.cls && same_step && s.bad.request == bad.request) {
      AddAll(s.bad.heads, &bad.heads);
      bad.positions.insert(bad.positions.end(), s.bad.positions.begin(), s.bad.positions.end());
      AddAll(s.bad.ranks.empty() ? std::vector<int32_t>{capture_.trace().event(s.event).rank()} : s.bad.ranks,
             &bad.ranks);
    } else {
      ++elsewhere;
    }
    if (said[i].first != said[0].first && bad.evidence.size() < kMaxEvidence) {
      for (const std::string& line : s.bad.evidence) {
        std::string text = std::string(checks_[said[i].first]->name) + ": " + line;
        if (std::find(bad.evidence.begin(), bad.evidence.end(), text) == bad.evidence.end())
          bad.evidence.push_back(std::move(text));
      }
    }
  }
  Unite(&bad.positions);
  if (bad.evidence.size() > kMaxEvidence) bad.evidence.resize(kMaxEvidence);
  if (elsewhere > 0) bad.evidence.push_back("seen " + std::to_string(elsewhere) + " more times at this site");
  return bad;
}

// One check's line of the ledger, and what it says of the hypothesis: confirmed by a root, not testable when it saw
// only consequences or nothing, ruled out by results that it judged right.
std::string Assembly::Line(size_t check, CheckState* state) const {
  const CheckReport& r = reports_[check];
  std::string line = std::string(checks_[check]->name) + ": ";
  // A root that no other check explains.
  const auto root = std::find_if(standing_[check].begin(), standing_[check].end(),
                                 [](const Standing& s) { return s.root && s.explained.empty(); });
  if (root != standing_[check].end()) {
    *state = CheckState::kConfirmed;
    return line + root->suspicion->bad.cls + " at " + root->name +
           (root->suspicion->bad.evidence.empty() ? "" : ", " + root->suspicion->bad.evidence[0]);
  }
  const auto explained = std::find_if(standing_[check].begin(), standing_[check].end(),
                                      [](const Standing& s) { return !s.explained.empty(); });
  const std::string behind = explained == standing_[check].end()
                                 ? ""
                                 : explained->name + " is wrong, which " + explained->explained + " explains";
  if (!standing_[check].empty() && (behind.empty() || r.n_right() == 0)) {
    *state = CheckState::kNotTestable;
    if (!behind.empty()) return line + behind;
    return line + "symptoms at " + standing_[check][0].name + " and behind follow from " + root_name_;
  }
  if (r.n_right() == 0) {
    *state = CheckState::kNotTestable;
    return line + (r.missing_why_.empty() ? "nothing that it judges was recorded" : r.missing_why_);
  }
  *state = CheckState::kRuledOut;
  line += std::to_string(r.n_right()) + (behind.empty() ? " judged, all right" : " judged right; " + behind);
  if (r.worst_event_ != kNoEvent) {
    line += ", at most " + Short(r.worst_share_) + " of the bound (" + Short(r.worst_measured_) + " of " +
            Short(r.worst_bound_) + " at " + capture_.Info(r.worst_event_)->name + ")";
  }
  line += NotJudged(r);
  if (r.n_sampled_ > 0) line += "; " + r.sampled_;
  if (r.n_sampled_ > 1) line += ", and so " + std::to_string(r.n_sampled_ - 1) + " more results";
  for (const std::string& note : r.notes_) line += "; " + note;
  return line;
}

std::string Assembly::NotJudged(const CheckReport& r) {
  if (r.n_missing_ == 0) return "";
  return "; " + std::to_string(r.n_missing_) + " not judged, because " + r.missing_why_;
}

std::string Assembly::WeightsRecorded() const {
  size_t n = 0;
  for (const std::string& name : capture_.Names()) {
    const std::span<const EventId> events = capture_.EventsOf(name);
    n += name.ends_with(".weight") && !events.empty() && capture_.trace().event(events[0]).phase() == Phase::kLoad;
  }
  return std::to_string(n) +
         " weights were recorded; `assay weights CHECKPOINT --trace TRACE` holds them against the "
         "checkpoint";
}

// All checks of a hypothesis, what checks of other hypotheses confirm of it, and what is implied where none exists.
// Confirmed beats ruled out beats not testable.
LedgerEntry Assembly::Entry(std::string_view name) const {
  LedgerEntry entry;
  entry.hypothesis = name;
  bool confirmed = false, ruled_out = false;
  std::vector<std::string> untested, not_judged;
  for (size_t i = 0; i < checks_.size(); ++i) {
    if (checks_[i]->hypothesis != name) continue;
    entry.judged += reports_[i].n_right_;
    entry.not_judged += reports_[i].n_missing_;
    CheckState state = CheckState::kNotTestable;
    std::string line = Line(i, &state);
    // What confirms another hypothesis says nothing against this one.
    if (state == CheckState::kConfirmed &&
        std::none_of(standing_[i].begin(), standing_[i].end(), [&](const Standing& s) {
          return s.root && s.explained.empty() && (s.suspicion->hypothesis.empty() || s.suspicion->hypothesis == name);
        })) {
      const auto& s = *std::find_if(standing_[i].begin(), standing_[i].end(),
                                    [](const Standing& x) { return x.root && x.explained.empty(); });
      untested.push_back(std::move(line) + ", which is " + std::string(s.suspicion->hypothesis));
      if (entry.capture.empty()) entry.capture = "the same run with that mended";
      continue;
    }
    // Of a check that judged nothing, in case that others rule the hypothesis out.
    if (state == CheckState::kNotTestable && reports_[i].n_missing_ > 0)
      not_judged.push_back(std::string(checks_[i]->name) + ": " + NotJudged(reports_[i]).substr(2));
    confirmed = confirmed || state == CheckState::kConfirmed;
    ruled_out = ruled_out || state == CheckState::kRuledOut;
    (state == CheckState::kNotTestable ? untested : entry.evidence).push_back(std::move(line));
    if (state != CheckState::kConfirmed && entry.capture.empty()) entry.capture = reports_[i].missing_capture_;
    if (state == CheckState::kNotTestable && entry.capture.empty()) entry.capture = checks_[i]->needs;
  }
  for (size_t i = 0; i < checks_.size(); ++i) {
    if (checks_[i]->hypothesis == name) continue;
    for (const Standing& s : standing_[i]) {
      if (!s.root || !s.explained.empty() || s.suspicion->hypothesis != name) continue;
      confirmed = true;
      entry.evidence.push_back(std::string(checks_[i]->name) + ": " + s.suspicion->bad.cls + " at " + s.name);
      break;
    }
  }
  for (size_t i = 0; !confirmed && i < checks_.size(); ++i) {
    for (const CheckReport::Spoken& spoken : reports_[i].spoken_) {
      if (spoken.against != name) continue;
      ruled_out = true;
      entry.judged += spoken.n;
      entry.evidence.push_back(std::string(checks_[i]->name) + ": " + spoken.line);
    }
  }
  for (const Implied& implied : kImplied) {
    if (implied.hypothesis != name || confirmed) continue;
    std::string unexplained;
    for (size_t i = 0; i < checks_.size(); ++i) {
      if (std::find(implied.checks.begin(), implied.checks.end(), checks_[i]->name) == implied.checks.end()) continue;
      const CheckReport& r = reports_[i];
      for (const Standing& s : standing_[i]) {
        if (implied.of_weights && s.root && s.explained.empty() && s.suspicion->rank <= 1) unexplained = s.name;
      }
      if (r.n_right() == 0) continue;
      entry.judged += r.n_right_;
      entry.not_judged += r.n_missing_;
      ruled_out = true;
      std::string line = std::string(checks_[i]->name) + ": " + std::to_string(r.n_right()) + " " +
                         std::string(implied.text) + ", at most " + Short(r.worst_share_) + " of the bound";
      entry.evidence.push_back(std::move(line) + NotJudged(r));
    }
    if (!unexplained.empty()) {
      ruled_out = false;
      untested.push_back(unexplained + " does not follow from its weight, and why is not known");
    } else if (ruled_out && implied.of_weights) {
      entry.evidence.push_back(WeightsRecorded());
    } else if (!ruled_out) {
      untested.emplace_back("nothing was judged that would show it");
    }
    if (!ruled_out) entry.capture = implied.capture;
  }
  entry.state = confirmed ? CheckState::kConfirmed : ruled_out ? CheckState::kRuledOut : CheckState::kNotTestable;
  // What could not be tested is no evidence for a hypothesis that is ruled out.
  if (entry.state == CheckState::kRuledOut && !entry.evidence.empty()) {
    entry.evidence.insert(entry.evidence.end(), not_judged.begin(), not_judged.end());
  } else {
    AddAll(untested, &entry.evidence);
  }
  return entry;
}

// Calls in order of execution: the first wrong one is the first finding, and symptoms behind it are consequences.
CheckResult Assembly::Result() {
  CheckResult result;
  standing_.assign(checks_.size(), {});
  for (const Call& call : Calls()) {
    FirstBad bad = Merged(call);
    // A symptom behind something wrong needs no cause of its own.
    const bool root = call.local || result.findings.empty();
    if (result.findings.empty()) root_name_ = bad.name;
    // What another check explains is no cause of its own.
    const auto best = std::max_element(call.said.begin(), call.said.end(),
                                       [](const auto& a, const auto& b) { return a.second->rank < b.second->rank; });
    for (const auto& [check, suspicion] : call.said) {
      // Later events of a call that its check has explained are the same fault, whether the search went on or not.
      if (check == best->first && suspicion->rank <= 1 && best->second->rank > 1) continue;
      const bool explained = check != best->first && suspicion->rank <= 1 && best->second->rank > 1;
      standing_[check].push_back(
          {suspicion, root, bad.name, explained ? std::string(checks_[best->first]->name) : std::string()});
    }
    (root ? result.findings : result.consequences).push_back(std::move(bad));
  }
  for (const std::string_view name : AllHypotheses()) {
    const bool exists =
        std::any_of(checks_.begin(), checks_.end(), [&](const CheckDef* c) { return c->hypothesis == name; });
    const bool said = std::any_of(standing_.begin(), standing_.end(), [&](const std::vector<Standing>& list) {
      return std::any_of(list.begin(), list.end(), [&](const Standing& x) { return x.suspicion->hypothesis == name; });
    });
    // Only when every check ran: a user who asked for one check is not told of others.
    const bool implied =
        checks_.size() == AllChecks().size() &&
        std::any_of(std::begin(kImplied), std::end(kImplied), [&](const Implied& i) { return i.hypothesis == name; });
    if (exists || said || implied) result.ledger.push_back(Entry(name));
  }
  CheckCoverage& c = result.coverage;
  const Trace& trace = capture_.trace();
  c.events = capture_.event_count();
  c.sites = capture_.Names().size();
  c.processes = trace.processes().size();
  c.payloads = capture_.payload_count();
  for (const Damage& d : trace.damages()) c.damages += d.benign ? 0 : 1;
  c.damages += trace.payload_damages().size();
  for (const TraceProcess& p : trace.processes()) c.dropped += p.drops.total();
  c.checks_run = checks_.size();
  for (const CheckReport& r : reports_) {
    c.results_judged += r.n_right_ + r.found_.size();
    c.results_not_judged += r.n_missing_;
  }
  return result;
}

}  // namespace assay
