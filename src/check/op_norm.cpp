// RMSNorm and LayerNorm, with mean squares over all ranks where the row is cut.
#include <algorithm>
#include <cmath>

#include "base/number_text.h"
#include "check/op_checks.h"
#include "check/op_explain.h"
#include "check/op_fitted.h"
#include "check/op_norm_explain.h"
#include "check/op_stream.h"
#include "fit/formats.h"
#include "oracle/norm.h"

namespace assay::check {
namespace {

using namespace op;
using oracle::Array;

struct NormSite {
  std::string_view result, input, weight;  // below the layer; input empty: the residual stream
};
// Names of weights as Hugging Face checkpoints have them, below the layer.
constexpr NormSite kNorms[] = {
    {"input_norm", "", "input_layernorm"},
    {"post_norm", "", "post_attention_layernorm"},
    {"final_norm", "", "norm"},
    {"attn.q_a_normed", "attn.q_a", "attn.q_a_layernorm"},
    {"attn.kv_c_normed", "attn.kv_a", "attn.kv_a_layernorm"},
    {"attn.out_normed", "attn.out", "attn.out_norm"},
};

// Factor of the branch in the stream that is normed. The table has it on `out`, where the stream is stored: that event
// of the step speaks for this norm too.
double BranchScale(const Subject& s) {
  if (Capture::OwnText(s.info(), "branch_scale")) return s.Number("branch_scale", 1);
  const TensorPtr out = s.Beside(s.Sibling("out"));
  return s.capture().Number(out == nullptr ? s.info() : *out->info, "branch_scale").value_or(1);
}

// The product of branch and factor is rounded before it is added, which shows where the two terms nearly cancel. The
// bound speaks of the normed element alone: it grows by what the terms are larger than their sum.
void AllowProduct(const Array& stream, const Array& branch, double factor, oracle::Computed* y) {
  if (stream.size() != y->scale.size() || branch.size() != y->scale.size()) return;
  for (int64_t i = 0; i < y->scale.size(); ++i) {
    const double term = std::abs(factor * branch[i]), sum = std::abs(stream[i] + factor * branch[i]);
    if (term > sum && sum > 0) y->scale[i] *= term / sum;
  }
}

// float16 takes part: what is stored, what it was computed in, or what squares are summed in.
bool UsesHalf(const Subject& s) {
  const Event& event = s.info().event;
  return event.dtype == DType::kF16 || event.compute_dtype == DType::kF16 ||
         ParseDType(Capture::OwnText(s.info(), "accum_dtype").value_or("")) == DType::kF16;
}

// Rows of zeros exactly where the sum of squares is beyond the largest f16: infinite, its root's inverse is 0. Without
// a right row below it there is no "exactly where".
std::optional<Explanation> SquaresLeaveRange(const Subject& s, const Array& x, const Difference& d) {
  const auto rows = static_cast<int64_t>(s.judged().size());
  if (d.rows.empty() || rows == 0 || !UsesHalf(s) || s.actual().size() != x.size()) return std::nullopt;
  constexpr double kLargest = 65504;
  const int64_t per_row = x.rows() / rows, width = s.actual().size() / rows;
  double least = HUGE_VAL, most = 0;
  for (int64_t r = 0; r < rows; ++r) {
    if (!s.judged()[static_cast<size_t>(r)]) continue;
    double sum = 0;
    for (int64_t i = r * per_row * x.cols(); i < (r + 1) * per_row * x.cols(); ++i) sum += x[i] * x[i];
    const bool wrong = std::binary_search(d.rows.begin(), d.rows.end(), r);
    for (int64_t i = r * width; wrong && i < (r + 1) * width; ++i) {
      if (s.actual()[i] != 0) return std::nullopt;
    }
    if (wrong)
      least = std::min(least, sum);
    else
      most = std::max(most, sum);
  }
  const double d_columns = static_cast<double>(x.cols());
  if (!(most > 0) || !(least > kLargest) ||
      (most > kLargest && !(least / d_columns > kLargest && most / d_columns <= kLargest)))
    return std::nullopt;
  return Explanation{fault_class::kRange, "rows are 0 exactly where the squares leave the range of f16: from " +
                                              NumberText(least) + " on, right up to " + NumberText(most)};
}

// One norm [T, d] of its operand, which for the residual stream is a sum of what was recorded before it (StreamBehind).
void JudgeNorm(Subject& s, const NormSite& site) {
  Operation norm;
  std::string missing;
  if (site.input.empty()) {
    norm.inputs = StreamBehind(s, &missing);
  } else {
    norm.inputs = {{s.Sibling(site.input), s.Operand(s.Sibling(site.input))}};
    if (norm.inputs[0].tensor == nullptr) missing = norm.inputs[0].name;
  }
  if (!missing.empty()) return Missing(s, missing);
  const std::string weight_name = s.Sibling(site.weight) + ".weight";
  const TensorPtr weight = s.Weight(weight_name);
  if (weight == nullptr) return Missing(s, weight_name);
  const TensorPtr bias = s.Weight(s.Sibling(site.weight) + ".bias");
  const size_t n_terms = norm.inputs.size();
  norm.inputs.push_back({weight_name, weight});

  // Norms of latents keep an eps of their own in some families.
  const bool latent = site.result == "attn.q_a_normed" || site.result == "attn.kv_c_normed";
  double eps = s.Number("eps", 1e-6);
  if (latent && !Capture::OwnText(s.info(), "eps")) eps = s.Number("model.latent_norm_eps", eps);
  const double branch = n_terms > 1 ? BranchScale(s) : 1;
  const bool layer_norm = s.Text("op", "rmsnorm") == "layernorm";
  // Mean squares of the whole row where this rank has a part of it.
  const EventInfo& operand = *norm.inputs[0].tensor->info;
  std::vector<double> squares;
  const bool cut = operand.event.shard.count > 1 && !layer_norm;
  if (cut) {
    auto whole = s.capture().Stitched(operand);
    if (!whole.ok()) return s.report().Missing(whole.status().message(), "record " + operand.name + " on every rank");
    auto means = oracle::MeanSquares(ToArray({(*whole)->n_rows(), (*whole)->row_size()}, (*whole)->values), 0,
                                     (*whole)->row_size());
    if (!means.ok()) return;
    squares = *means;
  }
  const int64_t rows = s.actual().shape.empty() ? 1 : s.actual().shape[0];
  // Rows as they are normed: terms of the stream added up, the latent without k_pe, heads apart.
  const fit::Format* kept = nullptr;  // the sum of the stream rounded so, to fit faults
  const auto prepared = [&](std::span<const Array> in) -> Result<Array> {
    Array x = in[0];
    for (size_t j = 1; j < n_terms; ++j) {
      if (in[j].size() != x.size())
        return Status::BadInput(norm.inputs[j].name + " has another shape than " + norm.inputs[0].name);
      for (int64_t i = 0; i < x.size(); ++i) x[i] += branch * in[j][i];
    }
    for (double& v : x.values) v = kept == nullptr ? v : fit::RoundTo(v, *kept);
    if (x.size() == 0 || rows == 0) return Status::BadInput(operand.name + " is empty");
    x.shape = {rows, x.size() / rows};
    const int64_t width = s.actual().size() / rows;
    // attn.kv_a holds k_pe behind the latent; only the latent is normed.
    if (x.cols() > width && !cut) {
      ASSAY_ASSIGN_OR_RETURN(x, oracle::TakeColumns(x, 0, width));
    }
    // A weight shorter than the row is that of a head: each head is normed by itself.
    const int64_t own = in[n_terms].size();
    if (x.cols() != own && own > 0 && x.cols() % own == 0) x.shape = {x.size() / own, own};
    return x;
  };
  const auto run_with = [&](std::span<const Array> in, bool own_squares) -> Result<oracle::Computed> {
    ASSAY_ASSIGN_OR_RETURN(const Array x, prepared(in));
    const Array& w = in[n_terms];
    Result<oracle::Computed> y = layer_norm
                                     ? oracle::LayerNorm(x, w, bias == nullptr ? Array{{0}, {}} : ToArray(*bias), eps)
                                 : cut && !own_squares ? oracle::RmsNormGiven(x, w, eps, squares)
                                                       : oracle::RmsNorm(x, w, eps);
    if (!y.ok()) return y;
    y->value.shape = y->scale.shape = s.actual().shape;
    // The residual stream is a sum: engines norm it before or after they store it.
    if (site.input.empty()) y->stores += 1;
    if (branch != 1) AllowProduct(in[0], in[1], branch, &*y);
    return y;
  };
  norm.run = [&](std::span<const Array> in) { return run_with(in, false); };
  JudgeOperation(s, norm, [&](const Difference& d, const oracle::Computed& right) -> std::optional<Explanation> {
    const auto arrays = norm.arrays();
    if (cut && Fits(s, run_with(arrays, true))) {
      double ratio = ConstantRatio(s.actual(), right.value, s.judged(), std::max(1e-3, 4 * s.precision().store));
      if (std::isnan(ratio)) {  // one constant a row: that of the first row that is off
        double cross = 0, square = 0;
        for (int64_t i = 0; i < right.value.size() / rows; ++i) {
          cross += s.actual()[i] * right.value[i];
          square += right.value[i] * right.value[i];
        }
        ratio = square > 0 ? cross / square : kNone;
      }
      return Explanation{fault_class::kReduce, "fits the mean square of this rank's columns in place of the whole row",
                         ratio, "normed shard used / expected"};
    }
    const int64_t world = s.capture().world_size(), cols = right.value.size() / rows;
    if (!cut && !layer_norm && n_terms == 1 && world > 1 &&
        cols % world == 0) {  // statistics of this rank's columns alone
      const int64_t begin = s.info().event.rank * (cols / world);
      auto own = oracle::MeanSquares({{rows, arrays[0].size() / rows}, arrays[0].values}, begin, begin + cols / world);
      if (own.ok() && Fits(s, oracle::RmsNormGiven({{rows, cols}, arrays[0].values}, arrays[1], eps, *own)))
        return Explanation{fault_class::kReduce,
                           "fits the mean square of the columns of this rank in place of the whole row"};
    }
    // The second term of the stream is the branch that a fused kernel adds: left out, the norm saw the residual before
    // it.
    if (n_terms > 1) {
      auto alone = arrays;
      std::fill(alone[1].values.begin(), alone[1].values.end(), 0.0);
      if (Fits(s, run_with(alone, false))) {
        const bool compiled = s.Flag("compiled", false) || s.Flag("inplace", false);
        return Explanation{compiled ? fault_class::kCompile : fault_class::kKernel,
                           "fits without " + norm.inputs[1].name + " added before the norm"};
      }
    }
    for (const fit::Format& format : fit::Formats()) {
      if (n_terms < 2 || (format.name != "f16" && format.name != "bf16")) continue;
      kept = &format;
      const auto y = run_with(arrays, false);
      kept = nullptr;
      if (FitsBetter(s, right, y))
        return Weighed(s, right, *y,
                       {fault_class::kPrecision,
                        "fits a residual stream kept in " + std::string(format.name) + " in front of the norm"});
    }
    if (auto x = prepared(arrays); x.ok() && !cut) {
      if (auto why = SquaresLeaveRange(s, *x, d)) return why;
      const int64_t all = arrays[0].size() / std::max<int64_t>(rows, 1);
      if (n_terms == 1 && !layer_norm && x->rows() == rows && all > x->cols()) {
        const auto of_all = oracle::MeanSquares({{rows, all}, arrays[0].values}, 0, all);
        const auto y = of_all.ok() ? oracle::RmsNormGiven(*x, arrays[n_terms], eps, *of_all) : right;
        if (FitsBetter(s, right, y))
          return Weighed(s, right, *y,
                         {fault_class::kKernel, "fits the mean square of all " + std::to_string(all) +
                                                    " columns of the operand, in place of the " +
                                                    std::to_string(x->cols()) + " that are normed"});
      }
      NormCall call{weight_name, *x, arrays[n_terms], Array{{0}, {}}, eps, layer_norm};
      if (layer_norm && bias != nullptr) call.bias = ToArray(*bias);
      if (auto why = ExplainNorm(s, call, right)) return why;
    }
    const double c = ConstantRatio(s.actual(), right.value, s.judged(), std::max(1e-4, 8 * s.precision().store));
    if (!std::isnan(c))
      return Explanation{fault_class::kScale, "the normed rows are one constant off", c, "normed used / expected"};
    return std::nullopt;
  });
}

}  // namespace

void JudgeNorms(const Capture& capture, CheckReport* report) {
  for (const NormSite& site : kNorms) {
    const std::string_view stems[] = {site.result};
    JudgeStems(capture, report, stems, [&](Subject& s) { JudgeNorm(s, site); });
  }
}

}  // namespace assay::check
