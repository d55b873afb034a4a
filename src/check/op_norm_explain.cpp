#include "check/op_norm_explain.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/number_text.h"
#include "base/rounding.h"
#include "check/op_fitted.h"
#include "check/op_other_weight.h"
#include "fit/constants.h"

namespace assay::op {
namespace {

using oracle::Array;
using oracle::Computed;

// What a norm may do otherwise. The row is (x - mean) / divisor · weight + bias.
struct Norm {
  bool mean = false;     // subtracted, and left out of the squares
  bool outside = false;  // divisor = sqrt(square) + eps in place of sqrt(square + eps)
  double count = 0;      // the sum of squares is divided by it; 0: the number of columns
  double eps = 0;
};

// Of one row; 0 for none.
double MeanOf(std::span<const double> row) {
  double sum = 0;
  for (double v : row) sum += v;
  return sum / static_cast<double>(std::max<size_t>(row.size(), 1));
}

// Mean of the squared distances from `mean`; count: what the sum is divided by instead of the number of columns.
double SquareOf(std::span<const double> row, double mean, double count) {
  double sum = 0;
  for (double v : row) sum += (v - mean) * (v - mean);
  return sum / (count > 0 ? count : static_cast<double>(std::max<size_t>(row.size(), 1)));
}

// The norm by the given form. Bounds come from the declared one (`right`), never below what the other values need.
Computed Run(const NormCall& call, const Norm& norm, const Array& weight, const Array& bias, const Computed& right) {
  Computed y = right;
  const int64_t d = call.x.cols();
  for (int64_t r = 0; r < call.x.rows(); ++r) {
    const auto row = call.x.row(r);
    const double mean = norm.mean ? MeanOf(row) : 0, square = SquareOf(row, mean, norm.count);
    const double divisor = norm.outside ? std::sqrt(square) + norm.eps : std::sqrt(square + norm.eps);
    for (int64_t i = 0; i < d; ++i) {
      const double v = (row[static_cast<size_t>(i)] - mean) / divisor * (weight.values.empty() ? 1 : weight[i]);
      const double b = bias.values.empty() ? 0 : bias[i];
      y.value[r * d + i] = v + b;
      y.scale[r * d + i] = std::max(right.scale[r * d + i], std::abs(v) + std::abs(b));
    }
  }
  return y;
}

// The eps at which the rows come out, each weighed by how much its eps can be seen; nullopt: rows do not say.
std::optional<double> SolveEps(const Subject& s, const NormCall& call, Norm norm) {
  const int64_t d = call.x.cols(), rows = call.x.rows();
  const auto judged = static_cast<int64_t>(s.judged().size());
  double sum = 0, weights = 0;
  for (int64_t r = 0; r < rows; ++r) {
    if (judged > 0 && !s.judged()[static_cast<size_t>(r * judged / rows)]) continue;
    const auto row = call.x.row(r);
    const double mean = norm.mean ? MeanOf(row) : 0, square = SquareOf(row, mean, norm.count);
    double cross = 0, own = 0;
    for (int64_t i = 0; i < d; ++i) {
      const double v = (row[static_cast<size_t>(i)] - mean) * (call.weight.values.empty() ? 1 : call.weight[i]);
      const double y = s.actual()[r * d + i] - (call.bias.values.empty() ? 0 : call.bias[i]);
      if (!std::isfinite(y)) return std::nullopt;
      cross += v * y;
      own += v * v;
    }
    // Least squares of the row: y = factor · (x - mean) weight, so factor = 1 / divisor.
    const double factor = own > 0 ? cross / own : 0;
    if (!(factor > 0)) continue;
    const double eps = norm.outside ? 1 / factor - std::sqrt(square) : 1 / (factor * factor) - square;
    // The factor is known to so much of itself: an eps far below the square is not.
    const double seen = 1 / (square + std::abs(eps) + 1e-300), weight = norm.outside ? std::sqrt(seen) : seen;
    sum += eps * weight * weight;
    weights += weight * weight;
  }
  if (!(weights > 0)) return std::nullopt;
  const double eps = sum / weights;
  return eps >= 0 ? std::optional<double>(eps) : std::nullopt;
}

// The usual one that is as near as that.
double NamedEps(double eps) {
  for (double usual : {1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-12, 1e-2, 2e-5, 5e-6, 1e-20}) {
    if (std::abs(eps - usual) < 0.03 * usual) return usual;
  }
  return eps;
}

// What a row is of x · weight, by least squares, and how surely: the roundings of the result (0.4 u each, weighed by
// squares), four sigmas.
struct RowFactor {
  int64_t row = 0;  // of the operand
  double factor = 0, known = 0;
};

// Of the judged rows that have one; empty where an element is not finite.
std::vector<RowFactor> FactorsOf(const Subject& s, const NormCall& call, const Computed& right) {
  const int64_t d = call.x.cols(), rows = call.x.rows(), judged = static_cast<int64_t>(s.judged().size());
  std::vector<RowFactor> out;
  for (int64_t r = 0; r < rows; ++r) {
    if (judged > 0 && !s.judged()[static_cast<size_t>(r * judged / rows)]) continue;
    double cross = 0, own = 0, fourth = 0;
    for (int64_t i = r * d; i < (r + 1) * d; ++i) {
      const double v = call.x[i] * (call.weight.values.empty() ? 1 : call.weight[i % d]);
      if (!std::isfinite(s.actual()[i])) return {};
      cross += v * s.actual()[i];
      own += v * v;
      fourth += v * v * v * v;
    }
    if (!(own > 0) || !(cross > 0)) continue;
    const double known = 4 * s.precision().store * std::sqrt(right.stores / 2 * fourth) / own + 1e-7;
    out.push_back({r, cross / own, known});
  }
  return out;
}

// Each row with the factor that it has.
Computed ByFactors(const NormCall& call, const Computed& right, const std::vector<RowFactor>& factors) {
  const int64_t d = call.x.cols();
  Computed y = right;
  for (const RowFactor& f : factors) {
    for (int64_t i = f.row * d; i < (f.row + 1) * d; ++i)
      y.value[i] = f.factor * call.x[i] * (call.weight.values.empty() ? 1 : call.weight[i % d]);
  }
  return y;
}

// Statistics in bf16: each row is a factor of its own off, and what the factors come from are values of bf16. Rows
// agree with that by chance as often as their factor is known worse than these values are apart.
std::optional<Explanation> CoarseStatistics(const Subject& s, const NormCall& call, const Computed& right,
                                            const std::vector<RowFactor>& factors) {
  constexpr int kBits = 8;
  constexpr double kLeastBits = 40, kQuantities = 4;
  double bits[4] = {};
  bool fits[4] = {true, true, true, true};
  for (const RowFactor& f : factors) {
    const double square = 1 / (f.factor * f.factor);
    // 1 / root; mean square with eps, without it; sum of squares.
    const double quantity[4] = {f.factor, square, square - call.eps,
                                (square - call.eps) * static_cast<double>(call.x.cols())};
    for (int q = 0; q < 4; ++q) {
      if (!(quantity[q] > 0)) continue;
      const double spacing = SpacingAt(quantity[q], kBits);
      const double room = f.known * (q == 0 ? 1 : 2) * quantity[q];
      fits[q] = fits[q] && std::abs(RoundToBits(quantity[q], kBits) - quantity[q]) <= room;
      bits[q] -= std::log2(std::min(1.0, 2 * room / spacing));
    }
  }
  constexpr const char* kNames[] = {"inverse roots", "mean squares with eps", "mean squares", "sums of squares"};
  for (int q = 0; q < 4; ++q) {
    if (!fits[q] || bits[q] - std::log2(kQuantities) < kLeastBits) continue;
    if (!FitsBetter(s, right, ByFactors(call, right, factors))) continue;
    return Explanation{fault_class::kPrecision, std::string("fits statistics in bf16: the ") + kNames[q] +
                                                    " of all rows are values of bf16, " + NumberText(bits[q], 3) +
                                                    " bits beyond chance"};
  }
  return std::nullopt;
}

// The same where rows are too short, or stored too coarsely, to say what their factors come from: they lie around one
// by a few roundings of bf16, and apart from each other by more than they are known to. One constant on all rows is not
// that, nor on some of them: a tenth at least must lie on either side of the middle.
std::optional<Explanation> ScatteredStatistics(const Subject& s, const NormCall& call, const Computed& right,
                                               const std::vector<RowFactor>& factors) {
  constexpr size_t kLeastRows = 8;
  constexpr double kMostOff = 8 * 0x1p-8;
  if (factors.size() < kLeastRows) return std::nullopt;
  const int64_t d = call.x.cols();
  std::vector<double> ratios;
  for (const RowFactor& f : factors) {
    const double divisor = std::sqrt(SquareOf(call.x.row(f.row), 0, static_cast<double>(d)) + call.eps);
    ratios.push_back(f.factor * divisor);
    if (!(std::abs(ratios.back() - 1) <= kMostOff)) return std::nullopt;
  }
  std::vector<double> sorted = ratios;
  std::sort(sorted.begin(), sorted.end());
  const double middle = sorted[sorted.size() / 2];
  size_t below = 0, above = 0;
  for (size_t i = 0; i < ratios.size(); ++i) {
    below += ratios[i] < middle - factors[i].known ? 1 : 0;
    above += ratios[i] > middle + factors[i].known ? 1 : 0;
  }
  if (10 * std::min(below, above) < ratios.size()) return std::nullopt;
  if (!FitsBetter(s, right, ByFactors(call, right, factors))) return std::nullopt;
  return Explanation{fault_class::kPrecision, "each row is a factor of its own off, from " +
                                                  FactorText(sorted.front()) + " to " + FactorText(sorted.back()) +
                                                  ": statistics in a coarser type than declared"};
}

}  // namespace

// Parts left out or changed first (weight, bias), then other eps, then other forms, each with the declared eps and with
// the one that the rows themselves give; another layer's weight last, as it needs the whole checkpoint.
std::optional<Explanation> ExplainNorm(const Subject& s, const NormCall& call, const Computed& right) {
  const auto try_one = [&](const Norm& norm, const Array& weight, const Array& bias,
                           const Explanation& why) -> std::optional<Explanation> {
    const Computed y = Run(call, norm, weight, bias, right);
    if (!FitsBetter(s, right, y)) return std::nullopt;
    return Weighed(s, right, y, why);
  };
  if (call.x.size() != s.actual().size() || call.x.size() != right.value.size()) return std::nullopt;
  const Norm declared{call.layer_norm, false, 0, call.eps};
  const Array none{{0}, {}};

  if (!call.weight.values.empty()) {
    if (auto why = try_one(declared, none, call.bias,
                           {fault_class::kLoad, "fits a weight of ones in place of " + call.weight_name}))
      return why;
    for (double by : {1.0, -1.0}) {
      Array more = call.weight;
      for (double& w : more.values) w += by;
      if (auto why = try_one(declared, more, call.bias,
                             {fault_class::kKernel, by > 0 ? "fits weights with 1 added"
                                                           : "fits weights with 1 subtracted: 1 + weight was stored"}))
        return why;
    }
  }
  if (!call.bias.values.empty()) {
    if (auto why = try_one(declared, call.weight, none, {fault_class::kKernel, "fits without the bias"})) return why;
  }
  Norm other = declared;
  other.eps = 0;
  if (auto why = try_one(other, call.weight, call.bias, {fault_class::kKernel, "fits without eps", 0, "eps used"}))
    return why;
  // Defaults of the usual libraries.
  for (double eps : {1e-5, 1e-6, 1e-8, 1e-12}) {
    other.eps = eps;
    if (eps == call.eps) continue;
    if (auto why = try_one(other, call.weight, call.bias,
                           {fault_class::kKernel, "fits an eps of " + NumberText(eps, 4), eps, "eps used"}))
      return why;
  }
  struct Form {
    const char* text;
    bool mean, outside;
    double count;
  };
  const auto d = static_cast<double>(call.x.cols());
  const Form forms[] = {
      {"", call.layer_norm, false, 0},
      {"eps outside of the root", call.layer_norm, true, 0},
      {call.layer_norm ? "no mean subtracted" : "the mean subtracted", !call.layer_norm, false, 0},
      {"the sum of squares in place of their mean", call.layer_norm, false, 1},
      {"squares divided by one less than their number", call.layer_norm, false, d - 1},
      {call.layer_norm ? "no mean subtracted and eps outside of the root"
                       : "the mean subtracted and eps outside of "
                         "the root",
       !call.layer_norm, true, 0},
  };
  const std::vector<RowFactor> factors =
      call.layer_norm ? std::vector<RowFactor>{} : FactorsOf(s, call, right);  // about a mean there is no one factor
  if (auto why = CoarseStatistics(s, call, right, factors)) return why;
  const bool constant =
      !std::isnan(ConstantRatio(s.actual(), right.value, s.judged(), std::max(1e-4, 8 * s.precision().store)));
  for (const Form& form : forms) {
    if (form.count == 1 && constant) continue;  // a constant is told as one
    Norm norm{form.mean, form.outside, form.count, call.eps};
    const std::string text = form.text;
    // With the declared eps first, then with the one that the rows give.
    if (!text.empty()) {
      if (auto why = try_one(norm, call.weight, call.bias, {fault_class::kKernel, "fits with " + text})) return why;
    }
    const auto solved = SolveEps(s, call, norm);
    if (!solved) continue;
    for (double eps : {NamedEps(*solved), *solved}) {
      norm.eps = eps;
      if (auto why = try_one(norm, call.weight, call.bias,
                             {fault_class::kKernel,
                              "fits an eps of " + NumberText(eps, 4) + (text.empty() ? "" : ", with " + text) + ", " +
                                  NumberText(call.eps, 4) + " declared",
                              eps, "eps used"}))
        return why;
    }
  }
  if (auto why = ForOtherWeights(s, call.weight_name, call.weight,
                                 [&](const OtherWeight& w) { return try_one(declared, w.value, call.bias, w.why); }))
    return why;
  return ScatteredStatistics(s, call, right, factors);
}

}  // namespace assay::op
