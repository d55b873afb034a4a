#include "check/op_other_weight.h"

#include <algorithm>
#include <vector>

#include "check/op_fitted.h"

namespace assay::op {
namespace {

constexpr size_t kMostTried = 256;

struct Candidate {
  EventId id;
  int order;  // of trial
};

}  // namespace

std::optional<Explanation> ForOtherWeights(
    const Subject& subject, const std::string& name, const oracle::Array& right,
    const std::function<std::optional<Explanation>(const OtherWeight&)>& attempt) {
  if (SearchedEnough(subject)) return std::nullopt;
  const Capture& capture = subject.capture();
  const std::string prefix = subject.info().prefix;
  const std::string stem = name.starts_with(prefix) ? name.substr(prefix.size()) : name;
  std::vector<Candidate> candidates;
  for (const std::string& other : capture.Names()) {
    const bool of_kind = name.ends_with("bias")
                             ? other.ends_with("bias")
                             : other.ends_with(".weight") || other.ends_with("_proj") || other.ends_with(stem);
    if (!of_kind) continue;
    for (EventId id : capture.EventsOf(other)) {
      const auto info = capture.Info(id);
      if (info->event.phase != Phase::kLoad || info->audit == "before") continue;
      int64_t n = 1;
      for (int64_t extent : info->event.shape) n *= extent;
      if (n != right.size()) continue;
      const bool same = other == name, near = !prefix.empty() && other.starts_with(prefix);
      if (same && info->event.rank == subject.info().event.rank) continue;
      candidates.push_back({id, same ? 0 : near ? 1 : other.ends_with(stem) ? 2 : 3});
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.order < b.order; });
  if (candidates.size() > kMostTried) candidates.resize(kMostTried);
  for (const Candidate& c : candidates) {
    auto tensor = capture.Load(c.id);
    if (!tensor.ok() || (*tensor)->values == right.values) continue;
    const EventInfo& info = *(*tensor)->info;
    const bool of_another_rank = info.name == name;
    const std::string text = of_another_rank ? "fits " + name + " of rank " + std::to_string(info.event.rank) +
                                                   " in place of this rank's own"
                                             : "fits " + info.name + " in place of " + name;
    if (auto why = attempt(
            {{right.shape, (*tensor)->values}, {of_another_rank ? fault_class::kTpShard : fault_class::kLoad, text}}))
      return why;
  }
  return std::nullopt;
}

}  // namespace assay::op
