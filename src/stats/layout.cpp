#include "stats/layout.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace assay {
namespace {

constexpr int64_t kShortRun = 64;  // contiguous elements below which gathering beats one kernel call a run

// Sizes and strides that fit together, and their product. Strides may be anything: a view is believed about its memory.
Status CheckView(const TensorView& view, int64_t* n_elements) {
  if (BitsOf(view.dtype) == 0) {
    return Status::Usage("measure: unknown dtype " + std::to_string(static_cast<int>(view.dtype)));
  }
  if (view.shape.size() != view.strides.size()) {
    return Status::Usage("measure: " + std::to_string(view.shape.size()) + " sizes but " +
                         std::to_string(view.strides.size()) + " strides");
  }
  int64_t total = 1;
  bool empty = false;
  for (int64_t size : view.shape) {
    if (size < 0) return Status::Usage("measure: negative size " + std::to_string(size));
    // An empty tensor may have any other extents: their product is not formed.
    if (size == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(total, size, &total)) {
      return Status::Usage("measure: more than 2^63 elements");
    }
  }
  *n_elements = empty ? 0 : total;
  if (*n_elements > 0 && view.data == nullptr) return Status::Usage("measure: null data of a tensor with elements");
  return {};
}

// The axes of the columns, without those of size 1; two neighbours become one where the outer one steps over exactly
// the inner one.
void MergeAxes(const TensorView& view, int row_axis, std::vector<Layout::Axis>* axes) {
  axes->clear();
  for (int a = 0; a < view.rank(); ++a) {
    if (a == row_axis || view.shape[a] == 1) continue;
    const Layout::Axis axis{view.shape[a], view.strides[a]};
    int64_t span = 0;
    if (!axes->empty() && !__builtin_mul_overflow(axis.size, axis.stride, &span) && axes->back().stride == span) {
      axes->back() = {axes->back().size * axis.size, axis.stride};
    } else {
      axes->push_back(axis);
    }
  }
}

// Gathers n elements of `bits` bits, `stride` apart from element `from` of data on, to element `at` of out.
void CopyElements(const uint8_t* data, int64_t from, int64_t stride, int64_t n, int bits, uint8_t* out, int64_t at) {
  if (bits == 4) {
    for (int64_t k = 0; k < n; ++k) {
      // Two elements to a byte, the even one in the low nibble; a gathered run may begin at either.
      const int64_t src = from + k * stride;
      const int nibble = data[src >> 1] >> ((src & 1) * 4) & 0xf;
      const int64_t dst = at + k;
      const int kept = (dst & 1) != 0 ? out[dst >> 1] & 0x0f : 0;
      out[dst >> 1] = static_cast<uint8_t>(kept | nibble << ((dst & 1) * 4));
    }
    return;
  }
  const int64_t bytes = bits / 8;
  if (stride == 1) {
    std::memcpy(out + at * bytes, data + from * bytes, static_cast<size_t>(n * bytes));
    return;
  }
  for (int64_t k = 0; k < n; ++k) {
    const uint8_t* src = data + (from + k * stride) * bytes;
    uint8_t* dst = out + (at + k) * bytes;
    // Sizes that the compiler knows become plain moves; a memcpy of a variable size would be a call for each element.
    switch (bytes) {
      case 1:
        *dst = *src;
        break;
      case 2:
        std::memcpy(dst, src, 2);
        break;
      case 4:
        std::memcpy(dst, src, 4);
        break;
      default:
        std::memcpy(dst, src, 8);
        break;
    }
  }
}

}  // namespace

Status MakeLayout(const TensorView& view, const LogicalLayout& logical, Layout* out) {
  int64_t n_elements = 0;
  ASSAY_RETURN_IF_ERROR(CheckView(view, &n_elements));
  const int rank = view.rank();
  if (logical.row_axis < -1 || logical.row_axis >= rank) {
    return Status::Usage("measure: row axis " + std::to_string(logical.row_axis) + " of a tensor of rank " +
                         std::to_string(rank));
  }
  if (logical.head_axis < -1 || logical.head_axis >= rank) {
    return Status::Usage("measure: head axis " + std::to_string(logical.head_axis) + " of a tensor of rank " +
                         std::to_string(rank));
  }
  // Without token rows axis 0 still gives t, if there is another one for the columns.
  const int row_axis = logical.row_axis >= 0 ? logical.row_axis : rank >= 2 ? 0 : -1;
  if (logical.head_axis >= 0 && logical.head_axis == row_axis) {
    return Status::Usage("measure: axis " + std::to_string(row_axis) + " is both the row and the head axis");
  }
  Layout& l = *out;
  l.data = view.data;
  l.dtype = view.dtype;
  l.offset_elems = view.offset_elems;
  l.n_rows = row_axis >= 0 ? view.shape[row_axis] : 1;
  l.row_stride = row_axis >= 0 ? view.strides[row_axis] : 0;
  l.first_t = logical.row_axis >= 0 ? 0 : logical.row_offset;
  l.cols = 1;
  int64_t after_row = 1;
  int64_t after_head = 1;
  for (int a = 0; a < rank; ++a) {
    if (a == row_axis) continue;
    l.cols *= view.shape[a];  // no overflow: CheckView, or a factor is 0
    if (a > row_axis) after_row *= view.shape[a];
    if (logical.head_axis >= 0 && a > logical.head_axis) after_head *= view.shape[a];
  }
  l.index_inner = static_cast<uint64_t>(std::max<int64_t>(after_row, 1));
  MergeAxes(view, row_axis, &l.axes);
  l.contiguous = l.axes.empty() || (l.axes.size() == 1 && l.axes[0].stride == 1);

  if (logical.full_cols < 0 || logical.col_offset < 0) {
    return Status::Usage("measure: negative full_cols or col_offset");
  }
  l.col_offset = logical.col_offset;
  l.full_cols = logical.full_cols > 0 ? logical.full_cols : l.cols;
  int64_t end = 0;
  if (__builtin_add_overflow(l.col_offset, l.cols, &end) || end > l.full_cols) {
    return Status::Usage("measure: columns " + std::to_string(l.col_offset) + " + " + std::to_string(l.cols) +
                         " do not lie in full_cols = " + std::to_string(l.full_cols));
  }
  l.pitch = (static_cast<uint64_t>(l.full_cols) + 7) / 8 * 8;
  // Cut groups: where the columns begin or end inside of a group, but for the end of the whole row.
  l.digest_split = n_elements > 0 && (l.col_offset % kLanes != 0 || (end % kLanes != 0 && end != l.full_cols));
  l.n_heads = logical.head_axis >= 0 ? view.shape[logical.head_axis] : 0;
  l.head_inner = std::max<int64_t>(after_head, 1);
  l.heads_aligned = l.head_inner % kLanes == 0 && l.col_offset % kLanes == 0;
  return {};
}

const uint8_t* Fetch(const Layout& layout, int64_t row, int64_t col, int64_t want, Stage* stage, int64_t* n) {
  const uint8_t* data = static_cast<const uint8_t*>(layout.data);
  const int bits = BitsOf(layout.dtype);
  const int64_t row_offset = layout.offset_elems + row * layout.row_stride;
  // Kernels read e2m1 from a byte's low nibble; an odd start has to be shifted by copying.
  if (layout.contiguous && (bits != 4 || (row_offset + col) % 2 == 0)) {
    *n = want;
    return data + (row_offset + col) * bits / 8;
  }
  const size_t n_axes = layout.axes.size();
  const Layout::Axis inner = n_axes > 0 ? layout.axes[n_axes - 1] : Layout::Axis{1, 1};

  // Offset of column c, and how many columns follow it along the innermost axis. The outermost axis needs no division.
  auto locate = [&](int64_t c, int64_t* along) {
    int64_t at = row_offset;
    *along = inner.size;
    for (size_t a = n_axes; a-- > 0;) {
      const Layout::Axis& axis = layout.axes[a];
      const int64_t outer = a > 0 ? c / axis.size : 0;
      const int64_t place = c - outer * axis.size;
      at += place * axis.stride;
      if (a + 1 == n_axes) *along -= place;
      c = outer;
    }
    return at;
  };

  int64_t along = 0;
  int64_t at = locate(col, &along);
  // In place where the innermost run is long enough; otherwise gathered, many runs to one kernel call.
  if (inner.stride == 1 && (bits != 4 || at % 2 == 0)) {
    if (along >= want) {
      *n = want;
      return data + at * bits / 8;
    }
    // Whole groups alone: the rest of the run joins the next in the stage.
    if (inner.size >= kShortRun && along >= kLanes) {
      *n = along / kLanes * kLanes;
      return data + at * bits / 8;
    }
  }
  const int64_t take = std::min(want, kStageElements);
  // Whole groups again, so that the caller's next piece begins with a group.
  *n = take < kLanes ? take : take / kLanes * kLanes;
  for (int64_t done = 0; done < *n;) {
    const int64_t run = std::min(along, *n - done);
    CopyElements(data, at, inner.stride, run, bits, stage->bytes, done);
    done += run;
    if (done < *n) at = locate(col + done, &along);
  }
  return stage->bytes;
}

}  // namespace assay
