// Multi-head latent attention: keys and values out of the latent through kv_b_proj, queries into it through W_UK, the
// output out of it through W_UV.
#include <algorithm>
#include <cmath>

#include "check/op_checks.h"
#include "check/op_explain.h"
#include "check/op_fitted.h"
#include "check/op_other_weight.h"
#include "oracle/linear.h"

namespace assay::check {
namespace {

using namespace op;
using oracle::Array;

// Weights of each head as [H, d, c], c the latent's columns. Engines keep them as [H, d, c] or [H, c, d]; the axes of
// the event say which, and without them the shape.
struct HeadWeights {
  TensorPtr tensor;
  std::string name;
  bool latent_last = true;
  bool of_kv_b = false;  // cut out of kv_b_proj: rows of a head are its keys, then its values
  bool keys = false;
};

// By the axes' names, else by which axis has c entries; where neither tells, [H, d, c] for keys and [H, c, d] for
// values.
bool LatentLast(const Tensor& w, int64_t c, bool keys) {
  const std::string& axes = w.info->axes;
  if (axes.ends_with(" c")) return true;
  if (axes.find(" c ") != std::string::npos) return false;
  if (w.shape.size() == 3 && w.shape[1] != w.shape[2]) return w.shape[2] == c;
  return keys;
}

// The weight that the absorbed path derived, or kv_b_proj, from which both are cut. Nothing: neither was recorded.
std::optional<HeadWeights> WeightsOf(const Subject& s, bool keys, int64_t c) {
  HeadWeights w;
  w.keys = keys;
  w.name = s.Sibling(keys ? "attn.W_UK_T" : "attn.W_UV");
  w.tensor = s.Weight(w.name);
  if (w.tensor != nullptr) {
    w.latent_last = LatentLast(*w.tensor, c, keys);
    return w;
  }
  w.name = s.Sibling("attn.kv_b_proj.weight");
  w.tensor = s.Weight(w.name);
  w.of_kv_b = true;
  if (w.tensor == nullptr) return std::nullopt;
  return w;
}

// Heads of a result on this rank, and which ones of a weight that was recorded whole.
struct HeadRange {
  int64_t first = 0, count = 1, all = 1;
  // The columns of a shard are what its event says: they need not lie inside of the weight.
  bool inside() const { return count > 0 && first >= 0 && first <= all - count; }
};

// A weight recorded whole on every rank is cut to the heads of this rank's result.
HeadRange HeadsOf(const Subject& s, int64_t heads, const Tensor& weight) {
  HeadRange range{0, heads, heads};
  const Shard& shard = s.info().event.shard;
  const int64_t width = s.tensor()->dim(-1);
  if (shard.count > 1 && weight.info->event.shard.count <= 1 && width > 0 && shard.full_cols > 0) {
    range.first = shard.col_offset / width;
    range.all = shard.full_cols / width;
  }
  return range;
}

// The other ways in which the memory of a head may be read.
enum class Reading { kRight, kOther, kRightAsTransposed, kOtherAsTransposed };

// [heads, d, c] whatever the recorded layout; `reading` then lets the same memory be read wrongly.
Result<Array> Canonical(const HeadWeights& w, const Array& whole, const HeadRange& range, int64_t d, int64_t c,
                        Reading reading) {
  if (!range.inside()) return Status::BadInput(w.name + " lacks heads of this shard");
  const int64_t heads = range.count;
  Array out = Array::Filled({heads, d, c});
  Array in = whole;
  const int64_t each = whole.size() / std::max<int64_t>(range.all, 1);
  if (range.all != heads && whole.size() == range.all * each) {
    in.values.assign(whole.values.begin() + range.first * each, whole.values.begin() + (range.first + heads) * each);
    in.shape = {heads, each};
  }
  if (w.of_kv_b) {
    // Rows of one head in kv_b_proj: dn of keys, then dv of values; d of them are asked for.
    const int64_t own = in.size() / std::max<int64_t>(heads * c, 1);
    if (own < d || in.size() != heads * own * c) return Status::BadInput(w.name + " has other heads");
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t first = (h * own + (w.keys ? 0 : own - d)) * c;
      std::copy_n(in.values.begin() + first, d * c, out.values.begin() + h * d * c);
    }
    return out;
  }
  if (in.size() != out.size()) return Status::BadInput(w.name + " has another shape than its operands");
  const bool turned = (reading == Reading::kOther || reading == Reading::kOtherAsTransposed) == w.latent_last;
  if (turned) {
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < c; ++i)
        for (int64_t j = 0; j < d; ++j) out[(h * d + j) * c + i] = in[(h * c + i) * d + j];
  } else {
    out.values = in.values;
  }
  if (reading != Reading::kRightAsTransposed && reading != Reading::kOtherAsTransposed) return out;
  // Laid out anew as [H, d, c] or [H, c, d], and that memory read the other way round.
  Array again = out;
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t j = 0; j < d; ++j) {
      for (int64_t i = 0; i < c; ++i) {
        if (reading == Reading::kRightAsTransposed)
          again[(h * d + j) * c + i] = out[h * d * c + i * d + j];
        else
          again[h * d * c + i * d + j] = out[(h * d + j) * c + i];
      }
    }
  }
  return again;
}

// keys: y[t, h, c] = sum over d of x[t, h, d] w[h, d, c]; otherwise y[t, h, d] = sum over c of x[t, h, c] w[h, d, c].
// shift: head h takes the weights of head h + shift. k: the terms of each sum and the store.
oracle::Computed PerHead(const Array& x, const Array& w, bool keys, int64_t shift) {
  const int64_t rows = x.shape[0], heads = w.shape[0], d = w.shape[1], c = w.shape[2];
  oracle::Computed y;
  y.value = y.scale = Array::Filled({rows, heads, keys ? c : d});
  y.k = static_cast<double>(keys ? d : c) + 1;
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      const double* from = &w.values[static_cast<size_t>((h + shift) % heads * d * c)];
      for (int64_t j = 0; j < d; ++j) {
        for (int64_t i = 0; i < c; ++i) {
          const double term = x[(t * heads + h) * (keys ? d : c) + (keys ? j : i)] * from[j * c + i];
          const int64_t to = (t * heads + h) * (keys ? c : d) + (keys ? i : j);
          y.value[to] += term;
          y.scale[to] += std::abs(term);
        }
      }
    }
  }
  return y;
}

// The second operand taken from another layer or rank.
std::optional<Explanation> OtherAbsorbed(const Subject& s, const Operation& product, const oracle::Computed& right) {
  const auto in = product.arrays();
  return ForOtherWeights(s, product.inputs[1].name, in[1], [&](const OtherWeight& w) -> std::optional<Explanation> {
    const std::vector<Array> changed{in[0], w.value};
    const auto y = product.run(changed);
    if (!FitsBetter(s, right, y)) return std::nullopt;
    return Weighed(s, right, *y, w.why);
  });
}

// attn.q_latent of attn.q_nope (keys), attn.out of attn.latent_out.
void JudgePerHead(Subject& s, const std::string& input, bool keys) {
  const TensorPtr whole = s.Operand(input);
  if (whole == nullptr) {
    if (keys) Missing(s, input);
    return;  // an output that is not behind a latent is judged as attention
  }
  // In a step of prefill and decode, the decoded rows alone go through the latent space.
  const TensorPtr x = WithRowsOf(whole, *s.tensor());
  if (x == nullptr) {
    return s.report().Missing(input + " has not all rows of " + s.info().name, Capture::RecordHint(input));
  }
  if (x->shape.size() != 3 || s.actual().rank() != 3 || x->shape[1] != s.actual().shape[1]) {
    return s.report().Missing(input + " has other heads than " + s.info().name, Capture::RecordHint(input));
  }
  const int64_t heads = x->shape[1], c = keys ? s.actual().cols() : x->shape[2],
                d = keys ? x->shape[2] : s.actual().cols();
  const auto w = WeightsOf(s, keys, c);
  if (!w) return Missing(s, s.Sibling(keys ? "attn.W_UK_T" : "attn.W_UV"));
  const HeadRange range = HeadsOf(s, heads, *w->tensor);
  const auto run = [&](int64_t shift, Reading reading) {
    return [&, shift, reading](std::span<const Array> in) -> Result<oracle::Computed> {
      ASSAY_ASSIGN_OR_RETURN(Array weights, Canonical(*w, in[1], range, d, c, reading));
      return PerHead(in[0], weights, keys, shift);
    };
  };
  Operation product;
  product.inputs = {{x->info->name, x}, {w->name, w->tensor}};
  product.run = run(0, Reading::kRight);
  JudgeOperation(s, product, [&](const Difference&, const oracle::Computed& right) -> std::optional<Explanation> {
    for (int64_t shift = 1; shift < heads; ++shift) {
      if (Fits(s, run(shift, Reading::kRight)(product.arrays()))) {
        return Explanation{fault_class::kTpShard,
                           "fits the weights of other heads: head h takes those of head h + " + std::to_string(shift)};
      }
    }
    // kv_b_proj has rows of heads: its transpose as a whole is not a reading of one head.
    for (Reading reading : {Reading::kOther, Reading::kRightAsTransposed, Reading::kOtherAsTransposed}) {
      if (w->of_kv_b && reading == Reading::kOther) continue;
      if (Fits(s, run(0, reading)(product.arrays())))
        return Explanation{fault_class::kStride, "fits the memory of " + w->name + " read as its transpose"};
    }
    if (auto why = OtherAbsorbed(s, product, right)) return why;
    const double ratio = ConstantRatio(s.actual(), right.value, s.judged(), std::max(1e-4, 8 * s.precision().store));
    if (!std::isnan(ratio))
      return Explanation{fault_class::kScale, "the result is one constant off", ratio, "result used / expected"};
    return std::nullopt;
  });
}

// attn.k_nope and attn.v of attn.kv_c_normed through kv_b_proj.
void JudgeUp(Subject& s, bool keys) {
  const TensorPtr latent = s.Operand(s.Sibling("attn.kv_c_normed"));
  if (latent == nullptr) return;  // not MLA, or judged elsewhere
  const TensorPtr w = s.Weight(s.Sibling("attn.kv_b_proj.weight"));
  if (w == nullptr) return Missing(s, s.Sibling("attn.kv_b_proj.weight"));
  if (!SameRows(*latent, *s.tensor())) return;
  const int64_t heads = s.actual().rank() == 3 ? s.actual().shape[1] : 1, cols = s.actual().cols();
  const HeadRange range = HeadsOf(s, heads, *w);
  Operation up;
  up.inputs = {{latent->info->name, latent}, {w->info->name, w}};
  const auto run = [&](int64_t shift, bool of_keys) {
    return [&, shift, of_keys](std::span<const Array> in) -> Result<oracle::Computed> {
      const int64_t c = in[0].cols(), n = in[1].size() / std::max<int64_t>(c, 1);
      if (!range.inside() || n % range.all != 0 || n / range.all < cols || in[1].size() != n * c)
        return Status::BadInput("kv_b_proj has other heads than " + s.info().name);
      const int64_t own = n / range.all;
      std::vector<int64_t> rows;
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t j = 0; j < cols; ++j)
          rows.push_back((range.first + (h + shift) % heads) * own + (of_keys ? j : own - cols + j));
      ASSAY_ASSIGN_OR_RETURN(Array picked, oracle::TakeRows({{n, c}, in[1].values}, rows));
      ASSAY_ASSIGN_OR_RETURN(oracle::Computed y,
                             oracle::Linear({{in[0].size() / c, c}, in[0].values}, picked, {{0}, {}}));
      y.value.shape = y.scale.shape = s.actual().shape;
      return y;
    };
  };
  up.run = run(0, keys);
  JudgeOperation(s, up, [&](const Difference&, const oracle::Computed& right) -> std::optional<Explanation> {
    for (int64_t shift = 1; shift < heads; ++shift) {
      if (Fits(s, run(shift, keys)(up.arrays())))
        return Explanation{fault_class::kTpShard,
                           "fits the rows of other heads: head h takes those of head h + " + std::to_string(shift)};
    }
    if (Fits(s, run(0, !keys)(up.arrays())))
      return Explanation{fault_class::kLoad, keys ? "fits the rows of values in place of those of keys"
                                                  : "fits the rows of keys in place of those of values"};
    if (auto why = OtherAbsorbed(s, up, right)) return why;
    const double ratio = ConstantRatio(s.actual(), right.value, s.judged(), std::max(1e-4, 8 * s.precision().store));
    if (!std::isnan(ratio))
      return Explanation{fault_class::kScale, "the result is one constant off", ratio, "result used / expected"};
    return std::nullopt;
  });
}

}  // namespace

// The derived weights, and the four products of both paths; attn.v only where keys are materialised too, as other
// models have a v_proj.
void JudgeAbsorption(const Capture& capture, CheckReport* report) {
  constexpr std::string_view kKeys[] = {"attn.k_nope"}, kValues[] = {"attn.v"}, kLatent[] = {"attn.q_latent"},
                             kOut[] = {"attn.out"};
  JudgeAbsorbedWeights(capture, report);
  JudgeStems(capture, report, kKeys, [](Subject& s) { JudgeUp(s, true); });
  JudgeStems(capture, report, kValues, [](Subject& s) {
    if (s.capture().HasSite(s.Sibling("attn.k_nope"))) JudgeUp(s, false);
  });
  JudgeStems(capture, report, kLatent, [](Subject& s) { JudgePerHead(s, s.Sibling("attn.q_nope"), true); });
  JudgeStems(capture, report, kOut, [](Subject& s) { JudgePerHead(s, s.Sibling("attn.latent_out"), false); });
}

}  // namespace assay::check
