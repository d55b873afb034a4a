// What the metadata says of a rotation, for every check that rotates.
#pragma once

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

}  // namespace assay::op
