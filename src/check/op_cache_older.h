// Rows gathered from a cache that hold what was written for their own position before it was written again: drafts that
// were not accepted, or a write that went elsewhere.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "check/op_common.h"

namespace assay::op {

// The columns of a row written that the read has.
using CutRow = std::function<std::vector<double>(std::vector<double>)>;
// names: sites whose rows side by side are a row written; wrong: rows of the read. All of them must be older ones.
std::optional<Explanation> ExplainOlderRows(const Subject& read, std::span<const std::string> names,
                                            std::span<const int64_t> wrong, const CutRow& cut);

}  // namespace assay::op
