// A strided, read-only view of a tensor that somebody else owns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tensor/dtype.h"

namespace assay {

// shape and strides have one entry an axis; strides are in elements and may be 0 (broadcast) or negative. Element (i0,
// i1, ...) lives at bit (offset_elems + sum i_k * strides[k]) * BitsOf(dtype) from data. Rank 0 is one element. Nothing
// is owned: data, shape and strides must outlive the view. Nothing is checked either: whoever takes a view from a host
// validates it (stats/measure.h), as do the readers of files.
struct TensorView {
  // May be null when the view has no elements.
  const void* data = nullptr;
  DType dtype = DType::kInvalid;
  std::span<const int64_t> shape;
  std::span<const int64_t> strides;
  // For kF4E2M1 an odd offset begins in the high nibble of a byte.
  int64_t offset_elems = 0;

  int rank() const { return static_cast<int>(shape.size()); }
};

}  // namespace assay
