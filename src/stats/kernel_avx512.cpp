// AVX-512 kernel (F, BW, DQ, VL). A piece is cut into chunks: the groups of one block, 2048 elements at most, which
// stay in L1 while several short loops go over them:
//   Scan    extremes of the bit patterns; tells whether a chunk holds anything that is not a modest finite number, in
//           which case the portable kernel takes it, and whether zeros and subnormals must be counted at all;
//   Digest  products of word pairs, 64 bytes at a time;
//   Values  sums in double, and the sketch: a sign by XOR, one float addition an element.
// Loops of their own cost a load a vector more than one fused loop would, and loads are not what is short here.
//
// The sketch's running sums live in a matrix of 256 slots by 8 lanes. A vector holds a pair of neighbouring slots (16
// floats); for bf16 a quad, split into even and odd elements, which is how a vector of bf16 widens cheapest. Slot =
// position XOR rotation, so inside a vector the rotation only permutes groups.
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
    // Elements 0..15 of the first and of the second pair of a quad, out of (even, odd).
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (uint32_t quad = 0; quad < kPairs / 2; ++quad) {
      float* at = acc->matrix + quad * 32;
      const __m512 even = _mm512_load_ps(at);
      const __m512 odd = _mm512_load_ps(at + 16);
      buckets.Add(ByResidue(_mm512_permutex2var_ps(even, first, odd), 2 * quad), 2 * quad);
      buckets.Add(ByResidue(_mm512_permutex2var_ps(even, second, odd), 2 * quad + 1), 2 * quad + 1);
      _mm512_store_ps(at, zero);
      _mm512_store_ps(at + 16, zero);
    }
  }
  for (int v = 0; v < 4; ++v) AddTo(acc->sketch + 16 * v, buckets.part[v]);
  acc->matrix_depth = 0;
  acc->matrix_layout = 0;
  acc->matrix_block = ~uint64_t{0};
}

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

// Lane numbers divided by `words`: which of a vector's groups a 32-bit word belongs to.
template <int kWords>
ASSAY_INLINE __m512i GroupOfWord() {
  static_assert(kWords == 2 || kWords == 4 || kWords == 8 || kWords == 16);
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_srli_epi32(lanes, kWords == 2 ? 1 : kWords == 4 ? 2 : kWords == 8 ? 3 : 4);
}

// Digest of n groups of kWords words each; hashes[k] is group k's.
template <int kWords>
ASSAY_INLINE uint64_t Digest(const uint8_t* data, uint32_t n, const uint32_t* hashes) {
  constexpr uint32_t kPerVector = 16 / kWords;
  alignas(64) static constexpr auto kKeys = [] {
    struct {
      uint32_t word[16] = {};
    } keys;
    for (int w = 0; w < 16; ++w) keys.word[w] = kDigestKeys.word[w % kWords];
    return keys;
  }();
  const __m512i keys = _mm512_load_si512(kKeys.word);
  const __m512i spread = GroupOfWord<kWords>();
  auto products = [&](__m512i words, const uint32_t* h) {
    const __m512i g = _mm512_permutexvar_epi32(spread, _mm512_loadu_si512(h));
    const __m512i w = _mm512_add_epi32(_mm512_add_epi32(g, keys), words);
    return _mm512_mul_epu32(w, _mm512_srli_epi64(w, 32));
  };
  __m512i sum0 = _mm512_setzero_si512();
  __m512i sum1 = _mm512_setzero_si512();
  uint32_t k = 0;
  for (; k + 2 * kPerVector <= n; k += 2 * kPerVector) {
    const uint8_t* at = data + k * kWords * 4;
    sum0 = _mm512_add_epi64(sum0, products(_mm512_loadu_si512(at), hashes + k));
    sum1 = _mm512_add_epi64(sum1, products(_mm512_loadu_si512(at + 64), hashes + k + kPerVector));
  }
  for (; k < n; k += kPerVector) {
    const uint32_t words = (n - k < kPerVector ? n - k : kPerVector) * kWords;
    const __mmask16 present = static_cast<__mmask16>((1u << words) - 1);
    const __m512i p = products(_mm512_maskz_loadu_epi32(present, data + k * kWords * 4), hashes + k);
    sum0 = _mm512_mask_add_epi64(sum0, static_cast<__mmask8>((1u << words / 2) - 1), sum0, p);
  }
  return static_cast<uint64_t>(_mm512_reduce_add_epi64(_mm512_add_epi64(sum0, sum1)));
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

// The float formats that the vector loops take. kLimit: magnitude patterns from here on are left to the portable
// kernel: the non-finite ones, and for f32 and bf16 those of 2^96 and more, whose running float sums could overflow.
// Pair: 16 elements, those of the mask, the others 0.
struct F32 {
  using Lanes = Lanes32;
  static constexpr DType kType = DType::kF32;
  static constexpr uint32_t kSign = 0x80000000u, kLimit = (127 + 96) << 23, kSmallestNormal = 1u << 23;
  ASSAY_INLINE __m512 Pair(const uint8_t* p, __mmask16 m) { return _mm512_maskz_loadu_ps(m, p); }
};

struct BF16 {
  using Lanes = Lanes16;
  static constexpr DType kType = DType::kBF16;
  static constexpr uint32_t kSign = 0x8000u, kLimit = (127 + 96) << 7, kSmallestNormal = 1u << 7;
  ASSAY_INLINE __m512 Pair(const uint8_t* p, __mmask16 m) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, p)), 16));
  }
};

struct F16 {
  using Lanes = Lanes16;
  static constexpr DType kType = DType::kF16;
  static constexpr uint32_t kSign = 0x8000u, kLimit = 0x7c00u, kSmallestNormal = 1u << 10;
  ASSAY_INLINE __m512 Pair(const uint8_t* p, __mmask16 m) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(m, p)); }
};

struct F8E4M3FN {
  using Lanes = Lanes8;
  static constexpr DType kType = DType::kF8E4M3FN;
  static constexpr uint32_t kSign = 0x80u, kLimit = 0x7fu, kSmallestNormal = 1u << 3;
  // The pattern, moved to where f16 has its fields, is the value times 2^-8 (bias 7 against 15), subnormals too.
  ASSAY_INLINE __m512 Pair(const uint8_t* p, __mmask16 m) {
    const __m256i v = _mm256_cvtepi8_epi16(_mm_maskz_loadu_epi8(m, p));  // the sign spreads upwards
    const __m256i f16 = _mm256_and_si256(_mm256_slli_epi16(v, 7), _mm256_set1_epi16(static_cast<short>(0xbf80)));
    return _mm512_mul_ps(_mm512_cvtph_ps(f16), _mm512_set1_ps(256.0f));
  }
};

struct F8E5M2 {
  using Lanes = Lanes8;
  static constexpr DType kType = DType::kF8E5M2;
  static constexpr uint32_t kSign = 0x80u, kLimit = 0x7cu, kSmallestNormal = 1u << 2;
  ASSAY_INLINE __m512 Pair(const uint8_t* p, __mmask16 m) {
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_maskz_loadu_epi8(m, p)), 8));
  }
};

// Extremes of the patterns of n elements, n > 0.
struct Range {
  uint32_t max_magnitude;
  uint32_t min_magnitude;
  uint32_t max_bits;  // pattern of the largest value ...
  uint32_t min_bits;  // ... and of the smallest
};

template <class F>
ASSAY_INLINE Range Scan(const uint8_t* data, uint32_t n) {
  using L = typename F::Lanes;
  const __m512i magnitude = L::Set(F::kSign - 1);
  uint32_t first = 0;
  __builtin_memcpy(&first, data, 64 / L::kCount);
  const __m512i filler = L::Set(first);  // lanes past the end repeat the first element
  __m512i high[2] = {filler, filler};    // signed maximum: the largest positive value, if there is one
  __m512i wide[2] = {filler, filler};    // unsigned maximum: the largest negative magnitude, if there is one
  __m512i near[2] = {_mm512_and_si512(filler, magnitude), _mm512_and_si512(filler, magnitude)};
  auto take = [&](__m512i v, int k) {
    high[k] = L::MaxSigned(high[k], v);
    wide[k] = L::MaxUnsigned(wide[k], v);
    near[k] = L::MinUnsigned(near[k], _mm512_and_si512(v, magnitude));
  };
  uint32_t k = 0;
  for (; k + 2 * L::kCount <= n; k += 2 * L::kCount) {
    take(_mm512_loadu_si512(data + k * (64 / L::kCount)), 0);
    take(_mm512_loadu_si512(data + (k + L::kCount) * (64 / L::kCount)), 1);
  }
  for (; k < n; k += L::kCount) {
    const uint32_t left = n - k < L::kCount ? n - k : L::kCount;
    const auto mask = static_cast<typename L::Mask>(~uint64_t{0} >> (64 - left));
    take(L::Load(data + k * (64 / L::kCount), mask, filler), 0);
  }
  const uint32_t top = L::FoldMaxSigned(L::MaxSigned(high[0], high[1]));
  const uint32_t bottom = L::FoldMaxUnsigned(L::MaxUnsigned(wide[0], wide[1]));
  Range r;
  r.min_magnitude = L::FoldMinUnsigned(L::MinUnsigned(near[0], near[1]));
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
    const __m512i v = _mm512_and_si512(L::Load(data + k * (64 / L::kCount), mask, normal), magnitude);
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
    const __m512i v = _mm512_and_si512(L::Load(data + k * (64 / L::kCount), mask, L::Set(~wanted)), magnitude);
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
  acc->finite += n;
  acc->count += n;
}

// Sums of a stretch of groups.
struct Sums {
  __m512d sum[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
  __m512d sum_sq[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
  __m512 residues = _mm512_setzero_ps();  // sketch by bucket & 15
  Buckets buckets;

  ASSAY_KERNEL_INLINE void Add(__m512 x) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
    sum[0] = _mm512_add_pd(sum[0], low);
    sum[1] = _mm512_add_pd(sum[1], high);
    sum_sq[0] = _mm512_fmadd_pd(low, low, sum_sq[0]);
    sum_sq[1] = _mm512_fmadd_pd(high, high, sum_sq[1]);
  }
};

// Which parts of the sketch a stretch feeds.
enum class Sketching { kNone, kMatrix, kDirect };

// Positions [p, end) of a block; data is position p's; hashes[q] is position q's.
struct Stretch {
  const uint8_t* data;
  uint32_t p;
  uint32_t end;
  uint32_t rotation;
  const uint32_t* hashes;
  float* matrix;
};

template <class F, Sketching kSketching, bool kCells>
ASSAY_INLINE void Pairs(const Stretch& s, Sums* sums) {
  constexpr uint32_t kGroupBytes = 512 / F::Lanes::kCount;
  // An odd rotation swaps the two groups of a pair.
  const int swap = static_cast<int>(s.rotation & 1) * 8;
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i order = _mm512_xor_si512(lanes, _mm512_set1_epi32(swap));
  const __m512i spread = _mm512_srli_epi32(order, 3);
  auto step = [&](uint32_t p, const uint8_t* data, __mmask16 mask) {
    const __m512 x = F::Pair(data, mask);
    sums->Add(x);
    if constexpr (kSketching != Sketching::kNone) {
      const uint32_t pair = (p ^ s.rotation) >> 1;
      const __m512i h = _mm512_permutexvar_epi32(spread, _mm512_loadu_si512(s.hashes + p));
      const __m512 y = FlipSign(_mm512_permutexvar_ps(order, x), h);
      if constexpr (kSketching == Sketching::kMatrix) {
        float* at = s.matrix + pair * 16;
        _mm512_store_ps(at, _mm512_add_ps(_mm512_load_ps(at), y));
      }
      if constexpr (kSketching == Sketching::kDirect || kCells) {
        const __m512 z = ByResidue(y, pair);
        if constexpr (kSketching == Sketching::kDirect) sums->buckets.Add(z, pair);
        if constexpr (kCells) sums->residues = _mm512_add_ps(sums->residues, z);
      }
    }
  };
  uint32_t p = s.p;
  const uint8_t* data = s.data;
  if (p & 1) {  // the second group of a pair alone
    step(p - 1, data - kGroupBytes, 0xff00);
    ++p;
    data += kGroupBytes;
  }
  for (; p + 2 <= s.end; p += 2, data += 2 * kGroupBytes) step(p, data, 0xffff);
  if (p < s.end) step(p, data, 0x00ff);
}

// A float format's chunk: one block's positions [p, p + n), not exceptional.
template <class F, Sketching kSketching, bool kCells>
void Values(const Piece& piece, uint32_t done, Stretch s, uint32_t head, uint32_t left, Accumulator* acc) {
  constexpr uint32_t kGroupBytes = 512 / F::Lanes::kCount;
  const uint32_t stop = s.end;
  (void)done;
  while (s.p < stop) {
    s.end = stop - s.p < left ? stop : s.p + left;
    Sums sums;
    Pairs<F, kSketching, kCells>(s, &sums);
    const double sum_sq = _mm512_reduce_add_pd(_mm512_add_pd(sums.sum_sq[0], sums.sum_sq[1]));
    acc->sum += _mm512_reduce_add_pd(_mm512_add_pd(sums.sum[0], sums.sum[1]));
    acc->sum_sq += sum_sq;
    if constexpr (kSketching == Sketching::kDirect) {
      for (int v = 0; v < 4; ++v) AddTo(acc->sketch + 16 * v, sums.buckets.part[v]);
    }
    if constexpr (kCells) {
      if (piece.row) {
        piece.row->sum_sq += sum_sq;
        AddTo(piece.row->sketch, sums.residues);
      }
      if (piece.heads) {
        piece.heads[head].sum_sq += sum_sq;
        AddTo(piece.heads[head].sketch, sums.residues);
      }
    }
    s.data += (s.end - s.p) * kGroupBytes;
    s.p = s.end;
    head = head + 1 == piece.n_heads ? 0 : head + 1;
    left = piece.head_groups;
  }
}

template <class F>
void AddFloats(const Piece& piece, Accumulator* acc) {
  constexpr uint32_t kGroupBytes = 512 / F::Lanes::kCount;
  alignas(64) uint32_t hashes[kBlockGroups + 32];
  alignas(64) uint32_t row_hashes[kBlockGroups + 32];
  uint32_t head = piece.head;
  uint32_t left = piece.heads ? piece.head_left : piece.n_groups;
  const bool cells = piece.row != nullptr || piece.heads != nullptr;
  for (uint32_t done = 0; done < piece.n_groups;) {
    const uint32_t group = piece.group + done;
    const uint32_t p = group & 0xff;
    const uint32_t n = piece.n_groups - done < kBlockGroups - p ? piece.n_groups - done : kBlockGroups - p;
    const uint8_t* data = piece.data + uint64_t{done} * kGroupBytes;
    // The next chunk comes in while this one is worked on.
    const Range range = Scan<F>(data, n * kLanes);
    const bool modest = range.max_magnitude < F::kLimit;
    if (modest) {
      TakeRange<F>(range, data, n * kLanes, piece, piece.column + uint64_t{done} * kLanes, acc);
      if (piece.sketch) {
        const uint32_t from = p & ~15u;
        HashGroups(group - (p - from), piece.salt.group, p + n - from, hashes + from);
        acc->digest += Digest<kGroupBytes / 4>(data, n, hashes + p);
        if (piece.row) {
          HashGroups(piece.row_group + done, piece.row_salt, n, row_hashes);
          piece.row->digest += Digest<kGroupBytes / 4>(data, n, row_hashes);
        }
        const Stretch s{data, p, p + n, SlotRotation(group, piece.salt), hashes, acc->matrix};
        if (acc->matrix) {
          if (acc->matrix_block != group >> 8) {
            if (acc->matrix_depth == kFlushDepth) Flush(acc);
            acc->matrix_block = group >> 8;
            ++acc->matrix_depth;
          }
          acc->matrix_layout = kLayoutPairs;
          if (cells) {
            Values<F, Sketching::kMatrix, true>(piece, done, s, head, left, acc);
          } else {
            Values<F, Sketching::kMatrix, false>(piece, done, s, head, left, acc);
          }
        } else {
          if (cells) {
            Values<F, Sketching::kDirect, true>(piece, done, s, head, left, acc);
          } else {
            Values<F, Sketching::kDirect, false>(piece, done, s, head, left, acc);
          }
        }
      } else {
        const Stretch s{data, p, p + n, 0, nullptr, nullptr};
        Values<F, Sketching::kNone, true>(piece, done, s, head, left, acc);
      }
    }
    // Heads go on, with or without the vector loops.
    for (uint32_t q = 0; q < n;) {
      const uint32_t m = left < n - q ? left : n - q;
      if (!modest) {
        AddGroupsPortable(piece, done + q, m, piece.row, piece.heads ? piece.heads + head : nullptr, acc);
      }
      q += m;
      left -= m;
      if (left == 0) {
        left = piece.heads ? piece.head_groups : piece.n_groups;
        head = head + 1 == piece.n_heads ? 0 : head + 1;
      }
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
