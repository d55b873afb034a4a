// The same call on the same operands several times (metadata `repeat`): equal inputs must give equal bits. Where only
// padding differs between the repeats, real rows must not.
#include <algorithm>
#include <cmath>
#include <map>

#include "check/checks.h"
#include "check/helpers.h"

namespace assay::check {
namespace {

// How two tensors of one site differ: in padding rows, in real rows, and how far relative to the row's top.
struct Difference {
  bool padding = false;
  double real = 0;  // largest relative difference of a real row; infinite for a differing NaN
  std::vector<bool> rows;
};

Difference Compare(const Tensor& a, const Tensor& b) {
  Difference d;
  d.rows.assign(static_cast<size_t>(a.n_rows()), false);
  if (a.shape != b.shape) {
    d.real = HUGE_VAL;
    return d;
  }
  for (int64_t r = 0; r < a.n_rows(); ++r) {
    const auto x = a.row(r), y = b.row(r);
    double top = 0, miss = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      if (x[i] == y[i] || (std::isnan(x[i]) && std::isnan(y[i]))) continue;
      const double off = std::fabs(x[i] - y[i]);
      miss = std::isfinite(off) ? std::max(miss, off) : HUGE_VAL;
    }
    for (const double value : x) top = std::isfinite(value) ? std::max(top, std::fabs(value)) : top;
    if (miss == 0) continue;
    const bool padding = !a.rows.empty() && a.rows[static_cast<size_t>(r)].padding;
    d.padding = d.padding || padding;
    if (padding) continue;
    d.rows[static_cast<size_t>(r)] = true;
    d.real = std::max(d.real, top > 0 ? miss / top : HUGE_VAL);
  }
  return d;
}

// What bits the odd repeat has: the majority is taken as the right one.
// Groups by all values; of groups of one size the first in the order of values is taken.
EventId Odd(const Capture& capture, const std::vector<EventId>& repeats) {
  std::map<std::vector<double>, std::vector<EventId>> groups;
  for (const EventId id : repeats) {
    auto t = capture.Load(id);
    if (t.ok()) groups[(*t)->values].push_back(id);
  }
  const std::vector<EventId>* smallest = nullptr;
  for (const auto& [values, ids] : groups) {
    if (smallest == nullptr || ids.size() < smallest->size()) smallest = &ids;
  }
  return smallest == nullptr ? repeats.back() : smallest->front();
}

}  // namespace

void CheckRepeats(const Capture& capture, CheckReport* report) {
  // Sites of one call in order, so that a site is judged by those before it.
  struct Group {
    std::string name;
    std::vector<EventId> repeats;
  };
  std::map<std::pair<int64_t, int32_t>, std::vector<Group>> calls;  // by step and rank
  for (const std::string& name : capture.Names()) {
    std::map<std::pair<int64_t, int32_t>, Group> of_site;
    for (const EventId id : RealEvents(capture, name)) {
      const EventView view = capture.trace().event(id);
      if (view.meta("repeat").empty()) continue;
      Group& g = of_site[{view.step(), view.rank()}];
      g.name = name;
      g.repeats.push_back(id);
    }
    for (auto& [key, group] : of_site) {
      if (group.repeats.size() > 1) calls[key].push_back(std::move(group));
    }
  }
  uint64_t held = 0;  // calls whose padding differed and whose results did not
  for (auto& [key, groups] : calls) {
    std::sort(groups.begin(), groups.end(),
              [&](const Group& a, const Group& b) { return capture.Earlier(a.repeats[0], b.repeats[0]); });
    bool padding_differs = false, real_differs = false, behind = false;  // behind: a result after that padding
    for (const Group& g : groups) {
      auto first = capture.Load(g.repeats[0]);
      if (!first.ok()) {
        report->Missing(first.status().message(), Capture::RecordHint(g.name));
        continue;
      }
      Difference worst;
      for (size_t i = 1; i < g.repeats.size(); ++i) {
        auto other = capture.Load(g.repeats[i]);
        if (!other.ok()) continue;
        Difference d = Compare(**first, **other);
        worst.padding = worst.padding || d.padding;
        if (d.real > worst.real) worst.real = d.real, worst.rows = std::move(d.rows);
      }
      const EventInfo& info = *(*first)->info;
      const bool pool = info.site.stem.ends_with("_cache");
      behind = behind || (padding_differs && !pool);
      // A pool that differs is an operand: slots that nobody owns may hold anything.
      if (worst.real == 0 || pool) {
        padding_differs = padding_differs || worst.padding || (pool && worst.real > 0);
        report->Right(info.id);
        continue;
      }
      // Sums taken in another order differ by roundings of partial sums. They walk at random: 2^12 partial sums as
      // large as the row's largest magnitude come to 64 u of it.
      const double u = IsFloat(info.event.dtype)
                           ? std::max(UnitRoundoff(info.event.compute_dtype), UnitRoundoff(info.event.dtype))
                           : 0;
      const double bound = u == 0 ? 0 : 64 * u;
      if (worst.real <= bound) {
        report->Right(info.id, worst.real, bound);
        continue;
      }
      if (real_differs) continue;  // a consequence within the call
      real_differs = true;
      const EventId odd = Odd(capture, g.repeats);
      Suspicion s = At(*capture.Info(odd), padding_differs ? fault_class::kPadRead : fault_class::kNonDet, 3);
      if (padding_differs) s.hypothesis = hypothesis::kPadding;
      AddRows(**first, worst.rows, &s.bad);
      s.bad.measured = worst.real;
      s.bad.bound = bound;
      s.bad.bound_basis = bound == 0
                              ? "exact: integers of equal operands"
                              : "64 u of the row's largest magnitude for sums in another order, u = " + NumberText(u);
      s.bad.confidence = 0.95;
      s.bad.evidence.push_back(std::to_string(g.repeats.size()) + " repeats, repeat " +
                               std::to_string(capture.Info(odd)->repeat) + " differs by " + NumberText(worst.real) +
                               " of the row's largest magnitude");
      s.bad.evidence.push_back(padding_differs ? "only padding rows or unowned slots differ before it"
                                               : "no recorded operand differs before it");
      report->Found(std::move(s));
    }
    held += behind && !real_differs;
  }
  if (held > 0)
    report->Speaks(hypothesis::kPadding, held,
                   std::to_string(held) + " calls with other padding gave the same real rows");
}

}  // namespace assay::check
