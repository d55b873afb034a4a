// Routing of a mixture of experts, and the weighted sum of what the experts return.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "oracle/bound.h"

namespace assay::oracle {

// Scores from logits: over all experts of a row (Mixtral, Qwen), or each by itself (DeepSeek-V3).
enum class Scoring : uint8_t { kSoftmax, kSigmoid };
// What a group of experts is ranked by: its best one (DeepSeek-V2), or the sum of its two best (DeepSeek-V3).
enum class GroupScore : uint8_t { kMax, kTop2Sum };

struct RouterSpec {
  Scoring scoring = Scoring::kSoftmax;
  int64_t top_k = 1;
  int64_t n_group = 1, topk_group = 1;  // experts are chosen from the best topk_group of n_group equal groups
  GroupScore group_score = GroupScore::kMax;
  bool renormalise = false;  // weights of the chosen sum to 1 ...
  double scaling = 1;        // ... before this factor
};

// Selection scores are scores + bias; weights are scores without it. Equal selection scores: the lower index first.
struct Routing {
  Computed scores;                 // [T, E], sigmoid or softmax of the logits
  Array selection;                 // [T, E], scores + bias
  std::vector<int64_t> ids;        // T x top_k, by falling selection score; -1 in rows with a NaN
  Computed weights;                // [T, top_k], in the order of ids
  std::vector<double> margin;      // T: smallest gap by which the choice of the set and of its order would change, the
                                   // choice of groups included
  std::vector<double> set_margin;  // T: the same for the set alone
};
// logits [T, E]; bias [E] or empty. kBadInput: shapes that do not fit, or more experts asked for than the open groups
// have.
Result<Routing> Route(const Array& logits, const Array& bias, const RouterSpec& spec);

// Weights of given ids [T, k] (a recorded choice), with or without the right set; id -1 gives NaN. kBadInput: an id
// outside of the experts.
Result<Computed> WeightsOf(const Array& logits, std::span<const int64_t> ids, const RouterSpec& spec);
// The same when scores are given: variants (scores with the bias left in, of a rounded bias) are formed by the caller.
Result<Computed> WeightsFromScores(const Array& scores, std::span<const int64_t> ids, const RouterSpec& spec);

// y[t] = Σ_j weights[t, j] · experts[row_of[t k + j]]; row -1: that choice is dropped and adds nothing.
// experts [R, h], row_of T x k. For [T, k, h] pass rows 0, 1, 2, ....
Result<Computed> Combine(const Array& experts, std::span<const int64_t> row_of, const Array& weights);

}  // namespace assay::oracle
