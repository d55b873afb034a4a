// Compiled and in-place code: a result that is its own input unchanged, and a sum one of whose operands was written
// over before it was read.
#include <algorithm>
#include <cmath>
#include <set>

#include "check/checks.h"
#include "check/helpers.h"

namespace assay::check {
namespace {

// What a site that must change its input is computed from.
std::string_view RotatedFrom(std::string_view stem) {
  if (stem == "attn.q") return "attn.q_proj";
  if (stem == "attn.k") return "attn.k_proj";
  if (stem == "attn.indexer.q") return "attn.indexer.q_proj";
  if (stem == "attn.indexer.k") return "attn.indexer.k_proj";
  return {};
}

// A rotation that left the rows of several positions as they were.
void JudgeRotation(const Capture& capture, const Tensor& y, std::string_view source, CheckReport* report) {
  const EventInfo& info = *y.info;
  auto x = capture.LoadOperand(info, info.prefix + std::string(source));
  if (!x.ok() || (*x)->values.size() != y.values.size()) {
    return report->Missing(x.ok() ? "its input has another shape" : x.status().message(), Capture::RecordHint(source));
  }
  std::set<int64_t> turned, unturned;
  std::vector<bool> bad(y.rows.size());
  for (size_t r = 0; r < y.rows.size(); ++r) {
    if (!y.rows[r].real() || y.rows[r].position == 0) continue;
    const auto a = (*x)->row(static_cast<int64_t>(r)), b = y.row(static_cast<int64_t>(r));
    const bool zero = std::all_of(a.begin(), a.end(), [](double v) { return v == 0; });
    bad[r] = !zero && std::equal(a.begin(), a.end(), b.begin(), b.end());
    (bad[r] ? unturned : turned).insert(y.rows[r].position);
  }
  if (unturned.size() < 2 || !turned.empty()) return report->Right(info.id);
  Suspicion s = At(info, fault_class::kCompile, 3);
  AddRows(y, bad, &s.bad);
  s.bad.measured = 1;
  s.bad.bound_basis = "exact: a rotation by another position than 0 changes a row";
  s.bad.confidence = 0.95;
  s.bad.evidence.push_back("equal to " + std::string(source) + " bit for bit at " + std::to_string(unturned.size()) +
                           " positions: what the rotation wrote was thrown away");
  report->Found(std::move(s));
}

// out = residual_scale (prev.out + attn.o_proj) + FFN with one operand as another tensor in the same memory left it.
void JudgeSum(const Capture& capture, const Tensor& out, CheckReport* report) {
  const EventInfo& info = *out.info;
  const std::string previous =
      info.site.layer == 0 ? "embed" : "layers." + std::to_string(info.site.layer - 1) + ".out";
  auto ffn = capture.LoadOperand(info, info.prefix + "mlp.down");
  if (!ffn.ok()) ffn = capture.LoadOperand(info, info.prefix + "moe.out");
  auto x = capture.LoadOperand(info, previous), o = capture.LoadOperand(info, info.prefix + "attn.o_proj");
  if (!ffn.ok() || !x.ok() || !o.ok())
    return report->Missing("an operand of " + info.name + " was not recorded", Capture::RecordHint(previous));
  const size_t n = out.values.size();
  if ((*ffn)->values.size() != n || (*x)->values.size() != n || (*o)->values.size() != n) return;
  const double u =
      8 * std::max({UnitRoundoff(info.event.compute_dtype), UnitRoundoff(info.event.dtype), UnitRoundoff(DType::kF32)});
  const double residual = capture.Number(info, "residual_scale").value_or(1),
               branch = capture.Number(info, "branch_scale").value_or(1);
  double top = 0;
  const auto miss = [&](const auto& want) {
    double worst = 0;
    for (size_t i = 0; i < n; ++i) {
      const double w = want(i), off = std::fabs(out.values[i] - w);
      top = std::isfinite(w) ? std::max(top, std::fabs(w)) : top;
      worst = std::isfinite(off) ? std::max(worst, off) : HUGE_VAL;
    }
    return worst;
  };
  const double right = miss(
      [&](size_t i) { return residual * ((*x)->values[i] + branch * (*o)->values[i]) + branch * (*ffn)->values[i]; });
  if (right <= u * top) return report->Right(info.id, top > 0 ? right / top : 0, u);
  // Tensors of the step that may have been written over an operand: which of them explains the sum?
  for (const std::string& name : capture.Names()) {
    if (ParseSiteName(name).layer != info.site.layer || name == info.name) continue;
    auto other = capture.LoadOperand(info, name);
    if (!other.ok() || (*other)->values.size() != n || *other == *ffn) continue;
    const auto& t = (*other)->values;
    if (miss([&](size_t i) { return t[i] + branch * (*ffn)->values[i]; }) > u * top &&
        miss([&](size_t i) { return residual * (t[i] + branch * (*o)->values[i]) + branch * (*ffn)->values[i]; }) >
            u * top) {
      continue;
    }
    Suspicion s = At(info, fault_class::kCompile, 3);
    AddRows(out, std::vector<bool>(out.rows.size(), true), &s.bad);
    s.bad.measured = right / top;
    s.bad.bound = u;
    s.bad.bound_basis = "8 roundings of the largest magnitude";
    s.bad.confidence = 0.95;
    s.bad.evidence.push_back("fits with " + name + " in the place of the residual operand, to rounding");
    const AddressRange a = MemoryOf((*other)->info->event), b = MemoryOf((*x)->info->event),
                       c = MemoryOf((*o)->info->event);
    if (a.overlaps(b) || a.overlaps(c)) s.bad.evidence.push_back(name + " lies in the memory of an operand");
    return report->Found(std::move(s));
  }
}

}  // namespace

void CheckCompiled(const Capture& capture, CheckReport* report) {
  for (const std::string& name : capture.Names()) {
    const SiteName site = ParseSiteName(name);
    const std::string_view source = RotatedFrom(site.stem);
    if (source.empty() && site.stem != "out") continue;
    for (const EventId id : RealEvents(capture, name)) {
      const auto info = capture.Info(id);
      if (!capture.Flag(*info, "compiled") && !capture.Flag(*info, "inplace")) continue;
      auto y = capture.Load(id);
      if (!y.ok()) {
        report->Missing(y.status().message(), Capture::RecordHint(name));
      } else if (site.stem == "out") {
        JudgeSum(capture, **y, report);
      } else {
        JudgeRotation(capture, **y, source, report);
      }
    }
  }
}

}  // namespace assay::check
