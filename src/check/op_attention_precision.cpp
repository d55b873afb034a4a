// How far attention is off whose sums are kept in a coarse type: some rows are computed so, since a bound allows many
// times of what roundings amount to.
#include <algorithm>
#include <cmath>
#include <vector>

#include "base/rounding.h"
#include "check/op_attention_trial.h"

namespace assay::op {

namespace {

// One query of one head: scores, softmax and values summed one after the other, each step rounded. `scores`: of all
// keys, exact. Empty when it sees no key.
std::vector<double> InCoarseSums(const AttentionBatch& b, const AttentionCall& call, int64_t t, int64_t h,
                                 const double* scores, int bits) {
  const auto round = [&](double x) { return RoundToBits(x, bits); };
  const int64_t keys = b.k.shape[0], kv_heads = b.k.shape[1], d = b.k.shape[2];
  const int64_t kv = h / (call.heads / kv_heads), dv = call.value_dim;
  if (keys == 0) return {};
  const double* q = b.q.values.data() + (t * call.heads + h) * d;
  const double top = *std::max_element(scores, scores + keys);
  if (!std::isfinite(top)) return {};
  std::vector<double> sum(static_cast<size_t>(dv));
  double total = call.sinks.values.empty() ? 0 : round(std::exp(call.sinks[h] - top));
  for (int64_t j = 0; j < keys; ++j) {
    if (!std::isfinite(scores[j])) continue;
    const double* k = b.k.values.data() + (j * kv_heads + kv) * d;
    const double* v = b.v.values.empty() ? k : b.v.values.data() + (j * kv_heads + kv) * dv;
    double exact = 0, coarse = 0;
    for (int64_t i = 0; i < d; ++i) exact += q[i] * k[i], coarse = round(coarse + round(q[i] * k[i]));
    const double weight = round(std::exp(scores[j] + (coarse - exact) * call.spec.scale - top));
    total = round(total + weight);
    for (int64_t i = 0; i < dv; ++i) {
      double& at = sum[static_cast<size_t>(i)];
      at = round(at + round(weight * v[i]));
    }
  }
  for (double& x : sum) x /= total;
  return sum;
}

}  // namespace

// Errors of all computed rows together, and three times as much: other orders of the sum round otherwise.
bool ErrsLike(const Subject& out, const AttentionCall& call, const AttentionValues& right, DType sums) {
  constexpr double kMostSteps = 5e7, kRoom = 3;
  const int bits = static_cast<int>(-std::log2(UnitRoundoff(sums)));
  const AttentionCall few = FewQueries(call);
  double steps = 0;
  for (const AttentionBatch& b : few.batches) {
    if (b.k.rank() != 3 || b.k.shape[1] == 0 || call.heads % b.k.shape[1] != 0) return false;
    const double n = static_cast<double>(b.rows.size()) * static_cast<double>(call.heads);
    steps += n * static_cast<double>(b.k.shape[0] * (b.k.shape[2] + call.value_dim));
  }
  const auto every = static_cast<int64_t>(std::ceil(std::max(steps / kMostSteps, 1.0)));
  double measured = 0, usual = 0;
  int64_t number = 0;
  for (const AttentionBatch& b : few.batches) {
    const auto scores = oracle::Scores(InputOf(b, few), few.spec);
    if (!scores.ok()) return false;
    for (size_t t = 0; t < b.rows.size(); ++t) {
      for (int64_t h = 0; h < call.heads; ++h) {
        if (number++ % every != 0) continue;
        const auto row = static_cast<int64_t>(t);
        const std::vector<double> coarse =
            InCoarseSums(b, few, row, h, scores->value.values.data() + (row * call.heads + h) * b.k.shape[0], bits);
        const int64_t at = (b.rows[t] * call.heads + h) * call.value_dim;
        for (size_t i = 0; i < coarse.size(); ++i) {
          const double due = right.out.value[at + static_cast<int64_t>(i)];
          measured += std::pow(out.actual()[at + static_cast<int64_t>(i)] - due, 2);
          usual += std::pow(coarse[i] - due, 2);
        }
      }
    }
  }
  return measured <= kRoom * kRoom * usual;
}

}  // namespace assay::op
