// Explanations by scales and zero points: which ones a wrong reader worked with, group by group.
#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "check/weights_slab.h"
#include "finding/finding.h"
#include "quant/misreading.h"

namespace assay {
namespace {

// One ratio a group: the scale that was used. NaN where no element of the group tells.
struct UsedScales {
  std::vector<double> right, used;
};

// Nothing as soon as one element is not its group's ratio times what was expected: then it is no matter of scales.
std::optional<UsedScales> FitGroups(const WeightSlab& s) {
  const size_t n = static_cast<size_t>(s.n_groups);
  const double unknown = std::nan("");
  UsedScales out{std::vector<double>(n, unknown), std::vector<double>(n, unknown)};
  // The largest element of a group carries its ratio; a ratio of sums would let small ones drown in rounding.
  std::vector<double> top(n, 0), ratio(n, unknown);
  for (size_t i = 0; i < s.actual.size(); ++i) {
    const size_t g = static_cast<size_t>(s.group[i]);
    out.right[g] = s.scale[i];
    if (std::fabs(s.expect[i]) > top[g]) {
      top[g] = std::fabs(s.expect[i]);
      ratio[g] = s.actual[i] / s.expect[i];
    }
  }
  for (int64_t i = 0; i < s.size(); ++i) {
    const size_t at = static_cast<size_t>(i), g = static_cast<size_t>(s.group[at]);
    if (top[g] == 0 ? s.actual[at] != 0 : !s.Predicts(i, ratio[g])) return std::nullopt;
  }
  for (size_t g = 0; g < n; ++g) out.used[g] = ratio[g] * out.right[g];
  return out;
}

// Groups that say nothing (all elements 0) fit any prediction.
bool AllGroups(const UsedScales& u, double roundoff, const std::vector<double>& predicted) {
  for (size_t g = 0; g < u.used.size(); ++g) {
    if (!std::isnan(u.used[g]) && !NearlyEqual(u.used[g], predicted[g], roundoff)) return false;
  }
  return true;
}

// What each group gets by a reading of the grid; NaN: what lies outside of it.
std::vector<double> Read(const GridReading& reading, const std::vector<double>& grid) {
  std::vector<double> out;
  for (const int64_t from : reading.from) out.push_back(from < 0 ? std::nan("") : grid[static_cast<size_t>(from)]);
  return out;
}

// As AllGroups, but groups that the prediction leaves open are free. Then enough others must have taken another scale.
bool MostGroups(const UsedScales& u, double roundoff, const std::vector<double>& predicted) {
  size_t open = 0, moved = 0;
  for (size_t g = 0; g < u.used.size(); ++g) {
    if (std::isnan(u.used[g])) continue;
    if (std::isnan(predicted[g])) {
      ++open;
    } else if (!NearlyEqual(u.used[g], predicted[g], roundoff)) {
      return false;
    } else {
      moved += NearlyEqual(u.right[g], predicted[g], roundoff) ? 0 : 1;
    }
  }
  return open == 0 || (moved >= 4 && open * 8 <= u.used.size() * 7);
}

// The bytes of float scales read as exponents. Any byte explains a power of two now and then, so all groups must have
// theirs at one place: a byte a group from the start, or byte `way` of each scale.
bool FromBytes(const WeightSlab& s, const UsedScales& u) {
  const StoredPart* part = s.weight == nullptr ? nullptr : s.weight->part("scale");
  if (part == nullptr || BitsOf(part->tensor->dtype) < 16) return false;
  const int width = BitsOf(part->tensor->dtype) / 8;
  for (int way = -1; way < width; ++way) {
    bool fits = true;
    for (size_t g = 0; g < u.used.size() && fits; ++g) {
      if (std::isnan(u.used[g])) continue;
      const size_t at = way < 0 ? g : g * static_cast<size_t>(width) + static_cast<size_t>(way);
      if (at >= part->tensor->size_bytes) {
        fits = false;
        break;
      }
      const int byte = std::to_integer<int>(part->tensor->data[at]);
      // Codes under the smallest exponents are subnormal floats and have lost digits; the largest do not fit a float
      // and were clipped by the loader.
      const double slack = byte < 24 ? 0.25 : std::max(8 * s.roundoff, 0x1p-20);
      fits = std::fabs(u.used[g] / std::ldexp(1.0, byte - 127) - 1) <= slack || (byte > 230 && u.used[g] > 0x1p100);
    }
    if (fits) return true;
  }
  return false;
}

// One line of evidence for every verdict about scales.
std::string RatioRange(const UsedScales& u) {
  double low = INFINITY, high = -INFINITY;
  int64_t off = 0, told = 0;
  for (size_t g = 0; g < u.used.size(); ++g) {
    if (std::isnan(u.used[g])) continue;
    const double ratio = u.used[g] / u.right[g];
    low = std::min(low, ratio);
    high = std::max(high, ratio);
    ++told;
    off += std::fabs(ratio - 1) > 1e-5 ? 1 : 0;
  }
  return "scale used / expected " + FactorText(low, 6) + " to " + FactorText(high, 6) + ", one ratio in each group; " +
         NumberText(off) + " of " + NumberText(told) + " groups are off";
}

// Every used scale is a scale of the tensor, and as often as there.
bool SameMultiset(const UsedScales& u, double roundoff) {
  std::vector<double> right, used;
  for (size_t g = 0; g < u.used.size(); ++g) {
    if (std::isnan(u.used[g])) return false;
    right.push_back(u.right[g]);
    used.push_back(u.used[g]);
  }
  std::sort(right.begin(), right.end());
  std::sort(used.begin(), used.end());
  for (size_t g = 0; g < used.size(); ++g) {
    if (!NearlyEqual(right[g], used[g], roundoff)) return false;
  }
  return true;
}

// Used scales are nearly all scales of the tensor, where these are distinct enough for that to be no chance.
// Nine tenths of them, and at least a quarter as many distinct ones as there are groups: with few distinct scales any
// number is soon one of them. A quarter of the groups must be off: a single scale is soon another's by chance.
bool MostlyElsewhere(const UsedScales& u, double roundoff) {
  std::vector<double> right, used;
  for (const double r : u.right) {
    if (!std::isnan(r)) right.push_back(r);
  }
  std::sort(right.begin(), right.end());
  right.erase(std::unique(right.begin(), right.end()), right.end());
  if (right.size() * 4 < u.used.size() || right.size() < 4) return false;
  size_t members = 0, off = 0;
  for (size_t g = 0; g < u.used.size(); ++g) {
    const double x = u.used[g];
    if (std::isnan(x)) continue;
    used.push_back(x);
    off += NearlyEqual(x, u.right[g], roundoff) ? 0 : 1;
    const auto at = std::lower_bound(right.begin(), right.end(), x * (1 - 8 * roundoff));
    members += at != right.end() && NearlyEqual(*at, x, roundoff) ? 1 : 0;
  }
  const size_t told = used.size();
  std::sort(used.begin(), used.end());
  used.erase(std::unique(used.begin(), used.end()), used.end());
  return off * 4 >= told && members * 10 >= told * 9 && used.size() * 4 >= right.size();
}

// The one factor of the groups that are off, when it is one.
Constant OneFactor(const UsedScales& u) {
  constexpr double kCoarse = 1e5;  // equal to five digits: one factor
  std::map<int64_t, std::vector<double>> ratios;
  for (size_t g = 0; g < u.used.size(); ++g) {
    const double ratio = u.used[g] / u.right[g];
    if (!std::isnan(ratio)) ratios[std::llround(ratio * kCoarse)].push_back(ratio);
  }
  ratios.erase(std::llround(kCoarse));
  if (ratios.size() != 1) return {};
  const std::vector<double>& equal = ratios.begin()->second;
  const double mean = std::accumulate(equal.begin(), equal.end(), 0.0) / static_cast<double>(equal.size());
  return Constant{mean, "scale used / expected, where it is off"};
}

}  // namespace

// From the largest element, whose ratio carries the least rounding; every other must then follow it.
MaybeExplained FitOneRatio(const WeightSlab& s) {
  double top = 0, ratio = 0;
  for (size_t i = 0; i < s.actual.size(); ++i) {
    if (std::fabs(s.expect[i]) > top) {
      top = std::fabs(s.expect[i]);
      ratio = s.actual[i] / s.expect[i];
    }
  }
  if (top == 0 || ratio == 0 || !std::isfinite(ratio)) return std::nullopt;
  double cross = 0, square = 0;
  for (int64_t i = 0; i < s.size(); ++i) {
    if (!s.Predicts(i, ratio)) return std::nullopt;
    cross += s.actual[static_cast<size_t>(i)] * s.expect[static_cast<size_t>(i)];
    square += s.expect[static_cast<size_t>(i)] * s.expect[static_cast<size_t>(i)];
  }
  ratio = cross / square;  // all elements carry more digits than the largest alone
  std::vector<std::string> evidence = {"all " + NumberText(s.size()) + " elements are " + FactorText(ratio, 6) +
                                       " times the expected ones"};
  if (s.global_scale != 0) {
    const double g = s.global_scale, squared = s.global_divides ? g * g : 1 / (g * g);
    if (std::fabs(ratio / squared - 1) < 1e-4) {
      evidence.push_back(
          "the global scale " + NumberText(g) +
          (s.global_divides ? " was multiplied by where it divides" : " was divided by where it multiplies"));
    } else {
      evidence.push_back("global scale " + NumberText(g) + " in the checkpoint, " +
                         NumberText(s.global_divides ? g / ratio : g * ratio) + " used");
    }
  }
  return Explained(s.quantised ? fault_class::kQScale : fault_class::kScale, Constant{ratio, "weight used / expected"},
                   std::move(evidence));
}

// A pattern in the scales that were used: their places before their values, as powers of two fit any rounding.
MaybeExplained FitScales(const WeightSlab& s) {
  if (!s.quantised || s.n_groups < 2) return std::nullopt;
  const std::optional<UsedScales> u = FitGroups(s);
  if (!u) return std::nullopt;
  std::vector<double> up(u->right.size()), down(up), nearest(up), inverse(up);
  for (size_t g = 0; g < up.size(); ++g) {
    const double exponent = std::log2(u->right[g]);
    up[g] = std::exp2(std::ceil(exponent));
    down[g] = std::exp2(std::floor(exponent));
    nearest[g] = std::exp2(std::nearbyint(exponent));
    inverse[g] = 1 / u->right[g];
  }
  const std::string range = RatioRange(*u);
  const auto fits = [&](const std::vector<double>& predicted) { return AllGroups(*u, s.roundoff, predicted); };
  const auto layout = [&](const std::string& what) { return Explained(fault_class::kQLayout, {}, {what, range}); };
  const auto scale = [&](const char* what) { return Explained(fault_class::kQScale, {}, {what, range}); };
  // Layout first: scales that are powers of two already would fit any rounding.
  for (const GridReading& reading : OtherGridReadings(s.grid_rows, s.grid_cols)) {
    if (MostGroups(*u, s.roundoff, Read(reading, u->right))) return layout("scales were " + reading.how);
  }
  if (SameMultiset(*u, s.roundoff)) return layout("the scales used are those of the checkpoint in another order");
  if (fits(up)) return scale("scales were rounded up to a power of two, the codes were not requantised");
  if (fits(down)) return scale("the mantissa of the scales was cut off: rounded down to a power of two");
  if (fits(nearest)) return scale("scales were rounded to the nearest power of two");
  if (FromBytes(s, *u)) return scale("the bytes of the float scales were read as exponents");
  if (fits(inverse)) return scale("the reciprocal of each scale was used");
  if (MostlyElsewhere(*u, s.roundoff)) return layout("the scales used are scales of other groups");
  return Explained(fault_class::kQScale, OneFactor(*u), {"each group is scaled by a factor of its own", range}, 0.85);
}

// (actual - expected) / scale is one number in each group when the zero point is wrong by that many codes.
MaybeExplained FitZero(const WeightSlab& s) {
  if (!s.quantised) return std::nullopt;
  const size_t n = static_cast<size_t>(s.n_groups);
  std::vector<double> shift(n, std::nan("")), zero(n, 0);  // in scales of the group
  for (size_t i = 0; i < s.actual.size(); ++i) {
    const size_t g = static_cast<size_t>(s.group[i]);
    if (s.scale[i] == 0) continue;
    const double steps = (s.actual[i] - s.expect[i]) / s.scale[i];
    if (std::isnan(shift[g])) shift[g] = steps, zero[g] = s.zero[i];
    const double size = std::fabs(s.code[i]) + std::fabs(s.zero[i]) + std::fabs(shift[g]) + 1;
    if (!(std::fabs(steps - shift[g]) <= 16 * s.roundoff * size)) return std::nullopt;
  }
  std::map<int64_t, int64_t> counts;  // of whole steps
  int64_t off = 0, told = 0;
  bool whole = true, dropped = true, zeros_alone = true;
  for (size_t g = 0; g < n; ++g) {
    if (std::isnan(shift[g])) continue;
    ++told;
    const double nearest = std::nearbyint(shift[g]);
    if (std::fabs(shift[g]) <= 64 * s.roundoff * (1 + std::fabs(zero[g]))) {
      zeros_alone = zeros_alone && zero[g] != 0;
      continue;
    }
    ++off;
    whole = whole && nearest != 0 && std::fabs(shift[g] - nearest) < 0.1;
    dropped = dropped && std::fabs(shift[g] - zero[g]) <= 0.01 * std::fabs(zero[g]);
    zeros_alone = zeros_alone && zero[g] == 0;
    ++counts[std::llround(shift[g])];
  }
  if (off == 0) return std::nullopt;
  std::vector<std::string> evidence = {NumberText(off) + " of " + NumberText(told) +
                                       " groups are shifted, each by a constant number of its scales"};
  if (whole && counts.size() == 1) {
    const int64_t steps = counts.begin()->first;
    evidence.push_back("every weight in them is off by " + NumberText(steps) + " scales");
    if (zeros_alone) evidence.emplace_back("they are the groups whose zero point is 0: it wrapped");
    return Explained(fault_class::kQZero, Constant{static_cast<double>(steps), "error in scales of the group"},
                     std::move(evidence));
  }
  if (dropped) {
    evidence.emplace_back("the zero point (minimum) was left out");
    return Explained(fault_class::kQZero, {}, std::move(evidence));
  }
  if (!whole) return std::nullopt;
  const auto most =
      std::max_element(counts.begin(), counts.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  return Explained(fault_class::kQZero,
                   Constant{static_cast<double>(most->first), "error in scales of the group, most frequent"},
                   std::move(evidence), 0.8);
}

// The grid of scales of the slab, also where a list says which group a column is in.
std::optional<ScaleGrid> GridOf(const WeightSlab& s) {
  if (s.block_rows > 0 && s.grid_rows > 0)
    return ScaleGrid{s.rows, s.cols, s.grid_rows, s.grid_cols, s.block_rows, s.block_cols};
  const bool listed = s.weight != nullptr && s.weight->part("g_idx") != nullptr;
  if (!listed || s.rows == 0) return std::nullopt;
  return ScaleGrid{s.rows, s.cols, s.rows, s.n_groups / s.rows, 1, 0};
}

// Scales and zero points are right, and spread over the elements by another rule.
MaybeExplained FitOtherCells(const WeightSlab& s) {
  const std::optional<ScaleGrid> grid = s.quantised ? GridOf(s) : std::nullopt;
  if (!grid || grid->grid_rows * grid->grid_cols != s.n_groups) return std::nullopt;
  std::vector<double> scale(static_cast<size_t>(s.n_groups), std::nan("")), zero(scale);
  for (size_t i = 0; i < s.scale.size(); ++i) {
    scale[static_cast<size_t>(s.group[i])] = s.scale[i];
    zero[static_cast<size_t>(s.group[i])] = s.zero[i];
  }
  for (const CellReading& reading : OtherCells(*grid)) {
    bool fits = true;
    for (int64_t i = 0; i < s.size() && fits; ++i) {
      const size_t at = static_cast<size_t>(i), g = static_cast<size_t>(reading.cell(i / s.cols, i % s.cols));
      const double predicted = (s.code[at] - zero[g]) * scale[g];
      const double room = 8 * s.roundoff * (std::fabs(predicted) + std::fabs(zero[g] * scale[g]));
      fits = std::fabs(s.actual[at] - predicted) <= room;
    }
    if (fits) return Explained(fault_class::kQLayout, {}, {"elements lie under scales " + reading.how});
  }
  return std::nullopt;
}

}  // namespace assay
