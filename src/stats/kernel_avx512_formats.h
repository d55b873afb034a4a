// Element formats of the AVX-512 kernel: lanes of 32, 16 and 8 bits under one set of names, and how each type widens to
// floats. For kernel_avx512.cpp alone: everything is inlined there.
#pragma once

#include <immintrin.h>

#include "stats/hash.h"
#include "tensor/dtype.h"

namespace assay {
namespace {

// Lanes of 32, 16 and 8 bits under one set of names. Fold* reduce to one number.
struct Lanes32 {
  static constexpr uint32_t kCount = 16;  // lanes of a vector
  using Mask = __mmask16;
  ASSAY_INLINE __m512i Set(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  ASSAY_INLINE __m512i Load(const uint8_t* p, Mask m, __m512i other) { return _mm512_mask_loadu_epi32(other, m, p); }
  ASSAY_INLINE __m512i MaxSigned(__m512i a, __m512i b) { return _mm512_max_epi32(a, b); }
  ASSAY_INLINE __m512i MaxUnsigned(__m512i a, __m512i b) { return _mm512_max_epu32(a, b); }
  ASSAY_INLINE __m512i MinUnsigned(__m512i a, __m512i b) { return _mm512_min_epu32(a, b); }
  ASSAY_INLINE Mask Less(__m512i a, __m512i b) { return _mm512_cmplt_epu32_mask(a, b); }
  ASSAY_INLINE Mask AtLeast(__m512i a, __m512i b) { return _mm512_cmpge_epu32_mask(a, b); }
  ASSAY_INLINE Mask AtLeastSigned(__m512i a, __m512i b) { return _mm512_cmpge_epi32_mask(a, b); }
  // Smaller magnitude of a magnitude and a finite pattern.
  ASSAY_INLINE __m512i Nearer(__m512i a, __m512i b, __m512i) {
    return _mm512_castps_si512(_mm512_range_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), 0xa));
  }
  ASSAY_INLINE bool Any(Mask a, Mask b) { return _kortestz_mask16_u8(a, b) == 0; }
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
  ASSAY_INLINE Mask AtLeast(__m512i a, __m512i b) { return _mm512_cmpge_epu16_mask(a, b); }
  ASSAY_INLINE Mask AtLeastSigned(__m512i a, __m512i b) { return _mm512_cmpge_epi16_mask(a, b); }
  ASSAY_INLINE __m512i Nearer(__m512i a, __m512i b, __m512i magnitudes) {
    return MinUnsigned(a, _mm512_and_si512(b, magnitudes));
  }
  ASSAY_INLINE bool Any(Mask a, Mask b) { return _kortestz_mask32_u8(a, b) == 0; }
  ASSAY_INLINE Mask Equal(__m512i a, __m512i b) { return _mm512_cmpeq_epi16_mask(a, b); }
  ASSAY_INLINE Mask Zero(__m512i a) { return _mm512_testn_epi16_mask(a, a); }
  ASSAY_INLINE __m512i Keep(__m512i a, Mask m) { return _mm512_maskz_mov_epi16(m, a); }
  ASSAY_INLINE __m512i Select(__m512i a, Mask m, __m512i b) { return _mm512_mask_mov_epi16(a, m, b); }
  // Halves of a lane of 32 bits, brought to its width, fold as one.
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
  ASSAY_INLINE Mask AtLeast(__m512i a, __m512i b) { return _mm512_cmpge_epu8_mask(a, b); }
  ASSAY_INLINE Mask AtLeastSigned(__m512i a, __m512i b) { return _mm512_cmpge_epi8_mask(a, b); }
  ASSAY_INLINE __m512i Nearer(__m512i a, __m512i b, __m512i magnitudes) {
    return MinUnsigned(a, _mm512_and_si512(b, magnitudes));
  }
  ASSAY_INLINE bool Any(Mask a, Mask b) { return _kortestz_mask64_u8(a, b) == 0; }
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
// to kVectors vectors of floats. kLimit: magnitude patterns from here on are taken apart: the non-finite ones, f32 and
// bf16 of 2^60 and more (squares in float).
template <class L, DType kDType, uint32_t kLimitBits, uint32_t kNonfiniteBits, uint32_t kNormalBits>
struct Format {
  using Lanes = L;
  static constexpr DType kType = kDType;
  static constexpr uint32_t kBytes = 64 / L::kCount;       // of an element
  static constexpr uint32_t kGroups = L::kCount / kLanes;  // of a step
  static constexpr uint32_t kWords = 16 / kGroups;         // of a group
  static constexpr uint32_t kVectors = L::kCount / 16;     // of floats that a step widens to
  static constexpr uint32_t kSign = 1u << (8 * kBytes - 1);
  static constexpr uint32_t kLimit = kLimitBits;
  static constexpr uint32_t kNonfinite = kNonfiniteBits;
  static constexpr uint32_t kSmallestNormal = kNormalBits;
  // Whether squares can underflow in float: those of a type with the range of f32.
  static constexpr bool kSmallSquares = kBytes == 4 || kDType == DType::kBF16;
};

struct F32 : Format<Lanes32, DType::kF32, (127 + 60) << 23, 0x7f800000, 1 << 23> {
  ASSAY_INLINE __m512 Widen(__m512i raw, int) { return _mm512_castsi512_ps(raw); }
};

// Lanes 0 to 3 of a quad's groups, then lanes 4 to 7: a bf16 is the upper half of a float.
struct BF16 : Format<Lanes16, DType::kBF16, (127 + 60) << 7, 0x7f80, 1 << 7> {
  ASSAY_INLINE __m512 Widen(__m512i raw, int v) {
    const __m512i zero = _mm512_setzero_si512();
    return _mm512_castsi512_ps(v == 0 ? _mm512_unpacklo_epi16(zero, raw) : _mm512_unpackhi_epi16(zero, raw));
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

// Eight bits: moved to where f16 has its fields, the pattern is a number of half precision, subnormals too. Of e5m2 it
// is the value; of e4m3fn the value times 2^-8, because its bias is 7 and not 15.
template <DType kDType, int kMantissaBits, uint32_t kNonfiniteBits>
struct Float8 : Format<Lanes8, kDType, kNonfiniteBits, kNonfiniteBits, 1 << kMantissaBits> {
  ASSAY_INLINE __m512 Widen(__m512i raw, int v) {
    constexpr int kF16MantissaBits = 10;
    const __m256i wide = _mm256_cvtepi8_epi16(Quarter(raw, v));  // the sign spreads upwards
    const __m256i moved = _mm256_slli_epi16(wide, kF16MantissaBits - kMantissaBits);
    if constexpr (kMantissaBits == 2) return _mm512_cvtph_ps(moved);
    // Of the spread sign one bit has come below the sign's place.
    const __m256i f16 = _mm256_and_si256(moved, _mm256_set1_epi16(static_cast<short>(0xbfff)));
    return _mm512_mul_ps(_mm512_cvtph_ps(f16), _mm512_set1_ps(256.0f));
  }
};

using F8E4M3FN = Float8<DType::kF8E4M3FN, 3, 0x7f>;
using F8E5M2 = Float8<DType::kF8E5M2, 2, 0x7c>;

}  // namespace
}  // namespace assay
