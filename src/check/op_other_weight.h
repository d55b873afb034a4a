// Weights that may have been taken in place of the right one: of another layer, another projection, another rank.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "check/op_common.h"

namespace assay::op {

struct OtherWeight {
  oracle::Array value;  // of the shape of the right one
  Explanation why;      // LOAD, or TP-SHARD where it is another rank's part
};
// Recorded weights (NAME.weight, phase load; biases for a bias) of this shape that hold other values than the right
// one, the same tensor on other ranks first, then tensors of its layer, then its name in other layers, then all others:
// hands each to `attempt` until one gives an answer. At most 256 are looked at.
std::optional<Explanation> ForOtherWeights(
    const Subject& subject, const std::string& name, const oracle::Array& right,
    const std::function<std::optional<Explanation>(const OtherWeight&)>& attempt);

// A head of its own that is nothing like the embedding that it is declared to be. A head that went through another
// quantisation than the embedding is near it.
void JudgeTie(const Subject& s);

}  // namespace assay::op
