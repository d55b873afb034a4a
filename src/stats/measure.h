// One pass over a strided view: counts, extremes, moments, exponent histogram, digest, sketch, row and head grids.
//
// Logical index of the element at row t (token position) and column c: i = t * pitch + col_offset + c, where pitch is
// full_cols rounded up to a multiple of 8 and c runs row-major over all axes but the row axis. It never depends on
// where the element lies in a buffer, so chunks, shards and requests add up (docs/numerics.md).
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "stats/stats.h"
#include "tensor/view.h"

namespace assay {

// n_rows consecutive rows of the tensor, of one request, at consecutive positions.
struct RowRun {
  uint64_t request = 0;
  int64_t first_row = 0;
  int64_t n_rows = 0;
  int64_t first_position = 0;
  bool padding = false;
};

struct LogicalLayout {
  // Axis of the token rows, or -1: no token rows. Without token rows the tensor is one segment (request 0); for rank
  // >= 2 axis 0 still gives t (plus row_offset), for rank 1 all elements are columns of t = row_offset.
  int row_axis = -1;
  std::span<const RowRun> runs;  // with a row axis: which rows to measure; rows in no run are not measured
  int64_t full_cols = 0;         // logical columns of the whole row, all shards together; 0: the view's own
  int64_t col_offset = 0;        // first logical column of this shard
  int64_t row_offset = 0;        // without token rows: logical row of the view's row 0
  int head_axis = -1;            // axis of the heads, for the head grid; -1: none
  // Positions to a segment, > 0: finer segments localise better, and each is a record in the trace.
  int64_t segment_rows = 64;
};

// Numbers are part of no format; names are values of ASSAY_ISA.
enum class Isa : uint8_t { kAuto = 0, kPortable = 1, kAvx2 = 2, kAvx512 = 3 };

struct MeasureOptions {
  Isa isa = Isa::kAuto;   // kAuto: the best of the machine, or what ASSAY_ISA=portable|avx2|avx512 names
  int threads = 1;        // > 1: large tensors are cut between threads; the counts, extremes and digest do not change
  bool row_grid = true;   // needs a row axis
  bool head_grid = true;  // needs a head axis
  bool sketch = true;     // false: counts, extremes and moments only (level "stats" without sketch)
};

// Errors: kUsage for a view or layout that does not fit together (axis out of range, run outside the tensor, unknown
// dtype, null data with elements); *out is empty then. Reads every element of every run once; writes nothing but *out,
// whose memory is used again: give the same one for many small tensors. Thread-safe.
Status Measure(const TensorView& view, const LogicalLayout& layout, const MeasureOptions& options,
               std::vector<Segment>* out);

// The instruction set that kAuto resolves to in this process, and whether one is compiled in and usable here.
Isa ActiveIsa();
bool IsaUsable(Isa isa);
const char* NameOf(Isa isa);
// kUsage unless text, a value of ASSAY_ISA, is empty or names an instruction set that is usable here. Measure itself
// takes the best there is in place of a wrong one: it has nobody to tell.
Status CheckIsaName(std::string_view text);

}  // namespace assay
