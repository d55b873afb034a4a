#include "check/op_moe_rows.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "check/helpers.h"
#include "check/op_moe.h"
#include "oracle/moe.h"

namespace assay::op {

using check::IntegerOf;
using oracle::Array;

std::vector<int64_t> IdsOf(const Tensor& t) {
  std::vector<int64_t> ids;
  for (double x : t.values) ids.push_back(IntegerOf(x));
  return ids;
}

// Stable, so that rows of one expert keep the order of their tokens, as grouped kernels have them.
Sent SentBy(const Tensor& ids) {
  Sent sent;
  sent.k = std::max<int64_t>(ids.row_size(), 1);
  for (int64_t i = 0; i < ids.n(); ++i) {
    if (IntegerOf(ids.values[static_cast<size_t>(i)]) >= 0) sent.order.push_back(i);
  }
  std::stable_sort(sent.order.begin(), sent.order.end(), [&](int64_t a, int64_t b) {
    return ids.values[static_cast<size_t>(a)] < ids.values[static_cast<size_t>(b)];
  });
  for (int64_t i : sent.order) sent.expert.push_back(IntegerOf(ids.values[static_cast<size_t>(i)]));
  return sent;
}

std::optional<Sent> SentRows(const Subject& s) {
  const TensorPtr ids = s.Operand(s.Sibling("moe.topk_ids"));
  return ids == nullptr ? std::nullopt : std::optional<Sent>(SentBy(*ids));
}

std::optional<ExpertRows> ExpertRowsOf(const Subject& s, const Tensor& tensor) {
  const TensorPtr ids = s.Operand(s.Sibling("moe.topk_ids"));
  ExpertRows rows;
  // [E, C, ..]: row c of block e is expert e's, whoever sent it; blocks may end in rows that nobody looks at.
  if (tensor.shape.size() == 3 && tensor.rows.empty()) {
    const int64_t blocks = tensor.shape[0], capacity = tensor.shape[1];
    for (int64_t e = 0; e < blocks; ++e) rows.expert.insert(rows.expert.end(), static_cast<size_t>(capacity), e);
    rows.choice.assign(rows.expert.size(), -1);
    if (ids == nullptr) return rows;
    const Sent sent = SentBy(*ids);
    std::vector<int64_t> used(static_cast<size_t>(blocks), 0);
    for (size_t r = 0; r < sent.order.size(); ++r) {
      const int64_t e = sent.expert[r];
      if (e >= blocks || used[static_cast<size_t>(e)] >= capacity) continue;
      rows.choice[static_cast<size_t>(e * capacity + used[static_cast<size_t>(e)]++)] = sent.order[r];
    }
    return rows;
  }
  if (ids == nullptr) return std::nullopt;
  if (tensor.shape.size() == 3 && tensor.shape[0] * tensor.shape[1] == ids->n()) {
    rows.expert = IdsOf(*ids);
    rows.choice.resize(rows.expert.size());
    std::iota(rows.choice.begin(), rows.choice.end(), 0);
    return rows;
  }
  Sent sent = SentBy(*ids);
  if (static_cast<int64_t>(sent.order.size()) != tensor.n_rows()) return std::nullopt;
  rows.expert = std::move(sent.expert);
  rows.choice = std::move(sent.order);
  return rows;
}

Subject WithRouterKeys(const Subject& ids) {
  const TensorPtr weights = [&]() -> TensorPtr {
    EventFilter filter;
    filter.step = ids.info().event.step;
    filter.rank = ids.info().event.rank;
    for (EventId id : ids.capture().Find(ids.Sibling("moe.topk_weights"), filter)) {
      if (auto t = ids.capture().Load(id); t.ok()) return *t;
    }
    return nullptr;
  }();
  return weights == nullptr ? ids : Subject(ids.capture(), weights, ids.report());
}

bool WeightsOnInput(const Subject& s) {
  constexpr std::string_view kKey = "weight_on_input";
  return Capture::OwnText(s.info(), kKey) ? s.Flag(kKey, false) : WithRouterKeys(s).Flag(kKey, false);
}

std::vector<double> WeightOfRows(const Subject& s, const ExpertRows& rows) {
  const TensorPtr w = s.Operand(s.Sibling("moe.topk_weights"));
  if (w == nullptr) return {};
  std::vector<double> out;
  for (int64_t i : rows.choice) {
    if (i >= w->n()) return {};
    out.push_back(i < 0 ? 1 : w->values[static_cast<size_t>(i)]);
  }
  return out;
}

Array WithWeights(const Array& rows, const std::vector<double>& weights, int power) {
  Array out = rows;
  const int64_t width = rows.size() / std::max<int64_t>(static_cast<int64_t>(weights.size()), 1);
  for (size_t r = 0; r < weights.size(); ++r) {
    const double factor = power == 0   ? 1
                          : power < 0  ? 1 / weights[r]
                          : power == 1 ? weights[r]
                                       : weights[r] * weights[r];
    for (int64_t i = 0; i < width; ++i) out[static_cast<int64_t>(r) * width + i] *= factor;
  }
  return out;
}

std::optional<Array> SentOf(const Subject& s, const ExpertRows& rows) {
  const TensorPtr x = s.Operand(s.Sibling("post_norm")), ids = s.Operand(s.Sibling("moe.topk_ids"));
  if (x == nullptr || ids == nullptr) return std::nullopt;
  const int64_t k = std::max<int64_t>(ids->row_size(), 1), width = x->row_size();
  Array out = Array::Filled({static_cast<int64_t>(rows.choice.size()), width});
  for (size_t r = 0; r < rows.choice.size(); ++r) {
    if (rows.choice[r] < 0) continue;
    if (rows.choice[r] / k >= x->n_rows()) return std::nullopt;
    const auto from = x->row(rows.choice[r] / k);
    std::copy(from.begin(), from.end(), out.values.begin() + static_cast<int64_t>(r) * width);
  }
  return out;
}

std::optional<bool> HoldsWeights(const Subject& s, const Array& dispatched, const ExpertRows& rows) {
  const auto sent = SentOf(s, rows);
  const std::vector<double> weights = WeightOfRows(s, rows);
  if (!sent || weights.empty() || sent->size() != dispatched.size()) return std::nullopt;
  double plain = 0, weighed = 0;
  for (int64_t i = 0; i < dispatched.size(); ++i) {
    const auto r = static_cast<size_t>(i / sent->cols());
    if (rows.choice[r] < 0 || !std::isfinite(dispatched[i])) continue;
    plain += std::pow(dispatched[i] - (*sent)[i], 2);
    weighed += std::pow(dispatched[i] - (*sent)[i] * weights[r], 2);
  }
  return weighed < plain;
}

}  // namespace assay::op

namespace assay::check {

using namespace op;

// moe.expert_counts [E]: integers, so they must be equal.
void JudgeExpertCounts(Subject& s) {
  const auto sent = SentRows(s);
  if (!sent) return;
  std::vector<double> right(static_cast<size_t>(s.actual().size()), 0);
  for (int64_t e : sent->expert) {
    if (e < static_cast<int64_t>(right.size())) right[static_cast<size_t>(e)] += 1;
  }
  if (right == s.actual().values) return s.report().Right(s.info().id);
  // A repeat that others contradict is a matter of the moment.
  std::string_view cls = fault_class::kKernel;
  if (s.info().repeat >= 0) {
    EventFilter filter;
    filter.rank = s.info().event.rank;
    for (EventId id : s.capture().Find(s.info().name, filter)) {
      auto other = s.capture().Load(id);
      if (other.ok() && (*other)->values != s.tensor()->values) cls = fault_class::kNonDet;
    }
  }
  const auto total = static_cast<int64_t>(std::accumulate(s.actual().values.begin(), s.actual().values.end(), 0.0));
  ReportRule(
      s.capture(), s.report(), s.info(),
      {cls, "counts sum to " + std::to_string(total) + ", " + std::to_string(sent->order.size()) + " rows were sent"});
}

// Copies, unless the engine multiplies by the weights before the experts (weight_on_input): then these rows or those
// that the product takes hold them.
void JudgeDispatched(Subject& s) {
  const TensorPtr ids = s.Operand(s.Sibling("moe.topk_ids")), x = s.Operand(s.Sibling("post_norm"));
  if (ids == nullptr && x == nullptr) return;
  if (ids == nullptr || x == nullptr)
    return Missing(s, x == nullptr ? s.Sibling("post_norm") : s.Sibling("moe.topk_ids"));
  Sent sent = SentBy(*ids);
  const ExpertRows rows{std::move(sent.expert), std::move(sent.order)};
  const auto right = SentOf(s, rows);
  if (!right || right->size() != s.actual().size()) {
    return s.report().Missing(s.info().name + " holds other rows than moe.topk_ids names",
                              "record moe.topk_ids of the same step");
  }
  const auto copied = [](const Array& want) {
    oracle::Computed copy;
    copy.value = copy.scale = want;
    for (double& v : copy.scale.values) v = std::abs(v);
    return copy;
  };
  const oracle::Computed plain = copied(*right);
  if (!IsComparable(s, plain)) return;
  const Difference d = Differ(s.actual(), plain, s.precision(), s.judged());
  if (d.ok) return ReportRight(s, d);
  Explanation why{fault_class::kMoeRoute, "rows are not those that moe.topk_ids sends to each expert"};
  const std::vector<double> weights = WeightOfRows(s, rows);
  if (weights.empty()) {
    if (WeightsOnInput(s)) return Missing(s, s.Sibling("moe.topk_weights"));
    return ReportWrong(s, d, why);
  }
  const oracle::Computed weighed = copied(WithWeights(*right, weights, 1));
  const Difference with = Differ(s.actual(), weighed, s.precision(), s.judged());
  if (!WeightsOnInput(s)) {
    if (with.ok) why.text = "rows hold the combine weights, which are to multiply the experts' results";
    return ReportWrong(s, d, why);
  }
  if (with.ok) return ReportRight(s, with);
  if (Differ(s.actual(), copied(WithWeights(*right, weights, 2)), s.precision(), s.judged()).ok)
    why.text = "rows hold the combine weights twice";
  ReportWrong(s, with, why);
}

}  // namespace assay::check
