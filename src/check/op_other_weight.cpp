#include "check/op_other_weight.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "check/helpers.h"
#include "check/op_fitted.h"

namespace assay::op {
namespace {

// Tensors that are loaded and tried: in a model of many equal layers the right guess is among the first.
constexpr size_t kMostTried = 256;

// order 0: the same tensor of another rank; 1: of this layer; 2: the same name in another layer; 3: any other.
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
      // By size alone: the same numbers in another shape are the same memory.
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

void JudgeTie(const Subject& s) {
  const TensorPtr head = s.Weight("lm_head.weight"), embedding = s.Weight("embed_tokens.weight");
  if (!s.Flag("tie_word_embeddings", false) || head == nullptr || embedding == nullptr) return;
  const Shard &own = head->info->event.shard, &other = embedding->info->event.shard;
  if (head->shape != embedding->shape || own.index != other.index || own.count != other.count) return;
  double off = 0, total = 0;
  for (int64_t i = 0; i < head->n(); ++i) {
    const double x = head->values[static_cast<size_t>(i)], y = embedding->values[static_cast<size_t>(i)];
    off += (x - y) * (x - y);
    total += y * y;
  }
  constexpr double kUnlike = 0.5;  // unrelated matrices of one size are sqrt(2) apart, 4-bit codes 0.1
  const double distance = std::sqrt(off / total);
  if (!(distance > kUnlike)) return;  // not a number: that is the finding of the check for such values
  Suspicion found = check::At(*head->info, fault_class::kLoad, 3);
  found.hypothesis = hypothesis::kWeights;
  found.bad.measured = distance;
  found.bad.bound = kUnlike;
  found.bad.bound_basis = "relative L2 distance of the two matrices; unrelated ones are 1.4 apart";
  found.bad.confidence = 0.95;
  found.bad.evidence.push_back("the head is declared as tied to the embedding and is another matrix");
  s.report().Found(std::move(found));
}

}  // namespace assay::op
