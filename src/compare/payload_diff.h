// Element by element, where both traces stored the tensor (level payload or sample): how far apart, in which units, and
// where. It adds figures to verdicts that were made from statistics; rows are matched by request and position, columns
// by their place in the whole tensor.
#pragma once

#include <vector>

#include "compare/diff.h"
#include "compare/joint_index.h"
#include "compare/judge.h"

namespace assay {

// Fills comparison.payload, max_abs and cosine of every judged site that has payloads on both sides, in causal order,
// until about 4 GiB are read; what was left out is noted. Damaged payloads are noted too.
// Rows set aside are left out here too.
void ComparePayloads(const JointIndex& index, Judgement* judgement, std::vector<std::string>* notes);

}  // namespace assay
