// The sketch's side of the AVX-512 kernel: the fixed table in the form that vectors want, and folds by residue. For
// kernel_avx512.cpp alone: everything is inlined there.
#pragma once

#include <immintrin.h>

#include "stats/kernel.h"
#include "stats/kernel_avx512_formats.h"

namespace assay {
namespace {

constexpr uint32_t kPairs = kBlockGroups / 2;
constexpr uint32_t kLayoutPairs = 1;  // matrix[pair][slot & 1][lane]
constexpr uint32_t kLayoutSwaps = 3;  // the same twice: for blocks of even rotation, and with slots 1, 0 for odd ones
constexpr uint32_t kLayoutQuads = 2;  // matrix[quad][lane >> 2][slot & 3][lane & 3]

// The table of hash.h in the form that vectors want, for pairs of slots. Element e of a pair is slot 2 * pair + e / 8,
// lane e % 8; its residue is bucket & 15, and every residue occurs once in a pair.
struct PairTable {
  alignas(64) uint32_t source[kPairs][16] = {};        // which element has residue k ...
  alignas(64) uint32_t source_split[kPairs][16] = {};  // ... in (lanes 0 to 3 of the quad's slots, lanes 4 to 7)
  alignas(64) float sign[kPairs][16] = {};             // 1 or -1: sign of the element with residue k
  // source, and in the top bit whether the sign is minus; [1]: slots swapped. Bytes take two operations more than the
  // above, but f32 needs the room: matrix, tables, heads' cells and data on their way share the L1 cache, and while
  // data come from memory a miss there waits behind them.
  alignas(64) uint8_t packed[2][kPairs][16] = {};
  alignas(64) uint8_t packed_split[kPairs][16] = {};  // of source_split
  uint16_t high[kPairs][4] = {};                      // [v], bit k: the element with residue k has bucket >> 4 == v
};

constexpr PairTable MakePairTable() {
  PairTable t;
  for (uint32_t pair = 0; pair < kPairs; ++pair) {
    for (uint32_t e = 0; e < 16; ++e) {
      const uint32_t slot = 2 * pair + e / 8;
      const uint32_t lane = e % 8;
      const uint32_t bucket = kSketchTable.bucket[slot][lane];
      const uint32_t minus = kSketchTable.minus[slot] >> lane & 1u;
      const uint32_t k = bucket & 15;
      t.source[pair][k] = e;
      t.source_split[pair][k] = (slot & 3) * 4 + (lane & 3) + (lane >> 2) * 16;
      t.packed_split[pair][k] = static_cast<uint8_t>(minus << 7 | t.source_split[pair][k]);
      t.sign[pair][k] = minus ? -1.0f : 1.0f;
      t.packed[0][pair][k] = static_cast<uint8_t>(minus << 7 | e);
      t.packed[1][pair][k] = static_cast<uint8_t>(minus << 7 | (e ^ 8));
      t.high[pair][bucket >> 4] = static_cast<uint16_t>(t.high[pair][bucket >> 4] | 1 << k);
    }
  }
  return t;
}

constexpr PairTable kPairTable = MakePairTable();

// x with its sign flipped where the top bit of h is set; sign_bits: the top bits.
ASSAY_INLINE __m512 FlipSign(__m512 x, __m512i h, __m512i sign_bits) {
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_castps_si512(x), h, sign_bits, 0x78));  // x ^ (h & s)
}

// A pair's elements ordered by residue, without the table's signs. `source` is the pair's of a PairTable.
ASSAY_INLINE __m512 Ordered(__m512 elements, const uint32_t* source) {
  return _mm512_permutexvar_ps(_mm512_load_si512(source), elements);
}

// The same out of both halves of the quad that the pair belongs to; of source_split.
ASSAY_INLINE __m512 Ordered(__m512 low, __m512 high, const uint32_t* source) {
  return _mm512_permutex2var_ps(low, _mm512_load_si512(source), high);
}

// By residue, and with the table's signs; of packed. A permutation looks at the lowest bits alone.
ASSAY_INLINE __m512 OrderedSigned(__m512 elements, const uint8_t* packed, __m512i sign_bits) {
  const __m512i order = _mm512_cvtepi8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(packed)));
  return FlipSign(_mm512_permutexvar_ps(order, elements), order, sign_bits);
}

// The same out of both halves of the quad; of packed_split.
ASSAY_INLINE __m512 OrderedSigned(__m512 low, __m512 high, const uint8_t* packed, __m512i sign_bits) {
  const __m512i order = _mm512_cvtepi8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(packed)));
  return FlipSign(_mm512_permutex2var_ps(low, order, high), order, sign_bits);
}

// sums + by_residue with the table's signs. `place` is 8 times a slot of the pair's even one: 16 times the pair.
ASSAY_INLINE __m512 AddSigned(__m512 sums, __m512 by_residue, size_t place) {
  return _mm512_fmadd_ps(by_residue, _mm512_load_ps(kPairTable.sign[0] + place), sums);
}

ASSAY_INLINE __m512 TableSigns(__m512 by_residue, size_t place) {
  return _mm512_mul_ps(by_residue, _mm512_load_ps(kPairTable.sign[0] + place));
}

// Sketch of 64 buckets in registers: [bucket >> 4], lane bucket & 15.
struct Buckets {
  __m512 part[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};

  // A pair's elements by residue, with the table's signs.
  ASSAY_KERNEL_INLINE void Add(__m512 by_residue, size_t place) {
    for (int v = 0; v < 4; ++v) {
      part[v] = _mm512_mask_add_ps(part[v], kPairTable.high[place / 16][v], part[v], by_residue);
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

}  // namespace
}  // namespace assay
