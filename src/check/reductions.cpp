// Sums over ranks: a result against its partial ones, and the routed and shared experts in moe.out.
#include <algorithm>
#include <cmath>
#include <set>

#include "check/checks.h"
#include "check/helpers.h"

namespace assay::check {
namespace {

double Roundoff(const Event& e) {
  return std::max({UnitRoundoff(e.compute_dtype), UnitRoundoff(e.dtype), UnitRoundoff(DType::kF32)});
}

struct Fit {
  double a = 0, b = 0;  // y = a x + b z, least squares
  double residual = 0;  // relative L2
};

double Dot(std::span<const double> x, std::span<const double> y) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
  return sum;
}

Fit LeastSquares(std::span<const double> y, std::span<const double> x, std::span<const double> z) {
  const double xx = Dot(x, x), xz = Dot(x, z), zz = Dot(z, z), xy = Dot(x, y), zy = Dot(z, y);
  const double det = xx * zz - xz * xz;
  Fit f;
  if (!(det > 1e-12 * xx * zz)) {
    f.residual = HUGE_VAL;
    return f;
  }
  f.a = (xy * zz - zy * xz) / det;
  f.b = (zy * xx - xy * xz) / det;
  double miss = 0;
  for (size_t i = 0; i < y.size(); ++i) miss += std::pow(y[i] - f.a * x[i] - f.b * z[i], 2);
  f.residual = std::sqrt(miss / std::max(Dot(y, y), 1e-300));
  return f;
}

// Rows of y that differ from want by more than terms roundings of the magnitudes summed.
std::vector<bool> WrongRows(const Tensor& y, std::span<const double> want, std::span<const double> magnitude, double u,
                            int terms, double* share, double* bound) {
  std::vector<bool> bad(static_cast<size_t>(y.n_rows()));
  const int64_t cols = y.row_size();
  for (int64_t r = 0; r < y.n_rows(); ++r) {
    if (!y.rows.empty() && !y.rows[static_cast<size_t>(r)].real()) continue;
    double top = 0, miss = 0;
    for (int64_t i = r * cols; i < (r + 1) * cols; ++i) {
      const size_t at = static_cast<size_t>(i);
      const double off = std::fabs(y.values[at] - want[at]);
      if (!std::isfinite(want[at])) continue;
      top = std::max(top, magnitude[at]);
      miss = std::isfinite(off) ? std::max(miss, off) : HUGE_VAL;
    }
    const double allowed = u * (terms + 2) * top;
    if (top > 0 && miss / top > *share) *share = miss / top;
    *bound = u * (terms + 2);
    bad[static_cast<size_t>(r)] = miss > allowed;
  }
  return bad;
}

bool Any(const std::vector<bool>& v) { return std::find(v.begin(), v.end(), true) != v.end(); }

void Describe(const Tensor& y, const std::vector<bool>& bad, double measured, double bound, double u, Suspicion* s) {
  AddRows(y, bad, &s->bad);
  s->bad.measured = measured;
  s->bad.bound = bound;
  s->bad.bound_basis =
      "one rounding a term and one of the result, of the largest sum of magnitudes in the row, u = " + Num(u);
  s->bad.confidence = 0.95;
}

// NAME against the sum of NAME.partial of every rank (and its bias, once).
void JudgePartial(const Capture& capture, const Tensor& y, CheckReport* report) {
  const EventInfo& info = *y.info;
  const auto ids = capture.Find(info.name + ".partial", {.step = info.event.step});
  std::vector<double> sum(y.values.size(), 0.0), magnitude(y.values.size(), 0.0);
  TensorPtr own;
  std::set<int32_t> ranks;
  double u = Roundoff(info.event);
  for (const EventId id : ids) {
    auto part = capture.Load(id);
    if (!part.ok() || (*part)->values.size() != y.values.size()) {
      return report->Missing(part.ok() ? info.name + ".partial has another shape" : part.status().message(),
                             Capture::RecordHint(info.name + ".partial") + " on every rank");
    }
    if (!ranks.insert((*part)->info->event.rank).second) continue;
    if ((*part)->info->event.rank == info.event.rank) own = *part;
    u = std::max(u, Roundoff((*part)->info->event));
    for (size_t i = 0; i < sum.size(); ++i) {
      sum[i] += (*part)->values[i];
      magnitude[i] += std::fabs((*part)->values[i]);
    }
  }
  const int64_t ranks_needed = capture.Integer(info, "world_size").value_or(capture.world_size());
  if (static_cast<int64_t>(ranks.size()) < ranks_needed) {
    return report->Missing(std::to_string(ranks.size()) + " of " + std::to_string(ranks_needed) + " partial sums of " +
                               info.name + " were recorded",
                           Capture::RecordHint(info.name + ".partial") + " on every rank");
  }
  if (auto bias = capture.LoadWeight(info, info.name + ".bias"); bias.ok() && (*bias)->n() == y.row_size()) {
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += (*bias)->values[i % static_cast<size_t>(y.row_size())];
  }
  double share = 0, bound = 0;
  const std::vector<bool> bad = WrongRows(y, sum, magnitude, u, static_cast<int>(ranks.size()), &share, &bound);
  if (!Any(bad)) return report->Right(info.id, share, bound);
  Suspicion s = At(info, fault_class::kReduce, 2);
  Describe(y, bad, share, bound, u, &s);
  if (own != nullptr && own->values == y.values) {
    s.rank = 3;
    s.bad.evidence.push_back("the rank holds its own partial sum: the reduction did not happen");
  } else {
    const double a = Dot(y.values, sum) / std::max(Dot(sum, sum), 1e-300);
    double miss = 0;
    for (size_t i = 0; i < sum.size(); ++i) miss += std::pow(y.values[i] - a * sum[i], 2);
    const double residual = std::sqrt(miss / std::max(Dot(y.values, y.values), 1e-300));
    if (residual < 8 * bound) {
      s.rank = 3;
      s.bad.constant_value = a;
      s.bad.constant = "result / sum of the partial ones";
      s.bad.evidence.push_back("the result is " + Num(a) + " times the sum, to " + Num(residual));
    } else {
      s.bad.evidence.push_back("the result is not the sum of " + std::to_string(ranks.size()) + " partial ones");
    }
  }
  report->Found(std::move(s));
}

// moe.out = routed + shared.
void JudgeMoeOut(const Capture& capture, const Tensor& y, CheckReport* report) {
  const EventInfo& info = *y.info;
  auto routed = capture.LoadOperand(info, info.prefix + "moe.routed");
  auto shared = capture.LoadOperand(info, info.prefix + "moe.shared");
  if (!routed.ok()) return report->Missing(routed.status().message(), Capture::RecordHint(info.prefix + "moe.routed"));
  const bool has_shared = shared.ok() && (*shared)->values.size() == y.values.size();
  if (capture.HasSite(info.prefix + "moe.shared") && !has_shared) {
    return report->Missing("moe.shared could not be read", Capture::RecordHint(info.prefix + "moe.shared"));
  }
  if ((*routed)->values.size() != y.values.size()) return;
  std::vector<double> sum = (*routed)->values, magnitude(sum.size());
  for (size_t i = 0; i < sum.size(); ++i) {
    magnitude[i] = std::fabs(sum[i]) + (has_shared ? std::fabs((*shared)->values[i]) : 0);
    if (has_shared) sum[i] += (*shared)->values[i];
  }
  double u = std::max(Roundoff(info.event), Roundoff((*routed)->info->event));
  if (has_shared) u = std::max(u, Roundoff((*shared)->info->event));
  double share = 0, bound = 0;
  const std::vector<bool> bad = WrongRows(y, sum, magnitude, u, 2, &share, &bound);
  if (!Any(bad)) return report->Right(info.id, share, bound);
  Suspicion s = At(info, fault_class::kKernel, 1);
  Describe(y, bad, share, bound, u, &s);
  if (has_shared) {
    const Fit fit = LeastSquares(y.values, (*routed)->values, (*shared)->values);
    if (fit.residual < 8 * bound) {
      s.bad.cls = fault_class::kReduce;
      s.rank = 3;
      s.bad.evidence.push_back("moe.out = " + Num(fit.a) + " routed + " + Num(fit.b) + " shared, to " +
                               Num(fit.residual));
      const bool shared_off = std::fabs(fit.a - 1) < 1e-2;
      s.bad.constant_value = shared_off ? fit.b : fit.a;
      s.bad.constant =
          shared_off ? "times that the shared expert was added" : "times that the routed experts were added";
    }
  }
  report->Found(std::move(s));
}

}  // namespace

void CheckReductions(const Capture& capture, CheckReport* report) {
  for (const std::string& name : capture.Names()) {
    const SiteName site = ParseSiteName(name);
    const bool moe_out = site.stem == "moe.out" && !site.partial;
    if (site.partial || (!moe_out && !capture.HasSite(name + ".partial"))) continue;
    for (const EventId id : RealEvents(capture, name)) {
      auto y = capture.Load(id);
      if (!y.ok()) {
        report->Missing(y.status().message(), Capture::RecordHint(name));
        continue;
      }
      if (capture.HasSite(name + ".partial")) JudgePartial(capture, **y, report);
      if (moe_out) JudgeMoeOut(capture, **y, report);
    }
  }
}

}  // namespace assay::check
