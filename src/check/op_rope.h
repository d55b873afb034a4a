// What the metadata says of a rotation, for every check that rotates.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string_view>

#include "check/op_common.h"
#include "check/op_explain.h"
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

// Stems of results that `rotation` judges, a layer without rotary embedding included: attn.q, attn.k_pe, …
bool IsRotated(std::string_view stem);

// Angles that were rounded on their way (PRECISION). run: the result by a rotation with rounded frequencies.
using RunRotation = std::function<Result<oracle::Computed>(const Rotation&)>;
std::optional<Explanation> ExplainAngles(const Subject& s, const Rotation& declared, std::span<const double> positions,
                                         const oracle::Computed& right, const RunRotation& run);
// Frequencies other than declared (ROPE-FORM): the declared scaling with other values of its keys, another base, or no
// formula that is known, where each pair turns by a frequency of its own in every row. before: what is rotated.
std::optional<Explanation> ExplainFrequencies(const Subject& s, const Rotation& declared, const oracle::Array& before,
                                              std::span<const double> positions, const oracle::Computed& right,
                                              const RunRotation& run);
// Another weight in the norm between projection and rotation, or no norm: the second operand of `turn`.
std::optional<Explanation> ExplainNormBefore(const Subject& s, const Operation& turn, const oracle::Computed& right);

// A rotation in place whose kernel took another stride for that of its rows, so that heads were turned by the positions
// of other rows, or not at all. before: the operand, of the result's shape; positions: one a row.
std::optional<Explanation> ExplainRowWalk(const Subject& result, const Rotation& rotation,
                                          const oracle::Computed& before, std::span<const double> positions);

}  // namespace assay::op
