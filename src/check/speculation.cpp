// Bookkeeping of speculative decoding: how many drafts were accepted, and that the state of a linear attention holds
// the accepted tokens and no other.
#include <algorithm>
#include <cmath>

#include "check/checks.h"
#include "check/helpers.h"

namespace assay::check {
namespace {

// Accepted drafts are the leading ones that equal the target's tokens.
void JudgeAccepted(const Capture& capture, const Tensor& accepted, CheckReport* report) {
  const EventInfo& info = *accepted.info;
  const std::optional<int64_t> drafts = capture.Integer(info, "drafts");
  auto draft = capture.LoadOperand(info, "spec.draft_tokens");
  auto target = capture.LoadOperand(info, "spec.target_tokens");
  std::vector<bool> bad(accepted.rows.size());
  std::string line;
  for (size_t r = 0; r < bad.size() && r < accepted.values.size(); ++r) {
    if (!accepted.rows[r].real()) continue;
    const double took = accepted.values[r];
    double want = took;
    if (draft.ok() && target.ok() && static_cast<int64_t>(r) < std::min((*draft)->n_rows(), (*target)->n_rows())) {
      const auto d = (*draft)->row(static_cast<int64_t>(r)), t = (*target)->row(static_cast<int64_t>(r));
      size_t same = 0;
      while (same < d.size() && same < t.size() && d[same] == t[same]) ++same;
      want = static_cast<double>(same);
    }
    bad[r] = took != want || took < 0 || (drafts && took > static_cast<double>(*drafts));
    if (bad[r] && line.empty())
      line = NumberText(took) + " drafts were accepted, " + NumberText(want) + " leading ones equal the target's";
  }
  if (line.empty()) return report->Right(info.id);
  Suspicion s = At(info, fault_class::kSpec, 3);
  AddRows(accepted, bad, &s.bad);
  s.bad.evidence.push_back(line);
  s.bad.bound_basis = "exact: integers";
  s.bad.confidence = 0.95;
  report->Found(std::move(s));
}

struct StateFit {
  int64_t n = -1;   // rows of the step that the state holds; -1: none fits
  double best = 0;  // relative distance of the count that was to be
};

// state = earlier + sum of k v^T over the first n rows of the request: which n fits.
StateFit FitRows(std::span<const double> state, std::span<const double> earlier, const Tensor& k, const Tensor& v,
                 const std::vector<int64_t>& rows, int64_t want, double bound) {
  std::vector<double> sum(state.size(), 0.0);
  if (!earlier.empty()) std::copy(earlier.begin(), earlier.end(), sum.begin());
  const int64_t d = k.dim(-1), dv = v.dim(-1), heads = k.row_size() / std::max<int64_t>(d, 1);
  StateFit fit;
  for (int64_t n = 0; n <= static_cast<int64_t>(rows.size()); ++n) {
    if (n > 0) {
      const auto key = k.row(rows[static_cast<size_t>(n - 1)]), value = v.row(rows[static_cast<size_t>(n - 1)]);
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t i = 0; i < d; ++i) {
          for (int64_t j = 0; j < dv; ++j) {
            sum[static_cast<size_t>((h * d + i) * dv + j)] +=
                key[static_cast<size_t>(h * d + i)] * value[static_cast<size_t>(h * dv + j)];
          }
        }
      }
    }
    double top = 0, miss = 0;
    for (size_t i = 0; i < sum.size(); ++i) {
      top = std::max(top, std::fabs(sum[i]));
      const double off = std::fabs(state[i] - sum[i]);
      miss = std::isfinite(off) ? std::max(miss, off) : HUGE_VAL;
    }
    const double relative = top > 0 ? miss / top : miss;
    if (n == want) fit.best = relative;
    if (relative <= bound && (fit.n < 0 || n == want)) fit.n = n;
  }
  return fit;
}

// attn.state [requests, heads d dv]: S = S_before + Σ k vᵀ over the accepted rows of the step (1 + accepted drafts).
void JudgeState(const Capture& capture, const Tensor& state, CheckReport* report) {
  const EventInfo& info = *state.info;
  auto k = capture.LoadOperand(info, info.prefix + "attn.k"), v = capture.LoadOperand(info, info.prefix + "attn.v");
  if (!k.ok() || !v.ok()) {
    return report->Missing((k.ok() ? v : k).status().message(), Capture::RecordHint(info.prefix + "attn.k and attn.v"));
  }
  const int64_t heads = (*k)->row_size() / std::max<int64_t>((*k)->dim(-1), 1);
  if ((*v)->rows.size() != (*k)->rows.size() || (*v)->row_size() != heads * (*v)->dim(-1) ||
      (*k)->row_size() * (*v)->dim(-1) != state.row_size()) {
    return report->Missing(info.name + ": attn.k, attn.v and the state have other rows, heads or sizes than each other",
                           "record all three of the same heads, [T, H, d], [T, H, dv] and [rows, H, d, dv]");
  }
  TensorPtr earlier;
  for (const EventId id : capture.Find(info.name, {.rank = info.event.rank, .before = info.id})) {
    if (capture.trace().event(id).step() >= info.event.step) continue;
    if (auto t = capture.Load(id); t.ok() && (*t)->row_size() == state.row_size()) earlier = *t;
  }
  auto accepted = capture.LoadOperand(info, "spec.accepted");
  // One rounding a row added, and that of the state itself.
  for (int64_t r = 0; r < state.n_rows(); ++r) {
    const RowId& who = state.rows.empty() ? RowId{} : state.rows[static_cast<size_t>(r)];
    if (!who.real()) continue;
    std::vector<int64_t> rows;
    for (size_t i = 0; i < (*k)->rows.size(); ++i) {
      if ((*k)->rows[i].real() && (*k)->rows[i].request == who.request) rows.push_back(static_cast<int64_t>(i));
    }
    std::sort(rows.begin(), rows.end(), [&](int64_t a, int64_t b) {
      return (*k)->rows[static_cast<size_t>(a)].position < (*k)->rows[static_cast<size_t>(b)].position;
    });
    int64_t want = static_cast<int64_t>(rows.size());
    for (size_t i = 0; accepted.ok() && i < (*accepted)->rows.size(); ++i) {
      if ((*accepted)->rows[i].request != who.request) continue;
      want = 1 + std::clamp<int64_t>(IntegerOf((*accepted)->values[i]), -1, static_cast<int64_t>(rows.size()));
    }
    std::span<const double> before;
    if (earlier != nullptr) {
      for (size_t i = 0; i < earlier->rows.size(); ++i) {
        if (earlier->rows[i].request == who.request) before = earlier->row(static_cast<int64_t>(i));
      }
    }
    // The first position starts from a state of zeros; any other needs the state that the step before left.
    const bool from_start = !rows.empty() && (*k)->rows[static_cast<size_t>(rows[0])].position == 0;
    if (before.empty() && !from_start) {
      report->Missing("the state that the step of " + info.name + " starts from was not recorded",
                      Capture::RecordHint(info.name) + ", in every step");
      continue;
    }
    const double u = std::max(UnitRoundoff(info.event.compute_dtype), UnitRoundoff(DType::kF32));
    const double bound = 4 * u * static_cast<double>(rows.size() + 2);
    const StateFit fit = FitRows(state.row(r), before, **k, **v, rows, want, bound);
    if (fit.n == want) {
      report->Right(info.id, fit.best, bound);
      continue;
    }
    // Rows of padding behind those that were to be kept.
    std::vector<int64_t> padded(rows.begin(),
                                rows.begin() + std::clamp<int64_t>(want, 0, static_cast<int64_t>(rows.size())));
    const auto real = static_cast<int64_t>(padded.size());
    for (size_t i = 0; i < (*k)->rows.size(); ++i) {
      if (!(*k)->rows[i].real()) padded.push_back(static_cast<int64_t>(i));
    }
    const StateFit with = FitRows(state.row(r), before, **k, **v, padded, -1, bound);
    if (fit.n < 0 && with.n > real) {
      Suspicion s = At(info, fault_class::kPadRead, 3);
      s.bad.request = who.request;
      s.bad.positions = {{who.position, who.position}};
      s.bad.measured = fit.best;
      s.bad.bound = bound;
      s.bad.bound_basis = "4 u (rows + 2) of the state's largest magnitude, u = " + NumberText(u);
      s.bad.confidence = 0.99;
      s.bad.constant_value = static_cast<double>(with.n - real);
      s.bad.constant = "padding rows in the state";
      s.bad.evidence.push_back("the state holds the rows that were to be kept and " + std::to_string(with.n - real) +
                               " padding rows");
      report->Found(std::move(s));
      continue;
    }
    Suspicion s = At(info, fit.n >= 0 ? fault_class::kSpec : fault_class::kKernel, fit.n >= 0 ? 3 : 1);
    s.bad.request = who.request;
    s.bad.positions = {{who.position, who.position}};
    s.bad.measured = fit.best;
    s.bad.bound = bound;
    s.bad.bound_basis = "4 u (rows + 2) of the state's largest magnitude, u = " + NumberText(u);
    s.bad.confidence = fit.n >= 0 ? 0.99 : 0.8;
    if (fit.n >= 0) {
      s.bad.constant_value = static_cast<double>(fit.n - want);
      s.bad.constant = "rejected tokens that remain in the state";
      s.bad.evidence.push_back("the state holds " + std::to_string(fit.n) + " rows of the step, " +
                               std::to_string(want) + " were to be kept");
    } else {
      s.bad.evidence.push_back("no number of leading rows of the step explains the state");
    }
    report->Found(std::move(s));
  }
}

}  // namespace

// Counts of accepted drafts, states after a step, states read by the next: each is judged by itself.
void CheckSpeculation(const Capture& capture, CheckReport* report) {
  for (const EventId id : RealEvents(capture, "spec.accepted")) {
    auto t = capture.Load(id);
    if (t.ok()) {
      JudgeAccepted(capture, **t, report);
    } else {
      report->Missing(t.status().message(), Capture::RecordHint("spec.accepted"));
    }
  }
  for (const std::string& name : capture.NamesOfStem("attn.state")) {
    for (const EventId id : RealEvents(capture, name)) {
      auto t = capture.Load(id);
      if (t.ok()) {
        JudgeState(capture, **t, report);
      } else {
        report->Missing(t.status().message(), Capture::RecordHint(name));
      }
    }
  }
  // A step starts from the state that the step before left.
  for (const std::string& name : capture.NamesOfStem("attn.state_read")) {
    for (const EventId id : RealEvents(capture, name)) {
      const auto info = capture.Info(id);
      auto read = capture.Load(id);
      TensorPtr left;
      for (const EventId earlier :
           capture.Find(info->prefix + "attn.state", {.rank = info->event.rank, .before = id})) {
        if (capture.trace().event(earlier).step() >= info->event.step) continue;
        if (auto t = capture.Load(earlier); t.ok()) left = *t;
      }
      if (!read.ok() || left == nullptr) continue;
      std::vector<bool> bad((*read)->rows.size());
      for (size_t r = 0; r < bad.size(); ++r) {
        for (size_t i = 0; i < left->rows.size(); ++i) {
          if (!(*read)->rows[r].real() || left->rows[i].request != (*read)->rows[r].request) continue;
          const auto a = (*read)->row(static_cast<int64_t>(r)), b = left->row(static_cast<int64_t>(i));
          bad[r] = !std::equal(a.begin(), a.end(), b.begin(), b.end());
        }
      }
      if (std::find(bad.begin(), bad.end(), true) == bad.end()) {
        report->Right(id);
        continue;
      }
      Suspicion s = At(*info, fault_class::kKvIdent, 2);
      AddRows(**read, bad, &s.bad);
      s.bad.evidence.push_back("the state read is not the one that the step before left for the request");
      s.bad.bound_basis = "exact: the same values";
      s.bad.confidence = 0.9;
      report->Found(std::move(s));
    }
  }
}

}  // namespace assay::check
