#include "compare/bounds.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "base/glob.h"

namespace assay {
namespace {

// Upper tail of chi square with an even number of degrees of freedom: exp(-x/2) * sum_{j < k/2} (x/2)^j / j!.
double ChiSquareTail(double x, int k) {
  double term = 1, sum = 1;
  for (int j = 1; j < k / 2; ++j) {
    term *= x / 2 / j;
    sum += term;
  }
  return std::exp(-x / 2 + std::log(sum));
}

}  // namespace

// Doubling finds an upper end, 60 halvings the root to the last bit of a double.
double SpreadAbove(int buckets, double p) {
  buckets = std::min(buckets, 512);  // larger sums overflow; the factor of fewer buckets is an upper bound
  double low = buckets, high = buckets;
  while (ChiSquareTail(high, buckets) > p) high *= 2;
  for (int i = 0; i < 60; ++i) {
    const double middle = (low + high) / 2;
    (ChiSquareTail(middle, buckets) > p ? low : high) = middle;
  }
  return std::sqrt(high / buckets);
}

// Gains are what a relative difference of the inputs may grow by where the inputs' differences are spread as rounding
// is; docs/diff.md has the measurements behind them.
OpModel ModelOf(SiteOp op) {
  switch (op) {
    case SiteOp::kSource:
    case SiteOp::kEmbed:
      return {1, false, 1};
    case SiteOp::kCopy:  // a cache write rounds once to the cache's dtype
      return {1, false, 1.5};
    case SiteOp::kNorm:  // mean of squares, reciprocal root, two products; weights are uneven over the channels
      return {4, false, 3};
    case SiteOp::kLinear:
      return {2, true, 3};
    case SiteOp::kRope:  // two products and a sum an element, sine and cosine rounded
      return {4, false, 2};
    case SiteOp::kAttention:  // scores, probabilities, output; a score's error grows by its own size
    case SiteOp::kMerge:
      return {6, true, 4};
    case SiteOp::kAdd:
    case SiteOp::kReduce:
      return {3, false, 1};
    case SiteOp::kActivation:  // a product of two inputs
      return {4, false, 4};
    case SiteOp::kRoute:
    case SiteOp::kSelect:
      return {4, false, 6};
    case SiteOp::kCombine:  // two matrix products and an activation inside
      return {8, true, 6};
    case SiteOp::kArgmax:
      return {1, false, 1};
  }
  return {4, true, 8};
}

double AttentionCondition(double query, double key) {
  return std::max(1.0, std::hypot(1.0, query * key) / std::sqrt(2.0));
}

// A bf16 value stored in f32 has bf16's error.
double RoundoffOf(DType dtype, DType compute_dtype) {
  return std::max(UnitRoundoff(dtype), UnitRoundoff(compute_dtype));
}

double RoundingNoise(double u, double roundings, bool contracts, double k) {
  // The walk of K roundings of one size is sqrt(K) of one (independent signs); roundings of the result add in the same
  // way.
  constexpr double kF32 = 0x1p-24;
  const double accumulator = std::min(u, kF32);
  const double walk = contracts ? accumulator * std::sqrt(std::max(k, 1.0)) : 0;
  return std::sqrt(u * u * roundings + walk * walk);
}

// z comes from the union over cols^2 / 2 pairs of a Gaussian tail exp(-z^2 / 2); never more than all of l2 on one pair.
double PairChange(double l2, int64_t cols, int terms, double p) {
  const auto n = static_cast<double>(std::max<int64_t>(cols, 1));
  const double z = std::sqrt(2 * std::max(std::log(n) * 2 - std::log(2 * p), 0.0));
  return std::sqrt(2.0 * terms) * l2 * std::min(1.0, z / std::sqrt(n));
}

// rfind: a pattern may hold a colon, a number may not.
Result<Tolerance> Tolerance::Parse(std::string_view text) {
  Tolerance out;
  size_t begin = 0;
  while (begin <= text.size() && !text.empty()) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string_view entry = text.substr(begin, end - begin);
    const size_t colon = entry.rfind(':');
    const std::string_view number = colon == std::string_view::npos ? entry : entry.substr(colon + 1);
    Entry parsed;
    parsed.pattern = colon == std::string_view::npos ? "*" : std::string(entry.substr(0, colon));
    const std::string copy(number);
    char* stop = nullptr;
    parsed.value = std::strtod(copy.c_str(), &stop);
    if (copy.empty() || *stop != '\0' || !(parsed.value >= 0) || !std::isfinite(parsed.value) ||
        parsed.pattern.empty()) {
      return Status::Usage("tolerance: \"" + std::string(entry) +
                           "\" is neither a number >= 0 nor PATTERN:NUMBER, as in \"1e-5,layers.*.q:1e-3\"");
    }
    out.entries_.push_back(std::move(parsed));
    begin = end + 1;
  }
  return out;
}

// Later entries win.
double Tolerance::of(std::string_view site) const {
  for (size_t i = entries_.size(); i > 0; --i) {
    if (GlobMatches(entries_[i - 1].pattern, site)) return entries_[i - 1].value;
  }
  return -1;
}

Status Tolerance::CheckPatterns(const std::vector<std::string>& sites) const {
  for (const Entry& entry : entries_) {
    const auto matches = [&](const std::string& site) { return GlobMatches(entry.pattern, site); };
    if (std::any_of(sites.begin(), sites.end(), matches)) continue;
    return Status::Usage("tolerance: no site of the traces matches \"" + entry.pattern + "\"");
  }
  return {};
}

}  // namespace assay
