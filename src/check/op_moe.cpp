// Router of a mixture: the choice of experts and its weights.
#include "check/op_moe.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>

#include "base/rounding.h"
#include "check/op_checks.h"
#include "check/op_explain.h"
#include "check/op_moe_rows.h"
#include "oracle/moe.h"

namespace assay::check {
namespace {

using namespace op;
using oracle::Array;

// No bias: the oracle takes an array without values for "none".
Array Empty() { return {{0}, {}}; }

// What the model's router does, by the metadata of the event or the process. Without any: sigmoid where a correction
// bias was recorded, which only those routers have.
oracle::RouterSpec SpecOf(const Subject& s, int64_t top_k) {
  oracle::RouterSpec spec;
  const std::string scoring = s.Text("scoring", "");
  const bool bias = s.Weight(s.Sibling("mlp.gate.e_score_correction_bias")) != nullptr;
  const bool sigmoid = scoring.empty() ? s.Flag("model.scoring_sigmoid", bias) : scoring == "sigmoid";
  spec.scoring = sigmoid ? oracle::Scoring::kSigmoid : oracle::Scoring::kSoftmax;
  spec.top_k = top_k;
  spec.n_group = std::max<int64_t>(s.Integer("n_group", 1), 1);
  spec.topk_group = std::max<int64_t>(s.Integer("topk_group", 1), 1);
  spec.group_score =
      s.Text("group_score", "max") == "top2_sum" ? oracle::GroupScore::kTop2Sum : oracle::GroupScore::kMax;
  spec.renormalise = s.Flag("renormalise", false);
  spec.scaling = s.Number("routed_scaling_factor", 1);
  return spec;
}

// Whether some bias of the experts makes every choice of these rows the best: differences b_f - b_e <= s_e - s_f for
// each expert e taken and f left out, which can be met unless they close a cycle below zero.
// A system of difference constraints: feasible exactly when Bellman and Ford's relaxation from 0 ends within n rounds
// (Cormen et al., Introduction to Algorithms, section 24.4). Why: without the bias a choice cannot be called wrong
// while some bias would make it right.
bool SomeBiasFits(const Array& scores, const std::vector<int64_t>& ids, int64_t k, std::span<const char> judged) {
  const int64_t n = scores.cols();
  Array least = Array::Filled({n, n}, HUGE_VAL);
  for (int64_t t = 0; t < scores.rows(); ++t) {
    if (!judged[static_cast<size_t>(t)]) continue;
    // An expert chosen twice fits no bias at all.
    const std::set<int64_t> mine(ids.begin() + t * k, ids.begin() + (t + 1) * k);
    if (static_cast<int64_t>(mine.size()) != k) return false;
    for (int64_t e : mine) {
      if (e < 0 || e >= n) return false;
      for (int64_t f = 0; f < n; ++f) {
        if (!mine.contains(f)) least[e * n + f] = std::min(least[e * n + f], scores[t * n + e] - scores[t * n + f]);
      }
    }
  }
  std::vector<double> b(static_cast<size_t>(n), 0);
  for (int64_t round = 0; round <= n; ++round) {
    bool changed = false;
    for (int64_t e = 0; e < n; ++e) {
      for (int64_t f = 0; f < n; ++f) {
        const double limit = b[static_cast<size_t>(e)] + least[e * n + f];
        if (limit < b[static_cast<size_t>(f)] - 1e-12) b[static_cast<size_t>(f)] = limit, changed = true;
      }
    }
    if (!changed) return true;
  }
  return false;
}

// moe.topk_ids [T, k] against the recorded moe.router_logits [T, E].
void JudgeIds(Subject& s) {
  const TensorPtr logits = s.Operand(s.Sibling("moe.router_logits"));
  if (logits == nullptr) {
    if (s.info().repeat < 0) Missing(s, s.Sibling("moe.router_logits"));
    return;
  }
  JudgeChoice(s, logits, s.Weight(s.Sibling("mlp.gate.e_score_correction_bias")));
}

// moe.topk_weights [T, k] of the recorded logits and the recorded choice, right or not: the choice is judged by itself.
void JudgeWeights(Subject& s) {
  const TensorPtr logits = s.Operand(s.Sibling("moe.router_logits")), chosen = s.Operand(s.Sibling("moe.topk_ids"));
  if (logits == nullptr) return Missing(s, s.Sibling("moe.router_logits"));
  if (chosen == nullptr) return Missing(s, s.Sibling("moe.topk_ids"));
  JudgeChoiceWeights(s, logits, chosen, s.Weight(s.Sibling("mlp.gate.e_score_correction_bias")));
}

// The logits of an earlier step, where the launch is bound to an address that they have left, or other strides of their
// storage; `fits`: every row's choice is right by these logits.
std::optional<Explanation> ChosenElsewhere(const Subject& s, const Tensor& logits,
                                           const std::function<bool(const Array&)>& fits) {
  const Capture& capture = s.capture();
  bool moved = false;
  BoundEvent(s, logits.info->name, logits.info->id, &moved);
  for (EventId id : capture.EventsOf(logits.info->name)) {
    if (!moved || !capture.Earlier(id, logits.info->id)) continue;
    const auto old = capture.Load(id);
    if (!old.ok() || (*old)->shape != logits.shape || !fits(ToArray(**old))) continue;
    return Explanation{fault_class::kGraph, "the choice fits the logits of step " +
                                                std::to_string((*old)->info->event.step) +
                                                ": the launch is bound to an address that they have left"};
  }
  const Readings readings = OtherReadings(s, logits, {});
  for (const Reading& way : readings.ways) {
    if (!fits(readings.Read(way))) continue;
    const bool from_start = way.from_beginning && way.strides == logits.info->event.strides;
    return Explanation{
        fault_class::kStride,
        from_start ? "the choice fits logits read from the beginning of their storage, not from where they begin"
                   : "the choice fits logits read from their storage with other strides than those of the view"};
  }
  return std::nullopt;
}

}  // namespace

// The right choice is not unique where two scores tie to rounding, so a row is wrong only when its set differs and the
// oracle's own margin is wider than that.
void JudgeChoice(Subject& s, const TensorPtr& logits, const TensorPtr& bias) {
  if (logits->n_rows() != s.tensor()->n_rows())
    return s.report().Missing(logits->info->name + " has other rows than " + s.info().name,
                              "record router logits of the same rows");
  const Subject keys = WithRouterKeys(s);
  const oracle::RouterSpec spec = SpecOf(keys, s.tensor()->row_size());
  const auto routing =
      oracle::Route(ToArray(*logits), bias == nullptr ? Empty() : ToArray({bias->n()}, bias->values), spec);
  if (!routing.ok()) return s.report().Missing(routing.status().message(), "record router logits of the same rows");
  const std::vector<int64_t> ids = IdsOf(*s.tensor());
  const int64_t experts = routing->selection.cols(), k = spec.top_k;
  // A choice is right when no expert left out scores higher than one taken by more than rounding: scores and their sum
  // with the bias are rounded in the compute type of the ids' row (float32 at best).
  const double u = std::max(
      UnitRoundoff(IsFloat(s.info().event.compute_dtype) ? s.info().event.compute_dtype : DType::kF32), 0x1p-24);
  const auto wrong_rows = [&](const oracle::Routing& r) {
    std::vector<int64_t> rows;
    for (int64_t t = 0; t < r.selection.rows(); ++t) {
      if (!s.judged()[static_cast<size_t>(t)]) continue;
      std::set<int64_t> mine(ids.begin() + t * k, ids.begin() + (t + 1) * k),
          right(r.ids.begin() + t * k, r.ids.begin() + (t + 1) * k);
      if (mine == right) continue;
      double top = 0;
      for (double x : r.selection.row(t)) top = std::max(top, std::abs(x));
      // 8 roundoffs: score, bias and sum on both sides of the gap.
      const bool tie = r.set_margin[static_cast<size_t>(t)] <= 8 * u * top;
      bool valid = static_cast<int64_t>(mine.size()) == k;
      for (int64_t e : mine) valid = valid && e >= 0 && e < experts;
      if (!valid || !tie) rows.push_back(t);
    }
    return rows;
  };
  const std::vector<int64_t> rows = wrong_rows(*routing);
  if (rows.empty()) return s.report().Right(s.info().id);
  // A model that has a correction bias, recorded without its weights, chooses by scores that are not known.
  const std::string gate = s.Sibling("mlp.gate");
  if (bias == nullptr && spec.scoring == oracle::Scoring::kSigmoid && s.Weight(gate + ".weight") == nullptr &&
      SomeBiasFits(routing->selection, ids, k, s.judged())) {
    return Missing(s, gate + ".e_score_correction_bias");
  }
  // Logits in another place: each wrong row is one choice of many, so that a few rows fit nothing by chance.
  constexpr double kEnoughBits = 20;  // beyond the readings that are tried
  const auto log2_of_factorial = [](int64_t n) { return std::lgamma(static_cast<double>(n) + 1) / std::log(2); };
  const double bits = log2_of_factorial(experts) - log2_of_factorial(k) - log2_of_factorial(experts - k);
  const bool telling = static_cast<double>(rows.size()) * bits > kEnoughBits;
  if (telling && k < experts) {
    const auto elsewhere = ChosenElsewhere(s, *logits, [&](const Array& read) {
      const auto other = oracle::Route(read, bias == nullptr ? Empty() : ToArray({bias->n()}, bias->values), spec);
      return other.ok() && wrong_rows(*other).empty();
    });
    if (elsewhere) return ReportRule(s.capture(), s.report(), s.info(), *elsewhere, rows);
  }
  // What else would explain every row is said in words; the class is the same.
  Explanation why{fault_class::kMoeRoute, "experts chosen are not the best of the recorded logits"};
  if (bias != nullptr) {
    const auto plain = oracle::Route(ToArray(*logits), Empty(), spec);
    if (plain.ok() && wrong_rows(*plain).empty()) why.text = "the choice fits scores without the correction bias";
    Array rounded = ToArray({bias->n()}, bias->values);
    for (double& x : rounded.values) x = RoundToBits(x, 8);
    const auto coarse = oracle::Route(ToArray(*logits), rounded, spec);
    if (coarse.ok() && wrong_rows(*coarse).empty()) why.text = "the choice fits a bias rounded to bf16";
  }
  if (spec.n_group > 1) {
    oracle::RouterSpec flat = spec;
    flat.n_group = flat.topk_group = 1;
    const auto all =
        oracle::Route(ToArray(*logits), bias == nullptr ? Empty() : ToArray({bias->n()}, bias->values), flat);
    if (all.ok() && wrong_rows(*all).empty()) why.text = "the choice fits all experts, without the groups";
  }
  ReportRule(s.capture(), s.report(), s.info(), why, rows);
}

// Variants of the router's arithmetic, one change at a time, each a mistake that engines have made.
void JudgeChoiceWeights(Subject& s, const TensorPtr& logits, const TensorPtr& chosen, const TensorPtr& bias) {
  const oracle::RouterSpec spec = SpecOf(s, s.tensor()->row_size());
  const std::vector<int64_t> ids = IdsOf(*chosen);
  Operation weigh;
  weigh.inputs = {{logits->info->name, logits}};
  weigh.run = [&](std::span<const Array> in) { return oracle::WeightsOf(in[0], ids, spec); };
  JudgeOperation(s, weigh, [&](const Difference&, const oracle::Computed& right) -> std::optional<Explanation> {
    const auto variant = [&](auto change) {
      oracle::RouterSpec other = spec;
      change(other);
      return Fits(s, oracle::WeightsOf(ToArray(*logits), ids, other));
    };
    const auto scores = oracle::Route(ToArray(*logits), Empty(), spec);
    if (scores.ok() && bias != nullptr && bias->n() == scores->scores.value.cols()) {
      // `with`: the bias stayed in. `lost`: the score was got back as (score + bias) - bias in float, which loses what
      // is below a roundoff of the bias.
      Array with = scores->scores.value, lost = with;
      for (int64_t i = 0; i < with.size(); ++i) {
        const double b = bias->values[static_cast<size_t>(i % with.cols())];
        with[i] += b;
        lost[i] = static_cast<double>((static_cast<float>(lost[i]) + static_cast<float>(b)) - static_cast<float>(b));
      }
      if (Fits(s, oracle::WeightsFromScores(with, ids, spec)))
        return Explanation{fault_class::kMoeRoute, "weights hold the correction bias, which is for the choice alone"};
      auto cancelled = oracle::WeightsFromScores(lost, ids, spec);
      if (cancelled.ok()) {
        // Scores far below the bias are lost; the rest of the rows is within float32 of it.
        for (int64_t i = 0; i < cancelled->value.size(); ++i)
          cancelled->scale[i] = std::max(cancelled->scale[i], std::abs(cancelled->value[i]));
        if (Differ(s.actual(), *cancelled, s.precision(), s.judged(), 64).ok) {
          return Explanation{fault_class::kMoeRoute,
                             "scores were got back by subtracting the bias: what lies far below it is lost"};
        }
      }
    }
    if (variant([](oracle::RouterSpec& r) { r.renormalise = !r.renormalise; })) {
      return Explanation{fault_class::kMoeRoute, spec.renormalise ? "fits weights that were not renormalised"
                                                                  : "fits weights that were renormalised"};
    }
    if (spec.scaling != 1 && variant([](oracle::RouterSpec& r) { r.scaling = 1; })) {
      return Explanation{fault_class::kMoeRoute, "fits weights without routed_scaling_factor", 1 / spec.scaling,
                         "weights used / expected"};
    }
    if (variant([](oracle::RouterSpec& r) {
          r.scoring = r.scoring == oracle::Scoring::kSigmoid ? oracle::Scoring::kSoftmax : oracle::Scoring::kSigmoid;
        })) {
      return Explanation{fault_class::kMoeRoute, "fits the other scoring function"};
    }
    const double c = ConstantRatio(s.actual(), right.value, s.judged(), std::max(1e-4, 8 * s.precision().store));
    if (!std::isnan(c))
      return Explanation{fault_class::kMoeRoute, "weights are one constant off", c, "weights used / expected"};
    if (auto why = ExplainPrecision(s, right)) return why;
    return Explanation{fault_class::kMoeRoute, "weights are not those of the chosen scores", kNone, "", 1};
  });
}

// Two passes: a choice is judged for every event before any of the weights.
void JudgeRouter(const Capture& capture, CheckReport* report) {
  constexpr std::string_view kIds[] = {"moe.topk_ids"}, kWeights[] = {"moe.topk_weights"};
  JudgeStems(capture, report, kIds, JudgeIds);
  JudgeStems(capture, report, kWeights, JudgeWeights);
}

}  // namespace assay::check
