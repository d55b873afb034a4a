#include "check/op_experts_explain.h"

#include <algorithm>
#include <cmath>

#include "check/op_fitted.h"
#include "fit/least_squares.h"
#include "oracle/moe.h"

namespace assay::op {
namespace {

using oracle::Array;

// Bounds of the searches: k^3 a token for the weights, a product of all rows for each expert.
constexpr int64_t kMostChosen = 32, kMostExperts = 64;

}  // namespace

// First the weights that were really used, token by token; then named patterns among them, the most specific first,
// each tried as a whole sum; the fitted weights themselves come last.
std::optional<Explanation> ExplainCombine(const Subject& s, const Array& experts, const std::vector<int64_t>& row_of,
                                          const Array& weights, const oracle::Computed& right) {
  const int64_t k = weights.cols(), tokens = weights.rows(), h = experts.cols();
  if (k < 2 || k > kMostChosen || h < 2 * k || s.actual().size() != tokens * h) return std::nullopt;
  Array used = weights;
  bool reversed = true, equal = true;
  std::vector<char> dropped(static_cast<size_t>(k), 1);
  // Fitted weights carry the rounding of the stored sum, magnified by how alike the experts' rows are.
  const double near = std::max(1e-3, 64 * s.precision().store);
  for (int64_t t = 0; t < tokens; ++t) {
    if (!s.judged()[static_cast<size_t>(t)]) continue;
    std::vector<std::span<const double>> rows;
    for (int64_t j = 0; j < k; ++j) {
      const int64_t at = row_of[static_cast<size_t>(t * k + j)];
      if (at < 0) return std::nullopt;
      rows.push_back(experts.row(at));
    }
    const std::vector<double> w = fit::SolveLeastSquares(s.actual().row(t), rows);
    if (w.empty()) return std::nullopt;
    double top = 0;
    for (int64_t j = 0; j < k; ++j) top = std::max(top, std::abs(weights[t * k + j]));
    for (int64_t j = 0; j < k; ++j) {
      const double x = w[static_cast<size_t>(j)];
      used[t * k + j] = x;
      dropped[static_cast<size_t>(j)] = dropped[static_cast<size_t>(j)] && std::abs(x) < near * top;
      reversed = reversed && std::abs(x - weights[t * k + k - 1 - j]) < near * top;
      equal = equal && std::abs(x - w[0]) < near * std::max(std::abs(w[0]), near * top);
    }
  }
  const auto fit = [&](const Array& w, const std::string& text) -> std::optional<Explanation> {
    const auto y = oracle::Combine(experts, row_of, w);
    if (!FitsBetter(s, right, y)) return std::nullopt;
    return Weighed(s, right, *y, {fault_class::kMoeRoute, text});
  };
  for (int64_t j = 0; j < k; ++j) {
    if (!dropped[static_cast<size_t>(j)]) continue;
    Array without = weights;
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t i = 0; i < k; ++i)
        if (dropped[static_cast<size_t>(i)]) without[t * k + i] = 0;
    if (auto why = fit(without, "fits the sum without choice " + std::to_string(j) + " of each token")) return why;
    break;
  }
  if (reversed) {
    Array turned = weights;
    for (int64_t t = 0; t < tokens; ++t) std::reverse(turned.row(t).begin(), turned.row(t).end());
    if (auto why = fit(turned, "fits the weights of each token in reverse order")) return why;
  }
  for (int64_t by = 1; by < k; ++by) {
    Array moved = weights;
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t j = 0; j < k; ++j) moved[t * k + j] = weights[t * k + (j + by) % k];
    if (auto why = fit(moved, "fits the weights of the choice " + std::to_string(by) + " further")) return why;
  }
  return fit(used, equal ? "fits equal weights for all choices of a token" : "fits other weights than those recorded");
}

// For each expert e the first expert f whose weights give every row of e within four allowances; found by running all
// rows through each f once, which is as many full products as there are experts (hence kMostExperts). A used expert
// that no f explains ends the search: half a permutation would not reproduce the output.
std::optional<Explanation> ExplainExperts(
    const Subject& s, const std::vector<int64_t>& expert, int64_t n_experts, const oracle::Computed& right,
    const std::function<Result<oracle::Computed>(const std::vector<int64_t>&)>& product) {
  if (SearchedEnough(s)) return std::nullopt;  // as many products of all rows as there are experts
  const Array& have = s.actual();
  const auto rows = static_cast<int64_t>(expert.size());
  if (n_experts < 2 || n_experts > kMostExperts || rows == 0 || have.size() % rows != 0) return std::nullopt;
  const int64_t width = have.size() / rows;
  std::vector<int64_t> source(static_cast<size_t>(n_experts), -1);
  const oracle::Precision p = s.precision();
  for (int64_t f = 0; f < n_experts; ++f) {
    const auto y = product(std::vector<int64_t>(expert.size(), f));
    if (!y.ok() || y->value.size() != have.size()) return std::nullopt;
    for (int64_t step = 0; step < n_experts; ++step) {
      const int64_t e = (f + step) % n_experts;
      bool any = false, same = source[static_cast<size_t>(e)] < 0;
      for (int64_t r = 0; r < rows && same; ++r) {
        if (expert[static_cast<size_t>(r)] != e) continue;
        any = true;
        for (int64_t i = r * width; i < (r + 1) * width && same; ++i)
          same = std::abs(have[i] - y->value[i]) <= 4 * Allowed(*y, i, p, s.one_store);
      }
      if (any && same) source[static_cast<size_t>(e)] = f;
    }
  }
  std::vector<int64_t> used = expert;
  std::string text;
  for (int64_t& e : used) {
    if (source[static_cast<size_t>(e)] < 0) return std::nullopt;
    e = source[static_cast<size_t>(e)];
  }
  for (int64_t e = 0, said = 0; e < n_experts && said < 6; ++e) {
    if (source[static_cast<size_t>(e)] < 0 || source[static_cast<size_t>(e)] == e) continue;
    text += (said++ > 0 ? ", " : "") + std::to_string(e) + " takes those of " +
            std::to_string(source[static_cast<size_t>(e)]);
  }
  const auto y = product(used);
  if (!FitsBetter(s, right, y)) return std::nullopt;
  return Weighed(s, right, *y, {fault_class::kMoeRoute, "fits the weights of other experts: " + text});
}

}  // namespace assay::op
