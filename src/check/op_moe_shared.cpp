// The shared expert of a mixture as one operation of post_norm: what lies between (gate, up, activation) has no sites.
#include <algorithm>
#include <cmath>

#include "check/op_explain.h"
#include "check/op_fitted.h"
#include "check/op_moe.h"
#include "oracle/activation.h"
#include "oracle/linear.h"

namespace assay::check {
namespace {

using namespace op;
using oracle::ActivationSpec;
using oracle::Array;
using oracle::Computed;

// Roundings on the way are independent of each other: eight sigma of them, where that is less than their sum.
constexpr double kSigmas = 8;

struct SharedWeights {
  std::string name;            // "layers.0.mlp.shared_experts"
  Array gate, up, down;        // [f, h], [f, h], [h, f]
  Array scalar;                // [1, h]: its sigmoid multiplies the result; no values: none was recorded
  bool parts_of_rank = false;  // of one rank among several
};

// nullopt: not recorded in full, as plain values.
std::optional<SharedWeights> WeightsOf(const Subject& s, const std::string& prefix) {
  for (const char* stem : {"mlp.shared_experts", "mlp.shared_expert"}) {
    SharedWeights w;
    w.name = prefix + stem;
    const auto take = [&](const char* part, Array* to) {
      const TensorPtr t = s.Weight(w.name + "." + part + ".weight");
      if (t == nullptr) return false;
      *to = {{t->n_rows(), t->row_size()}, t->values};
      w.parts_of_rank |= t->info->event.shard.count > 1;
      return true;
    };
    Array both;
    if (!take("down_proj", &w.down)) continue;
    if (take("gate_up_proj", &both)) {
      const int64_t half = both.rows() / 2, size = half * both.cols();
      w.gate = {{half, both.cols()}, {both.values.begin(), both.values.begin() + size}};
      w.up = {{half, both.cols()}, {both.values.begin() + size, both.values.begin() + 2 * size}};
    } else if (!take("gate_proj", &w.gate) || !take("up_proj", &w.up)) {
      continue;
    }
    if (const TensorPtr t = s.Weight(prefix + "mlp.shared_expert_gate.weight"))
      w.scalar = {{1, t->n()}, t->values};
    else
      w.scalar = {{0}, {}};
    return w;
  }
  return std::nullopt;
}

// What an element may be off, as the scale of a result that is rounded once.
void SetBound(const Array& bound, double store, Computed* y) {
  y->inner = y->floors = {};
  y->k = y->k_inner = 0;
  y->stores = 1;
  for (int64_t i = 0; i < bound.size(); ++i) y->scale[i] = bound[i] / store;
}

// sigmoid(x scalar) * down(act(gate x) * up x), each step stored.
Result<Computed> Shared(const Subject& s, const Array& x, const SharedWeights& w, const ActivationSpec& act) {
  const oracle::Precision p = s.precision();
  const Array none{{0}, {}};
  ASSAY_ASSIGN_OR_RETURN(const Computed gate, oracle::Linear(x, w.gate, none));
  ASSAY_ASSIGN_OR_RETURN(const Computed up, oracle::Linear(x, w.up, none));
  ASSAY_ASSIGN_OR_RETURN(const Computed middle, oracle::Gate(gate.value, up.value, act));
  // The product moves by what gate and up may be off: at the corners, and half as much again for what lies between.
  Array moved = Array::Filled(middle.value.shape);
  for (double a : {-1.0, 1.0}) {
    for (double b : {-1.0, 1.0}) {
      Array g = gate.value, u = up.value;
      for (int64_t i = 0; i < g.size(); ++i) {
        g[i] += a * Allowed(gate, i, p, true);
        u[i] += b * Allowed(up, i, p, true);
      }
      ASSAY_ASSIGN_OR_RETURN(const Computed corner, oracle::Gate(g, u, act));
      for (int64_t i = 0; i < moved.size(); ++i)
        moved[i] = std::max(moved[i], 1.5 * std::abs(corner.value[i] - middle.value[i]));
    }
  }
  for (int64_t i = 0; i < moved.size(); ++i) moved[i] += oracle::BoundAt(middle, i, p);
  ASSAY_ASSIGN_OR_RETURN(Computed y, oracle::Linear(middle.value, w.down, none));
  Array bound = Array::Filled(y.value.shape);
  const int64_t out = w.down.rows(), f = w.down.cols();
  for (int64_t i = 0; i < bound.size(); ++i) {
    double sum = 0, squares = 0;
    for (int64_t j = 0; j < f; ++j) {
      const double term = std::abs(w.down[i % out * f + j]) * moved[i / out * f + j];
      sum += term;
      squares += term * term;
    }
    bound[i] = oracle::BoundAt(y, i, p) + std::min(sum, kSigmas * std::sqrt(squares));
  }
  if (w.scalar.size() > 0) {
    ASSAY_ASSIGN_OR_RETURN(const Computed logit, oracle::Linear(x, w.scalar, none));
    for (int64_t i = 0; i < bound.size(); ++i) {
      const double factor = 1 / (1 + std::exp(-logit.value[i / out]));
      // Logit, sigmoid and product are stored.
      const double off = oracle::BoundAt(logit, i / out, p) + 2 * p.store;
      bound[i] = factor * (bound[i] + off * std::abs(y.value[i]));
      y.value[i] *= factor;
    }
  }
  y.value.shape = y.scale.shape = s.actual().shape;
  SetBound(bound, p.store, &y);
  return y;
}

// Every row is the right one times a factor of its own below 1: a gate that was not recorded.
bool LooksGated(const Subject& s, const Computed& right) {
  Computed gated = right;
  const int64_t width = std::max<int64_t>(right.value.cols(), 1);
  double least = 1, most = 0;
  for (int64_t r = 0; r < right.value.size() / width; ++r) {
    double cross = 0, square = 0;
    for (int64_t i = r * width; i < (r + 1) * width; ++i) {
      cross += s.actual()[i] * right.value[i];
      square += right.value[i] * right.value[i];
    }
    const double c = square > 0 ? cross / square : 0;
    least = std::min(least, c);
    most = std::max(most, c);
    for (int64_t i = r * width; i < (r + 1) * width; ++i) gated.value[i] *= c;
  }
  return least > 0 && most < 1 && most > 1.05 * least && Fits(s, gated);
}

}  // namespace

void JudgeSharedExpert(Subject& s) {
  if (!s.info().site.partial && s.capture().HasSite(s.info().name + ".partial")) return;  // judged as a sum
  const auto w = WeightsOf(s, s.info().prefix);
  const TensorPtr x = s.Operand(s.Sibling("post_norm"));
  if (!w) return;
  if (x == nullptr) return Missing(s, s.Sibling("post_norm"));
  // Of several ranks each one's own part follows from its part of the weights; whether a whole result is one rank's or
  // all of theirs is not said.
  const int64_t world = s.Integer("world_size", s.capture().world_size());
  if (world > 1 && !(w->parts_of_rank && s.info().site.partial))
    return Missing(s, s.info().site.partial ? "this rank's part of " + w->name : s.info().name + ".partial");
  // The routed experts' key holds for the shared one, which has none of its own in most recordings.
  const TensorPtr routed = s.Operand(s.Sibling("moe.act"));
  const std::string otherwise =
      routed == nullptr ? "silu" : s.capture().Text(*routed->info, "activation").value_or("silu");
  const auto act = oracle::ParseActivation(Capture::OwnText(s.info(), "activation").value_or(otherwise));
  if (!act) return s.report().Missing(s.info().name + ": its activation is not known", "record activation with it");
  Operation expert;
  expert.inputs = {{x->info->name, x}};
  expert.run = [&](std::span<const Array> in) -> Result<Computed> {
    return Shared(s, {{x->n_rows(), x->row_size()}, in[0].values}, *w, *act);
  };
  if (w->scalar.size() == 0) {
    if (const auto right = expert.Run();
        right.ok() && right->value.size() == s.actual().size() && !Differ(s, *right).ok && LooksGated(s, *right))
      return Missing(s, s.Sibling("mlp.shared_expert_gate.weight"));
  }
  JudgeOperation(s, expert, [&](const Difference&, const Computed& right) -> std::optional<Explanation> {
    const auto attempt = [&](const SharedWeights& other, const Explanation& why) -> std::optional<Explanation> {
      const auto y = Shared(s, {{x->n_rows(), x->row_size()}, x->values}, other, *act);
      if (!FitsBetter(s, right, y)) return std::nullopt;
      return Weighed(s, right, *y, why);
    };
    const double c = ConstantRatio(s.actual(), right.value, s.judged(), std::max(1e-3, 16 * s.precision().store));
    if (!std::isnan(c))
      return Explanation{fault_class::kScale, "the result is one constant off", c, "result used / expected"};
    SharedWeights other = *w;
    std::swap(other.gate, other.up);
    if (auto why = attempt(other, {fault_class::kMoeLayout, "fits the activation on up in place of gate"})) return why;
    if (w->scalar.size() > 0) {
      other = *w;
      other.scalar = {{0}, {}};
      if (auto why = attempt(other, {fault_class::kKernel, "fits without the gate of the shared expert"})) return why;
    }
    constexpr int64_t kMostLayers = 16;
    const int64_t layer = s.info().site.layer;
    for (int64_t step = 1; step <= kMostLayers && !SearchedEnough(s); ++step) {
      for (int64_t from : {layer - step, layer + step}) {
        if (from < 0) continue;
        const auto theirs = WeightsOf(s, "layers." + std::to_string(from) + ".");
        if (!theirs) continue;
        const std::string text = "fits " + theirs->name + " in place of " + w->name;
        if (auto why = attempt(*theirs, {fault_class::kLoad, text})) return why;
      }
    }
    return std::nullopt;
  });
}

}  // namespace assay::check
