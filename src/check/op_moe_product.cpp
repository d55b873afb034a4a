// The experts' two matrix products: rows, weights and biases as recorded, and what else would give the result.
#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>

#include "check/op_experts_explain.h"
#include "check/op_explain.h"
#include "check/op_fitted.h"
#include "check/op_moe.h"
#include "check/op_moe_layout.h"
#include "check/op_moe_rows.h"
#include "check/op_moe_weights.h"
#include "check/op_other_weight.h"
#include "check/op_quant_explain.h"
#include "oracle/linear.h"

namespace assay::check {
namespace {

using namespace op;
using oracle::Array;

// No bias: the oracle takes an array without values for "none".
Array Empty() { return {{0}, {}}; }

// Operands of one product, as the kernel takes them.
struct Product {
  const Subject& s;
  std::string input;  // full name
  std::string_view stem;
  bool quantised_input = false;
  Array x;  // [rows, in]
  ExpertWeights w;
  Array bias;  // [E out], or no values
  ExpertRows rows;
  std::vector<double> weights;  // combine weight of each row; empty: not known. Where they are due, x holds them
  bool first() const { return stem == "gate_up_proj"; }

  Result<oracle::Computed> Of(const Array& use, const Array& matrices, const Array& b) const {
    ASSAY_ASSIGN_OR_RETURN(oracle::Computed y, GroupedProduct(use, matrices, b, rows.expert));
    y.value.shape = y.scale.shape = s.actual().shape;
    return y;
  }
};

// Each element of the result from another column of its row.
Result<oracle::Computed> MovedColumns(const Result<oracle::Computed>& y, const std::vector<int64_t>& from) {
  if (!y.ok()) return y;
  oracle::Computed moved = *y;
  const auto n = static_cast<int64_t>(from.size());
  if (n == 0 || moved.value.size() % n != 0) return Status::BadInput("another width");
  for (int64_t i = 0; i < moved.value.size(); ++i) {
    const int64_t at = i - i % n + from[static_cast<size_t>(i % n)];
    moved.value[i] = y->value[at];
    moved.scale[i] = y->scale[at];
  }
  return moved;
}

// Bias: none, twice, in the other order of gate and up, another expert's, another layer's.
std::optional<Explanation> ExplainBias(const Product& p, const ByExpert& by, const oracle::Computed& right) {
  const int64_t experts = p.w.experts(), width = p.bias.size() / std::max<int64_t>(experts, 1);
  if (width == 0) return std::nullopt;
  const auto with = [&](const Array& b) { return p.Of(p.x, p.w.value, b); };
  if (auto why = by.Try(with(Empty()), {fault_class::kKernel, "fits without the experts' bias"})) return why;
  Array twice = p.bias;
  for (double& b : twice.values) b *= 2;
  if (auto why = by.Try(with(twice), {fault_class::kKernel, "fits the experts' bias added twice"})) return why;
  if (p.first() && width % 2 == 0) {
    const int64_t half = width / 2;
    const GateUpOrder halves{half};
    for (const GateUpOrder& other : GateUpOrders(half)) {
      for (bool into : {true, false}) {
        if (other == halves) continue;
        const auto from = into ? Reorder(halves, other, half) : Reorder(other, halves, half);
        Array moved = p.bias;
        for (int64_t i = 0; i < moved.size(); ++i)
          moved[i] = p.bias[i - i % width + from[static_cast<size_t>(i % width)]];
        const std::string text =
            NameOf(into ? other : halves, half) + " where the weight has " + NameOf(into ? halves : other, half);
        if (auto why = by.Try(with(moved), {fault_class::kMoeLayout, "fits the bias in the order of " + text}))
          return why;
      }
    }
  }
  const auto bare = with(Empty());
  if (bare.ok() && experts > 1 && bare->value.size() % width == 0) {
    auto why = ExplainExperts(p.s, p.rows.expert, experts, right, {fault_class::kMoeRoute, "biases"},
                              [&](int64_t f) -> Result<oracle::Computed> {
                                oracle::Computed y = *bare;
                                y.k += 1;
                                for (int64_t i = 0; i < y.value.size(); ++i) {
                                  y.value[i] += p.bias[f * width + i % width];
                                  y.scale[i] += std::abs(p.bias[f * width + i % width]);
                                }
                                return y;
                              });
    if (why) return why;
  }
  return ForOtherWeights(p.s, p.s.Sibling("mlp.experts." + std::string(p.stem) + "_bias"), p.bias,
                         [&](const OtherWeight& other) { return by.Try(with(other.value), other.why); });
}

// Combine weights in the rows: not where they belong, not at all, twice, or others than recorded.
std::optional<Explanation> ExplainWeighing(const Product& p, const oracle::Computed& right) {
  if (p.weights.empty()) return std::nullopt;
  const bool due = p.first() && WeightsOnInput(p.s);
  const std::string what = p.first() ? "inputs" : "rows";
  for (int times : {0, 1, 2}) {
    if (times == (due ? 1 : 0)) continue;
    const auto y = p.Of(WithWeights(p.x, p.weights, times - (due ? 1 : 0)), p.w.value, p.bias);
    if (!FitsBetter(p.s, right, y)) continue;
    const std::string text = times == 0   ? "fits " + what + " without the combine weights, which are to multiply them"
                             : times == 1 ? "fits " + what + " multiplied by the combine weights"
                                          : "fits " + what + " multiplied by the combine weights twice";
    return Weighed(p.s, right, *y, {fault_class::kMoeRoute, text});
  }
  if (!due || p.bias.size() > 0) return std::nullopt;
  // One factor a row, whichever: the least squares of the row.
  oracle::Computed other = right;
  const int64_t rows = p.x.rows(), width = right.value.size() / std::max<int64_t>(rows, 1);
  for (int64_t r = 0; r < rows; ++r) {
    double cross = 0, square = 0;
    for (int64_t i = r * width; i < (r + 1) * width; ++i) {
      cross += p.s.actual()[i] * right.value[i];
      square += right.value[i] * right.value[i];
    }
    const double c = square > 0 ? cross / square : 1;
    for (int64_t i = r * width; i < (r + 1) * width; ++i) {
      other.value[i] *= c;
      other.scale[i] *= std::abs(c);
    }
  }
  if (!FitsBetter(p.s, right, other)) return std::nullopt;
  return Weighed(p.s, right, other,
                 {fault_class::kMoeRoute, "fits inputs multiplied by other weights than those recorded"});
}

// Rows of the first weight in another order of gate and up than the result is declared to be in.
std::optional<Explanation> ExplainOrder(const Product& p, const ByExpert& by, const oracle::Computed& right) {
  const int64_t width = p.s.actual().cols(), half = width / 2;
  if (!p.first() || width % 2 != 0) return std::nullopt;
  const GateUpOrder halves{half};
  for (const GateUpOrder& other : GateUpOrders(half)) {
    if (other == halves) continue;
    for (bool into : {true, false}) {
      const auto from = into ? Reorder(halves, other, half) : Reorder(other, halves, half);
      const std::string text =
          other == GateUpOrder{half, true}
              ? "up in front of gate"
              : NameOf(into ? other : halves, half) + " where the weight has " + NameOf(into ? halves : other, half);
      if (auto why = by.Try(MovedColumns(right, from), {fault_class::kMoeLayout, "fits " + text})) return why;
    }
  }
  return std::nullopt;
}

// The input as codes that were read otherwise.
std::optional<Explanation> ExplainInput(const Product& p, const oracle::Computed& right) {
  if (!p.quantised_input) return std::nullopt;
  QuantisedProduct q;
  q.name = p.input;
  q.activation = true;
  q.plain = false;
  q.decode = [&](const DequantVariant& v) { return TakeApart(p.s, p.input + ".", true, v); };
  q.product = [&](const Array& value) -> Result<oracle::Computed> {
    if (value.size() != p.x.size()) return Status::BadInput("another shape");
    return p.Of({p.x.shape, value.values}, p.w.value, p.bias);
  };
  return ExplainQuantised(p.s, q, right);
}

// All weights with the scales (and zero points) of the pieces that `source` names for each piece; where these are of
// another shape, there is no such weight.
Result<Array> WithScalesOf(const Product& p, const std::vector<DequantParts>& parts,
                           const std::function<size_t(size_t)>& source) {
  Array w = p.w.value;
  const int64_t out = w.shape[1], in = w.shape[2];
  for (size_t i = 0; i < parts.size(); ++i) {
    const size_t from = source(i);
    if (from == i) continue;
    DequantParts own = parts[i];
    if (from >= parts.size() || parts[from].scale.size() != own.scale.size())
      return Status::BadInput("scales of another shape");
    own.scale = parts[from].scale;
    own.global = parts[from].global;
    const Array value = own.Values();
    const ExpertPiece& piece = p.w.pieces[i];
    if (value.size() != piece.rows * in) return Status::BadInput("codes of another shape");
    std::copy(value.values.begin(), value.values.end(), w.values.begin() + (piece.expert * out + piece.first) * in);
  }
  return w;
}

// These columns of these rows of a result, by themselves; all of them count.
TensorPtr PartOf(const Subject& s, const std::vector<int64_t>& rows, int64_t n_rows, int64_t first, int64_t columns) {
  auto part = std::make_shared<Tensor>();
  part->info = s.tensor()->info;
  part->shape = {static_cast<int64_t>(rows.size()), columns};
  const int64_t width = s.actual().size() / n_rows;
  for (int64_t r : rows) {
    const auto begin = s.tensor()->values.begin() + r * width + first;
    part->values.insert(part->values.end(), begin, begin + columns);
  }
  return part;
}

// Quantised weights: scales of another expert or of the other part first, which no expert shows by itself; then the
// product of one expert with wrong rows, judged as any product with codes is.
std::optional<Explanation> ExplainCodes(const Product& p, const ByExpert& by, const oracle::Computed& right) {
  if (!p.w.quantised() || p.w.value.rank() != 3) return std::nullopt;
  std::vector<DequantParts> parts;
  for (const ExpertPiece& piece : p.w.pieces) {
    auto taken = TakePiece(p.s, piece);
    if (!taken.ok()) return std::nullopt;
    parts.push_back(std::move(*taken));
  }
  const int64_t experts = p.w.experts();
  // Pieces of one expert lie side by side, unless some experts were recorded plainly.
  const size_t each = parts.size() / static_cast<size_t>(experts);
  const auto with = [&](const std::function<size_t(size_t)>& source) -> Result<oracle::Computed> {
    ASSAY_ASSIGN_OR_RETURN(const Array w, WithScalesOf(p, parts, source));
    return p.Of(p.x, w, p.bias);
  };
  if (each > 0 && each * static_cast<size_t>(experts) == parts.size()) {
    if (each == 2) {
      if (auto why = by.Try(with([](size_t i) { return i ^ 1; }),
                            {fault_class::kQScale, "fits scales of gate and up exchanged"}))
        return why;
      for (size_t part : {size_t{0}, size_t{1}}) {
        if (auto why = by.Try(with([&](size_t i) { return i / 2 * 2 + part; }),
                              {fault_class::kQScale,
                               std::string("fits the scales of ") + (part == 0 ? "gate" : "up") + " for gate and up"}))
          return why;
      }
    }
    auto why = ExplainExperts(p.s, p.rows.expert, experts, right, {fault_class::kQScale, "scales"}, [&](int64_t f) {
      return with([&](size_t i) { return static_cast<size_t>(f) * each + i % each; });
    });
    if (why) return why;
  }
  constexpr size_t kMostExperts = 4;  // wrong ones that are looked at by themselves
  const int64_t n_rows = p.x.rows(), out = p.w.value.shape[1], in = p.w.value.shape[2];
  for (size_t i = 0; i < std::min(by.wrong().size(), kMostExperts); ++i) {
    const int64_t e = by.wrong()[i];
    const std::vector<int64_t> rows = by.RowsOf(e);
    const auto x = oracle::TakeRows(p.x, rows);
    if (!x.ok()) continue;
    for (const ExpertPiece& piece : p.w.pieces) {
      if (piece.expert != e) continue;
      const Subject part(p.s.capture(), PartOf(p.s, rows, n_rows, piece.first, piece.rows), p.s.report());
      QuantisedProduct q;
      q.name = piece.name;
      q.other = *x;
      if (p.bias.size() == experts * out) {
        const auto begin = p.bias.values.begin() + e * out + piece.first;
        q.bias = {{piece.rows}, {begin, begin + piece.rows}};
      } else {
        q.bias = Empty();
      }
      q.decode = [&](const DequantVariant& v) { return TakePiece(p.s, piece, v); };
      q.product = [&](const Array& value) -> Result<oracle::Computed> {
        if (value.size() != piece.rows * in) return Status::BadInput("another shape");
        return oracle::Linear(*x, {{piece.rows, in}, value.values}, q.bias);
      };
      const auto declared = TakePiece(p.s, piece);
      if (!declared.ok()) continue;
      const auto own = q.product(declared->Values());
      if (!own.ok() || Differ(part, *own).ok) continue;
      if (auto why = ExplainQuantised(part, q, *own)) {
        why->text = "of expert " + std::to_string(e) + ": " + why->text;
        return why;
      }
    }
  }
  return std::nullopt;
}

// Weights of another tensor, of the experts of another layer, of other experts.
std::optional<Explanation> ExplainMatrices(const Product& p, const ByExpert& by, const oracle::Computed& right) {
  if (auto why = ForOtherWeights(p.s, p.w.name, p.w.value, [&](const OtherWeight& other) {
        return by.Try(p.Of(p.x, other.value, p.bias), other.why);
      }))
    return why;
  // Recorded expert by expert or as codes, which no single tensor of that size is.
  constexpr int kMostLayers = 64;
  const bool alone = p.s.Weight(p.w.name) == nullptr;
  const int64_t layer = p.s.info().site.layer;
  for (int64_t step = 1; alone && layer >= 0 && step <= kMostLayers && !SearchedEnough(p.s); ++step) {
    for (int64_t other : {layer - step, layer + step}) {
      const auto w = ExpertWeightsOf(p.s, "layers." + std::to_string(other) + ".", p.stem);
      if (other < 0 || !w.ok() || w->value.shape != p.w.value.shape) continue;
      const std::string text = "fits the experts' weights of layer " + std::to_string(other);
      if (auto why = by.Try(p.Of(p.x, w->value, p.bias), {fault_class::kLoad, text})) return why;
    }
  }
  if (p.w.value.rank() != 3) return std::nullopt;
  return ExplainExperts(p.s, p.rows.expert, p.w.experts(), right, {fault_class::kMoeRoute, "weights"}, [&](int64_t f) {
    const std::vector<int64_t> of(p.rows.expert.size(), f);
    auto y = GroupedProduct(p.x, p.w.value, p.bias, of);
    if (y.ok()) y->value.shape = y->scale.shape = p.s.actual().shape;
    return y;
  });
}

// In the order of certainty: the bias, combine weights, gate and up exchanged, codes read otherwise, one constant,
// other weights.
std::optional<Explanation> Explain(const Product& p, const oracle::Computed& right) {
  const ByExpert by(p.s, p.rows.expert, right);
  if (auto why = ExplainBias(p, by, right)) return why;
  if (auto why = ExplainWeighing(p, right)) return why;
  if (auto why = ExplainOrder(p, by, right)) return why;
  if (auto why = ExplainInput(p, right)) return why;
  const bool quantised = p.quantised_input || p.w.quantised();
  const std::string_view scale = quantised ? fault_class::kQScale : fault_class::kScale;
  const double c = ConstantRatio(p.s.actual(), right.value, p.s.judged(), std::max(1e-4, 8 * p.s.precision().store));
  if (!std::isnan(c)) return Explanation{scale, "the result is one constant off", c, "result used / expected"};
  if (auto why = ExplainCodes(p, by, right)) return why;
  if (auto why = ExplainMatrices(p, by, right)) return why;
  return by.TryConstant({scale, "the result is one constant off", kNone, "result used / expected"});
}

}  // namespace

void JudgeExpertProduct(Subject& s, std::string_view input_stem, std::string_view weight_stem) {
  const TensorPtr input = s.Operand(s.Sibling(input_stem));
  if (input == nullptr) return Missing(s, s.Sibling(input_stem));
  auto w = ExpertWeightsOf(s, s.info().prefix, weight_stem);
  if (!w.ok()) return Missing(s, w.status());
  Product p{s, input->info->name, weight_stem, false, ToArray(*input), std::move(*w), {}, {}, {}};
  p.bias = ExpertBiasOf(s, s.info().prefix, weight_stem, p.w.experts());
  if (p.w.value.rank() == 3 && p.bias.size() != 0 && p.bias.size() != p.w.experts() * p.w.value.shape[1]) {
    return s.report().Missing(s.info().name + ": the experts' bias has " + std::to_string(p.bias.size()) +
                                  " numbers for " + std::to_string(p.w.experts()) + " experts of " +
                                  std::to_string(p.w.value.shape[1]) + " rows",
                              "record one bias for each row of the experts' weights");
  }
  if (HasCodes(s, p.input + ".", true)) {
    auto decoded = Dequantise(s, p.input + ".", true);
    if (!decoded.ok()) return s.report().Missing(decoded.status().message(), Capture::RecordHint(p.input + ".q_scale"));
    p.x = *decoded;
    p.quantised_input = true;
  }
  if (p.w.value.rank() == 3) {
    auto rows = ExpertRowsOf(s, s.actual().rank() == 3 ? *s.tensor() : *input);
    if (!rows) return Missing(s, s.Sibling("moe.topk_ids"));
    p.rows = std::move(*rows);
    if (p.x.rank() == 3) p.x.shape = {p.x.size() / p.x.cols(), p.x.cols()};
    p.weights = WeightOfRows(s, p.rows);
  }
  // weight_on_input: the rows sent hold the weights, or the product takes them in; where that cannot be told from the
  // rows, whichever is nearer.
  bool due = p.first() && p.w.value.rank() == 3 && WeightsOnInput(s);
  if (due) {
    if (p.weights.empty()) return Missing(s, s.Sibling("moe.topk_weights"));
    std::optional<bool> held;
    if (!p.quantised_input) held = HoldsWeights(s, p.x, p.rows);
    if (!held) {
      const auto plain = p.Of(p.x, p.w.value, p.bias),
                 weighed = p.Of(WithWeights(p.x, p.weights, 1), p.w.value, p.bias);
      held = plain.ok() && weighed.ok() && Differ(s, *plain).measured < Differ(s, *weighed).measured;
    }
    if (*held) due = false;
  }
  if (due) p.x = WithWeights(p.x, p.weights, 1);
  Operation multiply;
  multiply.inputs = {{input->info->name, input}};
  multiply.quantised = p.quantised_input || p.w.quantised();
  multiply.run = [&](std::span<const Array> in) -> Result<oracle::Computed> {
    if (p.quantised_input) return p.Of(p.x, p.w.value, p.bias);
    Array use{p.x.shape, in[0].values};
    return p.Of(due ? WithWeights(use, p.weights, 1) : use, p.w.value, p.bias);
  };
  JudgeOperation(s, multiply, [&](const Difference&, const oracle::Computed& right) { return Explain(p, right); });
}

}  // namespace assay::check
