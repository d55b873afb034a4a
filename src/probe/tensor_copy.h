// Contiguous copies of strided tensors, and the choice of the rows that level sample keeps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "stats/measure.h"
#include "tensor/view.h"

namespace assay {

// Number of elements; kUsage for a negative extent, shape and strides of different rank, or a count beyond 2^63.
// Rank 0 has one element, any extent of 0 none.
Result<uint64_t> CountElements(const TensorView& view);

// Whether the elements lie row-major without gaps from the view's offset (a byte-aligned offset for packed types).
bool IsContiguous(const TensorView& view);

// The view's elements, row-major, no gaps, little-endian; packed types stay packed (two to a byte, the last byte's
// upper nibble 0 for an odd count). kUsage as CountElements, kEnvironment when memory for it cannot be had.
Status CopyContiguous(const TensorView& view, std::vector<std::byte>* out);

// The same of the given rows of one axis, in the order given; the axis keeps its place.
// REQUIRES, as CopyContiguous: the view's elements lie in memory of the host's.
Status CopyRows(const TensorView& view, int axis, std::span<const int64_t> rows, std::vector<std::byte>* out);

// The n rows with the smallest hash of (seed, request, position), ascending; padding rows are not chosen. Two runs that
// cut the same request into other chunks choose from the same order, so that the whole's rows are among the chunks'.
std::vector<int64_t> SampleRows(std::span<const RowRun> runs, int64_t n, uint64_t seed);

}  // namespace assay
