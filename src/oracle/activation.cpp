#include "oracle/activation.h"

#include <array>
#include <cmath>
#include <numbers>

namespace assay::oracle {
namespace {

// Value and the growth of the accumulator's roundings inside: see docs/numerics.md. argument: what roundings to the
// storing type add before the last ones, each once, in code that composes the function of stored tensors.
struct Point {
  double value, inner;
  double argument = 0;
};

// x sigmoid(alpha x), without overflow; -inf gives -0, its limit, where engines' -inf · 0 is NaN: see Act.
Point Swish(double x, double alpha) {
  const double z = alpha * x;
  const double sigmoid = z >= 0 ? 1 / (1 + std::exp(-z)) : std::exp(z) / (1 + std::exp(z));
  const double y = x * sigmoid;
  // The argument's rounding, z u, moves sigmoid by (1 - sigmoid) |z| u, relatively.
  const double argument = std::abs(y) * (1 - sigmoid) * std::abs(z);
  return {y, std::abs(y) + argument, alpha == 1 ? 0 : argument};
}

// The branch keeps the exponential's argument negative, as in Swish.
Point Sigmoid(double x) {
  const double y = x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x));
  return {y, y * (1 + (1 - y) * std::abs(x))};
}

// x Φ(x) through erfc, which keeps its relative precision in the tail where 1 + erf has none.
Point Gelu(double x) {
  const double y = 0.5 * x * std::erfc(-x * std::numbers::sqrt2 / 2);
  return {y, std::abs(x)};  // 1 + erf cancels for negative x: an absolute error of one roundoff times x
}

// 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))), with (1 + tanh(z/2)) / 2 = sigmoid(z): no cancellation for negative x.
Point GeluTanh(double x, bool composed) {
  const double cubic = 0.044715 * x * x * x, z = 2 * std::sqrt(2 / std::numbers::pi) * (x + cubic);
  const double y = z >= 0 ? x / (1 + std::exp(-z)) : x * (std::exp(z) / (1 + std::exp(z)));  // (1 + tanh(z/2)) / 2
  double argument = 0;
  if (composed && x != 0 && std::isfinite(z)) {
    // The argument: constants, x² x, both products and the sum; and tanh itself, which cancels against 1.
    const double t = std::tanh(z / 2), roundings = 3 + 4 * cubic / (x + cubic);
    argument = std::abs(x) / 2 * (std::abs(t) + roundings * (1 - t * t) * std::abs(z / 2));
  }
  // z's rounding moves (1 + tanh) / 2 by at most max(z / (4 cosh²(z/2))) < 0.23 roundoffs.
  return {y, 2 * std::abs(x), argument};
}

// NaN stays NaN, as it does in min and max of the usual kernels.
double Clamp(double x, double low, double high) { return x < low ? low : x > high ? high : x; }

// One element. inner 0: no argument of an exponential whose rounding could grow.
Point Act(double x, const ActivationSpec& spec) {
  switch (spec.kind) {
    case Activation::kSilu:
      return Swish(x, 1);
    case Activation::kGelu:
      return Gelu(x);
    case Activation::kGeluTanh:
      return GeluTanh(x, spec.composed);
    case Activation::kQuickGelu:
      return Swish(x, 1.702);
    case Activation::kSwigluOai:
      return Swish(spec.limit > 0 ? Clamp(x, -HUGE_VAL, spec.limit) : x, spec.alpha);
    case Activation::kRelu:
      return {x < 0 ? 0 : x, 0};
    case Activation::kRelu2:
      return {x < 0 ? 0 : x * x, 0};
    case Activation::kSigmoid:
      return Sigmoid(x);
    case Activation::kTanh:
      return {std::tanh(x), std::abs(x)};  // |x| (1 - tanh²) and the rounding of the value itself
    case Activation::kIdentity:
      return {x, 0};
  }
  return {std::nan(""), 0};
}

// Roundings to the storing type: argument, sigmoid and product where kernels are composed of them (1 + tanh and
// product of the tanh form), one where they are fused.
double StoresOf(const ActivationSpec& spec) {
  if (spec.kind == Activation::kGeluTanh) return spec.composed ? 2 : 1;
  return spec.kind == Activation::kQuickGelu || spec.kind == Activation::kSwigluOai ? 3 : 1;
}

// k 4: exponential, sum, quotient, product. k_inner 8: what the argument of the exponential may be off by, in
// roundings.
Computed EmptyLike(const Array& x) {
  return {Array::Filled(x.shape), Array::Filled(x.shape), Array::Filled(x.shape), 4, 8, 1};
}

// One name a kind; what other names an engine uses for it, ParseActivation knows.
struct Word {
  Activation kind;
  std::string_view name;
};
// Words of docs/adding-a-case.md, metadata key `activation`.
constexpr Word kWords[] = {
    {Activation::kSilu, "silu"},          {Activation::kGelu, "gelu"},
    {Activation::kGeluTanh, "gelu_tanh"}, {Activation::kQuickGelu, "quick_gelu"},
    {Activation::kRelu, "relu"},          {Activation::kRelu2, "relu2"},
    {Activation::kSigmoid, "sigmoid"},    {Activation::kTanh, "tanh"},
    {Activation::kIdentity, "identity"},  {Activation::kSwigluOai, "swiglu_oai"},
};

}  // namespace

std::span<const Activation> AllActivations() {
  static constexpr auto kAll = [] {
    std::array<Activation, std::size(kWords)> all{};
    for (size_t i = 0; i < all.size(); ++i) all[i] = kWords[i].kind;
    return all;
  }();
  return kAll;
}

std::string_view NameOf(Activation kind) {
  for (const Word& word : kWords) {
    if (word.kind == kind) return word.name;
  }
  return "?";
}

std::optional<ActivationSpec> ParseActivation(std::string_view word) {
  for (const Word& known : kWords) {
    if (known.name == word) return ActivationSpec{known.kind};
  }
  if (word == "swish") return ActivationSpec{Activation::kSilu};
  if (word == "gelu_pytorch_tanh") return ActivationSpec{Activation::kGeluTanh};
  if (word == "gelu_new") return ActivationSpec{.kind = Activation::kGeluTanh, .composed = true};
  return std::nullopt;
}

Computed Activate(const Array& x, const ActivationSpec& spec) {
  Computed c = EmptyLike(x);
  c.stores = StoresOf(spec);
  for (int64_t i = 0; i < x.size(); ++i) {
    const Point p = Act(x[i], spec);
    c.value[i] = p.value;
    c.scale[i] = std::abs(p.value) + p.argument / c.stores;
    c.inner[i] = p.inner;
  }
  return c;
}

Result<Computed> Gate(const Array& gate, const Array& up, const ActivationSpec& spec) {
  if (gate.shape != up.shape) {
    return Status::BadInput("a gate of shape " + ShapeText(gate.shape) + " and an up of shape " + ShapeText(up.shape));
  }
  const bool oai = spec.kind == Activation::kSwigluOai;
  Computed c = EmptyLike(gate);
  c.stores = StoresOf(spec) + (oai ? 2 : 1);
  c.floors = Array::Filled(gate.shape);
  for (int64_t i = 0; i < gate.size(); ++i) {
    const Point p = Act(gate[i], spec);
    double u = up[i], u_magnitude = std::abs(u);
    if (oai) {
      if (spec.limit > 0) u = Clamp(u, -spec.limit, spec.limit);
      u_magnitude = std::abs(u) + 1;  // u + 1 cancels near -1
      u += 1;
    }
    c.value[i] = p.value * u;
    c.scale[i] = (std::abs(p.value) + p.argument / c.stores) * u_magnitude;
    c.inner[i] = p.inner * u_magnitude;
    c.floors[i] = 1 + u_magnitude;  // an activation below the normal numbers is off by the floor, and is multiplied
  }
  return c;
}

// Only takes the halves apart; a wrong layout is what a check tries next.
Result<Computed> GateFused(const Array& gate_up, GateUpLayout layout, const ActivationSpec& spec) {
  if (gate_up.rank() == 0 || gate_up.cols() % 2 != 0) {
    return Status::BadInput("gate and up together need an even width, not shape " + ShapeText(gate_up.shape));
  }
  const int64_t f = gate_up.cols() / 2;
  if (layout == GateUpLayout::kHalves) {
    ASSAY_ASSIGN_OR_RETURN(const Array gate, TakeColumns(gate_up, 0, f));
    ASSAY_ASSIGN_OR_RETURN(const Array up, TakeColumns(gate_up, f, 2 * f));
    return Gate(gate, up, spec);
  }
  std::vector<int64_t> shape = gate_up.shape;
  shape.back() = f;
  Array gate = Array::Filled(shape), up = gate;
  for (int64_t i = 0; i < gate.size(); ++i) {
    gate[i] = gate_up[2 * i];
    up[i] = gate_up[2 * i + 1];
  }
  return Gate(gate, up, spec);
}

}  // namespace assay::oracle
