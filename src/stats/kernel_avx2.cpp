// AVX2 kernel (with FMA and F16C): f32, bf16, f16, e4m3fn and e5m2, a group of eight elements a step; other types are
// portable.
//
// Everything is done on the widened floats: extremes, counts, sums in double, the sketch's matrix (one row a slot). A
// group that holds a non-finite or a huge element goes to the portable kernel as a whole.
#if defined(ASSAY_HAVE_AVX2)

#include <immintrin.h>

#include "stats/kernel.h"

namespace assay {
namespace {

constexpr uint32_t kLayoutSlots = 1;  // matrix[slot][lane]

// The table of hash.h for folds to 16 buckets: the lane with bucket & 7 == k, its sign, and whether bucket & 8.
struct alignas(32) SlotTable {
  uint32_t source[kBlockGroups][kLanes] = {};
  uint32_t minus[kBlockGroups][kLanes] = {};  // top bit
  uint32_t upper[kBlockGroups][kLanes] = {};  // all bits
};

constexpr SlotTable MakeSlotTable() {
  SlotTable t;
  for (uint32_t s = 0; s < kBlockGroups; ++s) {
    for (uint32_t j = 0; j < kLanes; ++j) {
      const uint32_t bucket = kSketchTable.bucket[s][j];
      t.source[s][bucket & 7] = j;
      t.minus[s][bucket & 7] = static_cast<uint32_t>(kSketchTable.minus[s] >> j & 1) << 31;
      t.upper[s][bucket & 7] = (bucket & 8) != 0 ? ~0u : 0;
    }
  }
  return t;
}

constexpr SlotTable kSlotTable = MakeSlotTable();

ASSAY_INLINE __m256i LoadWords(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

struct F32 {
  static constexpr uint32_t kBytes = 4, kLimit = (127 + 96) << 23, kSmallestNormal = 1 << 23;
  ASSAY_INLINE __m256 Load(const uint8_t* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
};
struct BF16 {
  static constexpr uint32_t kBytes = 2, kLimit = (127 + 96) << 23, kSmallestNormal = 1 << 23;
  ASSAY_INLINE __m256 Load(const uint8_t* p) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
  }
};
struct F16 {
  static constexpr uint32_t kBytes = 2, kLimit = (127 + 16) << 23, kSmallestNormal = (127 - 14) << 23;
  ASSAY_INLINE __m256 Load(const uint8_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
};

// The patterns of 8 bits, moved to where f16 has its fields: e4m3fn is then the value times 2^-8.
struct F8E4M3FN {
  static constexpr uint32_t kBytes = 1, kLimit = 0x43f00000, kSmallestNormal = (127 - 6) << 23;  // NaN becomes 480
  ASSAY_INLINE __m256 Load(const uint8_t* p) {
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));  // spreads the sign
    const __m128i f16 = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<short>(0xbf80)));
    return _mm256_mul_ps(_mm256_cvtph_ps(f16), _mm256_set1_ps(256.0f));
  }
};
struct F8E5M2 {
  static constexpr uint32_t kBytes = 1, kLimit = (127 + 16) << 23, kSmallestNormal = (127 - 14) << 23;
  ASSAY_INLINE __m256 Load(const uint8_t* p) {
    const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm256_cvtph_ps(_mm_slli_epi16(wide, 8));
  }
};

void Flush(Accumulator* acc) {
  if (acc->matrix == nullptr || acc->matrix_layout == 0) return;
  for (uint32_t s = 0; s < kBlockGroups; ++s) {
    for (uint32_t j = 0; j < kLanes; ++j) {
      float& entry = acc->matrix[s * kLanes + j];
      const double x = static_cast<double>(entry);
      acc->sketch[kSketchTable.bucket[s][j]] += kSketchTable.minus[s] >> j & 1 ? -x : x;
      entry = 0;
    }
  }
  acc->matrix_depth = 0;
  acc->matrix_layout = 0;
  acc->matrix_block = ~uint64_t{0};
}

// Two vectors of doubles hold a vector of floats.
struct Doubles {
  __m256d low = _mm256_setzero_pd();
  __m256d high = _mm256_setzero_pd();

  ASSAY_KERNEL_INLINE double Sum() const {
    alignas(32) double v[4];
    _mm256_store_pd(v, _mm256_add_pd(low, high));
    return v[0] + v[1] + v[2] + v[3];
  }
};

// to[0, 8) += x
ASSAY_INLINE void AddTo(double* to, __m256 x) {
  const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
  const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
  _mm256_storeu_pd(to, _mm256_add_pd(_mm256_loadu_pd(to), low));
  _mm256_storeu_pd(to + 4, _mm256_add_pd(_mm256_loadu_pd(to + 4), high));
}

// The group's words, hashed and multiplied in pairs; added to four 64-bit sums.
template <class F>
ASSAY_INLINE __m256i AddDigest(__m256i sums, const uint8_t* data, uint32_t hash) {
  const __m256i g = _mm256_set1_epi32(static_cast<int>(hash));
  if constexpr (F::kBytes == 4) {
    const __m256i w = _mm256_add_epi32(_mm256_add_epi32(g, LoadWords(kDigestKeys.word)), LoadWords(data));
    return _mm256_add_epi64(sums, _mm256_mul_epu32(w, _mm256_srli_epi64(w, 32)));
  } else {
    const __m128i keys = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kDigestKeys.word));
    const __m128i* p = reinterpret_cast<const __m128i*>(data);
    const __m128i words = F::kBytes == 2 ? _mm_loadu_si128(p) : _mm_loadl_epi64(p);
    const __m128i w = _mm_add_epi32(_mm_add_epi32(_mm256_castsi256_si128(g), keys), words);
    const __m128i products = _mm_mul_epu32(w, _mm_srli_epi64(w, 32));
    return _mm256_add_epi64(sums, _mm256_zextsi128_si256(F::kBytes == 2 ? products : _mm_move_epi64(products)));
  }
}

ASSAY_INLINE uint64_t Fold64(__m256i v) {
  alignas(32) uint64_t x[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(x), v);
  return x[0] + x[1] + x[2] + x[3];
}

// What the groups of a chunk add up to; counts in the lanes of vectors.
struct ChunkState {
  __m256i high = _mm256_set1_epi32(INT32_MIN);  // signed maximum of patterns: the largest positive value, if any
  __m256i wide = _mm256_setzero_si256();        // unsigned maximum: the largest negative magnitude, if any
  __m256i near = _mm256_set1_epi32(INT32_MAX);  // smallest magnitude
  __m256i largest = _mm256_setzero_si256();     // largest magnitude
  __m256i zero = _mm256_setzero_si256();
  __m256i small = _mm256_setzero_si256();  // zero or subnormal
  __m256i digest = _mm256_setzero_si256();
  __m256i row_digest = _mm256_setzero_si256();
  Doubles sum;
  uint32_t taken = 0;  // groups
};

// Takes a chunk's counts, sums and extremes into acc.
template <class F>
void Finish(const ChunkState& c, const RowPiece& piece, uint32_t first, uint32_t n, Accumulator* acc) {
  if (c.taken == 0) return;
  struct alignas(32) Lanes {
    uint32_t v[8];
  };
  auto store = [](__m256i x) __attribute__((always_inline)) {
    Lanes lanes;
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes.v), x);
    return lanes;
  };
  const Lanes high = store(c.high), wide = store(c.wide), near = store(c.near), largest = store(c.largest);
  const Lanes zero = store(c.zero), small = store(c.small);
  int32_t top = INT32_MIN;
  uint32_t bottom = 0, nearest = ~0u, most = 0;
  for (int j = 0; j < 8; ++j) {
    if (static_cast<int32_t>(high.v[j]) > top) top = static_cast<int32_t>(high.v[j]);
    if (wide.v[j] > bottom) bottom = wide.v[j];
    if (near.v[j] < nearest) nearest = near.v[j];
    if (largest.v[j] > most) most = largest.v[j];
    acc->zero += zero.v[j];
    acc->subnormal += small.v[j] - zero.v[j];
  }
  TakePatterns(static_cast<uint32_t>(top), bottom, nearest, DType::kF32, acc);
  const double magnitude = DecodeForKernel(most, DType::kF32);
  if (magnitude >= acc->abs_max) {
    // Equal ones are news only where a later column can come earlier in the view, or some groups were taken before.
    const bool news = magnitude > acc->abs_max || piece.index.outer_stride != 0 || c.taken != n;
    for (uint32_t q = first; news && q < first + n; ++q) {
      const __m256 x = F::Load(piece.data + uint64_t{q} * kLanes * F::kBytes);
      const __m256i m = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(INT32_MAX));
      const __m256i hit = _mm256_cmpeq_epi32(m, _mm256_set1_epi32(static_cast<int>(most)));
      const int mask = _mm256_movemask_ps(_mm256_castsi256_ps(hit));
      if (mask == 0) continue;
      const uint64_t lane = static_cast<uint64_t>(__builtin_ctz(static_cast<unsigned>(mask)));
      acc->Largest(magnitude, piece.index.At(piece.column + uint64_t{q} * kLanes + lane));
      break;
    }
  }
  acc->count += uint64_t{c.taken} * kLanes;
  acc->sum += c.sum.Sum();
  acc->digest += Fold64(c.digest);
  if (piece.row) piece.row->digest[0] += Fold64(c.row_digest);
}

// Groups [first, first + n) of a piece: within one block and one head, so at most kBlockGroups, for which float sums of
// residues are good (docs/numerics.md).
template <class F, bool kCells>
void AddChunk(const RowPiece& piece, uint32_t first, uint32_t n, CellSums* head, Accumulator* acc) {
  const __m256i magnitude_bits = _mm256_set1_epi32(INT32_MAX);
  const __m256i limit = _mm256_set1_epi32(static_cast<int>(F::kLimit - 1));
  const __m256i normal = _mm256_set1_epi32(static_cast<int>(F::kSmallestNormal));
  const uint32_t rotation = SlotRotation(piece.group + first, piece.salt);
  ChunkState c;
  Doubles sum_sq;
  __m256 residues_low = _mm256_setzero_ps();   // bucket & 15 in 0..7
  __m256 residues_high = _mm256_setzero_ps();  // 8..15
  for (uint32_t q = first; q < first + n; ++q) {
    const uint8_t* data = piece.data + uint64_t{q} * kLanes * F::kBytes;
    const __m256 x = F::Load(data);
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i m = _mm256_and_si256(bits, magnitude_bits);
    const __m256i large = _mm256_cmpgt_epi32(m, limit);
    if (__builtin_expect(!_mm256_testz_si256(large, large), 0)) {
      AddGroupsPortable(piece, q, 1, piece.row, head, acc);
      continue;
    }
    ++c.taken;
    // Patterns compare like the values do, each sign for itself.
    c.high = _mm256_max_epi32(c.high, bits);
    c.wide = _mm256_max_epu32(c.wide, bits);
    c.near = _mm256_min_epu32(c.near, m);
    c.largest = _mm256_max_epu32(c.largest, m);
    c.zero = _mm256_sub_epi32(c.zero, _mm256_cmpeq_epi32(m, _mm256_setzero_si256()));
    c.small = _mm256_sub_epi32(c.small, _mm256_cmpgt_epi32(normal, m));
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    c.sum.low = _mm256_add_pd(c.sum.low, low);
    c.sum.high = _mm256_add_pd(c.sum.high, high);
    sum_sq.low = _mm256_fmadd_pd(low, low, sum_sq.low);
    sum_sq.high = _mm256_fmadd_pd(high, high, sum_sq.high);
    if (!piece.sketch) continue;
    const uint32_t group = piece.group + q;
    const uint32_t g = GroupHash(group, piece.salt.group);
    c.digest = AddDigest<F>(c.digest, data, g);
    const uint32_t slot = (group & 0xff) ^ rotation;
    const __m256 y = _mm256_castsi256_ps(_mm256_xor_si256(bits, _mm256_set1_epi32(static_cast<int>(g & 0x80000000u))));
    if (acc->matrix) {
      float* at = acc->matrix + slot * kLanes;
      _mm256_store_ps(at, _mm256_add_ps(_mm256_load_ps(at), y));
    } else {
      // A small segment: to the buckets, one by one, is cheaper than clearing and folding a matrix.
      alignas(32) float terms[kLanes];
      _mm256_store_ps(terms, y);
      for (uint32_t j = 0; j < kLanes; ++j) {
        const double term = static_cast<double>(terms[j]);
        acc->sketch[kSketchTable.bucket[slot][j]] += kSketchTable.minus[slot] >> j & 1 ? -term : term;
      }
    }
    if constexpr (kCells) {
      if (piece.row) {
        c.row_digest = AddDigest<F>(c.row_digest, data, GroupHash(piece.row_group + q, piece.row_salt));
      }
      const __m256i source = LoadWords(kSlotTable.source[slot]);
      const __m256i z =
          _mm256_xor_si256(_mm256_castps_si256(_mm256_permutevar8x32_ps(y, source)), LoadWords(kSlotTable.minus[slot]));
      const __m256i upper = LoadWords(kSlotTable.upper[slot]);
      residues_low = _mm256_add_ps(residues_low, _mm256_castsi256_ps(_mm256_andnot_si256(upper, z)));
      residues_high = _mm256_add_ps(residues_high, _mm256_castsi256_ps(_mm256_and_si256(upper, z)));
    }
  }
  Finish<F>(c, piece, first, n, acc);
  const double chunk_sum_sq = sum_sq.Sum();
  acc->sum_sq += chunk_sum_sq;
  if constexpr (kCells) {
    CellSums* const both[] = {piece.row, head};
    for (CellSums* cell : both) {
      if (cell == nullptr) continue;
      cell->sum_sq[0] += chunk_sum_sq;
      AddTo(cell->sketch, residues_low);
      AddTo(cell->sketch + 8, residues_high);
    }
  }
}

// Cuts a piece where a block or a head ends, and empties the matrix before an entry could see too many additions.
template <class F>
void AddFloats(const RowPiece& piece, Accumulator* acc) {
  const bool cells = piece.row != nullptr || piece.heads != nullptr;
  HeadCursor cursor(piece);
  for (uint32_t done = 0; done < piece.n_groups;) {
    const uint32_t group = piece.group + done;
    uint32_t n = kBlockGroups - (group & 0xff);
    if (n > piece.n_groups - done) n = piece.n_groups - done;
    if (n > cursor.left) n = cursor.left;
    if (acc->matrix && piece.sketch && acc->matrix_block != group >> 8) {
      if (acc->matrix_depth == kFlushDepth) Flush(acc);
      acc->matrix_block = group >> 8;
      ++acc->matrix_depth;
      acc->matrix_layout = kLayoutSlots;
    }
    if (cells) {
      AddChunk<F, true>(piece, done, n, cursor.Current(), acc);
    } else {
      AddChunk<F, false>(piece, done, n, nullptr, acc);
    }
    done += n;
    cursor.Advance(n);
  }
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

}  // namespace

const Kernel kAvx2Kernel = {Add, Flush, CountFieldsPortable};

}  // namespace assay

#endif  // ASSAY_HAVE_AVX2
