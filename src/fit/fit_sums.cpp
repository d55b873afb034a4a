// Fits of sums: a · R + b · S, expected + c · S, expected + c, expected + one constant a column.
#include <algorithm>
#include <cmath>

#include "base/number_text.h"
#include "fit/fits.h"
#include "fit/groups.h"

namespace assay::fit {
namespace {

// Of a term: its own, or that of the problem where it has none.
double BoundOf(const Evidence& evidence, const NamedArray& array, int64_t i) {
  return array.bound.empty() ? evidence.bound(i) : array.bound[static_cast<size_t>(i)];
}

// Least squares of y = Σ c_j x_j for one or two terms; false when they cannot be told apart.
struct Fit {
  double c[2] = {0, 0};
  double uncertainty[2] = {0, 0};
};
// Weighted by the inverse square of each element's bound, so that the fit is best where the numbers are sharpest; with
// such weights the inverse of the normal matrix gives the uncertainty of the constants. Elements without a bound, or
// not finite, do not take part. x(j, i) is term j, keep(i) whether element i counts.
template <class X, class Y, class Keep>
bool Solve(const Evidence& evidence, int terms, const X& x, const Y& y, const Keep& keep, Fit* fit) {
  double aa = 0, ab = 0, bb = 0, ay = 0, by = 0;
  for (int64_t i = 0; i < evidence.size(); ++i) {
    const double b = std::max(evidence.bound(i), 0x1p-24 * std::abs(evidence.expected(i)));
    const double x0 = x(0, i), x1 = terms > 1 ? x(1, i) : 0, target = y(i);
    if (!(b > 0) || !std::isfinite(b) || !std::isfinite(x0) || !std::isfinite(x1) || !std::isfinite(target)) continue;
    if (!keep(i)) continue;
    const double w = 1 / (b * b);
    aa += w * x0 * x0;
    ab += w * x0 * x1;
    bb += w * x1 * x1;
    ay += w * x0 * target;
    by += w * x1 * target;
  }
  if (terms == 1) {
    if (!(aa > 0)) return false;
    fit->c[0] = ay / aa;
    fit->uncertainty[0] = 1 / std::sqrt(aa);
    return true;
  }
  // By the normal equations; a determinant below 1e-10 of its terms means that the two arrays are nearly parallel and
  // any split of their sum fits.
  const double determinant = aa * bb - ab * ab;
  if (!(determinant > 1e-10 * aa * bb)) return false;
  fit->c[0] = (bb * ay - ab * by) / determinant;
  fit->c[1] = (aa * by - ab * ay) / determinant;
  fit->uncertainty[0] = std::sqrt(bb / determinant);
  fit->uncertainty[1] = std::sqrt(aa / determinant);
  return true;
}

// Twice: with all elements, then with those near the first fit, so that a tenth of outliers does not bend it.
template <class X, class Y>
bool SolveTwice(const Evidence& evidence, int terms, const X& x, const Y& y, Fit* fit) {
  if (!Solve(
          evidence, terms, x, y, [](int64_t) { return true; }, fit))
    return false;
  std::vector<double> errors;
  const auto error = [&](int64_t i, const Fit& f) {
    return std::abs(y(i) - f.c[0] * x(0, i) - (terms > 1 ? f.c[1] * x(1, i) : 0));
  };
  for (int64_t i = 0; i < evidence.size(); ++i) {
    const double e = error(i, *fit);
    if (std::isfinite(e)) errors.push_back(e);
  }
  if (errors.empty()) return false;
  std::nth_element(errors.begin(), errors.begin() + static_cast<int64_t>(errors.size() / 2), errors.end());
  // Four times the median error: beyond it lies what the sum does not explain.
  const double limit = 4 * errors[errors.size() / 2];
  const Fit first = *fit;
  return Solve(
      evidence, terms, x, y, [&](int64_t i) { return error(i, first) <= limit; }, fit);
}

// An integer within its uncertainty is that integer: the result of a loop, not of rounding.
double Snapped(double value, double uncertainty) {
  const double integer = std::round(value);
  return std::abs(value - integer) <= std::max(3 * uncertainty, 1e-6 * std::abs(value)) ? integer : value;
}

// A part that was added, left out (c = -1) or added several times.
void FitAdded(const Evidence& evidence, const NamedArray& s, std::vector<Explanation>* found) {
  Fit fit;
  const auto x = [&](int, int64_t i) { return s.values[static_cast<size_t>(i)]; };
  const auto y = [&](int64_t i) { return evidence.actual(i) - evidence.expected(i); };
  if (!SolveTwice(evidence, 1, x, y, &fit) || std::abs(fit.c[0]) < 1e-9) return;
  const double c = Snapped(fit.c[0], fit.uncertainty[0]);
  Explanation e{Kind::kAdded};
  e.array = s.name;
  Model model = evidence.Unchanged();
  model.bound.resize(model.values.size());
  for (int64_t i = 0; i < evidence.size(); ++i) {
    model.values[static_cast<size_t>(i)] += c * x(0, i);
    model.bound[static_cast<size_t>(i)] = evidence.bound(i) + std::abs(c) * BoundOf(evidence, s, i);
  }
  evidence.AddConstant(c, fit.uncertainty[0], &e, &model);
  e.parameters = "expected + " + NumberText(c) + " times " + s.name;
  if (evidence.Judge(model, &e)) found->push_back(e);
}

// Two parts with a factor each, such as the routed and the shared experts, of which one was scaled or counted twice.
void FitPair(const Evidence& evidence, const NamedArray& r, const NamedArray& s, std::vector<Explanation>* found) {
  Fit fit;
  const auto x = [&](int term, int64_t i) { return (term == 0 ? r : s).values[static_cast<size_t>(i)]; };
  const auto y = [&](int64_t i) { return evidence.actual(i); };
  if (!SolveTwice(evidence, 2, x, y, &fit)) return;
  const double a = Snapped(fit.c[0], fit.uncertainty[0]), b = Snapped(fit.c[1], fit.uncertainty[1]);
  Explanation e{Kind::kCombination};
  e.array = r.name + ", " + s.name;
  e.constant_a = a;
  Model model;
  model.values.resize(static_cast<size_t>(evidence.size()));
  model.bound.resize(model.values.size());
  for (int64_t i = 0; i < evidence.size(); ++i) {
    model.values[static_cast<size_t>(i)] = a * x(0, i) + b * x(1, i);
    model.bound[static_cast<size_t>(i)] =
        evidence.bound(i) + std::abs(a) * BoundOf(evidence, r, i) + std::abs(b) * BoundOf(evidence, s, i);
  }
  evidence.AddConstant(b, fit.uncertainty[1], &e, &model);
  if (a != 1) {  // once is how a sum is meant: no parameter
    ++model.free_parameters;
    model.price += evidence.options().parameter_bits / (a == std::round(a) ? 2 : 1);
  }
  e.parameters = NumberText(a) + " times " + r.name + " + " + NumberText(b) + " times " + s.name;
  if (evidence.Judge(model, &e)) found->push_back(e);
}

// Reorders the values; 0 for none.
double Median(std::vector<double>* values) {
  if (values->empty()) return 0;
  const auto middle = values->begin() + static_cast<int64_t>(values->size() / 2);
  std::nth_element(values->begin(), middle, values->end());
  return *middle;
}

// The median difference of each group: a tenth of outliers does not move it.
void FitOffset(const Evidence& evidence, Axis axis, std::vector<Explanation>* found) {
  const Groups groups = GroupsOf(evidence, axis);
  Explanation e{axis == Axis::kAll ? Kind::kOffset : Kind::kOffsetOfSome, axis};
  Model model = evidence.Unchanged();
  double last = 0;
  for (const int64_t g : groups.wrong) {
    const std::vector<int64_t>& elements = groups.elements[static_cast<size_t>(g)];
    if (axis != Axis::kAll && elements.size() < 3) return;  // nothing is left to confirm a constant of each
    std::vector<double> differences;
    for (const int64_t i : elements) {
      const double d = evidence.actual(i) - evidence.expected(i);
      if (std::isfinite(d)) differences.push_back(d);
    }
    last = Median(&differences);
    for (const int64_t i : elements) model.values[static_cast<size_t>(i)] += last;
    e.members.push_back(g);
    e.factors.push_back(last);
    if (axis != Axis::kAll) {
      ++model.free_parameters;
      model.price += evidence.options().parameter_bits;
    }
  }
  if (groups.wrong.empty()) return;
  if (axis == Axis::kAll) {
    e.members.clear();
    e.factors.clear();
    evidence.AddConstant(last, evidence.bound(0), &e, &model);
    e.parameters = "expected + " + NumberText(last);
  } else {
    e.parameters = "a constant added in each " + std::string(NameOf(axis)) + " of " + ListText(e.members);
  }
  if (evidence.Judge(model, &e)) found->push_back(e);
}

}  // namespace

void FitSums(const Evidence& evidence, std::vector<Explanation>* found) {
  const std::vector<NamedArray>& arrays = evidence.problem().arrays;
  for (size_t i = 0; i < arrays.size(); ++i) {
    if (!arrays[i].as_term) continue;
    FitAdded(evidence, arrays[i], found);
    for (size_t j = i + 1; j < arrays.size(); ++j) {
      if (arrays[j].as_term) FitPair(evidence, arrays[i], arrays[j], found);
    }
  }
  FitOffset(evidence, Axis::kAll, found);
  FitOffset(evidence, Axis::kRow, found);
  FitOffset(evidence, Axis::kColumn, found);
}

}  // namespace assay::fit
