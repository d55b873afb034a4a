// The operand and result of every oracle: a row-major array of doubles with its shape.
//
// Why: an oracle is judged by its numbers, so everything is decoded once, exactly, and strides, dtypes and ownership
// end here. What it does not do: no broadcasting, no views, no knowledge of traces. Shapes that do not fit are
// kBadInput.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "tensor/view.h"

namespace assay::oracle {

struct Array {
  std::vector<int64_t> shape;  // rank 0 is one element
  std::vector<double> values;  // row-major, product of shape

  // All elements equal; the start of every result.
  static Array Filled(std::vector<int64_t> shape, double value = 0);

  // Elements.
  int64_t size() const { return static_cast<int64_t>(values.size()); }
  int rank() const { return static_cast<int>(shape.size()); }
  // Size of the last axis, 1 for rank 0; and how many rows of that size there are (all other axes together).
  int64_t cols() const { return shape.empty() ? 1 : shape.back(); }
  int64_t rows() const;
  std::span<double> row(int64_t r) { return {values.data() + r * cols(), static_cast<size_t>(cols())}; }
  std::span<const double> row(int64_t r) const { return {values.data() + r * cols(), static_cast<size_t>(cols())}; }
  double& operator[](int64_t i) { return values[static_cast<size_t>(i)]; }
  double operator[](int64_t i) const { return values[static_cast<size_t>(i)]; }
};

// Product of the sizes; -1 when one is negative or the product passes 2^48.
int64_t ElementsOf(std::span<const int64_t> shape);
// "[3, 4, 8]", for messages.
std::string ShapeText(std::span<const int64_t> shape);
// An array that takes these values; kBadInput when their number is not that of the shape.
Result<Array> MakeArray(std::vector<int64_t> shape, std::vector<double> values);

// Every element of the view as a double, exactly (tensor/decode.h). The view must lie within its memory.
Result<Array> Decode(const TensorView& view);

// The same values under another shape.
Result<Array> Reshape(Array array, std::vector<int64_t> shape);
// Rows of axis 0 in the order of `indices` (repeats allowed).
Result<Array> TakeRows(const Array& array, std::span<const int64_t> indices);
// Columns [begin, end) of the last axis.
Result<Array> TakeColumns(const Array& array, int64_t begin, int64_t end);
// Side by side along the last axis; all other axes equal. The key of absorbed MLA is Concat(latent, k_pe).
Result<Array> Concat(const Array& a, const Array& b);

}  // namespace assay::oracle
