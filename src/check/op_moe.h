// Single operations of feed-forward layers and of mixtures of experts.
#pragma once

#include "check/op_common.h"

namespace assay::check {

// mlp.act from mlp.gate and mlp.up, or moe.act (experts) from moe.gate_up.
void JudgeActivation(op::Subject& act, bool experts);
// On given operands, for results at names of their own. Ids [T, k] against logits [T, E]; bias of the choice, or null.
void JudgeChoice(op::Subject& ids, const TensorPtr& logits, const TensorPtr& bias);
// Weights [T, k] of the chosen ids.
void JudgeChoiceWeights(op::Subject& weights, const TensorPtr& logits, const TensorPtr& ids, const TensorPtr& bias);
// Sum of the experts' rows (R h sorted by expert, E C h, or T k h) with these weights.
void JudgeCombined(op::Subject& result, const TensorPtr& rows, const TensorPtr& weights, const TensorPtr& ids);

}  // namespace assay::check
