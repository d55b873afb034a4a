// Rows of a mixture's tensors: which expert and which choice of which token each of them is, and the weights that the
// choices are given.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "check/op_common.h"

namespace assay::op {

// Ids as recorded, [T, k] in row order; negative ones (no choice, or another rank's expert) stay negative.
std::vector<int64_t> IdsOf(const Tensor& ids);

// Choices in the order in which rows are sent: by expert, then by token.
struct Sent {
  std::vector<int64_t> order;   // index into T x k
  std::vector<int64_t> expert;  // of each sent row
  int64_t k = 1;
};
Sent SentBy(const Tensor& ids);
// Nothing when the step's moe.topk_ids was not recorded.
std::optional<Sent> SentRows(const Subject& subject);

// One entry a row of an experts' tensor.
struct ExpertRows {
  std::vector<int64_t> expert;
  std::vector<int64_t> choice;  // index into T x k; -1: no choice fills the row
};
// Rows of `tensor`: sorted by expert [R, ..], padded to a capacity [E, C, ..], or one a choice in the order of tokens
// [T, k, ..]. Nothing when moe.topk_ids was not recorded or names other rows; a capacity's experts are known without.
std::optional<ExpertRows> ExpertRowsOf(const Subject& subject, const Tensor& tensor);

// The keys of the router stand on topk_weights: a subject there, `subject` where it was not recorded.
Subject WithRouterKeys(const Subject& subject);
// Combine weights multiply the experts' inputs: by the result's own key or the router's.
bool WeightsOnInput(const Subject& subject);
// The combine weight of each row, 1 for rows without a choice. Empty: moe.topk_weights was not recorded or has other
// rows.
std::vector<double> WeightOfRows(const Subject& subject, const ExpertRows& rows);
// `rows` [n, ..] each times its weight to the power (-1, 0, 1 or 2).
oracle::Array WithWeights(const oracle::Array& rows, const std::vector<double>& weights, int power);
// What post_norm sends to these rows, [n, h]; 0 in rows without a choice. Nothing where it was not recorded or is of
// other rows.
std::optional<oracle::Array> SentOf(const Subject& subject, const ExpertRows& rows);
// Whether moe.dispatched holds the weights already: its rows are nearer to the weighted ones of post_norm. Nothing when
// that cannot be told.
std::optional<bool> HoldsWeights(const Subject& subject, const oracle::Array& dispatched, const ExpertRows& rows);

}  // namespace assay::op
