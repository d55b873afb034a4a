// Fits of candidates, and of properties that the wrong values have by themselves.
#include <algorithm>
#include <cmath>

#include "base/number_text.h"
#include "fit/fits.h"
#include "fit/formats.h"

namespace assay::fit {
namespace {

// Rows of a head (all columns of one row and head) in which every element is the same.
void FitConstants(const Evidence& evidence, bool zero, std::vector<Explanation>* found) {
  const int64_t cols = evidence.problem().cols, units = evidence.size() / cols;
  if (cols < 2) return;
  Explanation x{zero ? Kind::kZero : Kind::kConstantRows, Axis::kRow};
  Model model = evidence.Unchanged();
  model.of_actual = true;
  std::vector<int64_t> members;
  for (int64_t u = 0; u < units; ++u) {
    const double v = evidence.actual(u * cols);
    if ((v == 0) != zero || !std::isfinite(v)) continue;
    bool same = true, wrong = false;
    for (int64_t i = u * cols; i < (u + 1) * cols; ++i) {
      same &= evidence.actual(i) == v;
      wrong |= evidence.wrong(i);
    }
    // Rows that should be constant (padding, a zero embedding) are right and explain nothing.
    if (!same || !wrong) continue;
    members.push_back(u);
    std::fill(model.values.begin() + u * cols, model.values.begin() + (u + 1) * cols, v);
    if (!zero) {
      ++model.free_parameters;
      model.price += evidence.options().parameter_bits;
    }
  }
  if (members.empty()) return;
  // Exact: a rounding bound does not make values equal.
  model.bound.assign(model.values.size(), 0);
  for (int64_t i = 0; i < evidence.size(); ++i) model.bound[static_cast<size_t>(i)] = evidence.bound(i);
  for (const int64_t u : members) {
    std::fill(model.bound.begin() + u * cols, model.bound.begin() + (u + 1) * cols, 0.0);
  }
  model.price += Evidence::ChoiceBits(members, units);
  const int64_t heads = evidence.problem().heads;
  for (const int64_t u : members) {
    if (x.members.empty() || x.members.back() != u / heads) x.members.push_back(u / heads);
  }
  x.parameters = std::to_string(members.size()) + " of " + std::to_string(units) +
                 (heads > 1 ? " heads of rows " : " rows, ") + ListText(x.members) +
                 (zero ? ": zero" : ": one value each");
  if (evidence.Judge(model, &x)) found->push_back(x);
}

// Columns that are zero in every row and head: the tail that a kernel's blocks do not reach.
void FitZeroColumns(const Evidence& evidence, std::vector<Explanation>* found) {
  const int64_t cols = evidence.problem().cols, units = evidence.size() / cols;
  if (cols < 2 || units < 2) return;
  Explanation x{Kind::kZero, Axis::kColumn};
  Model model = evidence.Unchanged();
  model.of_actual = true;
  model.bound.assign(model.values.size(), 0);
  for (int64_t i = 0; i < evidence.size(); ++i) model.bound[static_cast<size_t>(i)] = evidence.bound(i);
  for (int64_t c = 0; c < cols; ++c) {
    bool zero = true, wrong = false;
    for (int64_t u = 0; u < units && zero; ++u) {
      zero = evidence.actual(u * cols + c) == 0;
      wrong |= evidence.wrong(u * cols + c);
    }
    if (!zero || !wrong) continue;
    x.members.push_back(c);
    for (int64_t u = 0; u < units; ++u) {
      model.values[static_cast<size_t>(u * cols + c)] = model.bound[static_cast<size_t>(u * cols + c)] = 0;
    }
  }
  if (x.members.empty()) return;
  model.price += Evidence::ChoiceBits(x.members, cols);
  x.parameters =
      std::to_string(x.members.size()) + " of " + std::to_string(cols) + " columns, " + ListText(x.members) + ": zero";
  if (evidence.Judge(model, &x)) found->push_back(x);
}

// actual = expected rounded to a coarser format: every value is representable, and next to expected.
void FitCoarser(const Evidence& evidence, std::vector<Explanation>* found) {
  for (const Format& format : Formats()) {
    Model model = evidence.Unchanged();
    model.of_actual = true;
    model.hit.resize(model.values.size());
    int64_t hits = 0, by_chance = 0, looked = 0;
    for (int64_t i = 0; i < evidence.size(); ++i) {
      const double e = evidence.expected(i), a = evidence.actual(i);
      const double rounded = RoundTo(e, format);
      const bool near =
          Evidence::Meets(a, e, SpacingAt(e, format) / 2 + evidence.options().slack * evidence.bound(i)) ||
          a == rounded;  // the largest value, where it saturates
      const bool hit = near && (!std::isfinite(a) || RoundTo(a, format) == a);
      model.values[static_cast<size_t>(i)] = rounded;
      model.hit[static_cast<size_t>(i)] = hit;
      hits += hit && evidence.wrong(i);
      // A value off by a random part of the spacing is representable as often as a random value is.
      if (e != 0 && std::isfinite(e)) {
        ++looked;
        by_chance += rounded == e;
      }
    }
    if (hits == 0 || looked == 0) continue;
    // At least 2^-10: representability of neighbours is not independent. Doubled and counted from one up, as few
    // elements show little.
    model.chance =
        std::min(1.0, std::max(0x1p-10, 2.0 * static_cast<double>(by_chance + 1) / static_cast<double>(looked)));
    Explanation x{Kind::kCoarser, Axis::kAll};
    x.parameters = "expected rounded to " + std::string(format.name);
    x.array = format.name;
    model.price = 3;
    if (evidence.Judge(model, &x)) found->push_back(x);
  }
}

// The largest magnitude that occurs, at elements that should be larger: nothing may lie above it, as it is the maximum.
void FitSaturated(const Evidence& evidence, std::vector<Explanation>* found) {
  double top = 0;
  int64_t at_top = 0;
  for (int64_t i = 0; i < evidence.size(); ++i) {
    if (std::isfinite(evidence.actual(i))) top = std::max(top, std::abs(evidence.actual(i)));
  }
  for (int64_t i = 0; i < evidence.size(); ++i) {
    at_top += evidence.wrong(i) && std::abs(evidence.actual(i)) == top && std::abs(evidence.expected(i)) > top;
  }
  if (at_top == 0 || top == 0) return;
  Explanation x{Kind::kSaturated, Axis::kAll};
  Model model = evidence.Unchanged();
  model.of_actual = true;
  for (double& v : model.values) {
    if (!std::isnan(v)) v = std::clamp(v, -top, top);
  }
  evidence.AddConstant(top, 0, &x, &model);
  x.parameters = std::to_string(at_top) + " elements at +-" + NumberText(top);
  if (evidence.Judge(model, &x)) found->push_back(x);
}

}  // namespace

void FitCandidates(const Evidence& evidence, std::vector<Explanation>* found) {
  const std::vector<NamedArray>& arrays = evidence.problem().arrays;
  // A named candidate costs the choice among the candidates and nothing else: it has no free parameter.
  const double choices = static_cast<double>(
      std::count_if(arrays.begin(), arrays.end(), [](const NamedArray& a) { return a.as_candidate; }));
  for (const NamedArray& array : arrays) {
    if (!array.as_candidate) continue;
    Explanation x{Kind::kCandidate, Axis::kAll};
    x.array = x.parameters = array.name;
    Model model;
    model.values.assign(array.values.begin(), array.values.end());
    model.bound.assign(array.bound.begin(), array.bound.end());
    model.price = std::log2(choices);
    if (evidence.Judge(model, &x)) found->push_back(x);
  }
}

void FitValues(const Evidence& evidence, std::vector<Explanation>* found) {
  FitConstants(evidence, true, found);
  FitConstants(evidence, false, found);
  FitZeroColumns(evidence, found);
  FitCoarser(evidence, found);
  FitSaturated(evidence, found);
}

}  // namespace assay::fit
