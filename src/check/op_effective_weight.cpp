// Weights that a kernel works with (NAME.weight) beside the codes and scales that they were decoded from
// (NAME.weight.codes and its fellows), where both were recorded. With a checkpoint, `assay weights` does this.
#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "check/op_checks.h"
#include "check/op_fitted.h"
#include "check/op_quant_explain.h"

namespace assay::check {
namespace {

using namespace op;
using oracle::Array;

void JudgeWeight(Subject& s) {
  const std::string parts_of = s.info().name + ".";
  if (!HasCodes(s, parts_of, false)) return;
  const auto parts = TakeApart(s, parts_of, false);
  if (!parts.ok()) return s.report().Missing(parts.status().message(), Capture::RecordHint(parts_of + "scale"));
  const Array value = parts->Values();
  // Silent, since the shard may be cut behind the decoding.
  if (value.size() != s.actual().size()) return;  // a part of it, or packed otherwise
  const oracle::Computed right = Decoded(value, *parts, s.actual().shape);
  const Difference d = Differ(s, right);
  if (d.ok) return ReportRight(s, d);
  QuantisedProduct q;
  q.name = s.info().name + " of its codes";
  q.is_value = true;
  // There is no product with an activation: the filter of plain GEMMs does not apply.
  q.plain = false;
  q.decode = [&](const DequantVariant& v) { return TakeApart(s, parts_of, false, v); };
  q.product = [&](const Array& other) -> Result<oracle::Computed> {
    if (other.size() != s.actual().size()) return Status::BadInput("another shape");
    return Decoded(other, *parts, s.actual().shape);
  };
  std::optional<Explanation> why;
  const double c = ConstantRatio(s.actual(), right.value, s.judged(), std::max(1e-4, 8 * s.precision().store));
  if (!std::isnan(c))
    why = Explanation{fault_class::kQScale, "the weight is one constant off", c, "weight used / expected"};
  if (!why) why = ExplainQuantised(s, q, right);
  Difference coarser;
  if (!why && ExplainPrecision(s, right, &coarser))
    return ReportRight(s, coarser);  // kept in the model's type, recorded in a wider one
  if (!why) why = ExplainByFit(s, right, {}, true);
  if (!why) {
    why = Explanation{fault_class::kLoad, "the weight is not what its codes and scales stand for, and no cause fits"};
    why->rank = 1;
  }
  ReportWrong(s, d, *why);
}

}  // namespace

void JudgeEffectiveWeights(const Capture& capture, CheckReport* report) {
  constexpr std::string_view kCodes = ".weight.codes";
  std::set<std::string> stems;
  for (const std::string& name : capture.Names()) {
    if (!name.ends_with(kCodes)) continue;
    const std::string stem = ParseSiteName(name).stem;
    // Without ".codes".
    stems.insert(stem.substr(0, stem.size() - 6));
  }
  for (const std::string& stem : stems) {
    const std::string_view stems_of_one[] = {stem};
    JudgeStems(capture, report, stems_of_one, JudgeWeight, true);
  }
}

}  // namespace assay::check
