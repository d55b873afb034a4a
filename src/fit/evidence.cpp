#include "fit/evidence.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <unordered_set>

#include "base/hash.h"

namespace assay::fit {
namespace {

constexpr int64_t kMostSamples = 4096;   // pairs looked at to measure chance, for each pool
constexpr int64_t kMostCounted = 65536;  // hits that are told apart; more cannot make an explanation surer
constexpr double kKindBits = 5;          // which of the kinds
constexpr double kInfinity = HUGE_VAL;

// Bits by which h of n hits at chance p each surprise: n KL(h/n, p), the exponent of Chernoff's bound.
double ChernoffBits(double hits, double n, double p) {
  const double share = hits / n;
  // No better than chance: no evidence. Above it 0 < p < share, so the logarithms exist.
  if (share <= p) return 0;
  double bits = share * std::log2(share / p);
  if (share < 1) bits += (1 - share) * std::log2((1 - share) / (1 - p));
  return n * bits;
}

}  // namespace

Evidence::Evidence(const Problem& problem, const Options& options)
    : problem_(problem), options_(options), known_(KnownConstants(problem.numbers)) {
  wrong_.resize(problem.actual.size());
  double noise_sq = 0, actual_sq = 0;
  for (int64_t i = 0; i < size(); ++i) {
    const bool right = Meets(actual(i), expected(i), options.slack * bound(i));
    wrong_[static_cast<size_t>(i)] = !right;
    wrong_count_ += !right;
    if (!std::isfinite(actual(i)) || !std::isfinite(bound(i))) continue;
    noise_sq += bound(i) * bound(i);
    actual_sq += actual(i) * actual(i);
  }
  // Not below 1e-12: with bounds of 0 any residual at all would be infinitely costly.
  noise_ = std::max(actual_sq > 0 ? std::sqrt(noise_sq / actual_sq) : 0, 1e-12);
  residual_ = Residual({problem.expected.begin(), problem.expected.end()}, {});
}

bool Evidence::Meets(double x, double m, double tolerance) {
  if (!std::isfinite(x) || !std::isfinite(m)) return x == m || (std::isnan(x) && std::isnan(m));
  return std::abs(x - m) <= tolerance;
}

Model Evidence::Unchanged() const {
  Model model;
  model.values.assign(problem_.expected.begin(), problem_.expected.end());
  return model;
}

// A known name is half as dear: it is one of some hundred, a free number one of 2^16 that can be told apart.
void Evidence::AddConstant(double value, double uncertainty, Explanation* explanation, Model* model) const {
  explanation->constant = value;
  explanation->uncertainty = uncertainty;
  if (const std::optional<NamedNumber> named = NameConstant(value, uncertainty, known_)) {
    explanation->constant_name = ReadingsOf(value, uncertainty, known_);
    explanation->named_value = named->value;
  }
  model->free_parameters += 1;
  model->price += explanation->constant_name.empty() ? options_.parameter_bits : options_.parameter_bits / 2;
}

// A run: its first and last. Else the binomial coefficient through lgamma, and log2 n for how many there are.
double Evidence::ChoiceBits(const std::vector<int64_t>& chosen, int64_t all) {
  const double n = static_cast<double>(all), k = static_cast<double>(chosen.size());
  if (all <= 1 || chosen.empty()) return 0;
  const bool run = chosen.back() - chosen.front() + 1 == static_cast<int64_t>(chosen.size());
  if (run) return 2 * std::log2(n);
  return std::log2(n) + (std::lgamma(n + 1) - std::lgamma(k + 1) - std::lgamma(n - k + 1)) / std::log(2.0);
}

double Evidence::ToleranceOf(const Model& model, int64_t i) const {
  const double b = model.bound.empty() ? bound(i) : model.bound[static_cast<size_t>(i)];
  double tolerance = options_.slack * b;
  if (model.free_parameters > 0) {
    tolerance = std::max(tolerance, options_.fitted_roundoff * std::abs(model.values[static_cast<size_t>(i)]));
  }
  return tolerance;
}

double Evidence::Residual(const std::vector<double>& values, const std::vector<uint8_t>& known) const {
  double error_sq = 0, actual_sq = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double a = problem_.actual[i], m = values[i];
    if ((!known.empty() && !known[i]) || !std::isfinite(a) || !std::isfinite(m)) continue;
    error_sq += (a - m) * (a - m);
    actual_sq += a * a;
  }
  if (error_sq == 0) return 0;
  return actual_sq > 0 ? std::sqrt(error_sq / actual_sq) : kInfinity;
}

// A fixed seed: the same problem gets the same significance on every machine.
// Chance that a hit is an accident, the geometric mean over the hits of the larger of two: how often the model's values
// meet the array at places that they do not speak of (never less than what so many pairs can show); and how large the
// tolerance is beside the error, for an element that is nearly right is easily met by anything that is nearly right.
double Evidence::Chance(const Model& model, const std::vector<int64_t>& hits) const {
  if (model.chance > 0) return model.chance;
  const std::span<const double> pool = model.of_actual ? problem_.expected : problem_.actual;
  if (size() < 2) return 1;
  SplitMix64 random(0x666974);
  const int64_t pairs = std::min(kMostSamples, static_cast<int64_t>(hits.size()) * (size() - 1));
  int64_t met = 0;
  for (int64_t s = 0; s < pairs; ++s) {
    const int64_t i = hits[random.Next() % hits.size()];
    const int64_t j = (i + 1 + static_cast<int64_t>(random.Next() % static_cast<uint64_t>(size() - 1))) % size();
    met += Meets(pool[static_cast<size_t>(j)], model.values[static_cast<size_t>(i)], ToleranceOf(model, i));
  }
  const double elsewhere = static_cast<double>(met + 2) / static_cast<double>(pairs + 2);
  // The geometric mean, since Chernoff's exponent is nearly linear in log p.
  double log_sum = 0;
  for (const int64_t i : hits) {
    const double error = std::abs(actual(i) - expected(i));
    const double beside = std::isfinite(error) && error > 0 ? std::min(1.0, ToleranceOf(model, i) / error) : 0;
    log_sum += std::log2(std::max(elsewhere, beside));
  }
  return std::exp2(log_sum / static_cast<double>(hits.size()));
}

// In this order: share of hits, share of what is wrong, distinct pieces of evidence, significance; the costs are only
// computed for what passes. *out keeps what was filled in when it returns false.
bool Evidence::Judge(const Model& model, Explanation* out) const {
  std::vector<int64_t> hits;
  int64_t n_hits = 0, misses = 0;
  for (int64_t i = 0; i < size(); ++i) {
    const size_t at = static_cast<size_t>(i);
    if (!model.known.empty() && !model.known[at]) continue;
    const bool hit = model.hit.empty() ? Meets(actual(i), model.values[at], ToleranceOf(model, i)) : model.hit[at] != 0;
    if (hit && wrong(i)) {
      ++n_hits;
      if (static_cast<int64_t>(hits.size()) < kMostCounted) hits.push_back(i);
    }
    misses += !hit;
  }
  out->free_parameters = model.free_parameters;
  const double share = static_cast<double>(n_hits) / static_cast<double>(std::max<int64_t>(n_hits + misses, 1));
  if (n_hits == 0 || share < options_.hit_share) return false;
  // What nothing is predicted of must not be the larger part of what is wrong.
  if (n_hits < wrong_count_ / 2) return false;
  // Equal pairs (broadcast heads, repeated rows) are one piece of evidence.
  std::unordered_set<uint64_t> distinct;
  for (const int64_t i : hits) {
    distinct.insert(Mix64(std::bit_cast<uint64_t>(actual(i))) ^
                    std::bit_cast<uint64_t>(model.of_actual ? expected(i) : model.values[static_cast<size_t>(i)]));
  }
  out->support = static_cast<int64_t>(distinct.size()) - model.free_parameters;
  if (out->support < options_.least_support) return false;
  const double price = model.price + kKindBits;
  // Misses are scaled as the hits were, so the share stays what it is.
  const double effective = static_cast<double>(out->support);
  out->significance = ChernoffBits(effective, effective / share, Chance(model, hits)) - price;
  if (out->significance < options_.least_bits) return false;
  out->residual = Residual(model.values, model.known);
  const double n = static_cast<double>(std::min<int64_t>(size(), kMostSamples));
  // A description length: bits to write down what the model leaves, beyond the noise, plus the price of the model
  // itself.
  out->cost = n * std::log2(std::max(out->residual / noise_, 1.0)) + price;
  return true;
}

}  // namespace assay::fit
