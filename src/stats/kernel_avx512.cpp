// AVX-512 kernel (F, BW, DQ, VL): one fused loop over 64 bytes a step.
//
// A piece is cut into chunks, the groups of one block (2048 elements at most, one slot rotation). In a step the groups
// are brought into slot order by one permutation; from there the digest multiplies word pairs, the elements widen to
// float, add to sums in double, and to the sketch: a sign by XOR, one float addition. The sketch's running sums live in
// a matrix of 256 slots by 8 lanes.
// Elements at or above a limit (the non-finite ones, and those so large that float sums could overflow) are replaced by
// 0 on the way; a running maximum of the patterns tells whether a chunk had any, and only then another loop takes those
// few in double. Zeros and subnormals are counted by another loop too, and only if a running minimum says that there
// are any: activations rarely hold one. Tried: separate loops for extremes, digest and values, and a scan ahead of the
// chunk. From memory they run at half the rate of the fused loop (16 against 30 GB/s, f32), since memory idles while
// the others compute.
#if defined(ASSAY_HAVE_AVX512)

#include <immintrin.h>

#include "stats/kernel.h"

namespace assay {
namespace {

#define ASSAY_INLINE [[gnu::always_inline]] static inline

constexpr uint32_t kFlushDepth = 128;  // additions to one entry of the matrix before it is emptied
constexpr uint32_t kPairs = kBlockGroups / 2;
constexpr uint32_t kLayoutPairs = 1;  // matrix[pair][slot & 1][lane]
constexpr uint32_t kLayoutQuads = 2;  // matrix[quad][lane & 1][slot & 3][lane >> 1]

// The table of hash.h in the form that vectors want, for pairs of slots. Element e of a pair is slot 2 * pair + e / 8,
// lane e % 8; its residue is bucket & 15, and every residue occurs once in a pair.
struct PairTable {
  alignas(64) uint32_t source[kPairs][16] = {};        // which element has residue k ...
  alignas(64) uint32_t source_split[kPairs][16] = {};  // ... in (even elements of the quad, odd elements of the quad)
  alignas(64) uint32_t minus[kPairs][16] = {};         // top bit: sign of the element with residue k
  uint16_t high[kPairs][4] = {};                       // [v], bit k: the element with residue k has bucket >> 4 == v
};

constexpr PairTable MakePairTable() {
  PairTable t;
  for (uint32_t pair = 0; pair < kPairs; ++pair) {
    for (uint32_t e = 0; e < 16; ++e) {
      const uint32_t slot = 2 * pair + e / 8;
      const uint32_t bucket = kSketchTable.bucket[slot][e % 8];
      const uint32_t k = bucket & 15;
      const uint32_t in_quad = (pair & 1) * 16 + e;
      t.source[pair][k] = e;
      t.source_split[pair][k] = in_quad / 2 + (in_quad & 1) * 16;
      t.minus[pair][k] = static_cast<uint32_t>(kSketchTable.minus[slot] >> (e % 8) & 1) << 31;
      t.high[pair][bucket >> 4] = static_cast<uint16_t>(t.high[pair][bucket >> 4] | 1 << k);
    }
  }
  return t;
}

constexpr PairTable kPairTable = MakePairTable();

ASSAY_INLINE __m512i SignBits() { return _mm512_set1_epi32(INT32_MIN); }

// x with its sign flipped where the top bit of h is set.
ASSAY_INLINE __m512 FlipSign(__m512 x, __m512i h) {
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_castps_si512(x), h, SignBits(), 0x78));  // x ^ (h & s)
}

ASSAY_INLINE __m512 TableSigns(__m512 by_residue, uint32_t pair) {
  return _mm512_xor_ps(by_residue, _mm512_castsi512_ps(_mm512_load_si512(kPairTable.minus[pair])));
}

// A pair's elements with the table's signs, ordered by residue.
ASSAY_INLINE __m512 ByResidue(__m512 elements, uint32_t pair) {
  return TableSigns(_mm512_permutexvar_ps(_mm512_load_si512(kPairTable.source[pair]), elements), pair);
}

// The same out of the even and the odd elements of the quad that the pair belongs to.
ASSAY_INLINE __m512 ByResidue(__m512 even, __m512 odd, uint32_t pair) {
  return TableSigns(_mm512_permutex2var_ps(even, _mm512_load_si512(kPairTable.source_split[pair]), odd), pair);
}

// Sketch of 64 buckets in registers: [bucket >> 4], lane bucket & 15.
struct Buckets {
  __m512 part[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};

  ASSAY_KERNEL_INLINE void Add(__m512 by_residue, uint32_t pair) {
    for (int v = 0; v < 4; ++v) {
      part[v] = _mm512_mask_add_ps(part[v], kPairTable.high[pair][v], part[v], by_residue);
    }
  }
};

// to[0, 16) += x
ASSAY_INLINE void AddTo(double* to, __m512 x) {
  const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
  const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
  _mm512_storeu_pd(to, _mm512_add_pd(_mm512_loadu_pd(to), low));
  _mm512_storeu_pd(to + 8, _mm512_add_pd(_mm512_loadu_pd(to + 8), high));
}

// Sum of eight 64-bit numbers, modulo 2^64 (the intrinsic adds signed ones, which may not overflow).
ASSAY_INLINE uint64_t Fold64(__m512i v) {
  const __m256i four = _mm256_add_epi64(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
  const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
  return static_cast<uint64_t>(_mm_cvtsi128_si64(two)) + static_cast<uint64_t>(_mm_extract_epi64(two, 1));
}

void Flush(Accumulator* acc) {
  if (acc->matrix == nullptr || acc->matrix_layout == 0) return;
  Buckets buckets;
  const __m512 zero = _mm512_setzero_ps();
  if (acc->matrix_layout == kLayoutPairs) {
    for (uint32_t pair = 0; pair < kPairs; ++pair) {
      float* at = acc->matrix + pair * 16;
      buckets.Add(ByResidue(_mm512_load_ps(at), pair), pair);
      _mm512_store_ps(at, zero);
    }
  } else {
    for (uint32_t quad = 0; quad < kPairs / 2; ++quad) {
      float* at = acc->matrix + quad * 32;
      const __m512 even = _mm512_load_ps(at);
      const __m512 odd = _mm512_load_ps(at + 16);
      buckets.Add(ByResidue(even, odd, 2 * quad), 2 * quad);
      buckets.Add(ByResidue(even, odd, 2 * quad + 1), 2 * quad + 1);
      _mm512_store_ps(at, zero);
      _mm512_store_ps(at + 16, zero);
    }
  }
  for (int v = 0; v < 4; ++v) AddTo(acc->sketch + 16 * v, buckets.part[v]);
  acc->matrix_depth = 0;
  acc->matrix_layout = 0;
  acc->matrix_block = ~uint64_t{0};
}

// Bytes ahead of which the loop asks memory for data; reaching past the view is harmless.
constexpr uint32_t kAhead = 8192;

// Group hashes of groups [group, group + n), with room for whole vectors behind them.
ASSAY_INLINE void HashGroups(uint32_t group, uint32_t salt, uint32_t n, uint32_t* out) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (uint32_t k = 0; k < n; k += 16) {
    __m512i h = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(group + k)), lanes);
    h = _mm512_xor_si512(h, _mm512_set1_epi32(static_cast<int>(salt)));
    h = _mm512_mullo_epi32(h, _mm512_set1_epi32(static_cast<int>(0x9e3779b1u)));
    h = _mm512_xor_si512(h, _mm512_srli_epi32(h, 15));
    h = _mm512_mullo_epi32(h, _mm512_set1_epi32(static_cast<int>(0x85ebca77u)));
    _mm512_storeu_si512(out + k, h);
  }
}

// Lanes of 32, 16 and 8 bits under one set of names. Fold* reduce to one number.
struct Lanes32 {
  static constexpr uint32_t kCount = 16;
  using Mask = __mmask16;
  ASSAY_INLINE __m512i Set(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  ASSAY_INLINE __m512i Load(const uint8_t* p, Mask m, __m512i other) { return _mm512_mask_loadu_epi32(other, m, p); }
  ASSAY_INLINE __m512i MaxSigned(__m512i a, __m512i b) { return _mm512_max_epi32(a, b); }
  ASSAY_INLINE __m512i MaxUnsigned(__m512i a, __m512i b) { return _mm512_max_epu32(a, b); }
  ASSAY_INLINE __m512i MinUnsigned(__m512i a, __m512i b) { return _mm512_min_epu32(a, b); }
  ASSAY_INLINE Mask Less(__m512i a, __m512i b) { return _mm512_cmplt_epu32_mask(a, b); }
  ASSAY_INLINE Mask Equal(__m512i a, __m512i b) { return _mm512_cmpeq_epi32_mask(a, b); }
  ASSAY_INLINE Mask Zero(__m512i a) { return _mm512_testn_epi32_mask(a, a); }
  ASSAY_INLINE __m512i Keep(__m512i a, Mask m) { return _mm512_maskz_mov_epi32(m, a); }
  ASSAY_INLINE __m512i Select(__m512i a, Mask m, __m512i b) { return _mm512_mask_mov_epi32(a, m, b); }
  ASSAY_INLINE uint32_t FoldMaxSigned(__m512i v) { return static_cast<uint32_t>(_mm512_reduce_max_epi32(v)); }
  ASSAY_INLINE uint32_t FoldMaxUnsigned(__m512i v) { return _mm512_reduce_max_epu32(v); }
  ASSAY_INLINE uint32_t FoldMinUnsigned(__m512i v) { return _mm512_reduce_min_epu32(v); }
};

struct Lanes16 {
  static constexpr uint32_t kCount = 32;
  using Mask = __mmask32;
  ASSAY_INLINE __m512i Set(uint32_t x) { return _mm512_set1_epi16(static_cast<short>(x)); }
  ASSAY_INLINE __m512i Load(const uint8_t* p, Mask m, __m512i other) { return _mm512_mask_loadu_epi16(other, m, p); }
  ASSAY_INLINE __m512i MaxSigned(__m512i a, __m512i b) { return _mm512_max_epi16(a, b); }
  ASSAY_INLINE __m512i MaxUnsigned(__m512i a, __m512i b) { return _mm512_max_epu16(a, b); }
  ASSAY_INLINE __m512i MinUnsigned(__m512i a, __m512i b) { return _mm512_min_epu16(a, b); }
  ASSAY_INLINE Mask Less(__m512i a, __m512i b) { return _mm512_cmplt_epu16_mask(a, b); }
  ASSAY_INLINE Mask Equal(__m512i a, __m512i b) { return _mm512_cmpeq_epi16_mask(a, b); }
  ASSAY_INLINE Mask Zero(__m512i a) { return _mm512_testn_epi16_mask(a, a); }
  ASSAY_INLINE __m512i Keep(__m512i a, Mask m) { return _mm512_maskz_mov_epi16(m, a); }
  ASSAY_INLINE __m512i Select(__m512i a, Mask m, __m512i b) { return _mm512_mask_mov_epi16(a, m, b); }
  ASSAY_INLINE uint32_t FoldMaxSigned(__m512i v) {
    const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(v, 16), 16);
    return static_cast<uint32_t>(_mm512_reduce_max_epi32(_mm512_max_epi32(low, _mm512_srai_epi32(v, 16))));
  }
  ASSAY_INLINE uint32_t FoldMaxUnsigned(__m512i v) {
    const __m512i low = _mm512_and_si512(v, _mm512_set1_epi32(0xffff));
    return _mm512_reduce_max_epu32(_mm512_max_epu32(low, _mm512_srli_epi32(v, 16)));
  }
  ASSAY_INLINE uint32_t FoldMinUnsigned(__m512i v) {
    const __m512i low = _mm512_and_si512(v, _mm512_set1_epi32(0xffff));
    return _mm512_reduce_min_epu32(_mm512_min_epu32(low, _mm512_srli_epi32(v, 16)));
  }
};

struct Lanes8 {
  static constexpr uint32_t kCount = 64;
  using Mask = __mmask64;
  ASSAY_INLINE __m512i Set(uint32_t x) { return _mm512_set1_epi8(static_cast<char>(x)); }
  ASSAY_INLINE __m512i Load(const uint8_t* p, Mask m, __m512i other) { return _mm512_mask_loadu_epi8(other, m, p); }
  ASSAY_INLINE __m512i MaxSigned(__m512i a, __m512i b) { return _mm512_max_epi8(a, b); }
  ASSAY_INLINE __m512i MaxUnsigned(__m512i a, __m512i b) { return _mm512_max_epu8(a, b); }
  ASSAY_INLINE __m512i MinUnsigned(__m512i a, __m512i b) { return _mm512_min_epu8(a, b); }
  ASSAY_INLINE Mask Less(__m512i a, __m512i b) { return _mm512_cmplt_epu8_mask(a, b); }
  ASSAY_INLINE Mask Equal(__m512i a, __m512i b) { return _mm512_cmpeq_epi8_mask(a, b); }
  ASSAY_INLINE Mask Zero(__m512i a) { return _mm512_testn_epi8_mask(a, a); }
  ASSAY_INLINE __m512i Keep(__m512i a, Mask m) { return _mm512_maskz_mov_epi8(m, a); }
  ASSAY_INLINE __m512i Select(__m512i a, Mask m, __m512i b) { return _mm512_mask_mov_epi8(a, m, b); }
  ASSAY_INLINE uint32_t FoldMaxSigned(__m512i v) {
    const __m512i low = _mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8);
    return Lanes16::FoldMaxSigned(_mm512_max_epi16(low, _mm512_srai_epi16(v, 8)));
  }
  ASSAY_INLINE uint32_t FoldMaxUnsigned(__m512i v) {
    const __m512i low = _mm512_and_si512(v, _mm512_set1_epi16(0xff));
    return Lanes16::FoldMaxUnsigned(_mm512_max_epu16(low, _mm512_srli_epi16(v, 8)));
  }
  ASSAY_INLINE uint32_t FoldMinUnsigned(__m512i v) {
    const __m512i low = _mm512_and_si512(v, _mm512_set1_epi16(0xff));
    return Lanes16::FoldMinUnsigned(_mm512_min_epu16(low, _mm512_srli_epi16(v, 8)));
  }
};

// The float formats that the vector loop takes. A step is 64 bytes: kGroups groups of kWords 32-bit words, which widen
// to kVectors vectors of floats. kLimit: magnitude patterns from here on are taken apart: the non-finite ones, f32 of
// 2^96 and more (running sums of the sketch), bf16 of 2^60 and more (squares in float).
template <class L, DType kDType, uint32_t kLimitBits, uint32_t kNonfiniteBits, uint32_t kNormalBits>
struct Format {
  using Lanes = L;
  static constexpr DType kType = kDType;
  static constexpr uint32_t kBytes = 64 / L::kCount;  // of an element
  static constexpr uint32_t kGroups = L::kCount / kLanes;
  static constexpr uint32_t kWords = 16 / kGroups;
  static constexpr uint32_t kVectors = L::kCount / 16;
  static constexpr uint32_t kSign = 1u << (8 * kBytes - 1);
  static constexpr uint32_t kLimit = kLimitBits;
  static constexpr uint32_t kNonfinite = kNonfiniteBits;
  static constexpr uint32_t kSmallestNormal = kNormalBits;
  // Sums of types of 16 bits or fewer run in float for kFloatSteps steps before they go on in double.
  static constexpr bool kFloatSums = kBytes < 4;
  // Float sums of squares need an element of this magnitude or more among a few, or they underflow; 0: cannot happen.
  static constexpr uint32_t kTiny = 0;
};

struct F32 : Format<Lanes32, DType::kF32, (127 + 96) << 23, 0x7f800000, 1 << 23> {
  ASSAY_INLINE __m512 Widen(__m512i raw, int) { return _mm512_castsi512_ps(raw); }
};

// The even elements of a quad, then the odd ones.
struct BF16 : Format<Lanes16, DType::kBF16, (127 + 60) << 7, 0x7f80, 1 << 7> {
  static constexpr uint32_t kTiny = (127 - 60) << 7;
  ASSAY_INLINE __m512 Widen(__m512i raw, int v) {
    return _mm512_castsi512_ps(v == 0 ? _mm512_slli_epi32(raw, 16)
                                      : _mm512_and_si512(raw, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
};

struct F16 : Format<Lanes16, DType::kF16, 0x7c00, 0x7c00, 1 << 10> {
  ASSAY_INLINE __m512 Widen(__m512i raw, int v) {
    return _mm512_cvtph_ps(v == 0 ? _mm512_castsi512_si256(raw) : _mm512_extracti64x4_epi64(raw, 1));
  }
};

ASSAY_INLINE __m128i Quarter(__m512i raw, int v) {
  switch (v) {
    case 0:
      return _mm512_castsi512_si128(raw);
    case 1:
      return _mm512_extracti32x4_epi32(raw, 1);
    case 2:
      return _mm512_extracti32x4_epi32(raw, 2);
    default:
      return _mm512_extracti32x4_epi32(raw, 3);
  }
}

// The pattern, moved to where f16 has its fields, is the value times 2^-8 (bias 7 against 15), subnormals too.
struct F8E4M3FN : Format<Lanes8, DType::kF8E4M3FN, 0x7f, 0x7f, 1 << 3> {
  ASSAY_INLINE __m512 Widen(__m512i raw, int v) {
    const __m256i wide = _mm256_cvtepi8_epi16(Quarter(raw, v));  // the sign spreads upwards
    const __m256i f16 = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<short>(0xbf80)));
    return _mm512_mul_ps(_mm512_cvtph_ps(f16), _mm512_set1_ps(256.0f));
  }
};

struct F8E5M2 : Format<Lanes8, DType::kF8E5M2, 0x7c, 0x7c, 1 << 2> {
  ASSAY_INLINE __m512 Widen(__m512i raw, int v) {
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(Quarter(raw, v)), 8));
  }
};

// Running extremes of patterns, of modest elements alone.
template <class F>
struct Extremes {
  using L = typename F::Lanes;
  __m512i high = L::Set(F::kSign);                 // signed maximum: the largest positive value, if there is one
  __m512i wide = _mm512_setzero_si512();           // unsigned maximum: the largest negative magnitude, if there is one
  __m512i near = L::Set(F::kSign - 1);             // smallest magnitude of earlier chunks ...
  __m512i chunk_near = L::Set(F::kSign - 1);       // ... and of this one
  __m512i chunk_largest = _mm512_setzero_si512();  // largest magnitude of this chunk

  ASSAY_KERNEL_INLINE void Take(__m512i patterns, __m512i magnitudes) {
    high = L::MaxSigned(high, patterns);
    wide = L::MaxUnsigned(wide, patterns);
    chunk_near = L::MinUnsigned(chunk_near, magnitudes);
  }
  // Elements of the mask alone, and their share of chunk_largest.
  ASSAY_KERNEL_INLINE void TakeSome(typename L::Mask mask, __m512i patterns, __m512i magnitudes) {
    high = L::MaxSigned(high, L::Select(high, mask, patterns));
    wide = L::MaxUnsigned(wide, L::Keep(patterns, mask));
    chunk_near = L::MinUnsigned(chunk_near, L::Select(chunk_near, mask, magnitudes));
    chunk_largest = L::MaxUnsigned(chunk_largest, L::Keep(magnitudes, mask));
  }
  ASSAY_KERNEL_INLINE void NextChunk() {
    near = L::MinUnsigned(near, chunk_near);
    chunk_near = L::Set(F::kSign - 1);
    chunk_largest = _mm512_setzero_si512();
  }
};

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
                                     const Piece& piece, Accumulator* acc) {
  const uint32_t bits = F::Lanes::FoldMaxUnsigned(extremes.chunk_largest);
  const uint32_t found = FindMagnitude<F>(data, n, bits);
  if (found == n) return;  // no modest element
  acc->Largest(DecodeForKernel(bits, F::kType), piece.index.At(column + found));
  if (bits + 1 > acc->kernel_largest) acc->kernel_largest = bits + 1;
}

template <class F>
ASSAY_INLINE void TakeLargest(const Extremes<F>& extremes, const uint8_t* data, uint32_t n, uint64_t column,
                              const Piece& piece, Accumulator* acc) {
  // Equal values are news only where a later column can come earlier in the view (outer_stride != 0).
  const uint32_t known = acc->kernel_largest;
  const uint32_t news = piece.index.outer_stride != 0 && known > 0 ? known - 1 : known;
  if (news == 0 || F::Lanes::Less(extremes.chunk_largest, F::Lanes::Set(news)) !=
                       static_cast<typename F::Lanes::Mask>(~uint64_t{0})) {
    SearchLargest<F>(extremes, data, n, column, piece, acc);
  }
}

// Sums of a stretch of groups.
struct Sums {
  __m512d sum[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
  __m512d sum_sq[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
  __m512i digest = _mm512_setzero_si512();
  __m512i row_digest = _mm512_setzero_si512();
  __m512 residues = _mm512_setzero_ps();     // sketch by residue; with cells, of the head at hand, like sum_sq ...
  __m512d all_sum_sq = _mm512_setzero_pd();  // ... and of the heads before it
  __m512 all_residues = _mm512_setzero_ps();
  Buckets buckets;

  // Of narrow types, added to sum and sum_sq by Spill.
  __m512 float_sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  __m512 float_sum_sq[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};

  ASSAY_KERNEL_INLINE void AddFloat(__m512 x, int chain) {
    float_sum[chain] = _mm512_add_ps(float_sum[chain], x);
    float_sum_sq[chain] = _mm512_fmadd_ps(x, x, float_sum_sq[chain]);
  }
  ASSAY_KERNEL_INLINE void Spill() {
    const __m512 all = _mm512_add_ps(float_sum[0], float_sum[1]);
    const __m512 squares = _mm512_add_ps(float_sum_sq[0], float_sum_sq[1]);
    sum[0] = _mm512_add_pd(sum[0], _mm512_cvtps_pd(_mm512_castps512_ps256(all)));
    sum[1] = _mm512_add_pd(sum[1], _mm512_cvtps_pd(_mm512_extractf32x8_ps(all, 1)));
    sum_sq[0] = _mm512_add_pd(sum_sq[0], _mm512_cvtps_pd(_mm512_castps512_ps256(squares)));
    sum_sq[1] = _mm512_add_pd(sum_sq[1], _mm512_cvtps_pd(_mm512_extractf32x8_ps(squares, 1)));
    float_sum[0] = float_sum[1] = float_sum_sq[0] = float_sum_sq[1] = _mm512_setzero_ps();
  }
  ASSAY_KERNEL_INLINE void Add(__m512 x) { Add(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)); }
  ASSAY_KERNEL_INLINE void Add(__m256 first, __m256 second) {
    const __m512d low = _mm512_cvtps_pd(first);
    const __m512d high = _mm512_cvtps_pd(second);
    sum[0] = _mm512_add_pd(sum[0], low);
    sum[1] = _mm512_add_pd(sum[1], high);
    sum_sq[0] = _mm512_fmadd_pd(low, low, sum_sq[0]);
    sum_sq[1] = _mm512_fmadd_pd(high, high, sum_sq[1]);
  }
};

// Where the sketch goes: nowhere, to the matrix, or straight into 64 buckets (cheaper for a small segment).
enum class Sketching { kNone, kMatrix, kDirect };

// Where head cells go: `left` more groups to heads[head], then per_head to each of the next. No heads: left is beyond
// any piece.
struct HeadCursor {
  Cell* heads;
  uint32_t n_heads;
  uint32_t per_head;
  uint32_t head;
  uint32_t left;

  ASSAY_KERNEL_INLINE Cell* Current() const { return heads ? heads + head : nullptr; }
  ASSAY_KERNEL_INLINE void Advance(uint32_t n) {
    left -= n;
    if (left == 0) {
      left = per_head;
      head = head + 1 == n_heads ? 0 : head + 1;
    }
  }
};

constexpr uint32_t kUnroll = 2;      // steps between two looks at what is exceptional
constexpr uint32_t kFloatSteps = 8;  // steps of float sums: 16 additions (bf16) in two chains

// Positions [p, end) of a block; data is position p's; hashes[q] and row_hashes[q] are position q's.
struct Stretch {
  const uint8_t* data;
  uint32_t p;
  uint32_t end;
  uint32_t rotation;
  const uint32_t* hashes;
  const uint32_t* row_hashes;
  float* matrix;
};

struct alignas(64) VectorKeys {
  uint32_t word[16] = {};
};

// Digest keys of a 64-byte step of groups of kWords words.
template <uint32_t kWords>
constexpr VectorKeys MakeVectorKeys() {
  VectorKeys keys;
  for (uint32_t w = 0; w < 16; ++w) keys.word[w] = kDigestKeys.word[w % kWords];
  return keys;
}
template <uint32_t kWords>
constexpr VectorKeys kVectorKeys = MakeVectorKeys<kWords>();

ASSAY_INLINE __m512i LaneNumbers() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

// The step's hashes in the low lanes; what is in the others does not matter.
template <uint32_t kGroups>
ASSAY_INLINE __m512i LoadHashes(const uint32_t* h) {
  if constexpr (kGroups == 2) return _mm512_castsi128_si512(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(h)));
  if constexpr (kGroups == 4) return _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(h)));
  return _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(h)));
}

ASSAY_INLINE __m512i Products(__m512i words, __m512i hashes, __m512i keys) {
  const __m512i w = _mm512_add_epi32(_mm512_add_epi32(hashes, keys), words);
  return _mm512_mul_epu32(w, _mm512_srli_epi64(w, 32));
}

// Returns whether any element was left out.
template <class F, Sketching kSketching, bool kCells>
ASSAY_INLINE bool Steps(const Stretch& s, HeadCursor* cursor, Extremes<F>* extremes_out, Sums* sums_out) {
  // Copies, so that they stay in registers: vector stores to the matrix could alias anything.
  Extremes<F> extremes = *extremes_out;
  Sums sums = *sums_out;
  using L = typename F::Lanes;
  constexpr uint32_t kGroups = F::kGroups;
  constexpr uint32_t kGroupBytes = F::kWords * 4;
  constexpr int kWordShift = F::kWords == 8 ? 3 : F::kWords == 4 ? 2 : 1;
  // The part of the rotation that stays inside a step permutes its groups.
  const uint32_t inside = s.rotation & (kGroups - 1);
  const __m512i order = _mm512_xor_si512(LaneNumbers(), _mm512_set1_epi32(static_cast<int>(inside * F::kWords)));
  const __m512i spread = _mm512_srli_epi32(order, kWordShift);
  const __m512i keys = _mm512_load_si512(kVectorKeys<F::kWords>.word);
  const __m512i magnitude = L::Set(F::kSign - 1);
  const __m512i limit = L::Set(F::kLimit);
  // Which hash signs each lane of the float vectors. Pairs: lanes 0..7 the first group, 8..15 the second; bf16: by
  // quads.
  const __m512i pair_spread = _mm512_srli_epi32(LaneNumbers(), 3);

  bool exceptional = false;
  // kGuard: some elements may have to be left out.
  auto step = [&]<bool kGuard>(uint32_t p, const uint8_t* data, __m512i loaded, __mmask8 present)
      __attribute__((always_inline)) {
    const __m512i raw = _mm512_permutexvar_epi32(order, loaded);
    __m512i h = _mm512_setzero_si512();
    if constexpr (kSketching != Sketching::kNone) {
      h = _mm512_permutexvar_epi32(spread, LoadHashes<kGroups>(s.hashes + p));
      sums.digest = _mm512_mask_add_epi64(sums.digest, present, sums.digest, Products(raw, h, keys));
      if constexpr (kCells) {
        const __m512i r = _mm512_permutexvar_epi32(spread, LoadHashes<kGroups>(s.row_hashes + p));
        sums.row_digest = _mm512_mask_add_epi64(sums.row_digest, present, sums.row_digest, Products(raw, r, keys));
      }
    }
    const __m512i kept = kGuard ? L::Keep(raw, L::Less(_mm512_and_si512(raw, magnitude), limit)) : raw;
    const uint32_t base = (p ^ s.rotation) & ~(kGroups - 1);
    __m512 y[4];
    for (int v = 0; v < static_cast<int>(F::kVectors); ++v) {
      const __m512 x = F::Widen(kept, v);
      if constexpr (F::kType == DType::kF32 && !kGuard) {
        // Halves from memory: a load is cheaper than an extraction.
        const float* floats = reinterpret_cast<const float*>(data);
        sums.Add(_mm256_loadu_ps(floats), _mm256_loadu_ps(floats + 8));
      } else if constexpr (F::kFloatSums && !kGuard) {
        sums.AddFloat(x, v & 1);
      } else {
        sums.Add(x);
      }
      if constexpr (kSketching == Sketching::kNone) continue;
      if constexpr (F::kType == DType::kF32 || F::kType == DType::kBF16) {
        y[v] = FlipSign(x, h);
      } else {
        // Word w of the step is group w / kWords' in slot order: spread the hash of groups 2v, 2v + 1.
        const __m512i pick = _mm512_slli_epi32(_mm512_add_epi32(pair_spread, _mm512_set1_epi32(2 * v)), kWordShift);
        y[v] = FlipSign(x, _mm512_permutexvar_epi32(pick, h));
      }
      if constexpr (kSketching == Sketching::kMatrix) {
        float* at = s.matrix + base * kLanes + 16 * v;
        _mm512_store_ps(at, _mm512_add_ps(_mm512_load_ps(at), y[v]));
      }
    }
    if constexpr (kSketching == Sketching::kDirect || (kCells && kSketching != Sketching::kNone)) {
      for (uint32_t v = 0; v < F::kVectors; ++v) {
        const uint32_t pair = base / 2 + v;
        const __m512 z = F::kType == DType::kBF16 ? ByResidue(y[0], y[1], pair) : ByResidue(y[v], pair);
        if constexpr (kSketching == Sketching::kDirect) sums.buckets.Add(z, pair);
        if constexpr (kCells) sums.residues = _mm512_add_ps(sums.residues, z);
      }
    }
  };
  // A step of which only groups [from, to) are here.
  auto masked = [&](uint32_t p, const uint8_t* data, uint32_t from, uint32_t to) __attribute__((always_inline)) {
    const uint32_t words = ((1u << to * F::kWords) - 1) & ~((1u << from * F::kWords) - 1);
    const __m512i loaded = _mm512_maskz_loadu_epi32(static_cast<__mmask16>(words), data);
    const __m512i magnitudes = _mm512_and_si512(loaded, magnitude);
    const uint64_t elements = (~uint64_t{0} >> (64 - to * kLanes)) & (~uint64_t{0} << from * kLanes);
    const auto modest = static_cast<typename L::Mask>(L::Less(magnitudes, limit) & elements);
    exceptional |= modest != static_cast<typename L::Mask>(elements);
    extremes.TakeSome(modest, loaded, magnitudes);
    // Where the pairs of words of the present groups are in slot order.
    uint32_t present = 0;
    for (uint32_t g = from; g < to; ++g) present |= ((1u << F::kWords / 2) - 1) << (g ^ inside) * (F::kWords / 2);
    step.template operator()<true>(p, data, loaded, static_cast<__mmask8>(present));
  };

  auto run = [&](uint32_t p, uint32_t end, const uint8_t* data) __attribute__((always_inline)) {
    if (p % kGroups != 0) {
      const uint32_t from = p % kGroups;
      const uint32_t to = end - p < kGroups - from ? from + end - p : kGroups;
      masked(p - from, data - from * kGroupBytes, from, to);
      p += to - from;
      data += (to - from) * kGroupBytes;
    }
    while (p + kUnroll * kGroups <= end) {
      // Up to kFloatSteps steps, then float sums go on in double.
      const uint32_t far = p + kFloatSteps * kGroups;
      const uint32_t stop = F::kFloatSums && far < end ? far : end;
      for (; p + kUnroll * kGroups <= stop; p += kUnroll * kGroups, data += kUnroll * 64) {
        __m512i loaded[kUnroll];
        __m512i largest = _mm512_setzero_si512();
        for (uint32_t u = 0; u < kUnroll; ++u) {
          _mm_prefetch(reinterpret_cast<const char*>(data) + kAhead + 64 * u, _MM_HINT_T0);
          loaded[u] = _mm512_loadu_si512(data + 64 * u);
          largest = L::MaxUnsigned(largest, _mm512_and_si512(loaded[u], magnitude));
        }
        constexpr auto kAll = static_cast<typename L::Mask>(~uint64_t{0});
        bool fast = L::Less(largest, limit) == kAll;
        if constexpr (F::kTiny != 0) fast = fast && L::Less(largest, L::Set(F::kTiny)) != kAll;
        if (__builtin_expect(!fast, 0)) {
#pragma GCC unroll 1
          for (uint32_t u = 0; u < kUnroll; ++u) masked(p + u * kGroups, data + 64 * u, 0, kGroups);
          continue;
        }
        extremes.chunk_largest = L::MaxUnsigned(extremes.chunk_largest, largest);
        for (uint32_t u = 0; u < kUnroll; ++u) {
          extremes.Take(loaded[u], _mm512_and_si512(loaded[u], magnitude));
          step.template operator()<false>(p + u * kGroups, data + 64 * u, loaded[u], 0xff);
        }
      }
      if constexpr (F::kFloatSums) sums.Spill();
    }
#pragma GCC unroll 1
    for (; p < end; p += kGroups, data += 64) masked(p, data, 0, end - p < kGroups ? end - p : kGroups);
  };

  if constexpr (!kCells) {
    run(s.p, s.end, s.data);
  } else {
    const uint8_t* data = s.data;
    for (uint32_t p = s.p; p < s.end;) {
      const uint32_t end = s.end - p < cursor->left ? s.end : p + cursor->left;
      sums.sum_sq[0] = sums.sum_sq[1] = _mm512_setzero_pd();
      sums.residues = _mm512_setzero_ps();
      run(p, end, data);
      const __m512d sum_sq = _mm512_add_pd(sums.sum_sq[0], sums.sum_sq[1]);
      sums.all_sum_sq = _mm512_add_pd(sums.all_sum_sq, sum_sq);
      sums.all_residues = _mm512_add_ps(sums.all_residues, sums.residues);
      if (Cell* head = cursor->Current()) {
        head->sum_sq += _mm512_reduce_add_pd(sum_sq);
        if constexpr (kSketching != Sketching::kNone) AddTo(head->sketch, sums.residues);
      }
      cursor->Advance(end - p);
      data += (end - p) * kGroupBytes;
      p = end;
    }
  }
  *extremes_out = extremes;
  *sums_out = sums;
  return exceptional;
}

// What goes on over all chunks of a piece.
template <class F>
struct PieceState {
  Extremes<F> extremes;
  alignas(64) uint32_t hashes[kBlockGroups];
  alignas(64) uint32_t row_hashes[kBlockGroups];
};

// A whole piece, chunk by chunk.
template <class F, Sketching kSketching, bool kCells>
void AddChunks(const Piece& piece, PieceState<F>* state, Accumulator* acc) {
  constexpr uint32_t kGroupBytes = F::kWords * 4;
  Sums sums;
  HeadCursor cursor{piece.heads, piece.n_heads, piece.head_groups, piece.head, piece.heads ? piece.head_left : ~0u};
  for (uint32_t done = 0; done < piece.n_groups;) {
    const uint32_t group = piece.group + done;
    const uint32_t p = group & 0xff;
    const uint32_t n = piece.n_groups - done < kBlockGroups - p ? piece.n_groups - done : kBlockGroups - p;
    const uint8_t* data = piece.data + uint64_t{done} * kGroupBytes;
    Stretch s{data, p, p + n, 0, state->hashes, state->row_hashes, acc->matrix};
    if constexpr (kSketching != Sketching::kNone) {
      // Whole vectors of hashes: hashes[q] belongs to position q.
      const uint32_t from = p & ~15u;
      HashGroups(group - (p - from), piece.salt.group, p + n - from, state->hashes + from);
      if constexpr (kCells) {
        HashGroups(piece.row_group + done - (p - from), piece.row_salt, p + n - from, state->row_hashes + from);
      }
      s.rotation = SlotRotation(group, piece.salt);
    }
    if constexpr (kSketching == Sketching::kMatrix) {
      if (acc->matrix_block != group >> 8) {
        if (acc->matrix_depth == kFlushDepth) Flush(acc);
        acc->matrix_block = group >> 8;
        ++acc->matrix_depth;
      }
      acc->matrix_layout = F::kType == DType::kBF16 ? kLayoutQuads : kLayoutPairs;
    }
    const bool exceptional = Steps<F, kSketching, kCells>(s, &cursor, &state->extremes, &sums);
    if (__builtin_expect(exceptional, 0)) AddLarge(piece, done, n, F::kLimit, acc);
    if (F::Lanes::Less(state->extremes.chunk_near, F::Lanes::Set(F::kSmallestNormal)) != 0) {
      CountSmall<F>(data, n * kLanes, acc);
    }
    TakeLargest<F>(state->extremes, data, n * kLanes, piece.column + uint64_t{done} * kLanes, piece, acc);
    state->extremes.NextChunk();
    if constexpr (kCells && kSketching != Sketching::kNone) {
      if (piece.row) AddTo(piece.row->sketch, sums.all_residues);
      sums.all_residues = _mm512_setzero_ps();
    }
    done += n;
  }
  const __m512d all_sum_sq = kCells ? sums.all_sum_sq : _mm512_add_pd(sums.sum_sq[0], sums.sum_sq[1]);
  const double sum_sq = _mm512_reduce_add_pd(all_sum_sq);
  acc->sum += _mm512_reduce_add_pd(_mm512_add_pd(sums.sum[0], sums.sum[1]));
  acc->sum_sq += sum_sq;
  if constexpr (kSketching != Sketching::kNone) {
    acc->digest += Fold64(sums.digest);
  }
  if constexpr (kSketching == Sketching::kDirect) {
    for (int v = 0; v < 4; ++v) AddTo(acc->sketch + 16 * v, sums.buckets.part[v]);
  }
  if constexpr (kCells) {
    if (piece.row) {
      piece.row->sum_sq += sum_sq;
      piece.row->digest += Fold64(sums.row_digest);
    }
  }
}

template <class F>
void AddFloats(const Piece& piece, Accumulator* acc) {
  using L = typename F::Lanes;
  PieceState<F> state;
  const bool cells = piece.row != nullptr || piece.heads != nullptr;
  auto* add = !piece.sketch ? AddChunks<F, Sketching::kNone, true>
              : acc->matrix ? (cells ? AddChunks<F, Sketching::kMatrix, true> : AddChunks<F, Sketching::kMatrix, false>)
              : cells       ? AddChunks<F, Sketching::kDirect, true>
                            : AddChunks<F, Sketching::kDirect, false>;
  add(piece, &state, acc);
  acc->count += uint64_t{piece.n_groups} * kLanes;
  // Extremes of what was not exceptional; the exceptional finite ones were taken in one by one.
  const uint32_t nearest = L::FoldMinUnsigned(state.extremes.near);
  const uint32_t top = L::FoldMaxSigned(state.extremes.high);
  const uint32_t bottom = L::FoldMaxUnsigned(state.extremes.wide);
  const bool any_positive = static_cast<int32_t>(top) >= 0;
  const bool any_negative = (bottom & F::kSign) != 0;
  if (any_positive || any_negative) {
    // All of one sign: the value nearest to zero is the other extreme. + 0.0 turns -0 into +0.
    const double high = DecodeForKernel(any_positive ? top : F::kSign | nearest, F::kType) + 0.0;
    const double low = DecodeForKernel(any_negative ? bottom : nearest, F::kType) + 0.0;
    acc->Between(low, high);
  }
}

void Add(const Piece& piece, Accumulator* acc) {
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

const Kernel kAvx512Kernel = {Add, Flush};

}  // namespace assay

#endif  // ASSAY_HAVE_AVX512
