// AVX-512 kernel (F, BW, DQ, VL): one fused loop over eight groups at a time.
//
// A piece is cut into chunks of a few blocks (2048 elements and one slot rotation each). In the loop
// (kernel_avx512_steps.h) the groups of 64 bytes are brought into slot order by one permutation (f32: not even that);
// from there the digest multiplies word pairs, the elements widen to float, add to float sums that go on in double
// after a few additions, and to the sketch: a sign by XOR, one float addition. The sketch's running sums live in a
// matrix of 256 slots by 8 lanes. Elements at or above a limit (the non-finite ones, and those so large that float sums
// could overflow) are replaced by 0 on the way: the maximum of eight groups' patterns tells whether there are any, such
// groups go through guarded steps, and another loop takes those few elements in double. Zeros and subnormals are
// counted by another loop too, and only if a running minimum says that there are any: activations rarely hold one.
//
// What bounds it on Zen 5 is the number of vector operations, at about three a cycle, and for f32 with cells also room
// in the L1 cache: f32 from memory gained nothing by fewer operations before its tables were packed. Tried: separate
// loops for extremes, digest and values, and a scan ahead of the chunk (from memory half the rate of the fused loop:
// memory idles while the others compute); hashes of a row kept for the next rows (bf16 gains 2 %, small tensors lose);
// packed tables for the other types, which are bound by operations (3 to 8 % slower); hashes laid out so that shuffles
// inside of 128 bits spread them, chunks of 8 or 16 blocks, two chains of residues (1 % or less).
#if defined(ASSAY_HAVE_AVX512)

#include <immintrin.h>

#include <new>

#include "stats/kernel.h"
#include "stats/kernel_avx512_formats.h"
#include "stats/kernel_avx512_sketch.h"
#include "stats/kernel_avx512_steps.h"

namespace assay {
namespace {

ASSAY_INLINE __m512 SwapHalves(__m512 x) { return _mm512_shuffle_f32x4(x, x, 0x4e); }

// Adds the matrix to the sketch and leaves it zero. Any layout that a format may have chosen for it.
void FlushMatrix(Accumulator* acc) {
  if (acc->matrix == nullptr || acc->matrix_layout == 0) return;
  Buckets buckets;
  const __m512 zero = _mm512_setzero_ps();
  const __m512i sign_bits = _mm512_set1_epi32(INT32_MIN);
  if (acc->matrix_layout != kLayoutQuads) {
    for (uint32_t place = 0; place < kPairs * 16; place += 16) {
      float* at = acc->matrix + place;
      __m512 elements = _mm512_load_ps(at);
      _mm512_store_ps(at, zero);
      if (acc->matrix_layout == kLayoutSwaps) {
        float* swapped = at + kMatrixFloats / 2;
        elements = _mm512_add_ps(elements, SwapHalves(_mm512_load_ps(swapped)));
        _mm512_store_ps(swapped, zero);
      }
      buckets.Add(OrderedSigned(elements, kPairTable.packed[0][0] + place, sign_bits), place);
    }
  } else {
    for (uint32_t quad = 0; quad < kPairs / 2; ++quad) {
      float* at = acc->matrix + quad * 32;
      const __m512 low = _mm512_load_ps(at);
      const __m512 high = _mm512_load_ps(at + 16);
      for (uint32_t place = quad * 32; place < quad * 32 + 32; place += 16) {
        buckets.Add(TableSigns(Ordered(low, high, kPairTable.source_split[0] + place), place), place);
      }
      _mm512_store_ps(at, zero);
      _mm512_store_ps(at + 16, zero);
    }
  }
  for (int v = 0; v < 4; ++v) AddTo(acc->sketch + 16 * v, buckets.part[v]);
  acc->matrix_depth = 0;
  acc->matrix_layout = 0;
  acc->matrix_block = ~uint64_t{0};
}

// Counts zeros and subnormals among n elements.
template <class F>
void CountSmall(const uint8_t* data, uint32_t n, Accumulator* acc) {
  using L = typename F::Lanes;
  const __m512i magnitude = L::Set(F::kSign - 1);
  const __m512i normal = L::Set(F::kSmallestNormal);
  uint64_t zero = 0;
  uint64_t small = 0;
  for (uint32_t k = 0; k < n; k += L::kCount) {
    const uint32_t left = n - k < L::kCount ? n - k : L::kCount;
    const auto mask = static_cast<typename L::Mask>(~uint64_t{0} >> (64 - left));
    const __m512i v = _mm512_and_si512(L::Load(data + k * F::kBytes, mask, normal), magnitude);
    zero += static_cast<uint64_t>(_mm_popcnt_u64(L::Zero(v)));
    small += static_cast<uint64_t>(_mm_popcnt_u64(L::Less(v, normal)));
  }
  acc->zero += zero;
  acc->subnormal += small - zero;
}

// Number of the first of n elements with this magnitude; n if there is none.
template <class F>
uint32_t FindMagnitude(const uint8_t* data, uint32_t n, uint32_t wanted) {
  using L = typename F::Lanes;
  const __m512i magnitude = L::Set(F::kSign - 1);
  const __m512i target = L::Set(wanted);
  for (uint32_t k = 0; k < n; k += L::kCount) {
    const uint32_t left = n - k < L::kCount ? n - k : L::kCount;
    const auto mask = static_cast<typename L::Mask>(~uint64_t{0} >> (64 - left));
    const __m512i v = _mm512_and_si512(L::Load(data + k * F::kBytes, mask, L::Set(~wanted)), magnitude);
    const uint64_t hit = static_cast<uint64_t>(L::Equal(v, target)) & static_cast<uint64_t>(mask);
    if (hit != 0) return k + static_cast<uint32_t>(__builtin_ctzll(hit));
  }
  return n;
}

// Looks for the chunk's largest magnitude if it may be news. acc->kernel_largest holds the pattern of the largest one
// so far plus 1, so that 0 is news at first; n elements, the first of them local column `column`.
template <class F>
[[gnu::noinline]] void SearchLargest(const Extremes<F>& extremes, const uint8_t* data, uint32_t n, uint64_t column,
                                     const RowPiece& piece, Accumulator* acc) {
  const uint32_t bits = extremes.Largest();
  const uint32_t found = FindMagnitude<F>(data, n, bits);
  if (found == n) return;  // no modest element
  acc->Largest(DecodeForKernel(bits, F::kType), piece.index.At(column + found));
  if (bits + 1 > acc->kernel_largest) acc->kernel_largest = bits + 1;
}

// The test that nearly every chunk fails: whether its largest magnitude can matter at all. Arguments as above.
template <class F>
ASSAY_INLINE void TakeLargest(const Extremes<F>& extremes, const uint8_t* data, uint32_t n, uint64_t column,
                              const RowPiece& piece, Accumulator* acc) {
  // Equal values are news only where a later column can come earlier in the view (outer_stride != 0).
  const uint32_t known = acc->kernel_largest;
  const uint32_t news = piece.index.outer_stride != 0 && known > 0 ? known - 1 : known;
  if (news == 0 || extremes.Reach(F::Lanes::Set(news), F::Lanes::Set(F::kSign | news)))
    SearchLargest<F>(extremes, data, n, column, piece, acc);
}

// What a segment's pieces have added up to so far, lane by lane: Accumulator::kernel_lanes.
template <class F>
struct Running {
  Extremes<F> extremes;  // of what was not exceptional; the exceptional finite elements are taken in one by one
  __m512i digest = _mm512_setzero_si512();
  __m512d sum = _mm512_setzero_pd();
  __m512d sum_sq = _mm512_setzero_pd();
};

// The lanes as F's, begun anew if there are none. One segment holds one type, so they are never another type's.
template <class F>
Running<F>* RunningOf(Accumulator* acc) {
  static_assert(sizeof(Running<F>) == sizeof(acc->kernel_lanes));
  void* lanes = acc->kernel_lanes;
  if (acc->kernel_dtype == F::kType) return static_cast<Running<F>*>(lanes);
  acc->kernel_dtype = F::kType;
  return new (lanes) Running<F>;
}

// Takes the lanes into acc's own fields.
template <class F>
void FlushRunning(Accumulator* acc) {
  using L = typename F::Lanes;
  const Running<F>& running = *RunningOf<F>(acc);
  acc->sum += _mm512_reduce_add_pd(running.sum);
  acc->sum_sq += _mm512_reduce_add_pd(running.sum_sq);
  acc->digest += Fold64(running.digest);
  // Where nothing was taken, the extremes are as they were at first.
  const uint32_t bottom = L::FoldMaxUnsigned(running.extremes.wide);
  const uint32_t top = L::FoldMaxSigned(running.extremes.high);
  if (static_cast<int32_t>(top) >= 0 || (bottom & F::kSign) != 0) {
    TakePatterns(top, bottom, L::FoldMinUnsigned(running.extremes.near), F::kType, acc);
  }
  acc->kernel_dtype = DType::kInvalid;
}

// A whole piece, chunk by chunk. Chunks begin at multiples of kBlockGroups, but for the first, so that a rotation holds
// for each of their blocks; what costs more than a comparison (extremes, zeros, the row's sketch) is done once a chunk.
template <class F, Sketching kSketching, bool kCells>
void AddChunks(const RowPiece& piece, Accumulator* acc) {
  constexpr uint32_t kGroupBytes = F::kWords * 4;
  Running<F>* running = RunningOf<F>(acc);
  Extremes<F> extremes;  // of the chunk at hand
  Sums<F, kSketching> sums;
  Totals totals;
  HeadCursor cursor(piece);
  for (uint32_t done = 0; done < piece.n_groups;) {
    const uint32_t group = piece.group + done;
    const uint32_t p = group % kBlockGroups;
    const uint32_t room = kChunkBlocks * kBlockGroups - p;
    const uint32_t n = piece.n_groups - done < room ? piece.n_groups - done : room;
    const uint8_t* data = piece.data + uint64_t{done} * kGroupBytes;
    Stretch s{data,           p,           p + n,      {}, group - p, piece.salt.group, piece.row_group + done - p,
              piece.row_salt, piece.ahead, acc->matrix};
    if constexpr (kSketching != Sketching::kNone) {
      for (uint32_t k = 0; k * kBlockGroups < p + n; ++k) {
        s.rotation[k] = SlotRotation(group + k * kBlockGroups, piece.salt);
      }
    }
    if constexpr (kSketching == Sketching::kMatrix) {
      // A block adds at most once to an entry, and pieces of the same block (a row in fragments) to different ones.
      if (acc->matrix_depth + kChunkBlocks > kFlushDepth) FlushMatrix(acc);
      const uint32_t last = (group + n - 1) / kBlockGroups;
      const bool known = acc->matrix_block == group / kBlockGroups;
      acc->matrix_depth += last - group / kBlockGroups + (known ? 0 : 1);
      acc->matrix_block = last;
      acc->matrix_layout = F::kType == DType::kBF16  ? kLayoutQuads
                           : F::kType == DType::kF32 ? kLayoutSwaps
                                                     : kLayoutPairs;
    }
    const bool exceptional = Steps<F, kSketching, kCells>(s, &cursor, &extremes, &sums, &totals);
    if (__builtin_expect(exceptional, 0)) AddLarge(piece, done, n, F::kLimit, acc);
    if (F::Lanes::Less(extremes.near, F::Lanes::Set(F::kSmallestNormal)) != 0) {
      CountSmall<F>(data, n * kLanes, acc);
    }
    TakeLargest<F>(extremes, data, n * kLanes, piece.column + uint64_t{done} * kLanes, piece, acc);
    running->extremes.Take(extremes);
    extremes = {};
    if constexpr (kCells && kSketching != Sketching::kNone) {
      if (piece.row) AddTo(piece.row->sketch, totals.residues);
      totals.residues = _mm512_setzero_ps();
    }
    done += n;
  }
  running->sum = _mm512_add_pd(running->sum, sums.Sum());
  running->sum_sq = _mm512_add_pd(running->sum_sq, totals.sum_sq);
  if constexpr (kSketching != Sketching::kNone) running->digest = _mm512_add_epi64(running->digest, sums.digest);
  if constexpr (kSketching == Sketching::kDirect) {
    for (int v = 0; v < 4; ++v) AddTo(acc->sketch + 16 * v, sums.buckets.part[v]);
  }
  if constexpr (kCells) {
    if (piece.row) {
      _mm512_storeu_pd(piece.row->sum_sq, _mm512_add_pd(_mm512_loadu_pd(piece.row->sum_sq), totals.sum_sq));
      const __m512i digest = _mm512_loadu_si512(piece.row->digest);
      _mm512_storeu_si512(piece.row->digest, _mm512_add_epi64(digest, sums.row_digest));
    }
  }
}

template <class F>
void AddFloats(const RowPiece& piece, Accumulator* acc) {
  const bool cells = piece.row != nullptr || piece.heads != nullptr;
  auto* add = !piece.sketch ? AddChunks<F, Sketching::kNone, true>
              : acc->matrix ? (cells ? AddChunks<F, Sketching::kMatrix, true> : AddChunks<F, Sketching::kMatrix, false>)
              : cells       ? AddChunks<F, Sketching::kDirect, true>
                            : AddChunks<F, Sketching::kDirect, false>;
  add(piece, acc);
  acc->count += uint64_t{piece.n_groups} * kLanes;
}

void Add(const RowPiece& piece, Accumulator* acc) {
  switch (piece.dtype) {
    case DType::kF32:
      return AddFloats<F32>(piece, acc);
    case DType::kBF16:
      return AddFloats<BF16>(piece, acc);
    case DType::kF16:
      return AddFloats<F16>(piece, acc);
    case DType::kF8E4M3FN:
      return AddFloats<F8E4M3FN>(piece, acc);
    case DType::kF8E5M2:
      return AddFloats<F8E5M2>(piece, acc);
    default:
      return kPortableKernel.add(piece, acc);
  }
}

void Flush(Accumulator* acc) {
  FlushMatrix(acc);
  switch (acc->kernel_dtype) {
    case DType::kF32:
      return FlushRunning<F32>(acc);
    case DType::kBF16:
      return FlushRunning<BF16>(acc);
    case DType::kF16:
      return FlushRunning<F16>(acc);
    case DType::kF8E4M3FN:
      return FlushRunning<F8E4M3FN>(acc);
    case DType::kF8E5M2:
      return FlushRunning<F8E5M2>(acc);
    default:
      return;
  }
}

// Sixty-four fields at a time; a field of the range costs a comparison and a count of bits each.
void CountFields(const uint8_t* fields, size_t n, uint8_t left_out, FieldCounts* out) {
  const __m512i none = _mm512_set1_epi8(static_cast<char>(left_out));
  __m512i lows = _mm512_set1_epi8(-1), highs = _mm512_setzero_si512();
  uint64_t zeros = 0;
  for (size_t i = 0; i < n; i += 64) {
    const __m512i some = _mm512_load_si512(fields + i);
    const __mmask64 in = _mm512_cmpneq_epi8_mask(some, none);
    const __mmask64 nonzero = _mm512_test_epi8_mask(some, some);
    zeros += 64 - static_cast<uint64_t>(_mm_popcnt_u64(nonzero));
    lows = _mm512_mask_min_epu8(lows, in & nonzero, lows, some);
    highs = _mm512_mask_max_epu8(highs, in, highs, some);
  }
  out->zeros = static_cast<uint16_t>(zeros);
  out->low = static_cast<uint8_t>(Lanes8::FoldMinUnsigned(lows));
  out->high = static_cast<uint8_t>(Lanes8::FoldMaxUnsigned(highs));
  for (uint32_t field = out->low; field <= out->high; ++field) {
    const __m512i wanted = _mm512_set1_epi8(static_cast<char>(field));
    uint64_t count = 0;
    for (size_t i = 0; i < n; i += 64) {
      const __mmask64 hits = _mm512_cmpeq_epi8_mask(_mm512_load_si512(fields + i), wanted);
      count += static_cast<uint64_t>(_mm_popcnt_u64(hits));
    }
    out->counts[field] = static_cast<uint16_t>(count);
  }
}

}  // namespace

const Kernel kAvx512Kernel = {Add, Flush, CountFields};

}  // namespace assay

#endif  // ASSAY_HAVE_AVX512
