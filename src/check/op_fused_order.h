// Rows of a projection taken from other places of the memory that they share with others: a fused weight of queries,
// keys and values read in another order of its heads, and the rows of all ranks read from another first row.
#pragma once

#include <optional>

#include "check/op_linear_layer.h"

namespace assay::op {

// LOAD: concatenated parts read as [groups, heads of a group, d] (GPT-NeoX and BLOOM have as many groups as heads,
// Falcon as key heads), or the reverse. TP-SHARD: rows at another offset of all ranks' rows.
// head_size: rows of a head, 0 where it is not known or there are none.
std::optional<Explanation> ExplainOtherRows(const Subject& subject, const Layer& layer, const LinearSite& site,
                                            int64_t head_size, const oracle::Computed& right);

}  // namespace assay::op
