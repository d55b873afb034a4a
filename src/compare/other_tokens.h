// Rows that are not to be judged because the two runs chose different tokens before them.
#pragma once

#include <cstdint>
#include <vector>

#include "compare/joint_index.h"

namespace assay {

// By row number: 1 where an earlier generated token of the request differs, so that the row's input differs by right. A
// run that follows given tokens (--like) has equal inputs in spite of another choice. All 0 without next_token on both
// sides.
std::vector<uint8_t> RowsBehindOtherTokens(const JointIndex& index);

}  // namespace assay
