// Operands that were rounded before the operation, as tensor cores do with f32 ones.
#pragma once

#include <optional>

#include "check/op_explain.h"

namespace assay::op {

// tf32, f16 or bf16, rounded or cut, all operands or one: exactly what that gives.
std::optional<Explanation> ExplainCoarseOperands(const Subject& subject, const Operation& operation,
                                                 const oracle::Computed& right);

}  // namespace assay::op
