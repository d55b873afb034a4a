// Which rows a kernel really works on when it steps through a tensor's memory by strides that are not the tensor's.
//
// Why: a kernel that works in place, one row after the other, each with a number of its own (the position of a
// rotation), turns the wrong rows when it takes the stride of another axis for that of its rows: some get the number
// of another row, some are met several times, the rest is left as it was. Shapes, dtypes and the length of each row
// stay what they should be. From the strides alone it follows which row got which number; whether a result fits is for
// the caller to see. What a walk meets that does not begin where a head begins is not modelled.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"

namespace assay::oracle {

// Row j, head g of the kernel begin at j · row_stride + g · head_stride elements.
struct RowWalk {
  int64_t row_stride = 0;
  int64_t heads = 1;
  int64_t head_stride = 0;
  bool operator==(const RowWalk&) const = default;
};

// Walks over a view of `walk.heads` heads and rows of `cols` elements that a kernel may take for the right one `walk`:
// every stride of the view, or none at all (rows and heads without gaps), for the rows; all heads or one. The right
// walk and those that meet the same memory in the same order are not among them.
std::vector<RowWalk> OtherWalks(const RowWalk& walk, int64_t rows, int64_t cols);

// For row t, head h of the view (at t · view.heads + h): the rows j of the walk that begin there, ascending, 0 <= j <
// rows; empty where the walk never comes. kBadInput: negative sizes, or places beyond 2^62.
Result<std::vector<std::vector<int64_t>>> RowsThatMeet(const RowWalk& view, int64_t rows, const RowWalk& walk);

}  // namespace assay::oracle
