// What the codes of a quantised operand stand for: a family of causes beside those of op_quant_explain.h.
#pragma once

#include <optional>

#include "check/op_quant_explain.h"

namespace assay::op {

// Bytes decoded as another 8-bit type.
std::optional<Explanation> TryByteTypes(const QuantTrial& trial);
// Values of up to 32 different codes, solved for from the result.
std::optional<Explanation> TryTables(const QuantTrial& trial);

}  // namespace assay::op
