#include "check/op_cache_older.h"

#include <algorithm>
#include <cmath>

namespace assay::op {
namespace {

bool Same(std::span<const double> a, std::span<const double> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](double x, double y) { return x == y || (std::isnan(x) && std::isnan(y)); });
}

// The row of (request, position) in this event; nothing when it is not there.
std::span<const double> RowIn(const Tensor& t, uint64_t request, int64_t position) {
  for (size_t r = 0; r < t.rows.size(); ++r) {
    const RowId& id = t.rows[r];
    if (id.real() && id.request == request && id.position == position) return t.row(static_cast<int64_t>(r));
  }
  return {};
}

// Whether the rows of this step at the position were drafts of the request that were not accepted: behind the first row
// of the request in the step, and as many more as were accepted.
bool WasRejected(const Subject& s, const Tensor& written, uint64_t request, int64_t position) {
  int64_t first = position;
  for (const RowId& id : written.rows) {
    if (id.real() && id.request == request) first = std::min(first, id.position);
  }
  EventFilter filter;
  filter.step = written.info->event.step;
  for (EventId id : s.capture().Find("spec.accepted", filter)) {
    const auto accepted = s.capture().Load(id);
    if (!accepted.ok() || (*accepted)->values.size() != (*accepted)->rows.size()) continue;
    for (size_t b = 0; b < (*accepted)->rows.size(); ++b) {
      if ((*accepted)->rows[b].request == request)
        return static_cast<double>(position - first) > (*accepted)->values[b];
    }
  }
  return false;
}

}  // namespace

std::optional<Explanation> ExplainOlderRows(const Subject& s, std::span<const std::string> names,
                                            std::span<const int64_t> wrong, const CutRow& cut) {
  const Capture& capture = s.capture();
  if (wrong.empty()) return std::nullopt;
  bool rejected = true;
  int64_t step = -1;
  constexpr size_t kMostRows = 256;  // each is looked for in all events before
  for (const int64_t r : wrong.first(std::min(wrong.size(), kMostRows))) {
    const RowId& id = s.tensor()->rows[static_cast<size_t>(r)];
    bool found = false;
    for (EventId event : capture.EventsOf(names[0])) {
      if (found || capture.Info(event)->event.rank != s.info().event.rank || !capture.Earlier(event, s.info().id) ||
          capture.Info(event)->audit == "before") {
        continue;
      }
      const auto first = capture.Load(event);
      if (!first.ok()) return std::nullopt;
      std::vector<double> row;
      for (const std::string& name : names) {
        EventFilter filter;
        filter.step = capture.Info(event)->event.step;
        filter.rank = s.info().event.rank;
        for (EventId part : name == names[0] ? std::vector<EventId>{event} : capture.Find(name, filter)) {
          const auto t = capture.Load(part);
          if (!t.ok()) continue;
          const auto own = RowIn(**t, id.request, id.position);
          row.insert(row.end(), own.begin(), own.end());
          if (!own.empty()) break;
        }
      }
      if (row.empty() || !Same(cut(std::move(row)), s.tensor()->row(r))) continue;
      found = true;
      rejected = rejected && WasRejected(s, **first, id.request, id.position);
      if (step < 0) step = capture.Info(event)->event.step;
    }
    if (!found) return std::nullopt;
  }
  const std::string text = std::to_string(wrong.size()) + " rows gathered are those that were written for their " +
                           "positions in step " + std::to_string(step) + ", before they were written again";
  return rejected ? Explanation{fault_class::kSpec, text + ": drafts that were not accepted"}
                  : Explanation{fault_class::kKvIdent, text};
}

}  // namespace assay::op
