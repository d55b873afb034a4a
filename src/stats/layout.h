// A view and its logical layout, checked and brought into the form that Measure walks: rows of columns.
//
// Columns run row-major over all axes but the row axis. Fetch hands out contiguous stretches of a row: in place where
// memory is contiguous, else gathered into a buffer, so that kernels never see a stride.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "stats/kernel.h"
#include "stats/measure.h"

namespace assay {

// Borrows the view's memory and must not outlive it. All extents, offsets and strides are in elements.
struct Layout {
  const void* data = nullptr;
  DType dtype = DType::kInvalid;
  int64_t offset_elems = 0;

  int64_t n_rows = 1;      // of the view
  int64_t row_stride = 0;  // elements
  int64_t cols = 1;        // local columns
  int64_t col_offset = 0;
  int64_t full_cols = 1;
  uint64_t pitch = 8;          // full_cols rounded up to a multiple of 8
  int64_t first_t = 0;         // without token rows: t of row 0
  uint64_t index_inner = 1;    // columns after the row axis: see IndexMap
  int64_t n_heads = 0;         // 0: no head axis
  int64_t head_inner = 1;      // columns of one head that lie together
  bool heads_aligned = false;  // every head begins and ends with a group
  bool digest_split = false;

  struct Axis {
    int64_t size;
    int64_t stride;  // elements
  };
  bool contiguous = false;  // all columns of a row lie side by side
  std::vector<Axis> axes;   // of the columns, outermost first, neighbours merged where memory allows; sizes > 1

  // Row-major numbers count over the view as it is, row axis in its place: axes before it advance by a whole block of
  // rows (outer_stride), axes behind it by one.
  IndexMap IndexOfRow(int64_t row) const {
    const uint64_t inner = index_inner;
    const bool row_major = inner >= static_cast<uint64_t>(cols);
    return {static_cast<uint64_t>(row) * inner, inner, row_major ? 0 : static_cast<uint64_t>(n_rows) * inner};
  }
};

// Errors: kUsage, naming what does not fit.
Status MakeLayout(const TensorView& view, const LogicalLayout& logical, Layout* out);

inline constexpr int64_t kStageElements = 2048;

// Scratch of Fetch: kStageElements of the widest type.
struct Stage {
  alignas(64) uint8_t bytes[kStageElements * 8];
};

// Elements [col, col + *n) of a row, contiguous from the returned pointer on (for e2m1 at its low nibble), where
// 1 <= *n <= want. *n is a multiple of 8 whenever want is at least 8. The pointer lies in the view or in *stage.
const uint8_t* Fetch(const Layout& layout, int64_t row, int64_t col, int64_t want, Stage* stage, int64_t* n);

}  // namespace assay
