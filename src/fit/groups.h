// The groups of an array that may share a constant: rows, heads, columns, blocks.
#pragma once

#include <cstdint>
#include <vector>

#include "fit/evidence.h"

namespace assay::fit {

struct Groups {
  std::vector<std::vector<int64_t>> elements;  // of each group, indices into the array
  std::vector<int64_t> wrong;                  // groups with an element to explain
  int64_t size() const { return static_cast<int64_t>(elements.size()); }
};
// Empty when the problem has no such axis (one head; no block size). Columns run over all heads. Every element is in
// one group; blocks at an edge may be smaller.
Groups GroupsOf(const Evidence& evidence, Axis axis);

}  // namespace assay::fit
