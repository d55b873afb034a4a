// The innermost loops of the AVX-512 kernel: eight groups at a time, every statistic at once. For kernel_avx512.cpp
// alone: everything but the guarded steps is inlined there.
#pragma once

#include <immintrin.h>

#include <type_traits>

#include "stats/kernel.h"
#include "stats/kernel_avx512_formats.h"
#include "stats/kernel_avx512_sketch.h"

namespace assay {
namespace {

constexpr uint32_t kOctet = 8;        // groups of the innermost loop: 1 to 4 steps of 64 bytes
constexpr uint32_t kFloatOctets = 4;  // octets of float sums, two elements a lane and chain in each

// Blocks between two looks at what a chunk held.
constexpr uint32_t kChunkBlocks = 4;
// Float sums of cells run over a head's part of so many blocks: 128 additions to a residue in each.
constexpr uint32_t kRunBlocks = 2;

// A run whose squares add up to this much in any lane has lost next to nothing to underflow of single ones.
constexpr double kSafeSquares = 0x1p-112;

ASSAY_INLINE __m512i LaneNumbers() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

// A constant that the compiler keeps, instead of making it again and again.
ASSAY_INLINE __m512i Kept(__m512i x) {
  asm("" : "+v"(x));
  return x;
}

// Hashes of sixteen groups at a time: of first_group + order, lane by lane.
struct Hasher {
  __m512i first = Kept(_mm512_set1_epi32(static_cast<int>(0x9e3779b1u)));
  __m512i second = Kept(_mm512_set1_epi32(static_cast<int>(0x85ebca77u)));

  ASSAY_KERNEL_INLINE __m512i Hashes(uint32_t first_group, __m512i order, __m512i salt) const {
    __m512i h = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first_group)), order);
    h = _mm512_mullo_epi32(_mm512_xor_si512(h, salt), first);
    return _mm512_mullo_epi32(_mm512_xor_si512(h, _mm512_srli_epi32(h, 15)), second);
  }
};

// Extremes of patterns, of modest elements alone.
template <class F>
struct Extremes {
  using L = typename F::Lanes;
  __m512i high = L::Set(F::kSign);        // signed maximum: the largest positive value, if there is one
  __m512i wide = _mm512_setzero_si512();  // unsigned maximum: the largest negative magnitude, if there is one
  __m512i near = L::Set(F::kSign - 1);    // smallest magnitude

  // Elements of the mask alone.
  ASSAY_KERNEL_INLINE void TakeSome(typename L::Mask mask, __m512i patterns) {
    high = L::MaxSigned(high, L::Select(high, mask, patterns));
    wide = L::MaxUnsigned(wide, L::Keep(patterns, mask));
    near = L::Nearer(near, L::Select(near, mask, patterns), L::Set(F::kSign - 1));
  }
  ASSAY_KERNEL_INLINE void Take(const Extremes& other) {
    high = L::MaxSigned(high, other.high);
    wide = L::MaxUnsigned(wide, other.wide);
    near = L::MinUnsigned(near, other.near);
  }
  // Whether any magnitude is a pattern or more: given with the sign bit clear, and with it set.
  ASSAY_KERNEL_INLINE bool Reach(__m512i positive, __m512i negative) const {
    return L::Any(L::AtLeastSigned(high, positive), L::AtLeast(wide, negative));
  }
  // The largest magnitude. With no element at all: 0.
  ASSAY_KERNEL_INLINE uint32_t Largest() const {
    const uint32_t up = L::FoldMaxSigned(high);
    const uint32_t down = L::FoldMaxUnsigned(wide);
    const uint32_t positive = static_cast<int32_t>(up) >= 0 ? up : 0;
    const uint32_t negative = (down & F::kSign) != 0 ? down & (F::kSign - 1) : 0;
    return positive > negative ? positive : negative;
  }
};

// x, folded to eight lanes in float, in double.
ASSAY_INLINE __m512d FoldToDouble(__m512 x) {
  return _mm512_cvtps_pd(_mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)));
}

// Where the sketch goes: nowhere, to the matrix, or straight into 64 buckets (cheaper for a small segment).
enum class Sketching { kNone, kMatrix, kDirect };

// Sums of elements, in two chains so that one addition need not wait for the other: in float for kFloatOctets octets
// (the bound in docs/numerics.md rests on that number), which Spill then adds up in double. `sum` is of the whole
// piece; sums of squares are of the run: TakeSumSq, at its end, returns and empties them.
struct FloatSums {
  __m512d sum = _mm512_setzero_pd();
  __m512d sum_sq = _mm512_setzero_pd();
  __m512 float_sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  __m512 float_sum_sq[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};

  ASSAY_KERNEL_INLINE void AddFloat(__m512 x, uint32_t chain) {
    float_sum[chain] = _mm512_add_ps(float_sum[chain], x);
    float_sum_sq[chain] = _mm512_fmadd_ps(x, x, float_sum_sq[chain]);
  }
  ASSAY_KERNEL_INLINE void Spill() {
    sum = _mm512_add_pd(sum, FoldToDouble(_mm512_add_ps(float_sum[0], float_sum[1])));
    sum_sq = _mm512_add_pd(sum_sq, FoldToDouble(_mm512_add_ps(float_sum_sq[0], float_sum_sq[1])));
    float_sum[0] = float_sum[1] = float_sum_sq[0] = float_sum_sq[1] = _mm512_setzero_ps();
  }
  // In double, one chain: elements next to those that are left out.
  ASSAY_KERNEL_INLINE void AddSingly(__m512 x) {
    for (__m256 half : {_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)}) {
      const __m512d wide = _mm512_cvtps_pd(half);
      sum = _mm512_add_pd(sum, wide);
      sum_sq = _mm512_fmadd_pd(wide, wide, sum_sq);
    }
  }
  ASSAY_KERNEL_INLINE __m512d Sum() const { return sum; }
  ASSAY_KERNEL_INLINE __m512d TakeSumSq() {
    const __m512d total = sum_sq;
    sum_sq = _mm512_setzero_pd();
    return total;
  }
};

struct Nothing {};
template <bool kWanted, class T>
using Wanted = std::conditional_t<kWanted, T, Nothing>;

// What the innermost loop adds to, and no more: each of these is a register, and what guarded steps take by address is
// written out and read back around every run.
template <class F, Sketching kSketching>
struct Sums : FloatSums {
  __m512i digest = _mm512_setzero_si512();
  __m512i row_digest = _mm512_setzero_si512();
  __m512 residues = _mm512_setzero_ps();  // sketch by residue, of the run; with cells alone
  Wanted<kSketching == Sketching::kDirect, Buckets> buckets;
};

// Of the piece's runs that are over. Touched once a run, so it may live in memory.
struct Totals {
  __m512d sum_sq = _mm512_setzero_pd();
  __m512 residues = _mm512_setzero_ps();
};

// Positions [p, end) of a chunk; data is position p's. Position q is slot q & 255 of the chunk's block q / 256, turned
// by its rotation; group `group` + q; in the row, group row_group + q.
struct Stretch {
  const uint8_t* data;
  uint32_t p;
  uint32_t end;
  uint32_t rotation[kChunkBlocks];
  uint32_t group;
  uint32_t salt;
  uint32_t row_group;
  uint32_t row_salt;
  uint32_t ahead;  // RowPiece's
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

// Eight hashes in the low lanes; what is in the others does not matter.
ASSAY_INLINE __m512i LoadEight(const uint32_t* h) {
  return _mm512_castsi256_si512(_mm256_load_si256(reinterpret_cast<const __m256i*>(h)));
}

// For each rotation of the groups inside a step: where the words of the step come from. For step u of an octet: which
// of the octet's groups each word is of.
template <uint32_t kWords>
struct StepOrder {
  static constexpr uint32_t kGroups = 16 / kWords;
  alignas(64) uint32_t word[kGroups][16] = {};
  alignas(64) uint32_t group[kOctet / kGroups][16] = {};
};
template <uint32_t kWords>
constexpr StepOrder<kWords> MakeStepOrder() {
  StepOrder<kWords> order;
  for (uint32_t w = 0; w < 16; ++w) {
    for (uint32_t inside = 0; inside < 16 / kWords; ++inside) order.word[inside][w] = w ^ inside * kWords;
    for (uint32_t u = 0; u < kWords / 2; ++u) order.group[u][w] = u * (16 / kWords) + w / kWords;
  }
  return order;
}
template <uint32_t kWords>
constexpr StepOrder<kWords> kStepOrder = MakeStepOrder<kWords>();

ASSAY_INLINE __m512i Products(__m512i keyed_words, __m512i hashes) {
  const __m512i w = _mm512_add_epi32(keyed_words, hashes);
  return _mm512_mul_epu32(w, _mm512_shuffle_epi32(w, _MM_PERM_DDBB));
}

// Steps of 64 bytes and their constants.
template <class F, Sketching kSketching, bool kCells>
struct Stepper {
  using L = typename F::Lanes;
  static constexpr uint32_t kGroups = F::kGroups;
  static constexpr uint32_t kSteps = kOctet / kGroups;
  static constexpr int kWordShift = F::kWords == 8 ? 3 : F::kWords == 4 ? 2 : 1;
  // f32 has a half of the matrix and of the table for either order of a step's groups; the others bring them in order.
  static constexpr bool kSwapped = kGroups == 2;

  const __m512i keys = Kept(_mm512_load_si512(kVectorKeys<F::kWords>.word));
  const __m512i magnitude = Kept(L::Set(F::kSign - 1));
  const __m512i limit = Kept(L::Set(F::kLimit));
  const __m512i negative_limit = Kept(L::Set(F::kSign | F::kLimit));
  const __m512i sign_bits = Kept(_mm512_set1_epi32(INT32_MIN));
  __m512i spread[kSteps];

  // Of the block at hand: SetBlock.
  __m512i words;          // order of a step's words
  float* matrix;          // with the half for its rotation; so is packed
  const uint8_t* packed;  // of f32

  ASSAY_KERNEL_INLINE Stepper() {
    for (uint32_t u = 0; u < kSteps; ++u) spread[u] = Kept(_mm512_load_si512(kStepOrder<F::kWords>.group[u]));
  }

  // rotation: the block's r. The matrix is the accumulator's, or null where it is not used.
  ASSAY_KERNEL_INLINE void SetBlock(uint32_t rotation, float* whole_matrix) {
    const uint32_t half = kSwapped ? (rotation & 1) * (kMatrixFloats / 2) : 0;
    words = kSwapped ? spread[0] : _mm512_load_si512(kStepOrder<F::kWords>.word[rotation & (kGroups - 1)]);
    matrix = whole_matrix + half;
    packed = kPairTable.packed[0][0] + half;
  }

  // The first `turned` (a power of two) positions from a multiple of it on in slot order, but for what kSwapped leaves.
  ASSAY_KERNEL_INLINE static __m512i Order(uint32_t rotation, uint32_t turned) {
    const uint32_t turn = rotation & (turned - 1) & (kSwapped ? ~1u : ~0u);
    return _mm512_xor_si512(LaneNumbers(), _mm512_set1_epi32(static_cast<int>(turn)));
  }

  // Place in the matrix and the tables of the first of `turned` slots, among which position p is: 8 times the slot.
  ASSAY_KERNEL_INLINE static size_t PlaceOf(uint32_t p, uint32_t rotation, uint32_t turned) {
    return size_t{(p ^ rotation) & (kBlockGroups - turned)} * kLanes;
  }

  // A step of the block at hand: `loaded` from data, its groups' hashes spread to its words. kGuard: some elements may
  // have to be left out, and pairs of words not in `present`. u: number of the step in its octet.
  template <bool kGuard>
  ASSAY_KERNEL_INLINE void Step(size_t place, __m512i h, __m512i row_h, __m512i loaded, __mmask8 present, uint32_t u,
                                Sums<F, kSketching>& sums) const {
    const __m512i raw = kSwapped ? loaded : _mm512_permutexvar_epi32(words, loaded);
    if constexpr (kSketching != Sketching::kNone) {
      const __m512i keyed = _mm512_add_epi32(raw, keys);
      const __m512i products = Products(keyed, h);
      sums.digest = kGuard ? _mm512_mask_add_epi64(sums.digest, present, sums.digest, products)
                           : _mm512_add_epi64(sums.digest, products);
      if constexpr (kCells) {
        const __m512i row_products = Products(keyed, row_h);
        sums.row_digest = kGuard ? _mm512_mask_add_epi64(sums.row_digest, present, sums.row_digest, row_products)
                                 : _mm512_add_epi64(sums.row_digest, row_products);
      }
    }
    const __m512i kept = kGuard ? L::Keep(raw, L::Less(_mm512_and_si512(raw, magnitude), limit)) : raw;
    __m512 y[4];
#pragma GCC unroll 4
    for (uint32_t v = 0; v < F::kVectors; ++v) {
      const __m512 x = F::Widen(kept, static_cast<int>(v));
      if constexpr (kGuard) {
        sums.AddSingly(x);
      } else {
        sums.AddFloat(x, (u * F::kVectors + v) & 1);
      }
      if constexpr (kSketching == Sketching::kNone) continue;
      if constexpr (F::kType == DType::kF32 || F::kType == DType::kBF16) {
        y[v] = FlipSign(x, h, sign_bits);
      } else {
        // Word w of the step is group w / kWords' in slot order: spread the hash of groups 2v, 2v + 1.
        const __m512i pairs =
            _mm512_add_epi32(_mm512_srli_epi32(LaneNumbers(), 3), _mm512_set1_epi32(static_cast<int>(2 * v)));
        y[v] = FlipSign(x, _mm512_permutexvar_epi32(_mm512_slli_epi32(pairs, kWordShift), h), sign_bits);
      }
      if constexpr (kSketching == Sketching::kMatrix) {
        float* at = matrix + place + 16 * v;
        _mm512_store_ps(at, _mm512_add_ps(_mm512_load_ps(at), y[v]));
      }
    }
    if constexpr (kSketching == Sketching::kDirect || (kCells && kSketching != Sketching::kNone)) {
#pragma GCC unroll 4
      for (uint32_t v = 0; v < F::kVectors; ++v) {
        const size_t at = place + 16 * v;
        // Of a small segment, which often finds the caches full of other things, few lines of the table are worth an
        // operation more.
        if constexpr (F::kType == DType::kF32 || (F::kType == DType::kBF16 && kSketching == Sketching::kDirect)) {
          const __m512 z = F::kType == DType::kF32
                               ? OrderedSigned(y[v], packed + at, sign_bits)
                               : OrderedSigned(y[0], y[1], kPairTable.packed_split[0] + at, sign_bits);
          if constexpr (kSketching == Sketching::kDirect) sums.buckets.Add(z, at);
          if constexpr (kCells) sums.residues = _mm512_add_ps(sums.residues, z);
        } else {
          const __m512 z = F::kType == DType::kBF16 ? Ordered(y[0], y[1], kPairTable.source_split[0] + at)
                                                    : Ordered(y[v], kPairTable.source[0] + at);
          if constexpr (kSketching == Sketching::kDirect) sums.buckets.Add(TableSigns(z, at), at);
          if constexpr (kCells) sums.residues = AddSigned(sums.residues, z, at);
        }
      }
    }
  }
};

// Positions [p, end), all of one octet, with elements or groups to be left out. Returns whether there was such an
// element.
template <class F, Sketching kSketching, bool kCells>
[[gnu::noinline]] bool GuardedSteps(const Stretch& s, uint32_t p, uint32_t end, const uint8_t* data,
                                    Extremes<F>* extremes, Sums<F, kSketching>* sums) {
  using L = typename F::Lanes;
  constexpr uint32_t kGroups = F::kGroups;
  Stepper<F, kSketching, kCells> stepper;
  const Hasher hasher;
  const uint32_t rotation = s.rotation[p / kBlockGroups];
  const __m512i order = stepper.Order(rotation, kGroups);
  stepper.SetBlock(rotation, s.matrix);
  bool exceptional = false;
  // A step at a time. [from, to): the groups of the step that are here; only their bytes may be read.
  while (p < end) {
    const uint32_t from = p % kGroups;
    const uint32_t to = end - p < kGroups - from ? from + end - p : kGroups;
    p -= from;
    data -= from * F::kWords * 4;
    const uint32_t loaded_words = ((1u << to * F::kWords) - 1) & ~((1u << from * F::kWords) - 1);
    const __m512i loaded = _mm512_maskz_loadu_epi32(static_cast<__mmask16>(loaded_words), data);
    const uint64_t elements = (~uint64_t{0} >> (64 - to * kLanes)) & (~uint64_t{0} << from * kLanes);
    const auto modest =
        static_cast<typename L::Mask>(L::Less(_mm512_and_si512(loaded, stepper.magnitude), stepper.limit) & elements);
    exceptional |= modest != static_cast<typename L::Mask>(elements);
    extremes->TakeSome(modest, loaded);
    // Where the pairs of words of the present groups are in the order of the step.
    uint32_t present = 0;
    for (uint32_t g = from; g < to; ++g) {
      const uint32_t place = stepper.kSwapped ? g : g ^ (rotation & (kGroups - 1));
      present |= ((1u << F::kWords / 2) - 1) << place * (F::kWords / 2);
    }
    auto hashes = [&](uint32_t first, uint32_t salt) __attribute__((always_inline)) {
      const __m512i h = hasher.Hashes(first + p, order, _mm512_set1_epi32(static_cast<int>(salt)));
      return _mm512_permutexvar_epi32(stepper.spread[0], h);
    };
    stepper.template Step<true>(stepper.PlaceOf(p, rotation, kGroups), hashes(s.group, s.salt),
                                hashes(s.row_group, s.row_salt), loaded, static_cast<__mmask8>(present), 0, *sums);
    p += kGroups;
    data += 64;
  }
  return exceptional;
}

// Squares of the n modest elements at data in double, n a multiple of kLanes: for runs so small that they underflow.
template <class F>
[[gnu::noinline]] __m512d SmallSquares(const uint8_t* data, uint32_t n) {
  static_assert(F::kBytes == 4 || F::kType == DType::kBF16);
  constexpr int kShift = 32 - 8 * F::kBytes;  // from the low bits of a word to a float's place
  __m512d sum_sq = _mm512_setzero_pd();
  for (uint32_t k = 0; k < n; k += kLanes) {
    const uint8_t* at = data + k * F::kBytes;
    const __m256i words = F::kBytes == 4 ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))
                                         : _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    const __m256i magnitude = _mm256_and_si256(words, _mm256_set1_epi32(F::kSign - 1));
    const __mmask8 modest = _mm256_cmplt_epi32_mask(magnitude, _mm256_set1_epi32(F::kLimit));
    const __m256 x = _mm256_castsi256_ps(_mm256_maskz_slli_epi32(modest, magnitude, kShift));
    const __m512d wide = _mm512_cvtps_pd(x);
    sum_sq = _mm512_fmadd_pd(wide, wide, sum_sq);
  }
  return sum_sq;
}

// Returns whether any element was left out.
template <class F, Sketching kSketching, bool kCells>
ASSAY_INLINE bool Steps(const Stretch& s, HeadCursor* cursor, Extremes<F>* extremes_out, Sums<F, kSketching>* sums_out,
                        Totals* totals) {
  // Copies, so that they stay in registers: vector stores to the matrix could alias anything.
  Extremes<F> extremes = *extremes_out;
  Sums<F, kSketching> sums = *sums_out;
  using L = typename F::Lanes;
  using S = Stepper<F, kSketching, kCells>;
  constexpr uint32_t kGroupBytes = F::kWords * 4;
  S stepper;

  // Hashes of the block at hand, by position modulo kBlockGroups, those of an octet in slot order.
  alignas(64) uint32_t hashes[kBlockGroups];
  alignas(64) uint32_t row_hashes[kCells ? kBlockGroups : 16];
  auto hash_block = [&](uint32_t p, uint32_t end, uint32_t rotation) __attribute__((always_inline)) {
    if constexpr (kSketching == Sketching::kNone) return;
    const Hasher hasher;
    const __m512i order = S::Order(rotation, kOctet);
    const __m512i salt = _mm512_set1_epi32(static_cast<int>(s.salt));
    const __m512i row_salt = _mm512_set1_epi32(static_cast<int>(s.row_salt));
    for (uint32_t q = p - p % 16; q < end; q += 16) {
      _mm512_store_si512(hashes + q % kBlockGroups, hasher.Hashes(s.group + q, order, salt));
      if constexpr (kCells) {
        _mm512_store_si512(row_hashes + q % kBlockGroups, hasher.Hashes(s.row_group + q, order, row_salt));
      }
    }
  };

  // Eight groups from a multiple of eight on; false, and nothing added, if they need a guard. first_step: where the
  // first step in slot order is, in bytes.
  auto octet = [&](uint32_t p, uint32_t rotation, uint32_t first_step, const uint8_t* data)
      __attribute__((always_inline)) {
    __m512i loaded[S::kSteps];
#pragma GCC unroll 4
    for (uint32_t u = 0; u < S::kSteps; ++u) {
      _mm_prefetch(reinterpret_cast<const char*>(data) + s.ahead + 64 * u, _MM_HINT_T0);
      loaded[u] = _mm512_loadu_si512(data + (64 * u ^ first_step));
    }
    // Kept apart until it is known that none of them is exceptional.
    __m512i high = loaded[0];
    __m512i wide = loaded[0];
#pragma GCC unroll 4
    for (uint32_t u = 1; u < S::kSteps; ++u) {
      high = L::MaxSigned(high, loaded[u]);
      wide = L::MaxUnsigned(wide, loaded[u]);
    }
    if (__builtin_expect(L::Any(L::AtLeastSigned(high, stepper.limit), L::AtLeast(wide, stepper.negative_limit)), 0)) {
      return false;
    }
    extremes.high = L::MaxSigned(extremes.high, high);
    extremes.wide = L::MaxUnsigned(extremes.wide, wide);
    const size_t place = S::PlaceOf(p, rotation, kOctet);
    const __m512i octet_hashes = LoadEight(hashes + p % kBlockGroups);
    const __m512i octet_row_hashes = kCells ? LoadEight(row_hashes + p % kBlockGroups) : octet_hashes;
#pragma GCC unroll 4
    for (uint32_t u = 0; u < S::kSteps; ++u) {
      extremes.near = L::Nearer(extremes.near, loaded[u], stepper.magnitude);
      const __m512i h = _mm512_permutexvar_epi32(stepper.spread[u], octet_hashes);
      const __m512i row_h = kCells ? _mm512_permutexvar_epi32(stepper.spread[u], octet_row_hashes) : h;
      stepper.template Step<false>(place + u * F::kGroups * kLanes, h, row_h, loaded[u], 0xff, u, sums);
    }
    return true;
  };

  bool exceptional = false;
  // Positions [p, end) of one block.
  auto run = [&](uint32_t p, uint32_t end, uint32_t rotation, const uint8_t* data) __attribute__((always_inline)) {
    const uint32_t first_step = (rotation & (kOctet - 1)) / F::kGroups * 64;
    while (p < end) {
      bool guard = p % kOctet != 0 || end - p < kOctet;
      while (!guard) {
        // Float sums are good for a few octets.
        const uint32_t octets = (end - p) / kOctet;
        const uint32_t stop = p + kOctet * (octets > kFloatOctets ? kFloatOctets : octets);
        do {
          guard = !octet(p, rotation, first_step, data);
          if (guard) break;
          p += kOctet;
          data += kOctet * kGroupBytes;
        } while (p < stop);
        sums.Spill();
        guard |= end - p < kOctet;
      }
      if (p == end) return;
      // To the next octet, or all of it. Copies, because what has its address taken lives in memory from then on.
      const uint32_t left = kOctet - p % kOctet;
      const uint32_t stop = end - p < left ? end : p + left;
      Extremes<F> slow_extremes = extremes;
      Sums<F, kSketching> slow_sums = sums;
      exceptional |= GuardedSteps<F, kSketching, kCells>(s, p, stop, data, &slow_extremes, &slow_sums);
      extremes = slow_extremes;
      sums = slow_sums;
      data += (stop - p) * kGroupBytes;
      p = stop;
    }
  };
  // The run, which began at begin, is over: its sums go to all of them and to the head at hand.
  auto end_run = [&](const uint8_t* begin, const uint8_t* end) __attribute__((always_inline)) {
    __m512d sum_sq = sums.TakeSumSq();
    if constexpr (F::kSmallSquares) {
      if (__builtin_expect(_mm512_cmp_pd_mask(sum_sq, _mm512_set1_pd(kSafeSquares), _CMP_GE_OQ) == 0, 0)) {
        sum_sq = SmallSquares<F>(begin, static_cast<uint32_t>(end - begin) / F::kBytes);
      }
    }
    totals->sum_sq = _mm512_add_pd(totals->sum_sq, sum_sq);
    if constexpr (kCells) {
      if (CellSums* head = cursor->Current()) {
        _mm512_store_pd(head->sum_sq, _mm512_add_pd(_mm512_load_pd(head->sum_sq), sum_sq));
        if constexpr (kSketching != Sketching::kNone) AddTo(head->sketch, sums.residues);
      }
      totals->residues = _mm512_add_ps(totals->residues, sums.residues);
      sums.residues = _mm512_setzero_ps();
    }
  };

  // Block by block, and inside of it run by run: runs end with their head, and after kRunBlocks blocks.
  const uint8_t* data = s.data;
  const uint8_t* begin = data;
  for (uint32_t p = s.p; p < s.end;) {
    const uint32_t rotation = s.rotation[p / kBlockGroups];
    const uint32_t block_end =
        s.end - p < kBlockGroups - p % kBlockGroups ? s.end : p - p % kBlockGroups + kBlockGroups;
    hash_block(p, block_end, rotation);
    stepper.SetBlock(rotation, s.matrix);
    while (p < block_end) {
      const uint32_t end = kCells && block_end - p > cursor->left ? p + cursor->left : block_end;
      run(p, end, rotation, data);
      data += (end - p) * kGroupBytes;
      if (cursor->left == end - p || end == s.end || end % (kRunBlocks * kBlockGroups) == 0) {
        end_run(begin, data);
        begin = data;
      }
      cursor->Advance(end - p);
      p = end;
    }
  }
  *extremes_out = extremes;
  *sums_out = sums;
  return exceptional;
}

}  // namespace
}  // namespace assay
