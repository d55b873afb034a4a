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

// The table of hash.h in the form that vectors want, for pairs of slots. Element k of a pair is slot 2 * pair + k / 8,
// lane k % 8.
struct PairTable {
  alignas(16) uint8_t source[kPairs][16] = {};  // which element has bucket & 15 == k
  uint16_t minus[kPairs] = {};                  // bit k: sign of the element whose bucket & 15 == k
  uint16_t high[kPairs][4] = {};                // [v], bit k: the element whose bucket & 15 == k has bucket >> 4 == v
};

constexpr PairTable MakePairTable() {
  PairTable t;
  for (uint32_t pair = 0; pair < kPairs; ++pair) {
    for (uint32_t e = 0; e < 16; ++e) {
      const uint32_t slot = 2 * pair + e / 8;
      const uint32_t bucket = kSketchTable.bucket[slot][e % 8];
      const uint32_t k = bucket & 15;
      t.source[pair][k] = static_cast<uint8_t>(e);
      t.minus[pair] = static_cast<uint16_t>(t.minus[pair] | (kSketchTable.minus[slot] >> (e % 8) & 1) << k);
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

// A pair's signed elements, ordered by bucket & 15.
ASSAY_INLINE __m512 ByResidue(__m512 pair_elements, uint32_t pair) {
  const __m512i source =
      _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(kPairTable.source[pair])));
  const __m512i v = _mm512_castps_si512(_mm512_permutexvar_ps(source, pair_elements));
  return _mm512_castsi512_ps(_mm512_mask_xor_epi32(v, kPairTable.minus[pair], v, SignBits()));
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

// The first and the second pair of a quad out of its even and its odd elements.
ASSAY_INLINE __m512 FirstPair(__m512 even, __m512 odd) {
  const __m512i source = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  return _mm512_permutex2var_ps(even, source, odd);
}
ASSAY_INLINE __m512 SecondPair(__m512 even, __m512 odd) {
  const __m512i source = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  return _mm512_permutex2var_ps(even, source, odd);
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
      buckets.Add(ByResidue(FirstPair(even, odd), 2 * quad), 2 * quad);
      buckets.Add(ByResidue(SecondPair(even, odd), 2 * quad + 1), 2 * quad + 1);
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
constexpr uint32_t kAhead = 2048;

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
// to kVectors vectors of floats. kLimit: magnitude patterns from here on are taken apart: the non-finite ones, and for
// f32 and bf16 those of 2^96 and more. kNonfinite: the non-finite ones alone.
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
};

struct F32 : Format<Lanes32, DType::kF32, (127 + 96) << 23, 0x7f800000, 1 << 23> {
  ASSAY_INLINE __m512 Widen(__m512i raw, int) { return _mm512_castsi512_ps(raw); }
};

// The even elements of a quad, then the odd ones.
struct BF16 : Format<Lanes16, DType::kBF16, (127 + 96) << 7, 0x7f80, 1 << 7> {
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

// Extremes of the patterns of n elements, n > 0.
struct Range {
  uint32_t max_magnitude;
  uint32_t min_magnitude;
  uint32_t max_bits;  // pattern of the largest value ...
  uint32_t min_bits;  // ... and of the smallest
};

// Running extremes of patterns. first: any one of the elements.
template <class F>
struct Extremes {
  using L = typename F::Lanes;
  __m512i high;  // signed maximum: the largest positive value, if there is one
  __m512i wide;  // unsigned maximum: the largest negative magnitude, if there is one
  __m512i near;  // smallest magnitude

  ASSAY_KERNEL_INLINE explicit Extremes(uint32_t first)
      : high(L::Set(first)), wide(L::Set(first)), near(L::Set(first & (F::kSign - 1))) {}
  ASSAY_KERNEL_INLINE void Take(__m512i patterns, __m512i magnitudes) {
    high = L::MaxSigned(high, patterns);
    wide = L::MaxUnsigned(wide, patterns);
    near = L::MinUnsigned(near, magnitudes);
  }
  ASSAY_KERNEL_INLINE Range Fold() const {
    const uint32_t top = L::FoldMaxSigned(high);
    const uint32_t bottom = L::FoldMaxUnsigned(wide);
    Range r;
    r.min_magnitude = L::FoldMinUnsigned(near);
    const bool any_positive = static_cast<int32_t>(top) >= 0;
    const bool any_negative = (bottom & F::kSign) != 0;
    const uint32_t largest_negative = any_negative ? bottom & (F::kSign - 1) : 0;
    const uint32_t largest_positive = any_positive ? top : 0;
    r.max_magnitude = largest_negative > largest_positive ? largest_negative : largest_positive;
    // All of one sign: the value nearest to zero is the other extreme.
    r.max_bits = any_positive ? top : F::kSign | r.min_magnitude;
    r.min_bits = any_negative ? bottom : r.min_magnitude;
    return r;
  }
};

template <class F>
ASSAY_INLINE uint32_t PatternAt(const uint8_t* data, uint32_t k) {
  uint32_t bits = 0;
  __builtin_memcpy(&bits, data + k * F::kBytes, F::kBytes);
  return bits;
}

// Range of the finite ones among n elements; false if there is none.
template <class F>
bool FiniteRange(const uint8_t* data, uint32_t n, Range* range) {
  using L = typename F::Lanes;
  uint32_t first = 0;
  while (first < n && (PatternAt<F>(data, first) & (F::kSign - 1)) >= F::kNonfinite) ++first;
  if (first == n) return false;
  const __m512i filler = L::Set(PatternAt<F>(data, first));
  const __m512i magnitude = L::Set(F::kSign - 1);
  Extremes<F> extremes(PatternAt<F>(data, first));
  for (uint32_t k = 0; k < n; k += L::kCount) {
    const uint32_t left = n - k < L::kCount ? n - k : L::kCount;
    const auto mask = static_cast<typename L::Mask>(~uint64_t{0} >> (64 - left));
    __m512i v = L::Load(data + k * F::kBytes, mask, filler);
    const auto finite = L::Less(_mm512_and_si512(v, magnitude), L::Set(F::kNonfinite));
    v = L::Select(filler, finite, v);
    extremes.Take(v, _mm512_and_si512(v, magnitude));
  }
  *range = extremes.Fold();
  return true;
}

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

// Number of the first of n elements with this magnitude; there is one.
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
  return 0;
}

template <class F>
ASSAY_INLINE void TakeRange(const Range& r, const uint8_t* data, uint32_t n, const Piece& piece, uint64_t column,
                            Accumulator* acc) {
  if (r.min_magnitude < F::kSmallestNormal) CountSmall<F>(data, n, acc);
  const double low = DecodeForKernel(r.min_bits, F::kType) + 0.0;  // -0 becomes +0
  const double high = DecodeForKernel(r.max_bits, F::kType) + 0.0;
  const double largest = -low > high ? -low : high;
  if (acc->finite == 0 || low < acc->min) acc->min = low;
  if (acc->finite == 0 || high > acc->max) acc->max = high;
  if (acc->finite == 0 || largest >= acc->abs_max) {
    const uint64_t index = piece.index.At(column + FindMagnitude<F>(data, n, r.max_magnitude));
    if (acc->finite == 0 || largest > acc->abs_max || index < acc->abs_max_index) acc->abs_max_index = index;
    acc->abs_max = largest;
  }
}

// Sums of a stretch of groups.
struct Sums {
  __m512d sum[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
  __m512d sum_sq[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
  __m512i digest = _mm512_setzero_si512();
  __m512i row_digest = _mm512_setzero_si512();
  __m512 residues = _mm512_setzero_ps();  // sketch by bucket & 15
  Buckets buckets;

  // Sums go through the multiply-add units (times 1): the adders are busy converting and adding to the matrix.
  ASSAY_KERNEL_INLINE void Add(__m512 x) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
    sum[0] = _mm512_add_pd(sum[0], low);
    sum[1] = _mm512_add_pd(sum[1], high);
    sum_sq[0] = _mm512_fmadd_pd(low, low, sum_sq[0]);
    sum_sq[1] = _mm512_fmadd_pd(high, high, sum_sq[1]);
  }
};

// Where the sketch goes: nowhere, to the matrix, or straight into 64 buckets (cheaper for a small segment).
enum class Sketching { kNone, kMatrix, kDirect };

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

template <class F, Sketching kSketching, bool kCells>
ASSAY_INLINE void Steps(const Stretch& s, Extremes<F>* extremes, Sums* sums) {
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

  auto step = [&](uint32_t p, __m512i loaded, __mmask8 present) __attribute__((always_inline)) {
    const __m512i raw = _mm512_permutexvar_epi32(order, loaded);
    __m512i h = _mm512_setzero_si512();
    if constexpr (kSketching != Sketching::kNone) {
      h = _mm512_permutexvar_epi32(spread, LoadHashes<kGroups>(s.hashes + p));
      sums->digest = _mm512_mask_add_epi64(sums->digest, present, sums->digest, Products(raw, h, keys));
      if constexpr (kCells) {
        const __m512i r = _mm512_permutexvar_epi32(spread, LoadHashes<kGroups>(s.row_hashes + p));
        sums->row_digest = _mm512_mask_add_epi64(sums->row_digest, present, sums->row_digest, Products(raw, r, keys));
      }
    }
    const auto modest = L::Less(_mm512_and_si512(raw, magnitude), limit);
    const __m512i kept = L::Keep(raw, modest);
    const uint32_t base = (p ^ s.rotation) & ~(kGroups - 1);
    __m512 y[4];
    for (int v = 0; v < static_cast<int>(F::kVectors); ++v) {
      const __m512 x = F::Widen(kept, v);
      sums->Add(x);
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
      if constexpr (F::kType == DType::kBF16) {
        const __m512 first = FirstPair(y[0], y[1]);
        y[1] = SecondPair(y[0], y[1]);
        y[0] = first;
      }
      for (uint32_t v = 0; v < F::kVectors; ++v) {
        const __m512 z = ByResidue(y[v], base / 2 + v);
        if constexpr (kSketching == Sketching::kDirect) sums->buckets.Add(z, base / 2 + v);
        if constexpr (kCells) sums->residues = _mm512_add_ps(sums->residues, z);
      }
    }
  };
  // A step of which only groups [from, to) are here.
  auto masked = [&](uint32_t p, const uint8_t* data, uint32_t from, uint32_t to) {
    const uint32_t words = ((1u << to * F::kWords) - 1) & ~((1u << from * F::kWords) - 1);
    const __m512i loaded = _mm512_maskz_loadu_epi32(static_cast<__mmask16>(words), data);
    // Absent groups repeat the patterns of the first element that is here.
    uint32_t first = PatternAt<F>(data, from * kLanes);
    const __m512i seen = _mm512_mask_mov_epi32(L::Set(first), static_cast<__mmask16>(words), loaded);
    extremes->Take(seen, _mm512_and_si512(seen, magnitude));
    // Where the pairs of words of the present groups are in slot order.
    uint32_t present = 0;
    for (uint32_t g = from; g < to; ++g) present |= ((1u << F::kWords / 2) - 1) << (g ^ inside) * (F::kWords / 2);
    step(p, loaded, static_cast<__mmask8>(present));
  };

  uint32_t p = s.p;
  const uint8_t* data = s.data;
  if (p % kGroups != 0) {
    const uint32_t from = p % kGroups;
    const uint32_t to = s.end - p < kGroups - from ? from + s.end - p : kGroups;
    masked(p - from, data - from * kGroupBytes, from, to);
    p += to - from;
    data += (to - from) * kGroupBytes;
  }
  for (; p + kGroups <= s.end; p += kGroups, data += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(data) + kAhead, _MM_HINT_T0);
    const __m512i loaded = _mm512_loadu_si512(data);
    extremes->Take(loaded, _mm512_and_si512(loaded, magnitude));
    step(p, loaded, 0xff);
  }
  if (p < s.end) masked(p, data, 0, s.end - p);
}

// Which head a group of a piece belongs to, and how many of its groups are still to come.
struct HeadCursor {
  uint32_t head;
  uint32_t left;
};

// Positions [s.p, s.end) of one block, cut where heads end.
template <class F, Sketching kSketching, bool kCells>
void Chunk(const Piece& piece, Stretch s, HeadCursor* cursor, Extremes<F>* extremes, Accumulator* acc) {
  const uint32_t stop = s.end;
  while (s.p < stop) {
    s.end = stop - s.p < cursor->left ? stop : s.p + cursor->left;
    Sums sums;
    Steps<F, kSketching, kCells>(s, extremes, &sums);
    const double sum_sq = _mm512_reduce_add_pd(_mm512_add_pd(sums.sum_sq[0], sums.sum_sq[1]));
    acc->sum += _mm512_reduce_add_pd(_mm512_add_pd(sums.sum[0], sums.sum[1]));
    acc->sum_sq += sum_sq;
    if constexpr (kSketching != Sketching::kNone) {
      acc->digest += static_cast<uint64_t>(_mm512_reduce_add_epi64(sums.digest));
    }
    if constexpr (kSketching == Sketching::kDirect) {
      for (int v = 0; v < 4; ++v) AddTo(acc->sketch + 16 * v, sums.buckets.part[v]);
    }
    if constexpr (kCells) {
      if (piece.row) {
        piece.row->sum_sq += sum_sq;
        piece.row->digest += static_cast<uint64_t>(_mm512_reduce_add_epi64(sums.row_digest));
        AddTo(piece.row->sketch, sums.residues);
      }
      if (piece.heads) {
        piece.heads[cursor->head].sum_sq += sum_sq;
        AddTo(piece.heads[cursor->head].sketch, sums.residues);
      }
    }
    s.data += (s.end - s.p) * F::kWords * 4;
    cursor->left -= s.end - s.p;
    s.p = s.end;
    if (cursor->left == 0) {
      cursor->left = piece.heads ? piece.head_groups : ~0u;
      cursor->head = cursor->head + 1 == piece.n_heads ? 0 : cursor->head + 1;
    }
  }
}

template <class F>
void AddFloats(const Piece& piece, Accumulator* acc) {
  constexpr uint32_t kGroupBytes = F::kWords * 4;
  alignas(64) uint32_t hashes[kBlockGroups];
  alignas(64) uint32_t row_hashes[kBlockGroups];
  HeadCursor cursor{piece.head, piece.heads ? piece.head_left : ~0u};
  const bool cells = piece.row != nullptr || piece.heads != nullptr;
  for (uint32_t done = 0; done < piece.n_groups;) {
    const uint32_t group = piece.group + done;
    const uint32_t p = group & 0xff;
    const uint32_t n = piece.n_groups - done < kBlockGroups - p ? piece.n_groups - done : kBlockGroups - p;
    const uint8_t* data = piece.data + uint64_t{done} * kGroupBytes;
    Stretch s{data, p, p + n, 0, hashes, row_hashes, acc->matrix};
    Extremes<F> extremes(PatternAt<F>(data, 0));
    if (!piece.sketch) {
      Chunk<F, Sketching::kNone, true>(piece, s, &cursor, &extremes, acc);
    } else {
      // From a whole vector of hashes on: hashes[q] belongs to position q.
      const uint32_t from = p & ~15u;
      HashGroups(group - (p - from), piece.salt.group, p + n - from, hashes + from);
      if (cells) HashGroups(piece.row_group + done - (p - from), piece.row_salt, p + n - from, row_hashes + from);
      s.rotation = SlotRotation(group, piece.salt);
      if (acc->matrix) {
        if (acc->matrix_block != group >> 8) {
          if (acc->matrix_depth == kFlushDepth) Flush(acc);
          acc->matrix_block = group >> 8;
          ++acc->matrix_depth;
        }
        acc->matrix_layout = F::kType == DType::kBF16 ? kLayoutQuads : kLayoutPairs;
        if (cells) {
          Chunk<F, Sketching::kMatrix, true>(piece, s, &cursor, &extremes, acc);
        } else {
          Chunk<F, Sketching::kMatrix, false>(piece, s, &cursor, &extremes, acc);
        }
      } else {
        if (cells) {
          Chunk<F, Sketching::kDirect, true>(piece, s, &cursor, &extremes, acc);
        } else {
          Chunk<F, Sketching::kDirect, false>(piece, s, &cursor, &extremes, acc);
        }
      }
    }
    acc->count += uint64_t{n} * kLanes;
    Range range = extremes.Fold();
    bool any_finite = true;
    uint32_t n_finite = n * kLanes;
    if (range.max_magnitude >= F::kLimit) {
      n_finite -= AddLarge(piece, done, n, F::kLimit, acc);
      any_finite = FiniteRange<F>(data, n * kLanes, &range);
    }
    if (any_finite) {
      TakeRange<F>(range, data, n * kLanes, piece, piece.column + uint64_t{done} * kLanes, acc);
      acc->finite += n_finite;
    }
    done += n;
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
