#include "stats/sketch_math.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace assay {
namespace {

// sqrt is one instruction; std::sqrt would need libm for errno.
double SquareRoot(double x) { return __builtin_sqrt(x); }

// Both are sorted by exponent, and so is the result.
void MergeHistogram(const std::vector<ExponentBin>& from, std::vector<ExponentBin>* to) {
  if (from.empty()) return;
  std::vector<ExponentBin> merged;
  merged.reserve(from.size() + to->size());
  size_t a = 0;
  size_t b = 0;
  while (a < from.size() || b < to->size()) {
    if (b == to->size() || (a < from.size() && from[a].exponent < (*to)[b].exponent)) {
      merged.push_back(from[a++]);
    } else if (a == from.size() || (*to)[b].exponent < from[a].exponent) {
      merged.push_back((*to)[b++]);
    } else {
      merged.push_back({from[a].exponent, from[a].count + (*to)[b].count});
      ++a;
      ++b;
    }
  }
  *to = std::move(merged);
}

}  // namespace

double SketchNorm(std::span<const double> a) {
  double sum = 0;
  for (double v : a) sum += v * v;
  return SquareRoot(sum);
}

double SketchDistance(std::span<const double> a, std::span<const double> b) {
  double sum = 0;
  for (size_t k = 0; k < a.size() && k < b.size(); ++k) sum += (a[k] - b[k]) * (a[k] - b[k]);
  return SquareRoot(sum);
}

double RelativeL2(std::span<const double> a, std::span<const double> b, double sum_sq_b) {
  const double distance = SketchDistance(a, b);
  // Nothing against nothing is no difference; something against nothing is an infinite one.
  if (distance == 0 && sum_sq_b == 0) return 0;
  return distance / SquareRoot(sum_sq_b);
}

double CosineFromSketches(std::span<const double> a, std::span<const double> b, double sum_sq_a, double sum_sq_b) {
  if (sum_sq_a == 0 && sum_sq_b == 0) return 1;
  if (sum_sq_a == 0 || sum_sq_b == 0) return 0;
  const double norm_a = SquareRoot(sum_sq_a);
  const double norm_b = SquareRoot(sum_sq_b);
  const double distance = SketchDistance(a, b);
  // ||a - b||^2 = (|a| - |b|)^2 + 2 |a||b| (1 - cos)
  // The difference of squares as a product, so that near equality nothing cancels: the error of 1 - cos is relative.
  const double rest = (distance - (norm_a - norm_b)) * (distance + (norm_a - norm_b));
  const double cosine = 1 - rest / (2 * norm_a * norm_b);
  return cosine < -1 ? -1 : cosine > 1 ? 1 : cosine;
}

void AddSketch(std::span<const double> from, std::span<double> to) {
  for (size_t k = 0; k < from.size() && k < to.size(); ++k) to[k] += from[k];
}

// Extremes of a side without finite elements are NaN and must not take part; sums and counts simply add.
void MergeStats(const Stats& from, Stats* to) {
  const bool from_finite = from.count > from.nonfinite();
  const bool to_finite = to->count > to->nonfinite();
  if (from_finite) {
    if (!to_finite) {
      to->min = from.min;
      to->max = from.max;
      to->abs_max = from.abs_max;
      to->abs_max_index = from.abs_max_index;
    } else {
      to->min = std::min(to->min, from.min);
      to->max = std::max(to->max, from.max);
      if (from.abs_max > to->abs_max || (from.abs_max == to->abs_max && from.abs_max_index < to->abs_max_index)) {
        to->abs_max = from.abs_max;
        to->abs_max_index = from.abs_max_index;
      }
    }
  } else if (!to_finite && from.count > 0) {
    to->min = to->max = to->abs_max = std::numeric_limits<double>::quiet_NaN();
  }
  to->count += from.count;
  to->nan += from.nan;
  to->pos_inf += from.pos_inf;
  to->neg_inf += from.neg_inf;
  to->zero += from.zero;
  to->subnormal += from.subnormal;
  to->sum += from.sum;
  to->sum_sq += from.sum_sq;
  to->digest += from.digest;
  to->digest_split |= from.digest_split;
  to->histogram_samples += from.histogram_samples;
  MergeHistogram(from.histogram, &to->histogram);
  AddSketch(from.sketch, to->sketch);
}

}  // namespace assay
