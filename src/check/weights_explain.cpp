// Why a weight in memory is not what the checkpoint says. Each explanation predicts every element; the first that
// predicts all of them to rounding wins. Explanations with one constant go before those with one a group, so that a
// richer one never hides a simpler one.
#include <algorithm>
#include <cmath>

#include "check/weights_slab.h"
#include "finding/finding.h"

namespace assay {
namespace {

constexpr double kTiny = 0x1p-149;  // the step of float32 near zero

// Rounding leaves fewer distinct values; the two counts say how much was lost.
int64_t Distinct(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return std::unique(values.begin(), values.end()) - values.begin();
}

// Every value is its checkpoint value rounded to a narrower type. Memory has to lie on the type's grid: a value that is
// only near would be a matter of tolerance. Range and subnormals are left out, as weights lie far from both.
MaybeExplained FitRounding(const WeightSlab& s) {
  struct Kind {
    const char* name;
    int bits;  // of the significand, the hidden one included
  };
  for (const Kind kind : {Kind{"f16", 11}, Kind{"bf16", 8}, Kind{"f8_e4m3fn", 4}, Kind{"f8_e5m2", 3}}) {
    bool fits = true;
    for (size_t i = 0; i < s.actual.size() && fits; ++i) {
      if (s.expect[i] == 0) {
        fits = s.actual[i] == 0;
        continue;
      }
      if (!std::isfinite(s.actual[i])) return std::nullopt;
      int exponent = 0;
      std::frexp(s.actual[i], &exponent);
      const double step = std::ldexp(1.0, exponent - kind.bits);
      fits = std::nearbyint(s.actual[i] / step) * step == s.actual[i] && std::fabs(s.actual[i] - s.expect[i]) <= step;
    }
    if (!fits) continue;
    // The router's correction bias decides the choice by small differences (DeepSeek-V3, section 2.1.2): rounding it
    // routes tokens elsewhere.
    const bool router = s.name.find("e_score_correction_bias") != std::string::npos;
    return Explained(router ? fault_class::kMoeRoute : fault_class::kPrecision, {},
                     {std::string("every value is the checkpoint's, rounded to ") + kind.name,
                      NumberText(Distinct(s.expect)) + " distinct values in the checkpoint, " +
                          NumberText(Distinct(s.actual)) + " left"});
  }
  return std::nullopt;
}

// Fewer than four elements fit a constant by chance.
MaybeExplained FitOffset(const WeightSlab& s) {
  const double offset = s.actual[0] - s.expect[0];
  if (!(std::fabs(offset) > 0) || s.actual.size() < 4) return std::nullopt;
  for (size_t i = 0; i < s.actual.size(); ++i) {
    const double allowed = 8 * s.roundoff * (std::fabs(s.expect[i]) + std::fabs(offset));
    if (!(std::fabs(s.actual[i] - s.expect[i] - offset) <= allowed)) return std::nullopt;
  }
  return Explained(fault_class::kLoad, Constant{offset, "weight used - expected"},
                   {"a constant was added to every element"});
}

// What can be said of a weight that nothing explains: how much of it is right, and whether it is related at all.
WeightExplanation Unexplained(const WeightSlab& s) {
  int64_t nonfinite = 0, zero = 0, rows_right = 0;
  double ab = 0, aa = 0, bb = 0;
  for (int64_t r = 0; r < s.rows; ++r) {
    bool right = true;
    for (int64_t i = r * s.cols; i < (r + 1) * s.cols; ++i) {
      const size_t at = static_cast<size_t>(i);
      right = right && std::fabs(s.actual[at] - s.expect[at]) <= s.Allowed(i);
      if (!std::isfinite(s.actual[at])) {
        ++nonfinite;
        continue;
      }
      zero += s.actual[at] == 0 ? 1 : 0;
      ab += s.actual[at] * s.expect[at];
      aa += s.actual[at] * s.actual[at];
      bb += s.expect[at] * s.expect[at];
    }
    rows_right += right ? 1 : 0;
  }
  const double cosine = aa > 0 && bb > 0 ? ab / std::sqrt(aa * bb) : 0;
  std::vector<std::string> evidence = {"no explanation fits; cosine with the checkpoint " + NumberText(cosine) + ", " +
                                       NumberText(rows_right) + " of " + NumberText(s.rows) + " rows right, " +
                                       NumberText(zero) + " zeros, " + NumberText(nonfinite) + " not finite"};
  // Related, no row right, nothing missing: it was loaded, and decoded by a rule that no convention gives.
  if (s.quantised && rows_right == 0 && zero != s.size() && nonfinite == 0 && std::fabs(cosine) >= 0.3) {
    return Explained(fault_class::kKernel, {}, std::move(evidence), 0.5);
  }
  evidence.emplace_back(zero == s.size() ? "all zero: never written"
                        : rows_right > 0 ? "some rows were never written, or hold something else"
                        : cosine >= 0.3  ? "related to the checkpoint: part of it was written, or written over"
                                         : "unrelated to the checkpoint: never written, or another tensor's");
  return Explained(fault_class::kLoad, {}, std::move(evidence), 0.7);
}

}  // namespace

WeightExplanation Explained(std::string_view cls, Constant constant, std::vector<std::string> evidence,
                            double confidence) {
  return {std::string(cls), std::move(constant), std::move(evidence), confidence};
}

// Eight roundings: both sides were rounded, and through at most a product and a difference.
bool NearlyEqual(double a, double b, double roundoff) {
  return std::fabs(a - b) <= 8 * roundoff * std::max(std::fabs(a), std::fabs(b)) + 2 * kTiny;
}

// scale * (code - zero) may be computed as scale * code - scale * zero, whose rounding is one of the larger terms.
double WeightSlab::Allowed(int64_t i) const {
  const size_t at = static_cast<size_t>(i);
  return 4 * roundoff * (std::fabs(expect[at]) + (quantised ? std::fabs(zero[at] * scale[at]) : 0)) + kTiny;
}

bool WeightSlab::Predicts(int64_t i, double factor) const {
  const size_t at = static_cast<size_t>(i);
  const double predicted = factor * expect[at];
  const double size = std::fabs(predicted) + (quantised ? std::fabs(factor * zero[at] * scale[at]) : 0);
  return std::fabs(actual[at] - predicted) <= 8 * roundoff * size + 2 * kTiny;
}

// NaN beside NaN is equal: the checkpoint says so.
int64_t CountDifferent(const WeightSlab& slab) {
  int64_t n = 0;
  for (int64_t i = 0; i < slab.size(); ++i) {
    const size_t at = static_cast<size_t>(i);
    if (slab.actual[at] == slab.expect[at] || (std::isnan(slab.actual[at]) && std::isnan(slab.expect[at]))) continue;
    if (!(std::fabs(slab.actual[at] - slab.expect[at]) <= slab.Allowed(i))) ++n;
  }
  return n;
}

MaybeExplained FitWeight(const WeightSlab& slab) {
  // From few free numbers to many: one constant, no number but a type or an order, one number a group, an offset.
  for (const auto fit : {FitOneRatio, FitRounding, FitOrder, FitZero, FitLostColumns, FitScales, FitOtherCells,
                         FitTable, FitCodeOrder, FitOffset}) {
    if (MaybeExplained found = fit(slab)) return found;
  }
  return std::nullopt;
}

WeightExplanation ExplainWeight(const WeightSlab& slab) {
  if (MaybeExplained found = FitWeight(slab)) return *std::move(found);
  return Unexplained(slab);
}

}  // namespace assay
