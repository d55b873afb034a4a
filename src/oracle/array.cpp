#include "oracle/array.h"

#include <algorithm>
#include <utility>

#include "tensor/decode.h"

namespace assay::oracle {
namespace {

// Keeps sizes in bytes and sums of indices far from overflow.
constexpr int64_t kMostElements = int64_t{1} << 48;

}  // namespace

// A 0 decides before any product is formed: [2^40, 2^40, 0] has 0 elements and no overflow.
int64_t ElementsOf(std::span<const int64_t> shape) {
  if (std::any_of(shape.begin(), shape.end(), [](int64_t n) { return n < 0; })) return -1;
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  int64_t n = 1;
  for (const int64_t size : shape) {
    if (size > kMostElements / n) return -1;
    n *= size;
  }
  return n;
}

std::string ShapeText(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

// A shape that is none (ElementsOf -1) gives no values: the caller has checked it.
Array Array::Filled(std::vector<int64_t> shape, double value) {
  Array array;
  const int64_t n = ElementsOf(shape);
  array.shape = std::move(shape);
  array.values.assign(static_cast<size_t>(std::max<int64_t>(n, 0)), value);
  return array;
}

int64_t Array::rows() const {
  int64_t n = 1;
  for (size_t axis = 0; axis + 1 < shape.size(); ++axis) n *= shape[axis];
  return n;
}

Result<Array> MakeArray(std::vector<int64_t> shape, std::vector<double> values) {
  if (ElementsOf(shape) != static_cast<int64_t>(values.size())) {
    return Status::BadInput(std::to_string(values.size()) + " values do not fill the shape " + ShapeText(shape));
  }
  Array array;
  array.shape = std::move(shape);
  array.values = std::move(values);
  return array;
}

// Row by row of the last axis: one dispatch on the dtype a row, unless the row is strided.
Result<Array> Decode(const TensorView& view) {
  const int64_t n = ElementsOf(view.shape);
  if (n < 0 || view.shape.size() != view.strides.size() || BitsOf(view.dtype) == 0 || (n > 0 && view.data == nullptr)) {
    return Status::BadInput("a tensor of shape " + ShapeText(view.shape) + " cannot be decoded");
  }
  Array array = Array::Filled({view.shape.begin(), view.shape.end()});
  if (n == 0) return array;
  const int64_t cols = array.cols();
  const int64_t step = view.strides.empty() ? 1 : view.strides.back();
  std::vector<int64_t> index(view.shape.size(), 0);  // of the row's first element
  for (int64_t r = 0; r < n / cols; ++r) {
    int64_t first = view.offset_elems;
    for (size_t axis = 0; axis + 1 < index.size(); ++axis) first += index[axis] * view.strides[axis];
    double* out = array.values.data() + r * cols;
    if (step == 1) {
      DecodeTo(view.data, first, cols, view.dtype, out);
    } else {
      for (int64_t c = 0; c < cols; ++c) DecodeTo(view.data, first + c * step, 1, view.dtype, out + c);
    }
    // The next row, as an odometer counts: the last but one axis runs fastest.
    for (size_t axis = index.size() < 2 ? 0 : index.size() - 1; axis-- > 0;) {
      if (++index[axis] < view.shape[axis]) break;
      index[axis] = 0;
    }
  }
  return array;
}

Result<Array> Reshape(Array array, std::vector<int64_t> shape) {
  if (ElementsOf(shape) != array.size()) {
    return Status::BadInput("shape " + ShapeText(array.shape) + " does not fill " + ShapeText(shape));
  }
  array.shape = std::move(shape);
  return array;
}

// An index is checked before its row is copied; repeats and any order are fine.
Result<Array> TakeRows(const Array& array, std::span<const int64_t> indices) {
  if (array.rank() == 0) return Status::BadInput("a scalar has no rows");
  const int64_t n = array.shape[0];
  const int64_t width = n == 0 ? 0 : array.size() / n;
  Array out;
  out.shape = array.shape;
  out.shape[0] = static_cast<int64_t>(indices.size());
  out.values.reserve(indices.size() * static_cast<size_t>(width));
  for (const int64_t i : indices) {
    if (i < 0 || i >= n) {
      return Status::BadInput("row " + std::to_string(i) + " is outside of " + ShapeText(array.shape));
    }
    out.values.insert(out.values.end(), array.values.begin() + i * width, array.values.begin() + (i + 1) * width);
  }
  return out;
}

Result<Array> TakeColumns(const Array& array, int64_t begin, int64_t end) {
  if (array.rank() == 0 || begin < 0 || begin > end || end > array.cols()) {
    return Status::BadInput("columns " + std::to_string(begin) + ":" + std::to_string(end) + " are outside of " +
                            ShapeText(array.shape));
  }
  Array out;
  out.shape = array.shape;
  out.shape.back() = end - begin;
  out.values.reserve(static_cast<size_t>(array.rows() * (end - begin)));
  for (int64_t r = 0; r < array.rows(); ++r) {
    const std::span<const double> row = array.row(r);
    out.values.insert(out.values.end(), row.begin() + begin, row.begin() + end);
  }
  return out;
}

// All axes but the last are compared; std::equal reads as many of b's as a has, and the ranks are equal.
Result<Array> Concat(const Array& a, const Array& b) {
  if (a.rank() == 0 || a.rank() != b.rank() || !std::equal(a.shape.begin(), a.shape.end() - 1, b.shape.begin())) {
    return Status::BadInput("shapes " + ShapeText(a.shape) + " and " + ShapeText(b.shape) + " do not join");
  }
  Array out;
  out.shape = a.shape;
  out.shape.back() += b.cols();
  out.values.reserve(a.values.size() + b.values.size());
  for (int64_t r = 0; r < a.rows(); ++r) {
    out.values.insert(out.values.end(), a.row(r).begin(), a.row(r).end());
    out.values.insert(out.values.end(), b.row(r).begin(), b.row(r).end());
  }
  return out;
}

}  // namespace assay::oracle
