#include "check/op_experts_explain.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "check/op_fitted.h"
#include "fit/least_squares.h"
#include "oracle/moe.h"

namespace assay::op {
namespace {

using oracle::Array;

// Bounds of the searches: k^3 a token for the weights, a product of all rows for each expert.
constexpr int64_t kMostChosen = 32, kMostExperts = 64;

// Element i with its bound.
void CopyElement(const oracle::Computed& from, int64_t i, oracle::Computed* to) {
  to->value[i] = from.value[i];
  to->scale[i] = from.scale[i];
  if (from.inner.size() == to->inner.size() && from.inner.size() > 0) to->inner[i] = from.inner[i];
}

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
std::optional<Explanation> ExplainExperts(const Subject& s, const std::vector<int64_t>& expert, int64_t n_experts,
                                          const oracle::Computed& right, const Explanation& what,
                                          const std::function<Result<oracle::Computed>(int64_t f)>& product) {
  if (SearchedEnough(s)) return std::nullopt;  // as many products of all rows as there are experts
  const Array& have = s.actual();
  const auto rows = static_cast<int64_t>(expert.size());
  if (n_experts < 2 || n_experts > kMostExperts || rows == 0 || have.size() % rows != 0) return std::nullopt;
  const int64_t width = have.size() / rows;
  std::vector<int64_t> source(static_cast<size_t>(n_experts), -1);
  const oracle::Precision p = s.precision();
  oracle::Computed found = right;  // rows of e as f gives them
  for (int64_t f = 0; f < n_experts; ++f) {
    const auto y = product(f);
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
      if (!any || !same) continue;
      source[static_cast<size_t>(e)] = f;
      for (int64_t i = 0; i < have.size(); ++i) {
        if (expert[static_cast<size_t>(i / width)] != e) continue;
        CopyElement(*y, i, &found);
      }
    }
  }
  for (int64_t e : expert) {
    if (e < 0 || e >= n_experts || source[static_cast<size_t>(e)] < 0) return std::nullopt;
  }
  std::string text;
  for (int64_t e = 0, said = 0; e < n_experts && said < 6; ++e) {
    if (source[static_cast<size_t>(e)] < 0 || source[static_cast<size_t>(e)] == e) continue;
    text += (said++ > 0 ? ", " : "") + std::to_string(e) + " takes those of " +
            std::to_string(source[static_cast<size_t>(e)]);
  }
  if (!FitsBetter(s, right, found)) return std::nullopt;
  Explanation why = what;
  why.text = "fits the " + what.text + " of other experts: " + text;
  return Weighed(s, right, found, std::move(why));
}

ByExpert::ByExpert(const Subject& subject, std::span<const int64_t> expert, const oracle::Computed& right)
    : subject_(subject), right_(right), expert_(expert.begin(), expert.end()) {
  const Array& have = subject.actual();
  const auto rows = static_cast<int64_t>(expert_.size());
  const auto n_judged = static_cast<int64_t>(subject.judged().size());
  if (rows == 0 || n_judged == 0 || have.size() % rows != 0 || right.value.size() != have.size()) {
    expert_.clear();
    return;
  }
  const int64_t width = have.size() / rows;
  const oracle::Precision p = subject.precision();
  std::map<int64_t, int64_t> count;
  std::set<int64_t> wrong;
  for (int64_t r = 0; r < rows; ++r) {
    int64_t& e = expert_[static_cast<size_t>(r)];
    if (!subject.judged()[static_cast<size_t>(r * n_judged / rows)]) e = -1;
    if (e < 0) continue;
    ++count[e];
    for (int64_t i = r * width; i < (r + 1) * width; ++i) {
      if (std::abs(have[i] - right.value[i]) <= Allowed(right, i, p, subject.one_store)) continue;
      wrong.insert(e);
      break;
    }
  }
  wrong_.assign(wrong.begin(), wrong.end());
  std::stable_sort(wrong_.begin(), wrong_.end(), [&](int64_t a, int64_t b) { return count[a] > count[b]; });
  some_ = !wrong_.empty() && wrong_.size() < count.size();
}

bool ByExpert::IsWrong(int64_t expert) const { return std::find(wrong_.begin(), wrong_.end(), expert) != wrong_.end(); }

std::vector<int64_t> ByExpert::RowsOf(int64_t expert) const {
  std::vector<int64_t> rows;
  for (size_t r = 0; r < expert_.size(); ++r) {
    if (expert_[r] == expert) rows.push_back(static_cast<int64_t>(r));
  }
  return rows;
}

std::string ByExpert::Names() const {
  constexpr size_t kMostNames = 6;
  std::string text = wrong_.size() == 1 ? " in the rows of expert " : " in the rows of experts ";
  for (size_t i = 0; i < std::min(wrong_.size(), kMostNames); ++i)
    text += (i > 0 ? ", " : "") + std::to_string(wrong_[i]);
  return text + (wrong_.size() > kMostNames ? " and others alone" : " alone");
}

// Rows of the wrong experts by the candidate, all others as they should be: that must fit as a whole.
std::optional<Explanation> ByExpert::Try(const Result<oracle::Computed>& candidate, Explanation why) const {
  if (!candidate.ok() || candidate->value.size() != right_.value.size()) return std::nullopt;
  if (FitsBetter(subject_, right_, candidate)) return Weighed(subject_, right_, *candidate, std::move(why));
  if (!some_) return std::nullopt;
  oracle::Computed mixed = *candidate;
  const int64_t width = mixed.value.size() / static_cast<int64_t>(expert_.size());
  for (int64_t i = 0; i < mixed.value.size(); ++i) {
    if (IsWrong(expert_[static_cast<size_t>(i / width)])) continue;
    CopyElement(right_, i, &mixed);
  }
  if (!FitsBetter(subject_, right_, mixed)) return std::nullopt;
  why.text += Names();
  return Weighed(subject_, right_, mixed, std::move(why));
}

std::optional<Explanation> ByExpert::TryConstant(Explanation why) const {
  if (!some_) return std::nullopt;
  std::vector<char> rows;
  for (int64_t e : expert_) rows.push_back(IsWrong(e));
  const double c = ConstantRatio(subject_.actual(), right_.value, rows, std::max(1e-4, 8 * subject_.precision().store));
  if (std::isnan(c)) return std::nullopt;
  oracle::Computed scaled = right_;
  for (double& x : scaled.value.values) x *= c;
  for (double& x : scaled.scale.values) x *= std::abs(c);
  why.constant = c;
  return Try(scaled, std::move(why));
}

}  // namespace assay::op
