// The sum of what the experts return, and the operations of a mixture in their order.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "check/op_checks.h"
#include "check/op_experts_explain.h"
#include "check/op_explain.h"
#include "check/op_moe.h"
#include "check/op_moe_rows.h"
#include "oracle/moe.h"

namespace assay::check {
namespace {

using namespace op;
using oracle::Array;

// moe.routed [T, h] = sum over the choices of weight times expert's result.
void JudgeRouted(Subject& s) {
  const TensorPtr rows = s.Operand(s.Sibling("moe.expert_out")), weights = s.Operand(s.Sibling("moe.topk_weights")),
                  ids = s.Operand(s.Sibling("moe.topk_ids"));
  if (s.capture().HasSite(s.info().name + ".partial")) return;  // judged as a sum
  if (rows == nullptr) return;
  if (weights == nullptr) return Missing(s, s.Sibling("moe.topk_weights"));
  if (ids == nullptr) return Missing(s, s.Sibling("moe.topk_ids"));
  JudgeCombined(s, rows, weights, ids);
}

}  // namespace

// Finds for each choice (t, j) the row of `rows` that holds it, in whichever of three layouts they were recorded; row
// -1: the choice was dropped for want of capacity and adds nothing.
void JudgeCombined(Subject& s, const TensorPtr& rows, const TensorPtr& weights, const TensorPtr& ids) {
  s.DeclareOneStore();
  if (ids->n() != weights->n())
    return s.report().Missing(ids->info->name + " and " + weights->info->name + " have different shapes",
                              "record both of the same rows");
  const std::optional<Sent> sent = SentBy(*ids);
  std::vector<int64_t> row_of(static_cast<size_t>(weights->n()), -1);
  Array experts = ToArray(*rows);
  if (rows->shape.size() == 3 && rows->n_rows() == weights->n_rows() && rows->shape[1] == sent->k) {  // T k h
    std::iota(row_of.begin(), row_of.end(), 0);
    experts.shape = {experts.size() / experts.cols(), experts.cols()};
  } else if (rows->shape.size() == 3) {  // E C h: rows of an expert in the order of tokens
    std::vector<int64_t> used(static_cast<size_t>(rows->shape[0]), 0);
    for (size_t r = 0; r < sent->order.size(); ++r) {
      const int64_t e = sent->expert[r];
      if (e >= rows->shape[0] || used[static_cast<size_t>(e)] >= rows->shape[1]) continue;
      row_of[static_cast<size_t>(sent->order[r])] = e * rows->shape[1] + used[static_cast<size_t>(e)]++;
    }
    experts.shape = {experts.size() / experts.cols(), experts.cols()};
  } else {
    for (size_t r = 0; r < sent->order.size(); ++r)
      row_of[static_cast<size_t>(sent->order[r])] = static_cast<int64_t>(r);
  }
  Array w = ToArray(*weights);
  const bool on_input = WeightsOnInput(s);
  if (on_input) std::fill(w.values.begin(), w.values.end(), 1.0);
  Operation combine;
  combine.inputs = {{rows->info->name, rows}};
  combine.run = [&](std::span<const Array> in) { return oracle::Combine({experts.shape, in[0].values}, row_of, w); };
  JudgeOperation(s, combine, [&](const Difference&, const oracle::Computed& right) -> std::optional<Explanation> {
    if (on_input && Fits(s, oracle::Combine(experts, row_of, ToArray(*weights))))
      return Explanation{fault_class::kMoeRoute,
                         "fits experts' results multiplied by the combine weights, which are to multiply their inputs"};
    // Weights that were applied twice show as their squares, weights never applied as ones.
    Array ones = w;
    std::fill(ones.values.begin(), ones.values.end(), 1.0);
    if (Fits(s, oracle::Combine(experts, row_of, ones)))
      return Explanation{fault_class::kMoeRoute, "fits experts' results without their weights"};
    Array twice = w;
    for (double& x : twice.values) x *= x;
    if (Fits(s, oracle::Combine(experts, row_of, twice)))
      return Explanation{fault_class::kMoeRoute, "fits weights that were applied twice"};
    const double c = ConstantRatio(s.actual(), right.value, s.judged(), std::max(1e-4, 8 * s.precision().store));
    const double factor = WithRouterKeys(s).Number("routed_scaling_factor", 1);
    // The factor of the router's weights, applied once more or taken out again.
    const double off = std::abs(std::abs(std::log(std::abs(c))) - std::abs(std::log(std::abs(factor))));
    if (!std::isnan(c) && factor != 1 && factor > 0 && off <= std::max(1e-3, 4 * s.precision().store))
      return Explanation{fault_class::kMoeRoute,
                         std::string("routed_scaling_factor, which the weights hold, was ") +
                             ((c > 1) == (factor > 1) ? "applied once more" : "divided out of the sum"),
                         c, "sum used / expected"};
    if (!std::isnan(c))
      return Explanation{fault_class::kReduce, "the sum is one constant off", c, "sum used / expected"};
    if (auto why = ExplainPrecision(s, right)) return why;
    return ExplainCombine(s, experts, row_of, {{weights->n_rows(), weights->row_size()}, w.values}, right);
  });
}

void JudgeExperts(const Capture& capture, CheckReport* report) {
  const auto each = [&](std::string_view stem, const JudgeFunction& judge) {
    const std::string_view stems[] = {stem};
    JudgeStems(capture, report, stems, judge);
  };
  each("moe.expert_counts", JudgeExpertCounts);
  each("moe.dispatched", JudgeDispatched);
  each("moe.gate_up", [](Subject& s) { JudgeExpertProduct(s, "moe.dispatched", "gate_up_proj"); });
  each("moe.act", [](Subject& s) { JudgeActivation(s, true); });
  each("mlp.act", [](Subject& s) { JudgeActivation(s, false); });
  each("moe.expert_out", [](Subject& s) { JudgeExpertProduct(s, "moe.act", "down_proj"); });
  each("moe.routed", JudgeRouted);
  each("moe.shared", JudgeSharedExpert);
  each("moe.shared.partial", JudgeSharedExpert);
}

}  // namespace assay::check
