// Rows of probabilities sum to 1, and none is negative: attn.probs, and exp of logprobs.
#include <algorithm>
#include <cmath>

#include "check/checks.h"
#include "check/helpers.h"

namespace assay::check {
namespace {

// t: [T, H, keys] or [T, V]; the last axis sums to 1 in each row (and head).
void Judge(const Tensor& t, bool logarithms, CheckReport* report) {
  const EventInfo& info = *t.info;
  const int64_t keys = t.dim(-1);
  if (keys <= 0 || t.rows.empty()) return;
  // One rounding a probability, one more for the sum that they were divided by; a logarithm of size 20 loses 20 u.
  const double u =
      std::max({UnitRoundoff(info.event.compute_dtype), UnitRoundoff(info.event.dtype), UnitRoundoff(DType::kF32)});
  // The first term is systematic (a rounded denominator moves all terms alike), the second is the sum's own rounding,
  // which grows like a random walk.
  const double bound = u * (logarithms ? 64 : 2) + 8 * UnitRoundoff(DType::kF32) * std::sqrt(static_cast<double>(keys));
  std::vector<bool> bad(t.rows.size());
  double worst = 0;
  for (size_t r = 0; r < t.rows.size(); ++r) {
    if (!t.rows[r].real()) continue;
    const auto row = t.row(static_cast<int64_t>(r));
    for (size_t start = 0; start < row.size(); start += static_cast<size_t>(keys)) {
      double sum = 0;
      bool negative = false;
      for (size_t i = start; i < start + static_cast<size_t>(keys); ++i) {
        sum += logarithms ? std::exp(row[i]) : row[i];
        negative = negative || (!logarithms && row[i] < 0);
      }
      const double off = std::fabs(sum - 1);
      // Written so that NaN is worst.
      if (!(off <= worst)) worst = std::isnan(off) ? HUGE_VAL : off;
      bad[r] = bad[r] || negative || !(off <= bound);
    }
  }
  for (const bool b : bad) {
    if (!b) continue;
    Suspicion s = At(info, fault_class::kKernel, 1);
    AddRows(t, bad, &s.bad);
    s.local = std::isfinite(worst);  // NaN has its source elsewhere
    s.bad.measured = worst;
    s.bad.bound = bound;
    s.bad.bound_basis = "|sum - 1|: the rounding of the probabilities, u = " + NumberText(u) +
                        ", and of the sum over " + std::to_string(keys);
    s.bad.confidence = 0.9;
    s.bad.evidence.push_back("a row sums to 1 within " + NumberText(worst) + " only");
    return report->Found(std::move(s));
  }
  report->Right(info.id, worst, bound);
}

}  // namespace

void CheckSoftmaxSums(const Capture& capture, CheckReport* report) {
  for (const char* stem : {"attn.probs", "logprobs"}) {
    const bool logarithms = std::string_view(stem) == "logprobs";
    for (const std::string& name : capture.NamesOfStem(stem)) {
      for (const EventId id : RealEvents(capture, name)) {
        auto t = capture.Load(id);
        // Ranks share the vocabulary, and no part of a row sums to 1: the first rank's event stands for all of them.
        // (Probabilities of attention are shared by heads, whose rows are whole.)
        if (t.ok() && logarithms && (*t)->info->event.shard.count > 1) {
          if ((*t)->info->event.shard.index > 0) continue;
          t = capture.Stitched(*(*t)->info);
        }
        if (t.ok()) {
          Judge(**t, logarithms, report);
        } else {
          report->Missing(t.status().message(), Capture::RecordHint(name));
        }
      }
    }
  }
}

}  // namespace assay::check
