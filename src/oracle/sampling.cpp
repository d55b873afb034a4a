#include "oracle/sampling.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "oracle/softmax.h"

namespace assay::oracle {

// Ties go to the lower token, as argmax has it.
Result<std::vector<GreedyChoice>> Greedy(const Array& logits) {
  constexpr double kLowest = -std::numeric_limits<double>::infinity();
  std::vector<GreedyChoice> choices(static_cast<size_t>(logits.rows()));
  if (logits.size() == 0) return choices;
  for (int64_t r = 0; r < logits.rows(); ++r) {
    GreedyChoice choice;
    double best = kLowest, second = kLowest;
    bool nan = false;
    for (int64_t j = 0; j < logits.cols(); ++j) {
      const double v = logits.row(r)[static_cast<size_t>(j)];
      nan |= std::isnan(v);
      if (v > best) {
        second = best;
        best = v;
        choice.token = j;
      } else if (v > second) {
        second = v;
      }
    }
    choice.margin = best == second ? 0 : best - second;
    choices[static_cast<size_t>(r)] = nan ? GreedyChoice{} : choice;
  }
  return choices;
}

Result<double> TokenProbability(std::span<const double> logits, int64_t token, const SamplingSpec& spec) {
  const int64_t n = static_cast<int64_t>(logits.size());
  if (token < 0 || token >= n) {
    return Status::BadInput("token " + std::to_string(token) + " is outside of " + std::to_string(n) + " logits");
  }
  if (!(spec.temperature >= 0) || !(spec.top_p > 0) || spec.top_k < 0) {
    return Status::BadInput("temperature and top_k must not be negative, top_p must be positive");
  }
  std::vector<double> sorted(logits.begin(), logits.end());
  if (std::any_of(sorted.begin(), sorted.end(), [](double v) { return std::isnan(v); })) return std::nan("");
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  // Tied logits share a fate at every filter below, so the value of the token decides, not its place in the list.
  const double own = logits[static_cast<size_t>(token)];
  if (spec.temperature == 0) {
    const auto ties = std::upper_bound(sorted.begin(), sorted.end(), sorted[0], std::greater<>()) - sorted.begin();
    return own == sorted[0] ? 1.0 / static_cast<double>(ties) : 0.0;
  }
  // Each filter shortens the sorted list; `lowest` is the last logit that stays.
  const double infinity = std::numeric_limits<double>::infinity();
  double lowest = -infinity;
  const auto keep_from = [&](double logit) {
    lowest = std::max(lowest, logit);
    sorted.erase(std::upper_bound(sorted.begin(), sorted.end(), lowest, std::greater<>()), sorted.end());
  };
  const auto lse_of_kept = [&] {
    std::vector<double> scaled(sorted);
    for (double& v : scaled) v /= spec.temperature;
    return LogSumExp(scaled).lse;
  };
  if (spec.top_k > 0 && spec.top_k < n) keep_from(sorted[static_cast<size_t>(spec.top_k - 1)]);
  if (spec.top_p < 1) {
    const double lse = lse_of_kept();
    double sum = 0;
    size_t last = 0;
    for (; last < sorted.size(); ++last) {
      sum += std::exp(sorted[last] / spec.temperature - lse);
      // The token that crosses the edge stays in: the set is the smallest that reaches p (Holtzman et al. 2020, arXiv
      // 1904.09751, section 3.1).
      if (sum >= spec.top_p) break;
    }
    keep_from(sorted[std::min(last, sorted.size() - 1)]);
  }
  if (spec.min_p > 0) {
    // p >= min_p p_max in logits: differences of log-probabilities are differences of logits over the temperature.
    const double edge = sorted[0] + spec.temperature * std::log(spec.min_p);
    const auto kept = std::upper_bound(sorted.begin(), sorted.end(), edge, std::greater<>()) - sorted.begin();
    keep_from(sorted[static_cast<size_t>(std::max<int64_t>(kept - 1, 0))]);
  }
  if (own < lowest) return 0.0;
  return std::exp(own / spec.temperature - lse_of_kept());
}

}  // namespace assay::oracle
