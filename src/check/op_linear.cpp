// Linear layers: projections, MLP, experts' router and the head, on plain or quantised operands, whole or on one rank.
#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "check/helpers.h"
#include "check/op_checks.h"
#include "check/op_dequant.h"
#include "check/op_explain.h"
#include "check/op_fitted.h"
#include "check/op_fused_order.h"
#include "check/op_linear_layer.h"
#include "check/op_other_weight.h"
#include "check/op_quant_explain.h"
#include "check/op_sample.h"
#include "oracle/embedding.h"
#include "oracle/linear.h"

namespace assay::check {
namespace {

using namespace op;
using oracle::Array;

constexpr LinearSite kLinears[] = {
    {"attn.q_a", "input_norm", "attn.q_a_proj"},
    {"attn.q_proj", "attn.q_a_normed", "attn.q_b_proj"},
    {"attn.q_proj", "input_norm", "attn.q_proj", "attn.qkv_proj", "q_proj"},
    {"attn.k_proj", "input_norm", "attn.k_proj", "attn.qkv_proj", "k_proj"},
    {"attn.v_proj", "input_norm", "attn.v_proj", "attn.qkv_proj", "v_proj"},
    {"attn.kv_a", "input_norm", "attn.kv_a_proj_with_mqa"},
    {"attn.o_proj", "attn.out", "attn.o_proj"},
    {"mlp.gate", "post_norm", "mlp.gate_proj", "mlp.gate_up_proj", "gate_proj"},
    {"mlp.up", "post_norm", "mlp.up_proj", "mlp.gate_up_proj", "up_proj"},
    {"mlp.down", "mlp.act", "mlp.down_proj"},
    {"moe.router_logits", "post_norm", "mlp.gate"},
    {"logits", "final_norm", "lm_head"},
};
constexpr int64_t kMaxWork = int64_t{1} << 32;  // products of a whole recomputation; beyond it rows are sampled

using Product = std::function<Result<oracle::Computed>(const Array& x, const Array& w)>;

// Conventions and solved scales of the quantised operands, the weight before the activation. plain: the result is the
// product itself (no head's scale or cap), so that single elements of it can be looked at first.
std::optional<Explanation> QuantisedCause(const Subject& s, const Layer& layer, const oracle::Computed& right,
                                          const Product& product, bool plain) {
  for (bool activation : {false, true}) {
    if (activation ? !layer.quantised_input : !layer.quantised_weight) continue;
    const std::string name = activation ? layer.input.name : layer.weight;
    QuantisedProduct q;
    q.name = name;
    q.activation = activation;
    q.plain = plain;
    q.decode = [&s, name, activation](const DequantVariant& v) { return TakeApart(s, name + ".", activation, v); };
    q.other = activation ? layer.w : layer.x;
    q.bias = layer.bias;
    q.first = activation ? 0 : layer.first_row;
    q.product = [&, activation](const Array& value) -> Result<oracle::Computed> {
      if (!activation) {
        ASSAY_ASSIGN_OR_RETURN(const Array own, RowsOf(value, layer.first_row, layer.w.rows()));
        return product(layer.x, own);
      }
      if (layer.input_rows.empty() && value.size() != layer.x.size()) return Status::BadInput("another shape");
      if (layer.input_rows.empty()) return product({layer.x.shape, value.values}, layer.w);
      ASSAY_ASSIGN_OR_RETURN(const Array own, oracle::TakeRows(value, layer.input_rows));
      return product(own, layer.w);
    };
    // The filter would take rows of the whole input for those of the result.
    if (activation && !layer.input_rows.empty()) q.plain = false;
    if (auto why = ExplainQuantised(s, q, right)) return why;
  }
  return std::nullopt;
}

// A part of the operands that took no part: rows of the weight that hold nothing, columns at the end of both.
std::optional<Explanation> PartMissing(const Subject& s, const Layer& layer, const oracle::Computed& right,
                                       const Product& product) {
  const auto attempt = [&](const Array& x, const Array& w, const Explanation& why) -> std::optional<Explanation> {
    const auto y = product(x, w);
    if (!FitsBetter(s, right, y)) return std::nullopt;
    return Weighed(s, right, *y, why);
  };
  const int64_t n = layer.w.rows(), k = layer.w.cols();
  if (layer.bias.size() == n && n > 1) {  // without one the result could as well be what was not written
    Array w = layer.w;
    std::vector<int64_t> empty;
    for (int64_t c = 0; c < n; ++c) {
      bool bare = true;
      for (int64_t r = 0; r < layer.x.rows() && bare; ++r)
        bare = !s.judged()[static_cast<size_t>(r)] ||
               std::abs(s.actual()[r * n + c] - layer.bias[c]) <= 4 * s.precision().store * std::abs(layer.bias[c]);
      if (!bare) continue;
      empty.push_back(c);
      std::fill(w.row(c).begin(), w.row(c).end(), 0.0);
    }
    if (!empty.empty() && static_cast<int64_t>(empty.size()) < n) {
      if (auto why =
              attempt(layer.x, w,
                      {fault_class::kLoad, "fits a weight of which " + std::to_string(empty.size()) + " of " +
                                               std::to_string(n) + " rows, from row " + std::to_string(empty[0]) +
                                               ", hold zeros: they were never written"}))
        return why;
    }
  }
  // Tile sizes of kernels: what is behind the last whole tile of the inner axis is the part that a wrong bound drops.
  for (int64_t block : {8, 16, 32, 64, 128, 256}) {
    const int64_t kept = k / block * block;
    if (kept == 0 || kept == k) continue;
    const auto x = oracle::TakeColumns(layer.x, 0, kept), w = oracle::TakeColumns(layer.w, 0, kept);
    if (!x.ok() || !w.ok()) continue;
    if (auto why = attempt(*x, *w,
                           {fault_class::kKernel, "fits sums over the first " + std::to_string(kept) +
                                                      " columns: the tail behind whole blocks of " +
                                                      std::to_string(block) + " is left out"}))
      return why;
  }
  // One of two split-K halves.
  for (int64_t begin : {int64_t{0}, k / 2}) {
    if (k < 2) break;
    const auto x = oracle::TakeColumns(layer.x, begin, begin == 0 ? k / 2 : k),
               w = oracle::TakeColumns(layer.w, begin, begin == 0 ? k / 2 : k);
    if (!x.ok() || !w.ok()) continue;
    if (auto why = attempt(*x, *w,
                           {fault_class::kKernel, std::string("fits sums over the ") +
                                                      (begin == 0 ? "first" : "second") + " half of the columns"}))
      return why;
  }
  return std::nullopt;
}

// Heads of the input in another order, or its axes of heads and columns swapped.
// o_proj is where a wrong order of heads first mixes with a weight. from(c): the column of the recorded input that
// column c of the used one is.
std::optional<Explanation> InputHeads(const Subject& s, const Layer& layer, const oracle::Computed& right,
                                      const Product& product, bool plain) {
  const int64_t heads = layer.input.tensor->shape.size() == 3 ? layer.input.tensor->shape[1] : 1;
  if (heads < 2 || layer.x.cols() % heads != 0) return std::nullopt;
  const int64_t d = layer.x.cols() / heads;
  const auto with = [&](const std::function<int64_t(int64_t)>& from,
                        const Explanation& why) -> std::optional<Explanation> {
    Array x = layer.x;
    for (int64_t r = 0; r < x.rows(); ++r)
      for (int64_t c = 0; c < x.cols(); ++c) x[r * x.cols() + c] = layer.x[r * x.cols() + from(c)];
    if (x.values == layer.x.values || (plain && !ProductMayFit(s, x, 0, layer.w, 0, layer.bias))) return std::nullopt;
    const auto y = product(x, layer.w);
    if (!FitsBetter(s, right, y)) return std::nullopt;
    return Weighed(s, right, *y, why);
  };
  const std::string fits = "fits " + layer.input.name + " with its ";
  if (auto why = with([&](int64_t c) { return c % heads * d + c / heads; },
                      {fault_class::kStride, fits + "heads and columns swapped"}))
    return why;
  if (auto why = with([&](int64_t c) { return c % d * heads + c / d; },
                      {fault_class::kStride, fits + "columns and heads swapped"}))
    return why;
  for (int64_t by = 1; by < heads; ++by) {
    if (auto why = with([&](int64_t c) { return (c / d + by) % heads * d + c % d; },
                        {fault_class::kTpShard, fits + "heads moved by " + std::to_string(by)}))
      return why;
  }
  if (auto why = with([&](int64_t c) { return (heads - 1 - c / d) * d + c % d; },
                      {fault_class::kTpShard, fits + "heads in reverse order"}))
    return why;
  for (int64_t groups = 2; groups < heads; ++groups) {
    if (heads % groups != 0) continue;
    if (auto why = with(
            [&](int64_t c) {
              const int64_t h = c / d;
              return (h % groups * (heads / groups) + h / groups) * d + c % d;
            },
            {fault_class::kTpShard, fits + "heads interleaved over " + std::to_string(groups) + " groups"}))
      return why;
  }
  return std::nullopt;
}

// Columns of one head of a projection to heads; 0: it is none, or the head size was not recorded.
int64_t HeadSizeOf(const Subject& s, const LinearSite& site) {
  if (site.result != "attn.q_proj" && site.result != "attn.k_proj" && site.result != "attn.v_proj") return 0;
  if (s.tensor()->shape.size() == 3) return s.tensor()->dim(-1);
  const TensorPtr heads = s.Beside(s.Sibling(site.result.substr(0, 6)));
  return heads == nullptr ? s.Integer("model.head_dim", 0) : heads->dim(-1);
}

// Another weight of this shape, another part of the fused one, another rank's rows of one that was recorded whole; rows
// of each head in the order of the other pairing of a rotation.
std::optional<Explanation> OtherPlace(const Subject& s, const Layer& layer, const LinearSite& site,
                                      const oracle::Computed& right, const Product& product, bool plain) {
  const auto attempt = [&](const Array& w, const Explanation& why) -> std::optional<Explanation> {
    if (plain && !ProductMayFit(s, layer.x, 0, w, 0, layer.bias)) return std::nullopt;
    const auto y = product(layer.x, w);
    if (!FitsBetter(s, right, y)) return std::nullopt;
    return Weighed(s, right, *y, why);
  };
  const int64_t rows = layer.w.rows();
  if (layer.whole.rows() > rows) {
    // Every stretch of as many rows: other ranks' parts, or other parts of a fused weight of the same size.
    for (int64_t first = 0; first + rows <= layer.whole.rows() && rows > 0; first += rows) {
      const auto other = RowsOf(layer.whole, first, rows);
      if (!other.ok()) continue;
      const bool fused = !site.fused.empty() && layer.weight_tensor == nullptr && !layer.quantised_weight;
      if (first == layer.first_row) continue;
      if (auto why = attempt(*other, {fused ? fault_class::kLoad : fault_class::kTpShard,
                                      "fits rows " + std::to_string(first) + " to " + std::to_string(first + rows - 1) +
                                          " of the whole weight, rows " + std::to_string(layer.first_row) + " to " +
                                          std::to_string(layer.first_row + rows - 1) + " are due"}))
        return why;
    }
  }
  if (plain) {
    if (auto why = ExplainOtherRows(s, layer, site, HeadSizeOf(s, site), right)) return why;
  }
  if (auto why = ForOtherWeights(s, layer.weight, layer.w,
                                 [&](const OtherWeight& other) { return attempt(other.value, other.why); }))
    return why;
  if (!layer.bias.values.empty()) {
    const std::string bias = s.Sibling(site.weight) + ".bias";
    if (auto why = ForOtherWeights(s, bias, layer.bias, [&](const OtherWeight& other) -> std::optional<Explanation> {
          const auto y = oracle::Linear(layer.x, layer.w, other.value);
          if (!plain || !FitsBetter(s, right, y)) return std::nullopt;
          return Weighed(s, right, *y, other.why);
        }))
      return why;
  }
  if (auto why = InputHeads(s, layer, right, product, plain)) return why;
  if (auto why = PartMissing(s, layer, right, product)) return why;
  // Rows of each head reordered between the two layouts of rotary pairs, as importers do for one of two conventions.
  if (site.result != "attn.q_proj" && site.result != "attn.k_proj") return std::nullopt;
  const int64_t d = HeadSizeOf(s, site);
  if (d < 4 || d % 2 != 0 || rows % d != 0) return std::nullopt;
  for (bool pairs : {false, true}) {
    std::vector<int64_t> from;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t i = r % d;
      from.push_back(r - i + (pairs ? i % 2 * (d / 2) + i / 2 : i < d / 2 ? 2 * i : 2 * (i - d / 2) + 1));
    }
    const auto moved = oracle::TakeRows(layer.w, from);
    if (!moved.ok()) continue;
    if (auto why =
            attempt(*moved, {fault_class::kRopeForm, std::string("fits rows of each head reordered ") +
                                                         (pairs ? "from halves to pairs" : "from pairs to halves")}))
      return why;
  }
  return std::nullopt;
}

// One value of four-bit floats decoded as another, in all of the weight. Empty: no such table fits. Each magnitude in
// the place of each other: 49 products, of which a few elements are looked at first.
std::string DecodeTable(const Subject& s, const Layer& layer, const LinearSite& site, const oracle::Computed& right) {
  if (!layer.quantised_weight) return "";
  const auto parts = TakeApart(s, s.Sibling(site.weight) + ".weight.", false);
  if (!parts.ok() || (parts->quant != "nvfp4" && parts->quant != "mxfp4")) return "";
  constexpr float kValues[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  const Array plain = parts->Values();
  for (float magnitude : kValues) {
    for (float taken : kValues) {
      if (taken == magnitude || magnitude == 0) continue;
      const auto at = [&, ratio = double{taken} / double{magnitude}](int64_t r, int64_t c) {
        const auto i = static_cast<size_t>(r * plain.cols() + c);
        return std::abs(parts->code[i]) == magnitude ? plain.values[i] * ratio : plain.values[i];
      };
      if (!ProductMayFit(s, layer.x, 0, OperandRows{plain.rows(), plain.cols(), at}, 0, layer.bias)) continue;
      Array w = plain;
      for (int64_t i = 0; i < w.size(); ++i) w[i] = at(i / w.cols(), i % w.cols());
      if (!FitsBetter(s, right, oracle::Linear(layer.x, w, layer.bias))) continue;
      char text[80];
      std::snprintf(text, sizeof text, "fits codes of %g decoded as %g", double{magnitude}, double{taken});
      return text;
    }
  }
  return "";
}

// Causes by their price: constants first, then conventions of the codes, then other memory. The first that fits stays.
std::optional<Explanation> Explain(const Subject& s, const Layer& layer, const LinearSite& site,
                                   const oracle::Computed& right, const Product& product, bool plain) {
  const auto fits = [&](const Array& x, const Array& w) { return Fits(s, product(x, w)); };
  if (!layer.bias.values.empty() && Fits(s, oracle::Linear(layer.x, layer.w, {{0}, {}}))) {
    return Explanation{fault_class::kKernel, "fits without the bias"};
  }
  const double ratio = ConstantRatio(s.actual(), right.value, s.judged(), std::max(1e-4, 8 * s.precision().store));
  const double world = static_cast<double>(s.Integer("world_size", s.capture().world_size()));
  if (!std::isnan(ratio)) {
    // Within 1 %: the ratio is a least-squares one, and a sum over replicas is exactly the number of ranks.
    if (world > 1 && std::abs(ratio - world) < 0.01 * world)
      return Explanation{fault_class::kReduce, "the result was summed over ranks that each had the whole", ratio,
                         "result used / expected"};
    const bool quantised = layer.quantised_input || layer.quantised_weight;
    return Explanation{quantised ? fault_class::kQScale : fault_class::kScale, "the result is one constant off", ratio,
                       "result used / expected"};
  }
  if (auto why = QuantisedCause(s, layer, right, product, plain)) return why;
  if (const Tensor& in = *layer.input.tensor; layer.quantised_input) {
    auto x = Result<Array>(ToArray({in.n_rows(), in.row_size()}, in.values));
    if (!layer.input_rows.empty()) x = oracle::TakeRows(*x, layer.input_rows);
    if (x.ok() && FitsBetter(s, right, product(*x, layer.w)))
      return Explanation{fault_class::kPrecision, "fits the input before it was quantised"};
  }
  if (layer.w.rows() == layer.w.cols()) {
    Array turned = layer.w;
    for (int64_t r = 0; r < turned.rows(); ++r)
      for (int64_t c = 0; c < turned.cols(); ++c) turned[r * turned.cols() + c] = layer.w[c * turned.cols() + r];
    if (fits(layer.x, turned)) return Explanation{fault_class::kStride, "fits the weight transposed"};
  }
  // This rank's part of the sum in place of the sum.
  const TensorPtr own = layer.input.tensor;
  if (own->info->event.shard.count > 1 && own->row_size() < layer.x.cols()) {
    const int64_t begin = own->info->event.shard.col_offset, end = begin + own->row_size();
    auto x = oracle::TakeColumns(layer.x, begin, end), w = oracle::TakeColumns(layer.w, begin, end);
    if (x.ok() && w.ok() && fits(*x, *w))
      return Explanation{fault_class::kReduce, "fits the columns of this rank alone: the sum over ranks is missing"};
  }
  if (auto why = OtherPlace(s, layer, site, right, product, plain)) return why;
  if (site.result == "logits" && s.Flag("tie_word_embeddings", false)) {
    return Explanation{fault_class::kLoad,
                       "the head is declared as tied to the embedding and gives what another matrix gives"};
  }
  if (auto why = ExplainOverwritten(
          s,
          {{layer.input}, [&](std::span<const Array> in) {
             return oracle::Linear(in[0].rank() == 2 ? in[0] : Array{layer.x.shape, in[0].values}, layer.w, layer.bias);
           }})) {
    return why;
  }
  if (const std::string table = DecodeTable(s, layer, site, right); !table.empty())
    return Explanation{fault_class::kKernel, table};
  // The next row of both operands added: a block that is wider than the row.
  if (layer.w.rows() > 1 && layer.x.rows() > 1) {
    oracle::Computed next = right;
    auto all = oracle::Linear(layer.x, layer.w, {{0}, {}});
    if (all.ok()) {
      const int64_t n = layer.w.rows();
      for (int64_t r = 0; r + 1 < layer.x.rows(); ++r) {
        for (int64_t c = 0; c + 1 < n; ++c) {
          next.value[r * n + c] += all->value[(r + 1) * n + c + 1];
          next.scale[r * n + c] += all->scale[(r + 1) * n + c + 1];
        }
      }
      if (Fits(s, next))
        return Explanation{fault_class::kKernel, "fits sums that run on into the next row of both operands"};
    }
  }
  return std::nullopt;
}

// What the head does behind its product.
struct Head {
  double logit_scale = 1, soft_cap = 0;
  bool plain() const { return logit_scale == 1 && soft_cap == 0; }
};

// The head's scale and cap apply behind the product.
Result<oracle::Computed> Multiply(const Array& x, const Array& w, const Array& bias, const Head& head) {
  if (head.plain()) return oracle::Linear(x, w, bias);
  return oracle::Head(x, w, bias, head.logit_scale, head.soft_cap);
}

// The result of these rows of the layer: judged element by element, causes tried.
void JudgeRows(const Subject& s, const LinearSite& site, Layer* layer, const Head& head) {
  const double logit_scale = head.logit_scale, soft_cap = head.soft_cap;
  const auto product = [&](const Array& x, const Array& w) { return Multiply(x, w, layer->bias, head); };
  Operation multiply;
  multiply.inputs = {layer->input, {layer->weight, layer->weight_tensor}};
  multiply.quantised = layer->quantised_input || layer->quantised_weight;
  const size_t plain_size = layer->input.tensor->values.size();
  // Rereading an operand applies to what is used as it was recorded.
  multiply.run = [&](std::span<const Array> in) -> Result<oracle::Computed> {
    // Codes are decoded, so that another reading of the recorded input would not be what the GEMM takes.
    const bool use_x = !layer->quantised_input && in[0].values.size() == static_cast<size_t>(layer->x.size()) &&
                       plain_size == in[0].values.size();
    const bool use_w = layer->weight_tensor != nullptr && in[1].values.size() == static_cast<size_t>(layer->w.size());
    return product(use_x ? Array{layer->x.shape, in[0].values} : layer->x,
                   use_w ? Array{layer->w.shape, in[1].values} : layer->w);
  };
  JudgeOperation(s, multiply, [&](const Difference&, const oracle::Computed& right) -> std::optional<Explanation> {
    if (soft_cap != 0 && Fits(s, oracle::Head(layer->x, layer->w, layer->bias, logit_scale, 0)))
      return Explanation{fault_class::kMask, "fits without the soft cap of the logits"};
    if (logit_scale != 1 && Fits(s, oracle::Head(layer->x, layer->w, layer->bias, 1, soft_cap))) {
      return Explanation{fault_class::kScale, "fits without the scale of the logits", 1 / logit_scale,
                         "logit scale used / declared"};
    }
    return Explain(s, *layer, site, right, product, head.plain());
  });
}

// More than kMaxWork: a sample of the rows is judged element by element, and all of them by random projections, which
// see an error that is large beside the bounds of its row together. Causes are tried on some of the wrong rows and some
// of the sample.
void JudgeLarge(const Subject& s, const LinearSite& site, Layer* layer, const Head& head) {
  const std::vector<int64_t> sample = SampleRows(s.judged(), kSampledRows);
  auto x = oracle::TakeRows(layer->x, sample);
  const auto have = oracle::TakeRows(s.actual(), sample);
  if (!x.ok() || !have.ok() || sample.empty()) return;
  auto right = Multiply(*x, layer->w, layer->bias, head);
  if (!right.ok()) return Missing(s, right.status());
  if (right->value.size() != have->size())
    return Missing(s, layer->weight + " of as many rows as the result has columns");
  const Difference d = Differ(*have, *right, s.precision(), std::vector<char>(sample.size(), 1), 1, s.one_store);
  std::vector<int64_t> wrong;
  for (int64_t r : d.rows) wrong.push_back(sample[static_cast<size_t>(r)]);
  std::string text = SampleText(sample.size(), s.judged()) + " of " + s.info().name + " element by element";
  if (head.soft_cap == 0) {  // a cap is not linear
    Array scaled = layer->x, bias = layer->bias;
    for (Array* a : {&scaled, &bias}) {
      for (double& v : a->values) v *= head.logit_scale;
    }
    const std::vector<int64_t> others = WrongByProjection(s, scaled, layer->w, bias);
    wrong.insert(wrong.end(), others.begin(), others.end());
    std::sort(wrong.begin(), wrong.end());
    wrong.erase(std::unique(wrong.begin(), wrong.end()), wrong.end());
    text += ", all of them by random projections";
  }
  s.report().Sampled(text);
  if (wrong.empty()) return ReportRight(s, d);
  const int64_t most = std::clamp<int64_t>(kMaxWork / layer->w.size(), 8, kSampledRows);
  std::vector<int64_t> rows = SomeOf(wrong, most - most / 4);
  const std::vector<int64_t> more = SomeOf(sample, most - static_cast<int64_t>(rows.size()));
  rows.insert(rows.end(), more.begin(), more.end());
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  Subject part(s.capture(), TakeTensorRows(*s.tensor(), rows), s.report());
  part.DeclareOneStore();
  part.sample = text + ": " + std::to_string(wrong.size()) + " rows are wrong, the cause was looked for in " +
                std::to_string(rows.size());
  auto some = oracle::TakeRows(layer->x, rows);
  if (!some.ok()) return;
  layer->x = *some;
  if (layer->input_rows.empty()) {
    layer->input_rows = rows;
  } else {
    std::vector<int64_t> taken;
    for (int64_t r : rows) taken.push_back(layer->input_rows[static_cast<size_t>(r)]);
    layer->input_rows = std::move(taken);
  }
  JudgeRows(part, site, layer, head);
}

// A result of other rows than its input is judged whole, whatever it costs: sampled rows would not meet.
void JudgeProduct(Subject& s, const LinearSite& site) {
  s.DeclareOneStore();
  auto layer = GatherLayer(s, site);
  if (!layer.ok()) return Missing(s, layer.status());
  // The bias of a sum over ranks is one rank's, or comes behind the sum.
  if (s.info().site.partial && !layer->bias.values.empty() && !Fits(s, oracle::Linear(layer->x, layer->w, layer->bias)))
    layer->bias = {};
  Head head;
  if (site.result == "logits") head = {s.Number("logit_scale", 1), s.Number("soft_cap", 0)};
  const int64_t rows = layer->x.rows();
  const bool large = rows * layer->x.cols() > kMaxWork / std::max<int64_t>(layer->w.rows(), 1);
  const bool same_rows = rows == static_cast<int64_t>(s.judged().size());
  return large && same_rows ? JudgeLarge(s, site, &*layer, head) : JudgeRows(s, site, &*layer, head);
}

}  // namespace

void JudgeLinear(const Capture& capture, CheckReport* report) {
  std::set<int32_t> ties;  // ranks whose head was held against the embedding: once, whatever the number of steps
  for (const LinearSite& site : kLinears) {
    const std::string_view stems[] = {site.result};
    JudgeStems(capture, report, stems, [&](Subject& s) {
      // Of several sources the one that was recorded: the query behind its latent, or straight from the norm.
      const bool latent = s.capture().HasSite(s.Sibling("attn.q_a_normed"));
      if (site.result == "attn.q_proj" && latent != (site.input == "attn.q_a_normed")) return;
      // A reduced result is judged as the sum of its partial ones.
      if (!s.info().site.partial && s.capture().HasSite(s.info().name + ".partial")) return;
      if (site.result == "logits" && ties.insert(s.info().event.rank).second) JudgeTie(s);
      JudgeProduct(s, site);
    });
  }
  for (const LinearSite& site : kLinears) {
    const std::string stem = std::string(site.result) + ".partial";
    const std::string_view stems[] = {stem};
    JudgeStems(capture, report, stems, [&](Subject& s) { JudgeProduct(s, site); });
  }
}

}  // namespace assay::check
