// The driver: cuts the view into segments, rows and contiguous pieces, and hands those to a kernel.
#include "stats/measure.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <span>
#include <string>

#include "stats/float_environment.h"
#include "stats/histogram.h"
#include "stats/kernel.h"
#include "stats/layout.h"
#include "stats/sketch_math.h"
#include "tensor/decode.h"

namespace assay {
namespace {

// Elements of a segment from which on clearing and folding the kernels' matrix pays.
// The matrix is 16 KiB, all of which is folded at the end.
constexpr int64_t kMatrixElements = 4096;

// Bytes ahead of which kernels ask for data. Reaching past the view's end is harmless, but where it is all that would
// be reached, the host's caches lose for nothing. Tried: 2 to 64 KiB, other levels of the cache and two distances at
// once; without, data from memory arrive at a third of the rate.
constexpr uint32_t kAhead = 8192;

// Heads whose sums need no memory of their own: of most shards.
constexpr size_t kFewHeads = 16;

// Scratch of one thread: the kernels' matrix, all zero between segments (a flush leaves it so), and the staging buffer.
struct Scratch {
  alignas(64) float matrix[kMatrixFloats];
  bool matrix_is_zero = false;
  Stage stage;
  std::vector<CellSums> many_heads;
  alignas(CellSums) unsigned char few_heads[kFewHeads * sizeof(CellSums)];

  // n cells, all zero.
  std::span<CellSums> ZeroHeads(size_t n) {
    if (n > kFewHeads) {
      many_heads.assign(n, CellSums());
      return many_heads;
    }
    CellSums* cells = reinterpret_cast<CellSums*>(few_heads);
    for (size_t h = 0; h < n; ++h) new (cells + h) CellSums();
    return {cells, n};
  }

  float* ZeroMatrix() {
    if (!matrix_is_zero) std::fill(matrix, matrix + kMatrixFloats, 0.0f);
    matrix_is_zero = true;
    return matrix;
  }
};

// isa is usable here: Measure has checked that.
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
  uint32_t ahead;
  CellSums* heads;  // n_heads cells or null
  Stage* stage;
  Accumulator* acc;
};

// Largest number of groups, at most n, from group number `group` on that leaves its upper 32 bits alone.
// The upper half is part of the salt (hash.h), and one piece has one salt.
int64_t GroupsUntilWrap(uint64_t group, int64_t n) {
  const uint64_t left = (uint64_t{1} << 32) - (group & 0xffffffffu);
  return static_cast<int64_t>(std::min<uint64_t>(static_cast<uint64_t>(n), left));
}

// Adds local columns [col, end) of one view row, at logical row t.
void MeasureRow(const RowTask& task, int64_t row, uint64_t t, int64_t col, int64_t end, CellSums* cell) {
  const Layout& layout = *task.layout;
  RowPiece piece;
  piece.dtype = layout.dtype;
  piece.sketch = task.sketch;
  piece.ahead = task.ahead;
  piece.index = layout.IndexOfRow(row);
  piece.row = cell;
  piece.n_heads = static_cast<uint32_t>(layout.n_heads);
  const bool unaligned_heads = task.heads != nullptr && !layout.heads_aligned;
  while (col < end) {
    const uint64_t row_index = static_cast<uint64_t>(layout.col_offset + col);
    const uint64_t index = t * layout.pitch + row_index;
    const int lane = static_cast<int>(index % kLanes);
    // As much as one piece can hold: to the end, to where a group number's upper half changes, or the rest of a group.
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
      const uint64_t run = piece.column / inner;  // of one head's columns; more than heads where an axis is before them
      piece.heads = task.heads;
      piece.head_groups = static_cast<uint32_t>(inner / kLanes);
      piece.head = static_cast<uint32_t>(run < piece.n_heads ? run : run % piece.n_heads);
      piece.head_left = static_cast<uint32_t>((inner - (piece.column - run * inner)) / kLanes);
    }
    // Cut groups take the scalar way on every instruction set, so that all give the same bits.
    if (n < kLanes) {
      AddPartialGroup(piece, lane, static_cast<int>(n), task.acc);
    } else {
      task.kernel->add(piece, task.acc);
    }
    // In a second pass over the piece: only odd head sizes come here.
    if (unaligned_heads) {
      piece.heads = task.heads;
      AddUnalignedHeads(piece, lane, static_cast<uint64_t>(n), static_cast<uint64_t>(layout.head_inner));
      piece.heads = nullptr;
    }
    col += n;
  }
}

// Extremes of nothing are NaN.
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

// Kernels keep partial sums, lane by lane; here they become one number. A row's 16 buckets fold to 4.
// The order of the sums is fixed (lane 0 first): the same instruction set gives the same bits each time.
RowCell FinishRow(const CellSums& cell) {
  RowCell out;
  for (double part : cell.sum_sq) out.sum_sq += part;
  for (uint64_t part : cell.digest) out.digest += part;
  out.nonfinite = cell.nonfinite;
  for (int k = 0; k < kHeadSketchSize; ++k) out.sketch[k % kRowSketchSize] += cell.sketch[k];
  return out;
}

// Into *out, whatever it held.
void FinishHead(const CellSums& cell, HeadCell* out) {
  double sum_sq = 0;
  for (double part : cell.sum_sq) sum_sq += part;
  out->sum_sq = sum_sq;
  out->nonfinite = cell.nonfinite;
  std::copy(cell.sketch, cell.sketch + kHeadSketchSize, out->sketch.begin());
}

// A rectangle of one segment: view rows [first_row, first_row + n_rows), which are logical rows first_t, first_t + 1,
// ..., and local columns [col, end).
struct Part {
  int64_t first_row;
  int64_t n_rows;
  int64_t first_t;
  int64_t col;
  int64_t end;
};

// What is the same for all parts of a call.
struct Call {
  const Layout* layout;
  const Kernel* kernel;
  const MeasureOptions* options;
  bool row_grid;
  uint32_t ahead;
};

// Measures a part into *out, whose request is set: stats but for the histogram, rows (n_rows of them) and heads.
void MeasurePart(const Call& call, const Part& part, Scratch* scratch, Segment* out) {
  const Layout& layout = *call.layout;
  Accumulator acc;
  const int64_t cols = part.end - part.col;
  // Written as a division, since the product could overflow.
  if (cols > 0 && part.n_rows >= (kMatrixElements + cols - 1) / cols) acc.matrix = scratch->ZeroMatrix();
  const std::span<CellSums> heads =
      scratch->ZeroHeads(call.options->head_grid ? static_cast<size_t>(layout.n_heads) : 0);
  RowTask task{&layout,         call.kernel,
               out->request,    call.options->sketch,
               call.ahead,      heads.empty() ? nullptr : heads.data(),
               &scratch->stage, &acc};
  out->rows.resize(call.row_grid ? static_cast<size_t>(part.n_rows) : 0);
  // One row after the other, so that memory is read in its order; heads add up over the rows, a row's cell is done with
  // its row.
  for (int64_t k = 0; k < part.n_rows; ++k) {
    CellSums cell;
    MeasureRow(task, part.first_row + k, static_cast<uint64_t>(part.first_t + k), part.col, part.end,
               call.row_grid ? &cell : nullptr);
    if (call.row_grid) out->rows[static_cast<size_t>(k)] = FinishRow(cell);
  }
  call.kernel->flush(&acc);
  Finish(acc, layout.digest_split && part.n_rows > 0, &out->stats);
  out->heads.resize(heads.size());
  for (size_t h = 0; h < heads.size(); ++h) FinishHead(heads[h], &out->heads[h]);
}

// Rounded down, also for negative positions; b > 0.
int64_t FloorDivide(int64_t a, int64_t b) { return a / b - (a % b < 0); }

// One segment a stretch of positions between multiples of segment_rows. Checks the runs too: they come from the host,
// and kernels read what they name. Segments that *out has are used again with the memory that they hold; all but their
// statistics and cells is set.
Status PlanSegments(const Layout& layout, const LogicalLayout& logical, std::vector<Segment>* out) {
  if (logical.segment_rows <= 0) {
    return Status::Usage("measure: segment_rows must be positive, not " + std::to_string(logical.segment_rows));
  }
  out->reserve(logical.runs.size());  // a segment is large to move
  size_t n = 0;
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
      if (n == out->size()) out->emplace_back();
      Segment& segment = (*out)[n++];
      segment.request = run.request;
      segment.first_position = position;
      segment.n_rows = std::min(run.n_rows - done, next - position);
      segment.first_row = run.first_row + done;
      segment.padding = run.padding;
      done += segment.n_rows;
    }
  }
  out->resize(n);
  return {};
}

// --- Threads ---------------------------------------------------------------------------------------------------------

// Elements of a part below which another thread does not pay.
constexpr int64_t kPartElements = int64_t{1} << 17;

// A part of a segment, and what one thread made of it.
struct PartResult {
  size_t segment;
  Part part;
  Segment result;
};

// Cuts the segments' parts, at rows or, in one long row, at groups, into pieces of about `target` elements.
std::vector<PartResult> CutParts(const Layout& layout, const std::vector<Part>& wholes, int64_t target) {
  std::vector<PartResult> out;
  for (size_t s = 0; s < wholes.size(); ++s) {
    const Part& whole = wholes[s];
    if (whole.n_rows > 1) {
      const int64_t step = std::max<int64_t>(1, target / std::max<int64_t>(1, layout.cols));
      for (int64_t done = 0; done < whole.n_rows; done += step) {
        const int64_t n = std::min(step, whole.n_rows - done);
        out.push_back({s, {whole.first_row + done, n, whole.first_t + done, whole.col, whole.end}, {}});
      }
      continue;
    }
    for (int64_t col = whole.col; col < whole.end;) {
      // Ends of pieces are ends of groups, or digests would not add up.
      const int64_t left = whole.end - col;
      // Pulled back to the last whole group at or before the target.
      const int64_t end = left <= target ? whole.end : col + target - (layout.col_offset + col + target) % kLanes;
      out.push_back({s, {whole.first_row, whole.n_rows, whole.first_t, col, end}, {}});
      col = end;
    }
  }
  return out;
}

// Joins a part to its segment. Rows of a segment that is cut between rows are whole in one part; of one long row that
// is cut between groups, every part has a share.
void AddPart(const PartResult& from, const Part& whole, Segment* to) {
  MergeStats(from.result.stats, &to->stats);
  const size_t first = static_cast<size_t>(from.part.first_row - whole.first_row);
  for (size_t r = 0; r < from.result.rows.size(); ++r) {
    const RowCell& cell = from.result.rows[r];
    RowCell& sum = to->rows[first + r];
    sum.sum_sq += cell.sum_sq;
    sum.digest += cell.digest;
    sum.nonfinite += cell.nonfinite;
    AddSketch(cell.sketch, sum.sketch);
  }
  for (size_t h = 0; h < from.result.heads.size(); ++h) {
    to->heads[h].sum_sq += from.result.heads[h].sum_sq;
    to->heads[h].nonfinite += from.result.heads[h].nonfinite;
    AddSketch(from.result.heads[h].sketch, to->heads[h].sketch);
  }
}

// What the threads share. They take parts from a counter, so that none waits for a slower one.
struct Crew {
  const Call* call;
  std::vector<PartResult>* parts;
  std::atomic<size_t> next{0};
};

// A thread's life. Scratch and floating-point environment are its own.
void* Work(void* argument) {
  Crew* crew = static_cast<Crew*>(argument);
  const FloatEnvironment environment;
  Scratch scratch;
  for (;;) {
    const size_t k = crew->next.fetch_add(1, std::memory_order_relaxed);
    if (k >= crew->parts->size()) return nullptr;
    PartResult& part = (*crew->parts)[k];
    MeasurePart(*crew->call, part.part, &scratch, &part.result);
  }
}

// Parts are cut by their number alone and added in their order: a result depends on options.threads, never on timing.
void MeasureWithThreads(const Call& call, const std::vector<Part>& wholes, int64_t n_elements,
                        std::vector<Segment>* segments) {
  const int threads = std::min(call.options->threads, 256);
  // Four parts to a thread: a slow core then holds the others up by a fraction of a part's time.
  std::vector<PartResult> parts =
      CutParts(*call.layout, wholes, std::max(kPartElements, n_elements / (4 * int64_t{threads})));
  for (PartResult& part : parts) part.result.request = (*segments)[part.segment].request;
  Crew crew{&call, &parts};
  std::vector<pthread_t> others;
  for (int k = 1; k < threads && static_cast<size_t>(k) < parts.size(); ++k) {
    pthread_t thread;
    // pthreads rather than std::thread, which throws where there are no more threads.
    if (pthread_create(&thread, nullptr, Work, &crew) != 0) break;  // no more to be had: fewer do it too
    others.push_back(thread);
  }
  Work(&crew);
  for (pthread_t thread : others) pthread_join(thread, nullptr);
  for (size_t s = 0; s < segments->size(); ++s) {
    Segment& segment = (*segments)[s];
    segment.stats = Stats();
    segment.rows.assign(call.row_grid ? static_cast<size_t>(wholes[s].n_rows) : 0, RowCell());
    segment.heads.assign(call.options->head_grid ? static_cast<size_t>(call.layout->n_heads) : 0, HeadCell());
  }
  for (const PartResult& part : parts) AddPart(part, wholes[part.segment], &(*segments)[part.segment]);
}

}  // namespace

Status Measure(const TensorView& view, const LogicalLayout& logical, const MeasureOptions& options,
               std::vector<Segment>* out) {
  if (!IsaUsable(options.isa)) {
    out->clear();
    return Status::Usage(std::string("measure: instruction set ") + NameOf(options.isa) + " is not usable here");
  }
  Layout layout;
  Status plan = MakeLayout(view, logical, &layout);
  const bool has_rows = logical.row_axis >= 0;
  if (plan.ok() && has_rows) plan = PlanSegments(layout, logical, out);
  if (!plan.ok()) {
    out->clear();
    return plan;
  }
  std::vector<Segment>& segments = *out;
  if (!has_rows) segments.assign(1, Segment());
  const auto whole = [&](const Segment& s) -> Part {
    if (!has_rows) return {0, layout.n_rows, layout.first_t, 0, layout.cols};
    return {s.first_row, s.n_rows, s.first_position, 0, layout.cols};
  };
  const Kernel& kernel = *KernelOf(options.isa);
  const FloatEnvironment environment;
  Scratch scratch;
  int64_t n_elements = 0;
  for (const Segment& s : segments) n_elements += whole(s).n_rows * layout.cols;
  const bool far = n_elements > 8 * int64_t{kAhead} / std::max(1, BitsOf(layout.dtype));
  const Call call{&layout, &kernel, &options, has_rows && options.row_grid, far ? kAhead : 0};
  // With fewer elements than two parts, one thread would do all of it anyway.
  if (options.threads > 1 && n_elements >= 2 * kPartElements) {
    std::vector<Part> wholes;
    wholes.reserve(segments.size());
    for (const Segment& s : segments) wholes.push_back(whole(s));
    MeasureWithThreads(call, wholes, n_elements, &segments);
  } else {
    for (Segment& s : segments) MeasurePart(call, whole(s), &scratch, &s);
  }
  // Of whole segments: a sample does not add up from those of parts.
  for (Segment& s : segments) {
    const Part part = whole(s);
    SampleHistogram(layout, kernel, part.first_row, part.n_rows, &s.stats);
  }
  return {};
}

}  // namespace assay
