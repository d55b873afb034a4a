// Fits of constants: actual = c · expected, everywhere or in groups.
#include <algorithm>
#include <cmath>

#include "base/number_text.h"
#include "fit/fits.h"
#include "fit/groups.h"

namespace assay::fit {
namespace {

// c and its standard error, both absolute; not known: fewer than three elements to tell it from.
struct Ratio {
  double value = 0;
  double uncertainty = 0;
  bool known = false;
};

// The constant of the elements: median of the ratios of well-determined ones, then least squares over those that it
// fits, weighted by the bounds. The median makes a tenth of outliers harmless.
Ratio RatioOf(const Evidence& evidence, const std::vector<int64_t>& elements) {
  std::vector<double> sizes;
  for (const int64_t i : elements) {
    if (std::isfinite(evidence.expected(i)) && std::isfinite(evidence.actual(i)) && evidence.expected(i) != 0) {
      sizes.push_back(std::abs(evidence.expected(i)));
    }
  }
  if (sizes.size() < 3) return {};
  std::nth_element(sizes.begin(), sizes.begin() + static_cast<int64_t>(sizes.size() / 2), sizes.end());
  // Ratios of elements below the median in size are mostly noise over a small number.
  const double middle = sizes[sizes.size() / 2];
  std::vector<double> ratios;
  for (const int64_t i : elements) {
    if (std::abs(evidence.expected(i)) >= middle && std::isfinite(evidence.actual(i)) &&
        std::isfinite(evidence.expected(i))) {
      ratios.push_back(evidence.actual(i) / evidence.expected(i));
    }
  }
  std::nth_element(ratios.begin(), ratios.begin() + static_cast<int64_t>(ratios.size() / 2), ratios.end());
  Ratio ratio{ratios[ratios.size() / 2], 0, true};
  double top = 0, bottom = 0;
  for (const int64_t i : elements) {
    const double e = evidence.expected(i), a = evidence.actual(i);
    // A bound of 0 would weigh infinitely; no recorded value is finer than an f32.
    const double b = std::max(evidence.bound(i), 0x1p-24 * std::abs(e));
    if (!(b > 0) || !std::isfinite(b) || !std::isfinite(a)) continue;
    // Outliers: beyond 4 bounds and 2 % of the median's line. They are not part of what the constant explains.
    if (std::abs(a - ratio.value * e) > 4 * std::max(std::abs(ratio.value), 1.0) * b + 0.02 * std::abs(a)) continue;
    top += a * e / (b * b);
    bottom += e * e / (b * b);
  }
  if (bottom > 0) {
    ratio.value = top / bottom;
    // Of weighted least squares with the bounds as standard deviations, scaled as the bounds are by the factor.
    ratio.uncertainty = std::abs(ratio.value) / std::sqrt(bottom);
  }
  return ratio;
}

// The bound grows with the value: expected's rounding is multiplied too.
void Scale(const Evidence& evidence, const std::vector<int64_t>& elements, double factor, Model* model) {
  for (const int64_t i : elements) {
    model->values[static_cast<size_t>(i)] *= factor;
    model->bound[static_cast<size_t>(i)] = std::abs(factor) * evidence.bound(i);
  }
}

// Expected as it is, with a bound of its own for each element, so that a part can be scaled.
Model WithBounds(const Evidence& evidence) {
  Model model = evidence.Unchanged();
  model.bound.resize(model.values.size());
  for (int64_t i = 0; i < evidence.size(); ++i) model.bound[static_cast<size_t>(i)] = evidence.bound(i);
  return model;
}

// A factor of 0 is what FitValues tells better.
bool Usable(const Ratio& ratio) { return ratio.known && std::isfinite(ratio.value) && std::abs(ratio.value) > 1e-9; }

// First one constant for all groups that are wrong, then another for each of them.
void FitGroups(const Evidence& evidence, Axis axis, std::vector<Explanation>* found) {
  const Groups groups = GroupsOf(evidence, axis);
  if (groups.size() < 2 || groups.wrong.empty()) return;
  std::vector<int64_t> some;  // all wrong elements' groups together
  for (const int64_t g : groups.wrong) {
    some.insert(some.end(), groups.elements[static_cast<size_t>(g)].begin(),
                groups.elements[static_cast<size_t>(g)].end());
  }
  // With all groups wrong it would be kScale, which FitScales has tried.
  if (groups.wrong.size() < groups.elements.size()) {
    if (const Ratio ratio = RatioOf(evidence, some); Usable(ratio)) {
      Explanation x{Kind::kScaleOfSome, axis};
      Model model = WithBounds(evidence);
      Scale(evidence, some, ratio.value, &model);
      evidence.AddConstant(ratio.value, ratio.uncertainty, &x, &model);
      model.price += Evidence::ChoiceBits(groups.wrong, groups.size());
      x.members = groups.wrong;
      x.parameters = std::string(NameOf(axis)) + " " + ListText(groups.wrong) + ": " + FactorText(ratio.value, 6);
      if (evidence.Judge(model, &x)) found->push_back(x);
    }
  }
  if (groups.wrong.size() < 2) return;
  Explanation x{Kind::kScaleEach, axis};
  Model model = WithBounds(evidence);
  double least = HUGE_VAL, most = -HUGE_VAL;
  for (const int64_t g : groups.wrong) {
    const std::vector<int64_t>& elements = groups.elements[static_cast<size_t>(g)];
    const Ratio ratio = RatioOf(evidence, elements);
    if (!Usable(ratio)) continue;
    Scale(evidence, elements, ratio.value, &model);
    ++model.free_parameters;
    model.price += evidence.options().parameter_bits;
    least = std::min(least, ratio.value);
    most = std::max(most, ratio.value);
    x.members.push_back(g);
    x.factors.push_back(ratio.value);
  }
  if (x.members.empty()) return;
  x.parameters = std::string(NameOf(axis)) + " " + ListText(x.members) + ": " + FactorText(least, 6) + " to " +
                 FactorText(most, 6);
  if (evidence.Judge(model, &x)) found->push_back(x);
}

}  // namespace

void FitScales(const Evidence& evidence, std::vector<Explanation>* found) {
  std::vector<int64_t> all(static_cast<size_t>(evidence.size()));
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
  if (const Ratio ratio = RatioOf(evidence, all); Usable(ratio)) {
    Explanation x{Kind::kScale, Axis::kAll};
    Model model = WithBounds(evidence);
    Scale(evidence, all, ratio.value, &model);
    evidence.AddConstant(ratio.value, ratio.uncertainty, &x, &model);
    x.parameters = FactorText(ratio.value, 6) + " times expected";
    if (evidence.Judge(model, &x)) found->push_back(x);
  }
  for (const Axis axis : {Axis::kRow, Axis::kHead, Axis::kColumn, Axis::kBlock}) FitGroups(evidence, axis, found);
}

}  // namespace assay::fit
