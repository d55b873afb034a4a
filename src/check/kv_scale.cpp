// Scales of a quantised cache: none but 1 on a cache that is not quantised, and a dynamic one, of a cache or of an
// activation, is the largest magnitude of its tensor over the largest code.
#include <algorithm>
#include <cmath>

#include "check/checks.h"
#include "check/helpers.h"

namespace assay::check {
namespace {

// A scale declared on a cache whose codes are plain floats.
void JudgeDeclared(const Capture& capture, const EventInfo& info, CheckReport* report) {
  const auto dtype = CacheDType(capture, info);
  if (!dtype) return;
  if (LargestCode(*dtype) != 0) return report->Right(info.id);
  for (const char* key : {"k_scale", "v_scale", "kv_scale"}) {
    const double scale = capture.Number(info, key).value_or(1);
    if (scale == 1) continue;
    Suspicion s = At(info, fault_class::kKvScale, 2);
    s.bad.constant_value = scale;
    s.bad.constant = std::string(key) + " on a cache that is not quantised";
    s.bad.measured = scale;
    s.bad.bound = 1;
    s.bad.bound_basis = "exact: a cache of " + std::string(NameOf(*dtype)) + " has the scale 1";
    s.bad.confidence = 0.9;
    s.bad.evidence.push_back(std::string(key) + " " + NumberText(scale) + " with kv_cache_dtype " +
                             std::string(NameOf(*dtype)));
    return report->Found(std::move(s));
  }
  report->Right(info.id);
}

// Largest magnitude of each part of x that one scale stands for: the leading axes that the scale has.
std::optional<std::vector<double>> LargestOf(const Tensor& x, const Tensor& scale, bool real_only) {
  std::vector<int64_t> lead;
  if (scale.n() > 1) lead = scale.shape;
  while (!lead.empty() && lead.size() > 1 && lead.back() == 1) lead.pop_back();
  if (lead.size() > x.shape.size() || !std::equal(lead.begin(), lead.end(), x.shape.begin())) return std::nullopt;
  int64_t parts = 1;
  for (const int64_t n : lead) parts *= n;
  if (parts <= 0 || parts != std::max<int64_t>(scale.n(), 1)) return std::nullopt;
  std::vector<double> top(static_cast<size_t>(parts), 0.0);
  const int64_t each = x.n() / parts;
  for (int64_t i = 0; i < x.n(); ++i) {
    const size_t row = static_cast<size_t>(i / std::max<int64_t>(x.row_size(), 1));
    if (real_only && row < x.rows.size() && x.rows[row].padding) continue;
    double& t = top[static_cast<size_t>(i / each)];
    const double magnitude = std::fabs(x.values[static_cast<size_t>(i)]);
    t = std::isnan(magnitude) ? HUGE_VAL : std::max(t, magnitude);
  }
  return top;
}

// Limits that a dynamic scale is declared to be kept in.
struct ScaleLimits {
  double least = 0, most = HUGE_VAL;
  double Of(double scale) const { return std::max(std::min(scale, most), least); }
};

// A scale above what its values ask for saturates nothing, and engines keep the scales of tiny rows off zero by a least
// one that few recordings declare: so large a magnitude and above must have its own scale. A least scale in use,
// 1 / (448 · 512) for e4m3, stands for a magnitude of 1 / 512.
constexpr double kTiny = 1e-2;

// Whether the scale is one of a cache; others belong to codes of their own, NAME.q of NAME.q_scale.
bool IsOfCache(const Capture& capture, const EventInfo& scale) {
  const std::string_view stem = scale.site.stem;
  return stem == "attn.k_scale" || stem == "attn.v_scale" || stem == "attn.kv_scale" ||
         CacheDType(capture, scale).has_value();
}

// Type of the codes under a scale; kInvalid: they were not recorded.
DType CodesUnder(const Capture& capture, const EventInfo& scale) {
  if (IsOfCache(capture, scale)) return CacheDType(capture, scale).value_or(DType::kF8E4M3FN);
  EventFilter filter;
  filter.step = scale.event.step;
  filter.rank = scale.event.rank;
  for (const EventId id : capture.Find(scale.name.substr(0, scale.name.size() - 6), filter)) {
    return capture.Info(id)->event.dtype;
  }
  return DType::kInvalid;
}

// scale = largest magnitude / largest code, for each part that one scale stands for. Real rows alone first, then with
// padding: engines differ in whether padding takes part.
void JudgeDynamic(const Capture& capture, const Tensor& scale, CheckReport* report) {
  const EventInfo& info = *scale.info;
  const std::string of = Capture::OwnText(info, "scale_of").value_or("");
  auto x = capture.LoadOperand(info, of);
  if (!x.ok()) return report->Missing(x.status().message(), Capture::RecordHint(of));
  const DType codes = CodesUnder(capture, info);
  if (codes == DType::kInvalid) {
    return report->Missing(info.name + ": its codes were not recorded",
                           Capture::RecordHint(info.name.substr(0, info.name.size() - 6)));
  }
  const double code = LargestCode(codes);
  if (code == 0) return;
  ScaleLimits limits;
  limits.least = capture.Number(info, "scale_min").value_or(limits.least);
  limits.most = capture.Number(info, "scale_max").value_or(limits.most);
  double worst = 0, ratio = 1;
  int64_t n_judged = 0, n_tiny = 0;
  // Rounding of the scale's own dtype and of the division.
  const double bound = 4 * std::max(UnitRoundoff(info.event.dtype), UnitRoundoff(DType::kF32));
  std::vector<bool> bad(scale.rows.size());
  for (const bool real_only : {true, false}) {  // padding may be part of a tensor that one scale serves
    const auto top = LargestOf(**x, scale, real_only);
    if (!top) return report->Missing("the shape of " + info.name + " is not that of leading axes of " + of, "");
    worst = 0;
    n_judged = n_tiny = 0;
    for (size_t i = 0; i < top->size(); ++i) {
      if (!std::isfinite((*top)[i])) return;  // the fault of the tensor
      const double want = limits.Of((*top)[i] / code), have = scale.values[i];
      const size_t row = scale.rows.empty() ? 0 : i / static_cast<size_t>(std::max<int64_t>(scale.row_size(), 1));
      if (want == 0 || (row < scale.rows.size() && scale.rows[row].padding)) continue;
      const double off = std::isfinite(have) ? std::fabs(have / want - 1) : HUGE_VAL;
      if (off > bound && have > want && have < HUGE_VAL && (*top)[i] < kTiny) {
        ++n_tiny;
        continue;
      }
      ++n_judged;
      if (off > worst) worst = off, ratio = have / want;
      if (row < bad.size()) bad[row] = off > bound;
    }
    if (worst > bound) continue;
    if (n_judged > 0 || n_tiny == 0) return report->Right(info.id, worst, bound);
    return report->Missing(
        info.name + " is larger than the magnitudes of " + of + " ask for, all below 0.01: a least scale may be meant",
        "declare scale_min on " + info.name);
  }
  const bool cache = IsOfCache(capture, info);
  Suspicion s = At(info, cache ? fault_class::kKvScale : fault_class::kQScale, 2);
  if (!cache) s.hypothesis = hypothesis::kQuantised;
  AddRows(scale, bad, &s.bad);
  s.bad.measured = worst;
  s.bad.bound = bound;
  s.bad.bound_basis = "scale / (largest magnitude / " + NumberText(code) + ") - 1: two roundings of the scale";
  if (limits.least > 0 || limits.most < HUGE_VAL) s.bad.bound_basis += "; within scale_min and scale_max";
  s.bad.constant_value = ratio;
  s.bad.constant = "scale used / that of the tensor";
  s.bad.confidence = 0.95;
  s.bad.evidence.push_back("the scale is " + FactorText(ratio, 6) + " times the largest magnitude of " + of + " over " +
                           NumberText(code));
  report->Found(std::move(s));
}

}  // namespace

// First what caches declare, then every dynamic scale that was recorded with what it belongs to (scale_of).
void CheckKvScale(const Capture& capture, CheckReport* report) {
  for (const char* stem : {"attn.kv_write", "attn.out"}) {
    for (const std::string& name : capture.NamesOfStem(stem)) {
      const std::vector<EventId> ids = RealEvents(capture, name);
      const size_t stride = std::max<size_t>(1, ids.size() / 64);  // what is declared does not change from step to step
      for (size_t i = 0; i < ids.size(); i += stride) {
        if (!capture.trace().event(ids[i]).meta("kv_cache_dtype").empty())
          JudgeDeclared(capture, *capture.Info(ids[i]), report);
      }
    }
  }
  for (const std::string& name : capture.Names()) {
    if (!name.ends_with("_scale")) continue;
    for (const EventId id : RealEvents(capture, name)) {
      const auto info = capture.Info(id);
      if (capture.Text(*info, "scale_rule") != "dynamic" || Capture::OwnText(*info, "quant") || info->audit == "read")
        continue;
      auto t = capture.Load(id);
      if (t.ok()) {
        JudgeDynamic(capture, **t, report);
      } else {
        report->Missing(t.status().message(), Capture::RecordHint(name));
      }
    }
  }
}

}  // namespace assay::check
