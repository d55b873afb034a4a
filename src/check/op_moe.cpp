// Router and experts of a mixture: the choice, its weights, what is sent, the experts' products, and their sum.
#include "check/op_moe.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "base/rounding.h"
#include "check/helpers.h"
#include "check/op_checks.h"
#include "check/op_experts_explain.h"
#include "check/op_explain.h"
#include "check/op_fitted.h"
#include "check/op_other_weight.h"
#include "check/op_quant_explain.h"
#include "oracle/linear.h"
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

// Ids as recorded, [T, k] in row order; negative ones (no choice, or another rank's expert) stay negative.
std::vector<int64_t> IdsOf(const Tensor& t) {
  std::vector<int64_t> ids;
  for (double x : t.values) ids.push_back(IntegerOf(x));
  return ids;
}

// The keys of the router stand on topk_weights.
Subject WithRouterKeys(const Subject& ids) {
  const TensorPtr weights = [&]() -> TensorPtr {
    EventFilter filter;
    filter.step = ids.info().event.step;
    filter.rank = ids.info().event.rank;
    for (EventId id : ids.capture().Find(ids.Sibling("moe.topk_weights"), filter)) {
      if (auto t = ids.capture().Load(id); t.ok()) return *t;
    }
    return nullptr;
  }();
  return weights == nullptr ? ids : Subject(ids.capture(), weights, ids.report());
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
// ---- rows by expert ------------------------------------------------------------------------------------------------

// Choices in the order in which rows are sent: by expert, then by token.
struct Sent {
  std::vector<int64_t> order;   // index into T x k
  std::vector<int64_t> expert;  // of each sent row
  int64_t k = 1;
};
// Stable, so that rows of one expert keep the order of their tokens, as grouped kernels have them.
Sent SentBy(const Tensor& ids) {
  Sent sent;
  sent.k = std::max<int64_t>(ids.row_size(), 1);
  for (int64_t i = 0; i < ids.n(); ++i) {
    if (IntegerOf(ids.values[static_cast<size_t>(i)]) >= 0) sent.order.push_back(i);
  }
  std::stable_sort(sent.order.begin(), sent.order.end(), [&](int64_t a, int64_t b) {
    return ids.values[static_cast<size_t>(a)] < ids.values[static_cast<size_t>(b)];
  });
  for (int64_t i : sent.order) sent.expert.push_back(IntegerOf(ids.values[static_cast<size_t>(i)]));
  return sent;
}
// Nothing when the step's moe.topk_ids was not recorded.
std::optional<Sent> SentRows(const Subject& s) {
  const TensorPtr ids = s.Operand(s.Sibling("moe.topk_ids"));
  return ids == nullptr ? std::nullopt : std::optional<Sent>(SentBy(*ids));
}

// moe.expert_counts [E]: integers, so they must be equal.
void JudgeCounts(Subject& s) {
  const auto sent = SentRows(s);
  if (!sent) return;
  std::vector<double> right(static_cast<size_t>(s.actual().size()), 0);
  for (int64_t e : sent->expert) {
    if (e < static_cast<int64_t>(right.size())) right[static_cast<size_t>(e)] += 1;
  }
  if (right == s.actual().values) return s.report().Right(s.info().id);
  // A repeat that others contradict is a matter of the moment.
  std::string_view cls = fault_class::kKernel;
  if (s.info().repeat >= 0) {
    EventFilter filter;
    filter.rank = s.info().event.rank;
    for (EventId id : s.capture().Find(s.info().name, filter)) {
      auto other = s.capture().Load(id);
      if (other.ok() && (*other)->values != s.tensor()->values) cls = fault_class::kNonDet;
    }
  }
  const auto total = static_cast<int64_t>(std::accumulate(s.actual().values.begin(), s.actual().values.end(), 0.0));
  ReportRule(
      s.capture(), s.report(), s.info(),
      {cls, "counts sum to " + std::to_string(total) + ", " + std::to_string(sent->order.size()) + " rows were sent"});
}

// moe.dispatched [rows sent, h]: rows of post_norm, sorted by expert; copies, unless the engine multiplies by the
// weights before the experts (weight_on_input).
void JudgeDispatched(Subject& s) {
  const auto sent = SentRows(s);
  const TensorPtr x = s.Operand(s.Sibling("post_norm"));
  if (!sent || x == nullptr) {
    if (sent || x != nullptr) Missing(s, x == nullptr ? s.Sibling("post_norm") : s.Sibling("moe.topk_ids"));
    return;
  }
  std::vector<int64_t> rows;
  for (int64_t i : sent->order) rows.push_back(i / sent->k);
  auto right = oracle::TakeRows(ToArray(*x), rows);
  if (!right.ok() || right->size() != s.actual().size()) {
    return s.report().Missing(s.info().name + " holds other rows than moe.topk_ids names",
                              "record moe.topk_ids of the same step");
  }
  Array want = *right;
  if (s.Flag("weight_on_input", false)) {
    const TensorPtr w = s.Operand(s.Sibling("moe.topk_weights"));
    if (w == nullptr) return Missing(s, s.Sibling("moe.topk_weights"));
    for (int64_t i : sent->order) {
      if (i >= w->n())
        return s.report().Missing(w->info->name + " has other rows than moe.topk_ids",
                                  Capture::RecordHint(w->info->name));
    }
    for (size_t r = 0; r < rows.size(); ++r)
      for (int64_t c = 0; c < want.cols(); ++c)
        want[static_cast<int64_t>(r) * want.cols() + c] *= w->values[static_cast<size_t>(sent->order[r])];
  }
  oracle::Computed copy;
  copy.value = copy.scale = want;
  for (double& v : copy.scale.values) v = std::abs(v);
  if (!IsComparable(s, copy)) return;
  const Difference d = Differ(s.actual(), copy, s.precision(), s.judged());
  if (d.ok) return ReportRight(s, d);
  ReportWrong(s, d, {fault_class::kMoeRoute, "rows are not those that moe.topk_ids sends to each expert"});
}

// Weight of each expert: [E, out, in], from the fused tensor or expert by expert.
Result<Array> ExpertWeights(const Subject& s, std::string_view stem, std::string* name) {
  for (const char* suffix : {"", ".weight"}) {
    *name = s.Sibling("mlp.experts." + std::string(stem)) + suffix;
    if (const TensorPtr w = s.Weight(*name)) return ToArray(*w);
  }
  const std::vector<std::string> parts = stem == "gate_up_proj" ? std::vector<std::string>{"gate_proj", "up_proj"}
                                                                : std::vector<std::string>{std::string(stem)};
  // Expert by expert, gate rows in front of up rows, until a number is missing: that is how many experts there are.
  Array all;
  int64_t experts = 0;
  for (;; ++experts) {
    Array own;
    for (const std::string& part : parts) {
      const TensorPtr w = s.Weight(s.Sibling("mlp.experts." + std::to_string(experts) + "." + part + ".weight"));
      if (w == nullptr) {
        if (experts == 0) return Status::BadInput(s.Sibling("mlp.experts." + std::string(stem)));
        all.shape.insert(all.shape.begin(), experts);
        return all;
      }
      own.values.insert(own.values.end(), w->values.begin(), w->values.end());
      own.shape = {(own.shape.empty() ? 0 : own.shape[0]) + w->shape[0], w->row_size()};
    }
    all.shape = own.shape;
    all.values.insert(all.values.end(), own.values.begin(), own.values.end());
  }
}

// Rows through the weight of their expert; a two-dimensional weight serves all rows.
Result<oracle::Computed> Grouped(const Array& x, const Array& w, const Array& bias, std::span<const int64_t> expert) {
  if (w.rank() == 2) return oracle::Linear(x, w, bias);
  if (w.rank() != 3 || static_cast<int64_t>(expert.size()) != x.rows() || w.shape[2] != x.cols()) {
    return Status::BadInput("experts' weights do not fit their rows");
  }
  // Experts without rows cost nothing; the bound is that of the widest product among them.
  const int64_t out = w.shape[1], in = w.shape[2];
  oracle::Computed y;
  y.value = y.scale = Array::Filled({x.rows(), out});
  for (int64_t e = 0; e < w.shape[0]; ++e) {
    std::vector<int64_t> rows;
    for (size_t r = 0; r < expert.size(); ++r) {
      if (expert[r] == e) rows.push_back(static_cast<int64_t>(r));
    }
    if (rows.empty()) continue;
    ASSAY_ASSIGN_OR_RETURN(Array part, oracle::TakeRows(x, rows));
    const Array own = ToArray(
        {out, in}, std::span(w.values).subspan(static_cast<size_t>(e * out * in), static_cast<size_t>(out * in)));
    const Array b =
        bias.size() == w.shape[0] * out
            ? ToArray({out}, std::span(bias.values).subspan(static_cast<size_t>(e * out), static_cast<size_t>(out)))
            : Empty();
    ASSAY_ASSIGN_OR_RETURN(oracle::Computed z, oracle::Linear(part, own, b));
    y.k = std::max(y.k, z.k);
    y.stores = z.stores;
    for (size_t i = 0; i < rows.size(); ++i) {
      std::copy_n(z.value.values.begin() + static_cast<int64_t>(i) * out, out, y.value.values.begin() + rows[i] * out);
      std::copy_n(z.scale.values.begin() + static_cast<int64_t>(i) * out, out, y.scale.values.begin() + rows[i] * out);
    }
  }
  return y;
}

// One of the experts' two products, of the rows in `input_stem` through `weight_stem`. Rows come sorted by expert
// [rows, in], padded to a capacity [E, C, in], or one a choice [T, k, in].
void JudgeExpertProduct(Subject& s, std::string_view input_stem, std::string_view weight_stem) {
  const TensorPtr input = s.Operand(s.Sibling(input_stem));
  if (input == nullptr) return Missing(s, s.Sibling(input_stem));
  std::string name;
  auto w = ExpertWeights(s, weight_stem, &name);
  if (!w.ok()) return Missing(s, w.status().message());
  const TensorPtr bias = s.Weight(s.Sibling("mlp.experts." + std::string(weight_stem) + "_bias"));
  const Array b = bias == nullptr ? Empty() : ToArray({bias->n()}, bias->values);
  Array x = ToArray(*input);
  bool quantised = false;
  if (HasCodes(s, input->info->name + ".", true)) {
    auto decoded = Dequantise(s, input->info->name + ".", true);
    if (!decoded.ok())
      return s.report().Missing(decoded.status().message(), Capture::RecordHint(input->info->name + ".q_scale"));
    x = *decoded;
    quantised = true;
  }
  std::vector<int64_t> expert;
  // [E, C, in]: row c of block e is expert e's, whoever sent it; blocks may end in rows that nobody looks at.
  const bool by_capacity =
      input->shape.size() == 3 && w->rank() == 3 && s.actual().rank() == 3 && s.tensor()->rows.empty();
  if (by_capacity) {
    const int64_t capacity = input->shape[1];
    for (int64_t e = 0; e < input->shape[0]; ++e) expert.insert(expert.end(), static_cast<size_t>(capacity), e);
    x.shape = {x.size() / x.cols(), x.cols()};
  } else if (w->rank() == 3) {
    const auto sent = SentRows(s);
    if (!sent) return Missing(s, s.Sibling("moe.topk_ids"));
    expert = sent->expert;
    if (s.actual().rank() == 3 &&
        x.rows() == static_cast<int64_t>(expert.size())) {  // one row a choice, in order of tokens
      if (const TensorPtr ids = s.Operand(s.Sibling("moe.topk_ids"))) expert = IdsOf(*ids);
      x.shape = {x.size() / x.cols(), x.cols()};
    }
  }
  Operation multiply;
  multiply.inputs = {{input->info->name, input}};
  multiply.quantised = quantised;
  multiply.run = [&](std::span<const Array> in) -> Result<oracle::Computed> {
    Array use = quantised ? x : Array{x.shape, in[0].values};
    ASSAY_ASSIGN_OR_RETURN(oracle::Computed y, Grouped(use, *w, b, expert));
    y.value.shape = y.scale.shape = s.actual().shape;
    return y;
  };
  // In the order of certainty: a bias left out, gate and up exchanged, codes read otherwise, one constant, weights of
  // another tensor, weights of another expert.
  JudgeOperation(s, multiply, [&](const Difference&, const oracle::Computed& right) -> std::optional<Explanation> {
    if (b.size() > 0 && Fits(s, Grouped(x, *w, Empty(), expert)))
      return Explanation{fault_class::kKernel, "fits without the experts' bias"};
    if (weight_stem == "gate_up_proj" && s.actual().rank() == 2 && s.actual().cols() % 2 == 0) {
      // Rows of the weight in the other order of gate and up.
      for (int order = 0; order < 3; ++order) {
        oracle::Computed moved = right;
        const int64_t n = s.actual().cols(), half = n / 2;
        for (int64_t r = 0; r < right.value.rows(); ++r)
          for (int64_t c = 0; c < n; ++c) {
            const int64_t from = order == 0   ? (c < half ? 2 * c : 2 * (c - half) + 1)
                                 : order == 1 ? (c % 2) * half + c / 2
                                              : (c + half) % n;
            moved.value[r * n + c] = right.value[r * n + from];
            moved.scale[r * n + c] = right.scale[r * n + from];
          }
        if (Fits(s, moved))
          return Explanation{fault_class::kMoeLayout,
                             order == 2 ? "fits up in front of gate" : "fits gate and up in the other order"};
      }
    }
    if (quantised) {
      QuantisedProduct q;
      q.name = input->info->name;
      q.activation = true;
      q.plain = false;
      q.decode = [&](const DequantVariant& v) { return TakeApart(s, input->info->name + ".", true, v); };
      q.product = [&](const Array& value) -> Result<oracle::Computed> {
        if (value.size() != x.size()) return Status::BadInput("another shape");
        ASSAY_ASSIGN_OR_RETURN(oracle::Computed y, Grouped({x.shape, value.values}, *w, b, expert));
        y.value.shape = y.scale.shape = s.actual().shape;
        return y;
      };
      if (auto why = ExplainQuantised(s, q, right)) return why;
    }
    const double c = ConstantRatio(s.actual(), right.value, s.judged(), std::max(1e-4, 8 * s.precision().store));
    if (!std::isnan(c))
      return Explanation{quantised ? fault_class::kQScale : fault_class::kScale, "the result is one constant off", c,
                         "result used / expected"};
    if (auto why = ForOtherWeights(s, name, *w, [&](const OtherWeight& other) -> std::optional<Explanation> {
          const auto y = Grouped(x, other.value, b, expert);
          if (!FitsBetter(s, right, y)) return std::nullopt;
          return Weighed(s, right, *y, other.why);
        }))
      return why;
    if (w->rank() == 3)
      return ExplainExperts(s, expert, w->shape[0], right, [&](const std::vector<int64_t>& of) {
        auto y = Grouped(x, *w, b, of);
        if (y.ok()) y->value.shape = y->scale.shape = s.actual().shape;
        return y;
      });
    return std::nullopt;
  });
}

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
  if (s.Flag("weight_on_input", false)) std::fill(w.values.begin(), w.values.end(), 1.0);
  Operation combine;
  combine.inputs = {{rows->info->name, rows}};
  combine.run = [&](std::span<const Array> in) { return oracle::Combine({experts.shape, in[0].values}, row_of, w); };
  JudgeOperation(s, combine, [&](const Difference&, const oracle::Computed& right) -> std::optional<Explanation> {
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

void JudgeExperts(const Capture& capture, CheckReport* report) {
  const auto each = [&](std::string_view stem, const JudgeFunction& judge) {
    const std::string_view stems[] = {stem};
    JudgeStems(capture, report, stems, judge);
  };
  each("moe.expert_counts", JudgeCounts);
  each("moe.dispatched", JudgeDispatched);
  each("moe.gate_up", [](Subject& s) { JudgeExpertProduct(s, "moe.dispatched", "gate_up_proj"); });
  each("moe.act", [](Subject& s) { JudgeActivation(s, true); });
  each("mlp.act", [](Subject& s) { JudgeActivation(s, false); });
  each("moe.expert_out", [](Subject& s) { JudgeExpertProduct(s, "moe.act", "down_proj"); });
  each("moe.routed", JudgeRouted);
}

}  // namespace assay::check
