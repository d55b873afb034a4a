#include "oracle/moe.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "oracle/softmax.h"

namespace assay::oracle {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Both forms of the sigmoid avoid an overflowing exponential.
// scale is the score itself: it is a quotient, not a sum that could cancel.
Result<Computed> ScoresOf(const Array& logits, Scoring scoring) {
  if (scoring == Scoring::kSoftmax) return Softmax(logits);
  Computed c{Array::Filled(logits.shape), Array::Filled(logits.shape), Array::Filled(logits.shape), 4, 2, 1};
  for (int64_t i = 0; i < logits.size(); ++i) {
    const double z = logits[i];
    const double s = z >= 0 ? 1 / (1 + std::exp(-z)) : std::exp(z) / (1 + std::exp(z));
    c.value[i] = c.scale[i] = s;
    if (s > 0) c.inner[i] = s * (1 - s) * std::abs(z);  // the exponent's rounding
  }
  return c;
}

// Indices by falling value, the lower index first among equals.
std::vector<int64_t> Ranked(std::span<const double> values) {
  std::vector<int64_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return values[static_cast<size_t>(a)] > values[static_cast<size_t>(b)];
  });
  return order;
}

// Groups of one expert have no second.
double GroupScoreOf(std::span<const double> group, GroupScore kind) {
  double best = -kInfinity, second = -kInfinity;
  // The smaller of the new value and the best so far is the next candidate for the second place.
  for (const double v : group) {
    second = std::max(second, std::min(v, best));
    best = std::max(best, v);
  }
  return kind == GroupScore::kMax || group.size() < 2 ? best : best + second;
}

// Of one row.
struct Choice {
  std::vector<int64_t> ids;
  double margin = kInfinity, set_margin = kInfinity;
};

// Infinities of one sign are equal: no NaN.
double Gap(double above, double below) { return above == below ? 0 : above - below; }

// Groups first, then the experts of the groups that are left.
Choice Choose(std::span<const double> selection, const RouterSpec& spec) {
  Choice choice;
  std::vector<double> open(selection.begin(), selection.end());
  // Device-limited routing (DeepSeek-V2, arXiv 2405.04434, section 2.2.2): the experts of the other groups are closed
  // by a score that no open one has.
  if (spec.n_group > 1) {
    const size_t size = selection.size() / static_cast<size_t>(spec.n_group);
    std::vector<double> groups;
    for (size_t g = 0; g < static_cast<size_t>(spec.n_group); ++g) {
      groups.push_back(GroupScoreOf(selection.subspan(g * size, size), spec.group_score));
    }
    const std::vector<int64_t> order = Ranked(groups);
    for (size_t j = static_cast<size_t>(spec.topk_group); j < order.size(); ++j) {
      const auto closed = open.begin() + order[j] * static_cast<int64_t>(size);
      std::fill(closed, closed + static_cast<int64_t>(size), -kInfinity);
    }
    if (spec.topk_group < spec.n_group) {
      // Had this gap closed, another group would have been open and the set of experts another one.
      choice.set_margin = Gap(groups[static_cast<size_t>(order[static_cast<size_t>(spec.topk_group - 1)])],
                              groups[static_cast<size_t>(order[static_cast<size_t>(spec.topk_group)])]);
    }
  }
  const std::vector<int64_t> order = Ranked(open);
  const size_t k = static_cast<size_t>(spec.top_k);
  choice.ids.assign(order.begin(), order.begin() + spec.top_k);
  const auto at = [&](size_t j) { return open[static_cast<size_t>(order[j])]; };
  if (k < order.size()) choice.set_margin = std::min(choice.set_margin, Gap(at(k - 1), at(k)));
  choice.margin = choice.set_margin;
  // The order inside the set matters to `margin` alone.
  for (size_t j = 0; j + 1 < k; ++j) choice.margin = std::min(choice.margin, Gap(at(j), at(j + 1)));
  return choice;
}

// Weights of one row's ids from its scores. `inner` of the scores, where there are any, is carried along.
void WeighRow(const Computed& scores, int64_t row, std::span<const int64_t> ids, const RouterSpec& spec,
              Computed* weights) {
  const int64_t experts = scores.value.cols();
  const int64_t k = static_cast<int64_t>(ids.size());
  double sum = 0, sum_inner = 0;
  for (int64_t j = 0; j < k; ++j) {
    const int64_t at = row * experts + ids[static_cast<size_t>(j)];
    const bool known = ids[static_cast<size_t>(j)] >= 0;
    weights->value[row * k + j] = known ? scores.value[at] : std::nan("");
    weights->inner[row * k + j] = known && !scores.inner.values.empty() ? scores.inner[at] : 0;
    sum += weights->value[row * k + j];
    sum_inner += weights->inner[row * k + j];
  }
  for (int64_t j = 0; j < k; ++j) {
    double& w = weights->value[row * k + j];
    double& inner = weights->inner[row * k + j];
    // w = s / Σ s: the relative errors of numerator and sum add up.
    if (spec.renormalise) {
      w /= sum;
      inner = (inner + std::abs(w) * sum_inner) / std::abs(sum);
    }
    w *= spec.scaling;
    inner *= std::abs(spec.scaling);
    weights->scale[row * k + j] = std::abs(w);
  }
}

// -1 as an id gives NaN as its weight: a choice that could not be made has none.
Result<Computed> Weigh(const Computed& scores, std::span<const int64_t> ids, const RouterSpec& spec) {
  const int64_t rows = scores.value.rows(), experts = scores.value.cols();
  if (rows == 0 || ids.size() % static_cast<size_t>(rows) != 0) {
    return Status::BadInput(std::to_string(ids.size()) + " expert ids for scores of shape " +
                            ShapeText(scores.value.shape));
  }
  for (const int64_t id : ids) {
    if (id < -1 || id >= experts) {
      return Status::BadInput("expert " + std::to_string(id) + " of " + std::to_string(experts));
    }
  }
  const int64_t k = static_cast<int64_t>(ids.size()) / rows;
  const std::vector<int64_t> shape{rows, k};
  // Scores are kept in f32 by usual routers; softmax first or over the chosen alone, then sum, quotient, factor.
  Computed weights{Array::Filled(shape),         Array::Filled(shape), Array::Filled(shape),
                   2 * scores.k + double(k) + 4, scores.k_inner,       spec.renormalise ? 3.0 : 2.0};
  for (int64_t r = 0; r < rows; ++r) {
    WeighRow(scores, r, ids.subspan(static_cast<size_t>(r * k), static_cast<size_t>(k)), spec, &weights);
  }
  return weights;
}

}  // namespace

Result<Routing> Route(const Array& logits, const Array& bias, const RouterSpec& spec) {
  if (logits.rank() != 2) return Status::BadInput("router logits of shape " + ShapeText(logits.shape));
  const int64_t rows = logits.shape[0], experts = logits.shape[1];
  if (!bias.values.empty() && bias.size() != experts) {
    return Status::BadInput("a correction bias of shape " + ShapeText(bias.shape) + " for " + std::to_string(experts) +
                            " experts");
  }
  if (spec.n_group < 1 || experts % spec.n_group != 0 || spec.topk_group < 1 || spec.topk_group > spec.n_group ||
      spec.top_k < 1 || spec.top_k > experts / spec.n_group * spec.topk_group) {
    return Status::BadInput("top " + std::to_string(spec.top_k) + " of " + std::to_string(experts) + " experts in " +
                            std::to_string(spec.topk_group) + " of " + std::to_string(spec.n_group) + " groups");
  }
  Routing routing;
  ASSAY_ASSIGN_OR_RETURN(routing.scores, ScoresOf(logits, spec.scoring));
  routing.selection = routing.scores.value;
  for (int64_t i = 0; !bias.values.empty() && i < routing.selection.size(); ++i) {
    routing.selection[i] += bias[i % experts];
  }
  for (int64_t r = 0; r < rows; ++r) {
    const std::span<const double> row = std::as_const(routing.selection).row(r);
    const bool nan = std::any_of(row.begin(), row.end(), [](double v) { return std::isnan(v); });
    Choice choice = nan ? Choice{std::vector<int64_t>(static_cast<size_t>(spec.top_k), -1), 0, 0} : Choose(row, spec);
    routing.ids.insert(routing.ids.end(), choice.ids.begin(), choice.ids.end());
    routing.margin.push_back(choice.margin);
    routing.set_margin.push_back(choice.set_margin);
  }
  if (rows > 0) {
    ASSAY_ASSIGN_OR_RETURN(routing.weights, Weigh(routing.scores, routing.ids, spec));
  }
  return routing;
}

Result<Computed> WeightsOf(const Array& logits, std::span<const int64_t> ids, const RouterSpec& spec) {
  if (logits.rank() != 2) return Status::BadInput("router logits of shape " + ShapeText(logits.shape));
  ASSAY_ASSIGN_OR_RETURN(const Computed scores, ScoresOf(logits, spec.scoring));
  return Weigh(scores, ids, spec);
}

// Given scores count as exact: no rounding of theirs enters the bound.
Result<Computed> WeightsFromScores(const Array& scores, std::span<const int64_t> ids, const RouterSpec& spec) {
  if (scores.rank() != 2) return Status::BadInput("router scores of shape " + ShapeText(scores.shape));
  Computed given{scores, {}, {}, 0, 0, 1};
  return Weigh(given, ids, spec);
}

// k + 1 roundings: a product for each choice and the sum.
Result<Computed> Combine(const Array& experts, std::span<const int64_t> row_of, const Array& weights) {
  if (weights.rank() != 2 || weights.size() != static_cast<int64_t>(row_of.size()) || experts.rank() == 0) {
    return Status::BadInput("weights of shape " + ShapeText(weights.shape) + " for " + std::to_string(row_of.size()) +
                            " rows of experts");
  }
  const int64_t rows = weights.shape[0], k = weights.shape[1], h = experts.cols(), n = experts.rows();
  const std::vector<int64_t> shape{rows, h};
  // Engines store the weighted row, then add; or add in the storing type.
  Computed c{Array::Filled(shape), Array::Filled(shape), {}, static_cast<double>(k + 1), 0, static_cast<double>(k) + 1};
  for (int64_t i = 0; i < rows * k; ++i) {
    const int64_t from = row_of[static_cast<size_t>(i)];
    if (from < -1 || from >= n) {
      return Status::BadInput("row " + std::to_string(from) + " of experts of shape " + ShapeText(experts.shape));
    }
    for (int64_t j = 0; from >= 0 && j < h; ++j) {
      const double term = weights[i] * experts[from * h + j];
      c.value[i / k * h + j] += term;
      c.scale[i / k * h + j] += std::abs(term);
    }
  }
  return c;
}

}  // namespace assay::oracle
