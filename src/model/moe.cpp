#include "model/moe.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "model/numerics.h"

namespace assay {
namespace {

// Indices of the first k of values by descending value, lower index first among equals; gap: between the last that is
// in and the first that is out, and between consecutive ones inside when inner is set.
std::vector<int64_t> TopK(const std::vector<double>& values, int64_t k, bool inner, double* gap) {
  std::vector<int64_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  const auto key = [&](int64_t i) {  // NaN sorts last, so that the order stays a strict weak one
    const double v = values[static_cast<size_t>(i)];
    return std::isnan(v) ? -std::numeric_limits<double>::infinity() : v;
  };
  const auto better = [&](int64_t a, int64_t b) {
    const double x = key(a), y = key(b);
    return x > y || (x == y && a < b);
  };
  const size_t kept = std::min(order.size(), static_cast<size_t>(k) + 1);
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(), better);
  for (size_t i = inner ? 1 : static_cast<size_t>(k); i < kept; ++i) {
    const double step = values[static_cast<size_t>(order[i - 1])] - values[static_cast<size_t>(order[i])];
    if (std::isfinite(step)) *gap = std::min(*gap, step);
  }
  order.resize(static_cast<size_t>(k));
  return order;
}

}  // namespace

// DeepSeek-V3 (arXiv 2412.19437), equations 12 to 16: scores by sigmoid (or softmax over the experts); the correction
// bias enters the choice and not the weights; of n_group groups the topk_group best, by the sum of their two best
// scores or by the best, stay in the choice; weights of the chosen are renormalised and scaled as the config says.
template <class T>
void Route(const ModelConfig& config, const T* logits, const T* bias, int64_t rows, const RoutingFaults& faults,
           Routing* out) {
  const auto n = static_cast<size_t>(config.n_routed_experts);
  const auto k = static_cast<size_t>(config.n_experts_per_tok);
  out->ids.resize(static_cast<size_t>(rows) * k);
  out->weights.resize(static_cast<size_t>(rows) * k);
  out->margins.resize(static_cast<size_t>(rows));
  std::vector<double> scores(n), selection(n), group_scores;
  for (size_t r = 0; r < static_cast<size_t>(rows); ++r) {
    const T* row = logits + r * n;
    if (config.scoring_sigmoid) {
      for (size_t e = 0; e < n; ++e) scores[e] = 1.0 / (1.0 + std::exp(-static_cast<double>(row[e])));
    } else {
      const double top = static_cast<double>(*std::max_element(row, row + n));
      double sum = 0;
      for (size_t e = 0; e < n; ++e) sum += scores[e] = std::exp(static_cast<double>(row[e]) - top);
      for (size_t e = 0; e < n; ++e) scores[e] /= sum;
    }
    selection = scores;
    for (size_t e = 0; bias != nullptr && e < n; ++e) {
      const double b = static_cast<double>(bias[e]);
      selection[e] += faults.bf16_bias ? static_cast<double>(RoundToBf16(static_cast<float>(b))) : b;
    }
    // Before the groups that were not chosen are struck out: planted faults read it.
    const std::vector<double> biased = selection;

    double margin = std::numeric_limits<double>::infinity();
    if (config.n_group > 1) {
      const size_t size = n / static_cast<size_t>(config.n_group);
      group_scores.assign(static_cast<size_t>(config.n_group), 0);
      for (size_t g = 0; g < group_scores.size(); ++g) {
        std::vector<double> members(selection.begin() + static_cast<std::ptrdiff_t>(g * size),
                                    selection.begin() + static_cast<std::ptrdiff_t>((g + 1) * size));
        // Groups have some tens of experts: sorting one is cheap beside the experts' products.
        std::sort(members.begin(), members.end(), std::greater<>());
        group_scores[g] = members[0] + (config.group_top2_sum && size > 1 ? members[1] : 0.0);
      }
      const std::vector<int64_t> groups = TopK(group_scores, config.topk_group, false, &margin);
      for (size_t e = 0; e < n; ++e) {
        if (std::find(groups.begin(), groups.end(), static_cast<int64_t>(e / size)) == groups.end()) {
          selection[e] = -std::numeric_limits<double>::infinity();
        }
      }
    }
    const std::vector<int64_t> chosen = TopK(selection, config.n_experts_per_tok, true, &margin);
    // 1e-20 for the sigmoid families, as their code adds it: no division by zero when all scores underflow.
    double sum = config.norm_topk_eps;
    for (size_t i = 0; i < k; ++i) {
      const auto e = static_cast<size_t>(chosen[i]);
      out->ids[r * k + i] = chosen[i];
      out->weights[r * k + i] = faults.bias_in_weights ? biased[e] : scores[e];
      sum += out->weights[r * k + i];
    }
    for (size_t i = 0; i < k; ++i) {
      double& w = out->weights[r * k + i];
      if (config.norm_topk_prob && !faults.skip_renormalise) w /= sum;
      if (!faults.skip_scaling) w *= config.routed_scaling_factor;
    }
    out->margins[r] = static_cast<float>(margin);
  }
}

template void Route<float>(const ModelConfig&, const float*, const float*, int64_t, const RoutingFaults&, Routing*);
template void Route<double>(const ModelConfig&, const double*, const double*, int64_t, const RoutingFaults&, Routing*);

}  // namespace assay
