// The experts chosen, as integers: ids in range and different within a row, counts that are those of the ids.
#include <algorithm>
#include <cmath>

#include "check/checks.h"
#include "check/helpers.h"

namespace assay::check {
namespace {

// A rule about integers: no bound, and hardly a doubt.
Suspicion Exact(const EventInfo& info, std::string_view cls) {
  Suspicion s = At(info, cls, 2);
  s.bad.bound_basis = "exact: integers";
  s.bad.confidence = 0.95;
  return s;
}

// Number of experts: the width of the router's logits, or of the counts, else the model's.
int64_t Experts(const Capture& capture, const EventInfo& info) {
  for (const char* stem : {"moe.router_logits", "moe.expert_counts"}) {
    if (const auto id = capture.Operand(info, info.prefix + stem); id && !capture.Info(*id)->event.shape.empty()) {
      return capture.Info(*id)->event.shape.back();
    }
  }
  return capture.Integer(info, "n_routed_experts").value_or(-1);
}

// By the ids alone, so it holds without logits: an engine that names an expert twice or beyond the last is wrong
// whatever the scores were.
void JudgeIds(const Capture& capture, const Tensor& ids, CheckReport* report) {
  const int64_t experts = Experts(capture, *ids.info);
  std::vector<bool> bad(static_cast<size_t>(ids.n_rows()));
  std::string line;
  for (int64_t r = 0; r < ids.n_rows(); ++r) {
    if (!ids.rows.empty() && !ids.rows[static_cast<size_t>(r)].real()) continue;
    std::vector<double> row(ids.row(r).begin(), ids.row(r).end());
    std::erase_if(row, [](double e) { return e < 0; });  // chosen on another rank
    std::sort(row.begin(), row.end());
    const bool twice = std::adjacent_find(row.begin(), row.end()) != row.end();
    const bool outside = !row.empty() && experts > 0 && row.back() >= static_cast<double>(experts);
    bad[static_cast<size_t>(r)] = twice || outside;
    if (line.empty() && outside) line = "expert " + NumberText(row.back()) + " of " + std::to_string(experts);
    if (line.empty() && twice) line = "an expert is chosen twice in a row";
  }
  if (line.empty()) return report->Right(ids.info->id);
  Suspicion s = Exact(*ids.info, fault_class::kMoeRoute);
  AddRows(ids, bad, &s.bad);
  s.bad.evidence.push_back(line);
  report->Found(std::move(s));
}

// measured is the difference of the sums: rows that were lost or counted twice.
void JudgeCounts(const Capture& capture, const Tensor& counts, CheckReport* report) {
  const EventInfo& info = *counts.info;
  auto ids = capture.LoadOperand(info, info.prefix + "moe.topk_ids");
  if (!ids.ok()) return report->Missing(ids.status().message(), Capture::RecordHint(info.prefix + "moe.topk_ids"));
  const size_t experts = counts.values.size();
  std::vector<double> all(experts, 0), real(experts, 0);  // padding rows may be dispatched or not
  for (int64_t r = 0; r < (*ids)->n_rows(); ++r) {
    const bool padding = !(*ids)->rows.empty() && (*ids)->rows[static_cast<size_t>(r)].padding;
    for (const double id : (*ids)->row(r)) {
      if (id < 0 || id >= static_cast<double>(experts)) continue;
      all[static_cast<size_t>(id)] += 1;
      if (!padding) real[static_cast<size_t>(id)] += 1;
    }
  }
  if (counts.values == all || counts.values == real) return report->Right(info.id);
  double sum = 0, want = 0;
  for (size_t e = 0; e < experts; ++e) sum += counts.values[e], want += all[e];
  Suspicion s = Exact(info, fault_class::kKernel);
  s.bad.measured = std::fabs(sum - want);
  s.bad.evidence.push_back("counts sum to " + NumberText(sum) + ", the chosen experts to " + NumberText(want));
  report->Found(std::move(s));
}

}  // namespace

// Ids first: counts are held against them.
void CheckMoeCounts(const Capture& capture, CheckReport* report) {
  for (const char* stem : {"moe.topk_ids", "moe.expert_counts"}) {
    for (const std::string& name : capture.NamesOfStem(stem)) {
      for (const EventId id : RealEvents(capture, name)) {
        auto t = capture.Load(id);
        if (!t.ok()) {
          report->Missing(t.status().message(), Capture::RecordHint(name));
        } else if (std::string_view(stem) == "moe.topk_ids") {
          JudgeIds(capture, **t, report);
        } else {
          JudgeCounts(capture, **t, report);
        }
      }
    }
  }
}

}  // namespace assay::check
