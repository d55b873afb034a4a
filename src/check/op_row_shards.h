// Rows of a weight that ranks share, put together again: column-parallel projections, vocabulary-parallel embeddings.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "check/op_common.h"

namespace assay::op {

struct RowShards {
  oracle::Array whole;  // [rows of all ranks, columns]
  int64_t first = 0;    // row of it that this rank's part begins with
  int64_t rows = 0;     // of this rank's part
};
// By the shards' order, whatever their sizes: heads that the number of ranks does not divide leave uneven ones.
// nullopt: the weight is not shared, or some rank's part was not recorded as payload.
std::optional<RowShards> StitchRows(const Subject& subject, const std::string& name);

}  // namespace assay::op
