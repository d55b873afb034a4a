// What a sampler may return for a row of logits: the greedy token, and the probability of any token.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "oracle/array.h"

namespace assay::oracle {

// Of one row. Infinities count: a row with one +inf has that token.
struct GreedyChoice {
  int64_t token = -1;  // the first of the largest; -1: a NaN in the row, or nothing but -inf
  double margin = 0;   // gap to the second largest: 0 is a tie, infinite when there is no other finite one
};
Result<std::vector<GreedyChoice>> Greedy(const Array& logits);

// Filters in the order in which engines apply them: temperature, top-k, top-p (the smallest set of the most probable
// tokens that reaches p), min-p (at least min_p times the largest). Ties at an edge are kept, all of them.
struct SamplingSpec {
  double temperature = 1;  // 0: greedy
  int64_t top_k = 0;       // 0: all
  double top_p = 1;
  double min_p = 0;
};
// 0 for a token that is filtered out. NaN in the row: NaN.
Result<double> TokenProbability(std::span<const double> logits, int64_t token, const SamplingSpec& spec);

}  // namespace assay::oracle
