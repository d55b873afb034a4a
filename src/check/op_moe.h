// Single operations of feed-forward layers and of mixtures of experts.
#pragma once

#include <string_view>

#include "check/op_common.h"

namespace assay::check {

// mlp.act from mlp.gate and mlp.up, or moe.act (experts) from moe.gate_up.
void JudgeActivation(op::Subject& act, bool experts);
// moe.expert_counts [E]: integers, so they must be equal.
void JudgeExpertCounts(op::Subject& counts);
// moe.dispatched [rows sent, h]: rows of post_norm, sorted by expert.
void JudgeDispatched(op::Subject& dispatched);
// One of the experts' two products, of the rows in `input_stem` through `weight_stem` (gate_up_proj, down_proj). Rows
// come sorted by expert [rows, in], padded to a capacity [E, C, in], or one a choice [T, k, in].
void JudgeExpertProduct(op::Subject& product, std::string_view input_stem, std::string_view weight_stem);
// moe.shared (or this rank's partial one) from post_norm and the weights of mlp.shared_experts or mlp.shared_expert.
void JudgeSharedExpert(op::Subject& shared);
// On given operands, for results at names of their own. Ids [T, k] against logits [T, E]; bias of the choice, or null.
void JudgeChoice(op::Subject& ids, const TensorPtr& logits, const TensorPtr& bias);
// Weights [T, k] of the chosen ids.
void JudgeChoiceWeights(op::Subject& weights, const TensorPtr& logits, const TensorPtr& ids, const TensorPtr& bias);
// Sum of the experts' rows (R h sorted by expert, E C h, or T k h) with these weights.
void JudgeCombined(op::Subject& result, const TensorPtr& rows, const TensorPtr& weights, const TensorPtr& ids);

}  // namespace assay::check
