// What the metadata says of a rotation, for every check that rotates.
#pragma once

#include <optional>
#include <span>

#include "check/op_common.h"
#include "oracle/rope.h"

namespace assay::op {

struct Rotation {
  oracle::RopeSpec spec;
  oracle::RopeLayout layout;
  oracle::RopeFrequencies frequencies;
};
// From the rope.* keys of the result; `head_size` is what is rotated when rope.dim is left out. kBadInput: keys
// missing.
Result<Rotation> RotationOf(const Subject& result, int64_t head_size);

// A rotation in place whose kernel took another stride for that of its rows, so that heads were turned by the positions
// of other rows, or not at all. before: the operand, of the result's shape; positions: one a row.
std::optional<Explanation> ExplainRowWalk(const Subject& result, const Rotation& rotation,
                                          const oracle::Computed& before, std::span<const double> positions);

}  // namespace assay::op
