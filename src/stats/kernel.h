// What the driver (measure.cpp) asks of a kernel: add a stretch of contiguous, whole groups of one row to a segment.
//
// One implementation an instruction set (kernel_portable.cpp, kernel_avx2.cpp, kernel_avx512.cpp). Counts, extremes and
// digest are the same bits on all of them; sum, sum of squares and sketch agree within the bounds of docs/numerics.md.
// Groups that are cut (a shard's edge, a row's tail) go through AddPartialGroup, which all instruction sets share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "stats/hash.h"
#include "stats/measure.h"
#include "stats/stats.h"
#include "tensor/dtype.h"

namespace assay {

// Sums of a row, or of a head, within a segment. The sketch is the segment's folded to 16 buckets (bucket & 15); a row
// cell folds it once more to 4 (bucket & 3). Aligned, because vector loads and stores that straddle cache lines cost
// twice, and a head's cell sees three of each for every row.
struct alignas(64) CellSums {
  double sum_sq[8] = {};  // partial sums: their total counts
  double sketch[kHeadSketchSize] = {};
  uint64_t digest[8] = {};  // rows only: t = 0, salt of request 0; partial sums too
  uint32_t nonfinite = 0;
};

// Row-major number of local column c of the row at hand: (c / inner) * outer_stride + base + c % inner. It grows with
// c.
struct IndexMap {
  uint64_t base = 0;
  uint64_t inner = 1;
  uint64_t outer_stride = 0;

  ASSAY_KERNEL_INLINE uint64_t At(uint64_t c) const { return c / inner * outer_stride + base + c % inner; }
};

// n_groups whole groups of one row, contiguous at data (any alignment). Neither `group` nor `row_group` runs over 2^32.
struct RowPiece {
  const uint8_t* data = nullptr;
  DType dtype = DType::kInvalid;
  bool sketch = true;
  uint32_t n_groups = 0;
  uint32_t group = 0;      // low 32 bits of the first group's number
  Salt salt;               // of the request and the upper bits of the group number
  uint32_t row_group = 0;  // the same for t = 0 ...
  uint32_t row_salt = 0;   // ... and request 0: SaltOf(0, high).group
  uint64_t column = 0;     // local column of the first element
  uint32_t ahead = 0;      // bytes ahead of which to ask for data; 0: not, since the view ends before that
  IndexMap index;
  CellSums* row = nullptr;    // row cell or null
  CellSums* heads = nullptr;  // n_heads cells or null; every head covers head_groups whole groups, then comes the next
  uint32_t n_heads = 0;
  uint32_t head_groups = 0;
  uint32_t head = 0;       // head of the first group ...
  uint32_t head_left = 0;  // ... and how many groups of it are still to come, > 0
};

// Where head cells go: `left` more groups to Current(), then per_head to each of the next. No heads: left is beyond any
// piece.
struct HeadCursor {
  CellSums* heads;
  uint32_t n_heads;
  uint32_t per_head;
  uint32_t head;
  uint32_t left;

  ASSAY_KERNEL_INLINE explicit HeadCursor(const RowPiece& piece)
      : heads(piece.heads),
        n_heads(piece.n_heads),
        per_head(piece.head_groups),
        head(piece.head),
        left(piece.heads ? piece.head_left : ~0u) {}
  ASSAY_KERNEL_INLINE CellSums* Current() const { return heads ? heads + head : nullptr; }
  // n <= left groups are done.
  ASSAY_KERNEL_INLINE void Advance(uint32_t n) {
    left -= n;
    if (left != 0) return;
    left = per_head;
    head = head + 1 == n_heads ? 0 : head + 1;
  }
};

// Additions to one entry of the matrix before it is emptied.
inline constexpr uint32_t kFlushDepth = 128;

// Twice the slots: a kernel may keep blocks of even and of odd rotation apart.
inline constexpr int kMatrixFloats = 2 * kBlockGroups * kLanes;

// Running state of one segment, in the form that kernels like; Finish turns it into Stats. 64-byte aligned.
struct alignas(64) Accumulator {
  uint64_t count = 0;
  uint64_t nan = 0;
  uint64_t pos_inf = 0;
  uint64_t neg_inf = 0;
  uint64_t zero = 0;
  uint64_t subnormal = 0;
  // Over the finite elements; abs_max < 0: there was none yet.
  double min = __builtin_inf();
  double max = -__builtin_inf();
  double abs_max = -1;
  uint64_t abs_max_index = 0;
  double sum = 0;
  double sum_sq = 0;
  uint64_t digest = 0;
  alignas(64) double sketch[kSketchSize] = {};  // aligned as CellSums are
  // Scratch of kMatrixFloats floats, zero and 64-byte aligned, or null: a kernel may keep running sums of slots there,
  // in a layout of its own, and adds them to sketch in Flush.
  float* matrix = nullptr;
  uint32_t matrix_layout = 0;            // kernel's own; 0: nothing in the matrix
  uint32_t matrix_depth = 0;             // additions an entry may have seen since the last flush
  uint64_t matrix_block = ~uint64_t{0};  // last block that was added

  // A vector kernel's own, for elements of type kernel_dtype; Flush takes it into the fields above.
  DType kernel_dtype = DType::kInvalid;  // kInvalid: nothing there
  uint32_t kernel_largest = 0;           // the largest magnitude pattern so far, plus 1
  alignas(64) uint64_t kernel_lanes[6][8];

  // Finite elements between these two, which are elements themselves.
  ASSAY_KERNEL_INLINE void Between(double low, double high) {
    if (low < min) min = low;
    if (high > max) max = high;
  }
  // A finite element's magnitude and row-major number; ties go to the smaller number.
  ASSAY_KERNEL_INLINE void Largest(double magnitude, uint64_t index) {
    if (magnitude > abs_max || (magnitude == abs_max && index < abs_max_index)) {
      abs_max = magnitude;
      abs_max_index = index;
    }
  }
};

// Bits to value, out of line for the vector kernels.
double DecodeForKernel(uint64_t bits, DType dtype);

// How often each exponent field occurs.
struct FieldCounts {
  uint8_t low = 255;  // the fields that are neither 0 nor left out lie in [low, high]; low > high: there is none
  uint8_t high = 0;
  uint16_t zeros = 0;    // fields of 0
  uint16_t counts[256];  // of fields in [low, high] alone
};

// Fields to a vector of any instruction set.
inline constexpr size_t kFieldsAlign = 64;

struct Kernel {
  void (*add)(const RowPiece& piece, Accumulator* acc);
  void (*flush)(Accumulator* acc);  // brings what the kernel keeps apart (matrix, lanes) into acc; at the end
  // Counts n fields, a multiple of kFieldsAlign, at most 1024; those that are `left_out` do not count. fields is
  // aligned to kFieldsAlign.
  void (*count_fields)(const uint8_t* fields, size_t n, uint8_t left_out, FieldCounts* out);
};

// For every instruction set.
void CountFieldsPortable(const uint8_t* fields, size_t n, uint8_t left_out, FieldCounts* out);

extern const Kernel kPortableKernel;
#if defined(ASSAY_HAVE_AVX2)
extern const Kernel kAvx2Kernel;
#endif
#if defined(ASSAY_HAVE_AVX512)
extern const Kernel kAvx512Kernel;
#endif

// The part of a piece that vector code cannot take: any dtype, non-finite or huge values. Adds groups [first, first +
// n) of the piece to acc and to one row and one head cell (either may be null), in double.
void AddGroupsPortable(const RowPiece& piece, uint32_t first, uint32_t n, CellSums* row, CellSums* head,
                       Accumulator* acc);

// Extremes of elements whose patterns, as numbers of the type's width, have the signed maximum top, the unsigned
// maximum bottom and the smallest magnitude nearest. There is an element, all are finite; for float types of 32 bits or
// fewer.
void TakePatterns(uint32_t top, uint32_t bottom, uint32_t nearest, DType dtype, Accumulator* acc);

// What a vector kernel leaves out of groups [first, first + n): the elements whose magnitude pattern is `limit` or
// more, for a float type of 32 bits or fewer. Counts the non-finite ones (in acc and cells) and adds the finite ones to
// sums, extremes and sketch in double; count and digest are the caller's.
void AddLarge(const RowPiece& piece, uint32_t first, uint32_t n, uint32_t limit, Accumulator* acc);

// A group of which only lanes [lane, lane + n) are here: element k of `data` is lane + k. piece gives group, salts,
// column (of the first element here), index, row; heads are not touched. Lanes that are absent are zero bits in the
// digest, and pairs of words without any present lane add nothing.
void AddPartialGroup(const RowPiece& piece, int lane, int n, Accumulator* acc);

// Head cells alone, for heads that do not begin and end with a group: n elements from lane `lane` of piece.group on;
// the head of local column c is (c / inner) % n_heads. One element at a time.
void AddUnalignedHeads(const RowPiece& piece, int lane, uint64_t n, uint64_t inner);

}  // namespace assay
