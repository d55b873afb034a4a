// Weights across ranks, without a checkpoint: replicas hold the same bits, shards do not.
#pragma once

#include <vector>

#include "check/weights_pieces.h"

namespace assay {

void CheckRanks(const std::vector<MemoryTensor>& tensors, std::vector<WeightFinding>* found);

}  // namespace assay
