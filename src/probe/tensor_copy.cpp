#include "probe/tensor_copy.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "base/hash.h"

namespace assay {
namespace {

// Copies `count` elements of `bytes` each, `stride` elements apart. One instance a size lets the compiler turn memcpy
// into a move.
template <size_t kBytes>
void CopyStrided(const std::byte* from, int64_t stride, int64_t count, std::byte* to) {
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * static_cast<int64_t>(kBytes), from + i * stride * static_cast<int64_t>(kBytes), kBytes);
  }
}

// bytes: 1, 2, 4 or 8 of an element.
void CopyRun(const std::byte* from, int64_t stride, int64_t count, size_t bytes, std::byte* to) {
  if (stride == 1) {
    std::memcpy(to, from, static_cast<size_t>(count) * bytes);
    return;
  }
  switch (bytes) {
    case 1:
      return CopyStrided<1>(from, stride, count, to);
    case 2:
      return CopyStrided<2>(from, stride, count, to);
    case 4:
      return CopyStrided<4>(from, stride, count, to);
    default:
      return CopyStrided<8>(from, stride, count, to);
  }
}

// Walks the elements of all axes but the last; f(element number of the run's begin in storage).
template <class F>
void ForEachRun(const TensorView& view, F&& f) {
  const int outer = view.rank() - 1;
  std::vector<int64_t> index(static_cast<size_t>(std::max(outer, 0)), 0);
  int64_t at = view.offset_elems;
  for (;;) {
    f(at);
    int axis = outer - 1;
    for (; axis >= 0; --axis) {
      const auto a = static_cast<size_t>(axis);
      // Moved on by strides, not by a product of indexes: one addition an axis that turns.
      at += view.strides[a];
      if (++index[a] < view.shape[a]) break;
      at -= view.strides[a] * view.shape[a];
      index[a] = 0;
    }
    if (axis < 0) return;
  }
}

}  // namespace

Result<uint64_t> CountElements(const TensorView& view) {
  if (view.shape.size() != view.strides.size()) {
    return Status::Usage("shape has " + std::to_string(view.shape.size()) + " axes, strides " +
                         std::to_string(view.strides.size()));
  }
  int64_t count = 1;
  bool overflow = false, empty = false;
  for (size_t i = 0; i < view.shape.size(); ++i) {
    if (view.shape[i] < 0) {
      return Status::Usage("axis " + std::to_string(i) + " has a negative extent " + std::to_string(view.shape[i]));
    }
    empty = empty || view.shape[i] == 0;
    // An overflow counts only if no extent is 0: such a view has no elements whatever the others say.
    overflow = overflow || __builtin_mul_overflow(count, view.shape[i], &count);
  }
  if (empty) return uint64_t{0};
  if (overflow) return Status::Usage("shape has more than 2^63 elements");
  return static_cast<uint64_t>(count);
}

bool IsContiguous(const TensorView& view) {
  // Two elements share a byte: a copy would have to begin in the middle of one.
  if (BitsOf(view.dtype) == 4 && view.offset_elems % 2 != 0) return false;
  int64_t expected = 1;
  for (size_t i = view.shape.size(); i-- > 0;) {
    if (view.shape[i] == 0) return true;
    // The stride of an axis of one element is never taken.
    if (view.shape[i] != 1 && view.strides[i] != expected) return false;
    expected *= view.shape[i];
  }
  return true;
}

// 2^48 elements of 8 bytes are far beyond memory and keep the size in bytes from overflowing.
Status CopyContiguous(const TensorView& view, std::vector<std::byte>* out) {
  out->clear();
  ASSAY_ASSIGN_OR_RETURN(const uint64_t count, CountElements(view));
  const int bits = BitsOf(view.dtype);
  if (bits == 0) return Status::Usage("unknown dtype " + std::to_string(static_cast<int>(view.dtype)));
  if (count == 0) return {};
  if (view.data == nullptr) return Status::Usage("null data with " + std::to_string(count) + " elements");
  if (count > (uint64_t{1} << 48)) return Status::Usage("a copy of more than 2^48 elements");
  try {
    out->resize((count * static_cast<uint64_t>(bits) + 7) / 8);
  } catch (const std::bad_alloc&) {
    return Status::Environment("no memory for a copy of " + std::to_string(count) + " elements");
  }
  const auto* data = static_cast<const std::byte*>(view.data);
  const int64_t run = view.rank() == 0 ? 1 : view.shape.back();
  const int64_t stride = view.rank() == 0 ? 1 : view.strides.back();
  if (bits == 4) {
    int64_t written = 0;
    ForEachRun(view, [&](int64_t at) {
      for (int64_t i = 0; i < run; ++i, ++written) {
        const int64_t element = at + i * stride;
        const unsigned byte = std::to_integer<unsigned>(data[element >> 1]);
        const unsigned nibble = (element & 1) != 0 ? byte >> 4 : byte & 15u;
        (*out)[static_cast<size_t>(written >> 1)] |= std::byte((written & 1) != 0 ? nibble << 4 : nibble);
      }
    });
    return {};
  }
  const auto bytes = static_cast<size_t>(bits / 8);
  if (IsContiguous(view)) {
    std::memcpy(out->data(), data + view.offset_elems * static_cast<int64_t>(bytes), out->size());
    return {};
  }
  std::byte* to = out->data();
  ForEachRun(view, [&](int64_t at) {
    CopyRun(data + at * static_cast<int64_t>(bytes), stride, run, bytes, to);
    to += static_cast<size_t>(run) * bytes;
  });
  return {};
}

Status CopyRows(const TensorView& view, int axis, std::span<const int64_t> rows, std::vector<std::byte>* out) {
  out->clear();
  ASSAY_RETURN_IF_ERROR(CountElements(view).status());
  if (axis < 0 || axis >= view.rank()) return Status::Usage("row axis " + std::to_string(axis) + " out of range");
  const auto a = static_cast<size_t>(axis);
  for (int64_t row : rows) {
    if (row < 0 || row >= view.shape[a]) return Status::Usage("row " + std::to_string(row) + " out of range");
  }
  // Everything before the axis, one slice [1, rows, rest] at a time: slices lie in the order of the whole's rows.
  std::vector<int64_t> shape(view.shape.begin(), view.shape.end());
  std::vector<std::byte> piece;
  TensorView slice = view;
  for (size_t i = 0; i <= a; ++i) shape[i] = 1;
  slice.shape = shape;
  TensorView outer = view;  // axes before the row axis, with a last axis of one element for ForEachRun
  std::vector<int64_t> outer_shape(view.shape.begin(), view.shape.begin() + axis);
  std::vector<int64_t> outer_strides(view.strides.begin(), view.strides.begin() + axis);
  outer_shape.push_back(1);
  outer_strides.push_back(1);
  if (std::find(outer_shape.begin(), outer_shape.end(), 0) != outer_shape.end()) return {};
  outer.shape = outer_shape;
  outer.strides = outer_strides;
  Status status;
  const bool packed = BitsOf(view.dtype) == 4;
  uint64_t nibbles = 0;
  ForEachRun(outer, [&](int64_t at) {
    for (int64_t row : rows) {
      if (!status.ok()) return;
      slice.offset_elems = at + row * view.strides[a];
      status = CopyContiguous(slice, &piece);
      if (!status.ok()) return;
      try {
        if (!packed || nibbles % 2 == 0) {
          out->insert(out->end(), piece.begin(), piece.end());
        } else {  // a packed row of odd length before: shift by a nibble
          for (std::byte b : piece) {
            out->back() |= b << 4;
            out->push_back(b >> 4);
          }
        }
        if (packed) {
          nibbles += *CountElements(slice);
          out->resize((nibbles + 1) / 2);
        }
      } catch (const std::bad_alloc&) {
        status = Status::Environment("no memory for a copy of sampled rows");
      }
    }
  });
  return status;
}

// Keeps the n smallest of a hash of each row, which needs no state and gives the same rows whatever the order:
// bottom-n sampling.
std::vector<int64_t> SampleRows(std::span<const RowRun> runs, int64_t n, uint64_t seed) {
  std::vector<std::pair<uint64_t, int64_t>> keyed;
  for (const RowRun& run : runs) {
    if (run.padding) continue;
    const uint64_t salt = Mix64(seed + kGolden64) ^ Mix64(run.request + 0x632be59bd9b4e019u);
    for (int64_t i = 0; i < run.n_rows; ++i) {
      keyed.emplace_back(Mix64(salt + static_cast<uint64_t>(run.first_position + i) * kGolden64), run.first_row + i);
    }
  }
  const size_t keep = std::min(keyed.size(), static_cast<size_t>(std::max<int64_t>(n, 0)));
  std::partial_sort(keyed.begin(), keyed.begin() + static_cast<std::ptrdiff_t>(keep), keyed.end());
  std::vector<int64_t> rows;
  for (size_t i = 0; i < keep; ++i) rows.push_back(keyed[i].second);
  std::sort(rows.begin(), rows.end());
  return rows;
}

}  // namespace assay
