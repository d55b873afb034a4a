// Causes of wrong cache rows that lie in their codes: bytes of one 8-bit type that were read as another.
//
// It says nothing of scales, which are told first, and nothing of whose rows they are.
#pragma once

#include <optional>
#include <span>

#include "check/op_common.h"

namespace assay::op {

// Rows `have` (read back, dequantised) against `due` (given, or dequantised by the right type), both of one shape;
// code_scale: of each element, at least as many. Each element is encoded as one 8-bit type and decoded as another;
// `declared` is the cache's type, and one of the two. Only where rows of more than a few codes all fit.
std::optional<Explanation> ExplainOtherCodes(const oracle::Array& have, const oracle::Array& due,
                                             std::span<const double> code_scale, DType declared,
                                             std::span<const char> judged);

// Whether wrong elements go with what is due in their place: the row's own numbers, changed in a way that is not known.
// False: they have nothing to do with it, so they belong to another row or to nobody.
bool GoWithTheirOwn(const oracle::Array& have, const oracle::Array& due, std::span<const char> judged);

}  // namespace assay::op
