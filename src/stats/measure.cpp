// The driver: cuts the view into segments, rows and contiguous pieces, and hands those to a kernel.
#include "stats/measure.h"

#include <algorithm>
#include <string>

#include "stats/float_environment.h"
#include "stats/histogram.h"
#include "stats/kernel.h"
#include "stats/layout.h"
#include "tensor/decode.h"

namespace assay {
namespace {

// Elements of a segment from which on clearing and folding the kernels' matrix pays.
constexpr int64_t kMatrixElements = 4096;

// Scratch of one thread: the kernels' matrix, all zero between segments (a flush leaves it so), and the staging buffer.
struct Scratch {
  alignas(64) float matrix[kMatrixFloats];
  bool matrix_is_zero = false;
  Stage stage;

  float* ZeroMatrix() {
    if (!matrix_is_zero) std::fill(matrix, matrix + kMatrixFloats, 0.0f);
    matrix_is_zero = true;
    return matrix;
  }
};

const Kernel* KernelOf(Isa isa) {
  switch (isa == Isa::kAuto ? ActiveIsa() : isa) {
#if defined(ASSAY_HAVE_AVX512)
    case Isa::kAvx512:
      return &kAvx512Kernel;
#endif
#if defined(ASSAY_HAVE_AVX2)
    case Isa::kAvx2:
      return &kAvx2Kernel;
#endif
    default:
      return &kPortableKernel;
  }
}

// What MeasureRow needs beyond the row: the same for all rows of a segment.
struct RowTask {
  const Layout* layout;
  const Kernel* kernel;
  uint64_t request;
  bool sketch;
  Cell* heads;  // n_heads cells or null
  Stage* stage;
  Accumulator* acc;
};

// Largest number of groups, at most n, from group number `group` on that leaves its upper 32 bits alone.
int64_t GroupsUntilWrap(uint64_t group, int64_t n) {
  const uint64_t left = (uint64_t{1} << 32) - (group & 0xffffffffu);
  return static_cast<int64_t>(std::min<uint64_t>(static_cast<uint64_t>(n), left));
}

// Adds local columns [col, end) of one view row, at logical row t.
void MeasureRow(const RowTask& task, int64_t row, uint64_t t, int64_t col, int64_t end, Cell* cell) {
  const Layout& layout = *task.layout;
  Piece piece;
  piece.dtype = layout.dtype;
  piece.sketch = task.sketch;
  piece.index = layout.IndexOfRow(row);
  piece.row = cell;
  piece.n_heads = static_cast<uint32_t>(layout.n_heads);
  const bool unaligned_heads = task.heads != nullptr && !layout.heads_aligned;
  while (col < end) {
    const uint64_t row_index = static_cast<uint64_t>(layout.col_offset + col);
    const uint64_t index = t * layout.pitch + row_index;
    const int lane = static_cast<int>(index % kLanes);
    int64_t want = end - col;
    if (lane != 0 || want < kLanes) {
      want = std::min<int64_t>(want, kLanes - lane);  // a cut group
    } else {
      want = GroupsUntilWrap(index / kLanes, want / kLanes) * kLanes;
      want = GroupsUntilWrap(row_index / kLanes, want / kLanes) * kLanes;
      want = std::min<int64_t>(want, int64_t{1} << 34);  // n_groups is 32 bits
    }
    int64_t n = 0;
    piece.data = Fetch(layout, row, col, want, task.stage, &n);
    piece.n_groups = static_cast<uint32_t>(n / kLanes);
    piece.group = static_cast<uint32_t>(index / kLanes);
    piece.salt = SaltOf(task.request, static_cast<uint32_t>(index / kLanes >> 32));
    piece.row_group = static_cast<uint32_t>(row_index / kLanes);
    piece.row_salt = SaltOf(0, static_cast<uint32_t>(row_index / kLanes >> 32)).group;
    piece.column = static_cast<uint64_t>(col);
    if (task.heads != nullptr && layout.heads_aligned) {
      const uint64_t inner = static_cast<uint64_t>(layout.head_inner);
      piece.heads = task.heads;
      piece.head_groups = static_cast<uint32_t>(inner / kLanes);
      piece.head = static_cast<uint32_t>(piece.column / inner % piece.n_heads);
      piece.head_left = static_cast<uint32_t>((inner - piece.column % inner) / kLanes);
    }
    if (n < kLanes) {
      AddPartialGroup(piece, lane, static_cast<int>(n), task.acc);
    } else {
      task.kernel->add(piece, task.acc);
    }
    if (unaligned_heads) {
      piece.heads = task.heads;
      AddUnalignedHeads(piece, lane, static_cast<uint64_t>(n), static_cast<uint64_t>(layout.head_inner));
      piece.heads = nullptr;
    }
    col += n;
  }
}

void Finish(const Accumulator& acc, bool digest_split, Stats* stats) {
  stats->count = acc.count;
  stats->nan = acc.nan;
  stats->pos_inf = acc.pos_inf;
  stats->neg_inf = acc.neg_inf;
  stats->zero = acc.zero;
  stats->subnormal = acc.subnormal;
  const bool any_finite = acc.abs_max >= 0;
  stats->min = any_finite ? acc.min : kDecodedNaN;
  stats->max = any_finite ? acc.max : kDecodedNaN;
  stats->abs_max = any_finite ? acc.abs_max : kDecodedNaN;
  stats->abs_max_index = acc.abs_max_index;
  stats->sum = acc.sum;
  stats->sum_sq = acc.sum_sq;
  stats->digest = acc.digest;
  stats->digest_split = digest_split;
  std::copy(acc.sketch, acc.sketch + kSketchSize, stats->sketch.begin());
}

void FinishRow(const Cell& cell, RowCell* out) {
  out->sum_sq = cell.sum_sq;
  out->digest = cell.digest;
  out->nonfinite = cell.nonfinite;
  for (int k = 0; k < kHeadSketchSize; ++k) out->sketch[k % kRowSketchSize] += cell.sketch[k];
}

void FinishHead(const Cell& cell, HeadCell* out) {
  out->sum_sq = cell.sum_sq;
  out->nonfinite = cell.nonfinite;
  std::copy(cell.sketch, cell.sketch + kHeadSketchSize, out->sketch.begin());
}

// Measures view rows [first_row, first_row + n_rows), which are logical rows first_t, first_t + 1, ..., into *segment.
void MeasureSegment(const Layout& layout, const Kernel& kernel, const MeasureOptions& options, int64_t first_row,
                    int64_t n_rows, int64_t first_t, bool row_grid, Scratch* scratch, Segment* segment) {
  Accumulator acc;
  if (layout.cols > 0 && n_rows >= (kMatrixElements + layout.cols - 1) / layout.cols) {
    acc.matrix = scratch->ZeroMatrix();
  }
  std::vector<Cell> heads(options.head_grid ? static_cast<size_t>(layout.n_heads) : 0);
  RowTask task{&layout,         &kernel, segment->request, options.sketch, heads.empty() ? nullptr : heads.data(),
               &scratch->stage, &acc};
  if (row_grid) segment->rows.resize(static_cast<size_t>(n_rows));
  for (int64_t k = 0; k < n_rows; ++k) {
    Cell cell;
    MeasureRow(task, first_row + k, static_cast<uint64_t>(first_t + k), 0, layout.cols, row_grid ? &cell : nullptr);
    if (row_grid) FinishRow(cell, &segment->rows[static_cast<size_t>(k)]);
  }
  kernel.flush(&acc);
  Finish(acc, layout.digest_split && n_rows > 0, &segment->stats);
  segment->heads.resize(heads.size());
  for (size_t h = 0; h < heads.size(); ++h) FinishHead(heads[h], &segment->heads[h]);
  SampleHistogram(layout, first_row, n_rows, &segment->stats);
}

int64_t FloorDivide(int64_t a, int64_t b) { return a / b - (a % b < 0); }

// One segment a stretch of positions between multiples of segment_rows.
Status PlanSegments(const Layout& layout, const LogicalLayout& logical, std::vector<Segment>* out) {
  if (logical.segment_rows <= 0) {
    return Status::Usage("measure: segment_rows must be positive, not " + std::to_string(logical.segment_rows));
  }
  for (const RowRun& run : logical.runs) {
    if (run.first_row < 0 || run.n_rows < 0 || run.n_rows > layout.n_rows ||
        run.first_row > layout.n_rows - run.n_rows) {
      return Status::Usage("measure: run of rows " + std::to_string(run.first_row) + " + " +
                           std::to_string(run.n_rows) + " in a tensor of " + std::to_string(layout.n_rows) + " rows");
    }
    int64_t last = 0;
    if (__builtin_add_overflow(run.first_position, run.n_rows, &last) || last > INT64_MAX - logical.segment_rows) {
      return Status::Usage("measure: position " + std::to_string(run.first_position) + " is out of range");
    }
    for (int64_t done = 0; done < run.n_rows;) {
      const int64_t position = run.first_position + done;
      const int64_t next = (FloorDivide(position, logical.segment_rows) + 1) * logical.segment_rows;
      Segment segment;
      segment.request = run.request;
      segment.first_position = position;
      segment.n_rows = std::min(run.n_rows - done, next - position);
      segment.first_row = run.first_row + done;
      segment.padding = run.padding;
      done += segment.n_rows;
      out->push_back(std::move(segment));
    }
  }
  return {};
}

}  // namespace

Status Measure(const TensorView& view, const LogicalLayout& logical, const MeasureOptions& options,
               std::vector<Segment>* out) {
  out->clear();
  if (!IsaUsable(options.isa)) {
    return Status::Usage(std::string("measure: instruction set ") + NameOf(options.isa) + " is not usable here");
  }
  Layout layout;
  ASSAY_RETURN_IF_ERROR(MakeLayout(view, logical, &layout));
  const Kernel& kernel = *KernelOf(options.isa);
  const FloatEnvironment environment;
  Scratch scratch;
  if (logical.row_axis < 0) {
    out->emplace_back();
    MeasureSegment(layout, kernel, options, 0, layout.n_rows, layout.first_t, false, &scratch, &out->back());
    return {};
  }
  std::vector<Segment> segments;
  ASSAY_RETURN_IF_ERROR(PlanSegments(layout, logical, &segments));
  for (Segment& segment : segments) {
    MeasureSegment(layout, kernel, options, segment.first_row, segment.n_rows, segment.first_position, options.row_grid,
                   &scratch, &segment);
  }
  *out = std::move(segments);
  return {};
}

}  // namespace assay
