// The innermost loops of the AVX-512 kernel: eight groups at a time, every statistic at once. For kernel_avx512.cpp
// alone: everything but the guarded steps is inlined there.
#pragma once

#include <immintrin.h>

#include "stats/kernel.h"
#include "stats/kernel_avx512_formats.h"
#include "stats/kernel_avx512_sketch.h"

namespace assay {
namespace {

constexpr uint32_t kOctet = 8;        // groups of the innermost loop: 1 to 4 steps of 64 bytes
constexpr uint32_t kFloatOctets = 4;  // octets of float sums, two elements a lane and chain in each

// Blocks between two looks at what a chunk held. Float sums of cells run over a chunk: 128 elements a block and
// residue.
constexpr uint32_t kChunkBlocks = 2;

// Bytes ahead of which the loop asks for data: from memory, and from the second cache. Reaching past the view is
// harmless. Tried: one of the two alone, and other distances; from memory they lose up to a third of the rate.
constexpr uint32_t kAhead = 16384;
constexpr uint32_t kNear = 2048;

ASSAY_INLINE __m512i LaneNumbers() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

// A constant that the compiler keeps, instead of making it again and again.
ASSAY_INLINE __m512i Kept(__m512i x) {
  asm("" : "+v"(x));
  return x;
}

// Hashes of sixteen groups at a time.
struct Hasher {
  __m512i lanes = Kept(LaneNumbers());
  __m512i first = Kept(_mm512_set1_epi32(static_cast<int>(0x9e3779b1u)));
  __m512i second = Kept(_mm512_set1_epi32(static_cast<int>(0x85ebca77u)));

  ASSAY_KERNEL_INLINE __m512i Hashes(uint32_t first_group, __m512i salt) const {
    __m512i h = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first_group)), lanes);
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

// Sums of a stretch of groups, in kChains independent chains.
constexpr int kChains = 4;
struct Sums {
  __m512d sum[kChains] = {_mm512_setzero_pd(), _mm512_setzero_pd(), _mm512_setzero_pd(), _mm512_setzero_pd()};
  __m512d sum_sq[kChains] = {_mm512_setzero_pd(), _mm512_setzero_pd(), _mm512_setzero_pd(), _mm512_setzero_pd()};
  __m512i digest = _mm512_setzero_si512();
  __m512i row_digest = _mm512_setzero_si512();
  __m512 residues = _mm512_setzero_ps();     // sketch by residue; with cells, of the head at hand, like sum_sq ...
  __m512d all_sum_sq = _mm512_setzero_pd();  // ... and of the heads before it
  __m512 all_residues = _mm512_setzero_ps();
  Buckets buckets;

  // Of narrow types, added to sum and sum_sq by Spill.
  __m512 float_sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  __m512 float_sum_sq[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};

  ASSAY_KERNEL_INLINE void AddFloat(__m512 x, uint32_t chain) {
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
  ASSAY_KERNEL_INLINE void Add(__m512 x, int v) { Add(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1), v); }
  ASSAY_KERNEL_INLINE void Add(__m256 first, __m256 second, int v) {
    const int chain = 2 * v % kChains;
    const __m512d low = _mm512_cvtps_pd(first);
    const __m512d high = _mm512_cvtps_pd(second);
    sum[chain] = _mm512_add_pd(sum[chain], low);
    sum[chain + 1] = _mm512_add_pd(sum[chain + 1], high);
    sum_sq[chain] = _mm512_fmadd_pd(low, low, sum_sq[chain]);
    sum_sq[chain + 1] = _mm512_fmadd_pd(high, high, sum_sq[chain + 1]);
  }
  ASSAY_KERNEL_INLINE __m512d Sum() const {
    return _mm512_add_pd(_mm512_add_pd(sum[0], sum[1]), _mm512_add_pd(sum[2], sum[3]));
  }
  ASSAY_KERNEL_INLINE __m512d SumSq() const {
    return _mm512_add_pd(_mm512_add_pd(sum_sq[0], sum_sq[1]), _mm512_add_pd(sum_sq[2], sum_sq[3]));
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

// For each rotation of the groups inside a step: where the words of the step come from, and which of the octet's hashes
// is theirs in step u.
template <uint32_t kWords>
struct StepOrder {
  static constexpr uint32_t kGroups = 16 / kWords;
  alignas(64) uint32_t word[kGroups][16] = {};
  alignas(64) uint32_t group[kOctet / kGroups][kGroups][16] = {};
};
template <uint32_t kWords>
constexpr StepOrder<kWords> MakeStepOrder() {
  StepOrder<kWords> order;
  for (uint32_t inside = 0; inside < 16 / kWords; ++inside) {
    for (uint32_t w = 0; w < 16; ++w) {
      order.word[inside][w] = w ^ inside * kWords;
      for (uint32_t u = 0; u < kWords / 2; ++u) {
        order.group[u][inside][w] = u * (16 / kWords) + (w ^ inside * kWords) / kWords;
      }
    }
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
  static constexpr uint32_t kGroupBytes = F::kWords * 4;
  static constexpr uint32_t kSteps = kOctet / kGroups;
  static constexpr int kWordShift = F::kWords == 8 ? 3 : F::kWords == 4 ? 2 : 1;
  // f32 has a half of the matrix for either order of a step's groups; the others bring them in order.
  static constexpr bool kSwapped = kGroups == 2;

  const __m512i keys = Kept(_mm512_load_si512(kVectorKeys<F::kWords>.word));
  const __m512i magnitude = Kept(L::Set(F::kSign - 1));
  const __m512i limit = Kept(L::Set(F::kLimit));
  const __m512i negative_limit = Kept(L::Set(F::kSign | F::kLimit));
  const __m512i sign_bits = Kept(_mm512_set1_epi32(INT32_MIN));
  const __m512i upper_halves = Kept(_mm512_set1_epi32(static_cast<int>(0xffff0000u)));
  __m512i even_spread[kSteps];

  ASSAY_KERNEL_INLINE Stepper() {
    for (uint32_t u = 0; u < kSteps; ++u) even_spread[u] = Kept(_mm512_load_si512(kStepOrder<F::kWords>.group[u][0]));
  }

  // Where in the matrix and the tables the step at position p belongs.
  ASSAY_KERNEL_INLINE static uint32_t PlaceOf(uint32_t p, uint32_t rotation) {
    const uint32_t place = ((p ^ rotation) & (kBlockGroups - kGroups)) * kLanes;
    return kSwapped ? place + (rotation & 1) * (kMatrixFloats / 2) : place;
  }

  // A step whose groups are out of order by `inside`, a part of the rotation. kGuard: some elements may have to be left
  // out, and pairs of words not in `present`. u: number of the step in its octet, which has these hashes.
  template <bool kGuard>
  ASSAY_KERNEL_INLINE void Step(uint32_t place, uint32_t inside, __m512i hashes, __m512i row_hashes,
                                const uint8_t* data, __m512i loaded, __mmask8 present, uint32_t u, float* matrix,
                                Sums& sums) const {
    __m512i raw = loaded;
    __m512i spread = even_spread[u];
    if constexpr (!kSwapped) {
      raw = _mm512_permutexvar_epi32(_mm512_load_si512(kStepOrder<F::kWords>.word[inside]), loaded);
      spread = _mm512_load_si512(kStepOrder<F::kWords>.group[u][inside]);
    }
    __m512i h = _mm512_setzero_si512();
    if constexpr (kSketching != Sketching::kNone) {
      h = _mm512_permutexvar_epi32(spread, hashes);
      const __m512i keyed = _mm512_add_epi32(raw, keys);
      const __m512i products = Products(keyed, h);
      sums.digest = kGuard ? _mm512_mask_add_epi64(sums.digest, present, sums.digest, products)
                           : _mm512_add_epi64(sums.digest, products);
      if constexpr (kCells) {
        const __m512i row_products = Products(keyed, _mm512_permutexvar_epi32(spread, row_hashes));
        sums.row_digest = kGuard ? _mm512_mask_add_epi64(sums.row_digest, present, sums.row_digest, row_products)
                                 : _mm512_add_epi64(sums.row_digest, row_products);
      }
    }
    const __m512i kept = kGuard ? L::Keep(raw, L::Less(_mm512_and_si512(raw, magnitude), limit)) : raw;
    __m512 y[4];
#pragma GCC unroll 4
    for (uint32_t v = 0; v < F::kVectors; ++v) {
      const __m512 x = F::Widen(kept, static_cast<int>(v), upper_halves);
      if constexpr (F::kType == DType::kF32 && !kGuard) {
        // The upper half from memory: a load is cheaper than an extraction.
        sums.Add(_mm256_castsi256_ps(_mm512_castsi512_si256(loaded)),
                 _mm256_loadu_ps(reinterpret_cast<const float*>(data) + 8), static_cast<int>(u));
      } else if constexpr (F::kFloatSums && !kGuard) {
        sums.AddFloat(x, v & 1);
      } else {
        sums.Add(x, static_cast<int>(u * F::kVectors + v));
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
        const uint32_t at = (place + 16 * v) & (kBlockGroups * kLanes - 1);
        const __m512 z =
            F::kType == DType::kBF16 ? ByResidue(y[0], y[1], at) : ByResidue(y[v], at, kSwapped ? inside : 0);
        if constexpr (kSketching == Sketching::kDirect) sums.buckets.Add(TableSigns(z, at), at);
        if constexpr (kCells) sums.residues = AddSigned(sums.residues, z, at);
      }
    }
  }
};

// Positions [p, end), all of one octet, with elements or groups to be left out. Returns whether there was such an
// element.
template <class F, Sketching kSketching, bool kCells>
[[gnu::noinline]] bool GuardedSteps(const Stretch& s, uint32_t p, uint32_t end, const uint8_t* data,
                                    Extremes<F>* extremes, Sums* sums) {
  using L = typename F::Lanes;
  constexpr uint32_t kGroups = F::kGroups;
  const Stepper<F, kSketching, kCells> stepper;
  const Hasher hasher;
  bool exceptional = false;
  while (p < end) {
    const uint32_t from = p % kGroups;
    const uint32_t to = end - p < kGroups - from ? from + end - p : kGroups;
    p -= from;
    data -= from * F::kWords * 4;
    const uint32_t words = ((1u << to * F::kWords) - 1) & ~((1u << from * F::kWords) - 1);
    const __m512i loaded = _mm512_maskz_loadu_epi32(static_cast<__mmask16>(words), data);
    const uint64_t elements = (~uint64_t{0} >> (64 - to * kLanes)) & (~uint64_t{0} << from * kLanes);
    const auto modest =
        static_cast<typename L::Mask>(L::Less(_mm512_and_si512(loaded, stepper.magnitude), stepper.limit) & elements);
    exceptional |= modest != static_cast<typename L::Mask>(elements);
    extremes->TakeSome(modest, loaded);
    const uint32_t rotation = s.rotation[p / kBlockGroups];
    const uint32_t inside = rotation & (kGroups - 1);
    // Where the pairs of words of the present groups are in slot order.
    uint32_t present = 0;
    for (uint32_t g = from; g < to; ++g) {
      present |= ((1u << F::kWords / 2) - 1) << (g ^ (kGroups == 2 ? 0 : inside)) * (F::kWords / 2);
    }
    const __m512i hashes = hasher.Hashes(s.group + p, _mm512_set1_epi32(static_cast<int>(s.salt)));
    const __m512i row_hashes = hasher.Hashes(s.row_group + p, _mm512_set1_epi32(static_cast<int>(s.row_salt)));
    stepper.template Step<true>(stepper.PlaceOf(p, rotation), inside, hashes, row_hashes, data, loaded,
                                static_cast<__mmask8>(present), 0, s.matrix, *sums);
    p += kGroups;
    data += 64;
  }
  return exceptional;
}

// Returns whether any element was left out.
template <class F, Sketching kSketching, bool kCells>
ASSAY_INLINE bool Steps(const Stretch& s, HeadCursor* cursor, Extremes<F>* extremes_out, Sums* sums_out) {
  // Copies, so that they stay in registers: vector stores to the matrix could alias anything.
  Extremes<F> extremes = *extremes_out;
  Sums sums = *sums_out;
  using L = typename F::Lanes;
  constexpr uint32_t kGroupBytes = F::kWords * 4;
  constexpr uint32_t kSteps = kOctet / F::kGroups;
  const Stepper<F, kSketching, kCells> stepper;

  // A ring of hashes by position modulo 32: of the sixteen positions at hand, and of the next sixteen, since what has
  // just been stored is slow to load in parts.
  alignas(64) uint32_t hashes[32];
  alignas(64) uint32_t row_hashes[32];
  const Hasher hasher;
  const __m512i salt = Kept(_mm512_set1_epi32(static_cast<int>(s.salt)));
  const __m512i row_salt = Kept(_mm512_set1_epi32(static_cast<int>(s.row_salt)));
  auto hash = [&](uint32_t p) __attribute__((always_inline)) {  // of [p, p + 16), p a multiple of 16
    if constexpr (kSketching == Sketching::kNone) return;
    _mm512_store_si512(hashes + p % 32, hasher.Hashes(s.group + p, salt));
    if constexpr (kCells) _mm512_store_si512(row_hashes + p % 32, hasher.Hashes(s.row_group + p, row_salt));
  };
  uint32_t hashed = ~0u;  // first of the sixteen positions at hand

  [[maybe_unused]] const __m512i tiny = Kept(L::Set(F::kTiny));
  [[maybe_unused]] const __m512i negative_tiny = Kept(L::Set(F::kSign | F::kTiny));
  // Eight groups from a multiple of eight on; false, and nothing added, if they need a guard.
  auto octet = [&](uint32_t p, const uint8_t* data) __attribute__((always_inline)) {
    __m512i loaded[kSteps];
#pragma GCC unroll 4
    for (uint32_t u = 0; u < kSteps; ++u) {
      _mm_prefetch(reinterpret_cast<const char*>(data) + kNear + 64 * u, _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(data) + kAhead + 64 * u, _MM_HINT_T1);
      loaded[u] = _mm512_loadu_si512(data + 64 * u);
    }
    if (p % 16 == 0) {
      hash(p + 16);
      hashed = p;
    }
    __m512i high = loaded[0];
    __m512i wide = loaded[0];
#pragma GCC unroll 4
    for (uint32_t u = 1; u < kSteps; ++u) {
      high = L::MaxSigned(high, loaded[u]);
      wide = L::MaxUnsigned(wide, loaded[u]);
    }
    if (__builtin_expect(L::Any(L::AtLeastSigned(high, stepper.limit), L::AtLeast(wide, stepper.negative_limit)), 0)) {
      return false;
    }
    if constexpr (F::kTiny != 0) {
      if (__builtin_expect(!L::Any(L::AtLeastSigned(high, tiny), L::AtLeast(wide, negative_tiny)), 0)) return false;
    }
    extremes.high = L::MaxSigned(extremes.high, high);
    extremes.wide = L::MaxUnsigned(extremes.wide, wide);
    const uint32_t rotation = s.rotation[p / kBlockGroups];
    const uint32_t place = stepper.PlaceOf(p, rotation);
    const __m512i octet_hashes = LoadEight(hashes + p % 32);
    const __m512i octet_row_hashes = kCells ? LoadEight(row_hashes + p % 32) : octet_hashes;
#pragma GCC unroll 4
    for (uint32_t u = 0; u < kSteps; ++u) {
      extremes.near = L::Nearer(extremes.near, loaded[u], stepper.magnitude);
      stepper.template Step<false>(place ^ u * F::kGroups * kLanes, rotation & (F::kGroups - 1), octet_hashes,
                                   octet_row_hashes, data + 64 * u, loaded[u], 0xff, u, s.matrix, sums);
    }
    return true;
  };

  bool exceptional = false;
  auto run = [&](uint32_t p, uint32_t end, const uint8_t* data) __attribute__((always_inline)) {
    while (p < end) {
      if (p % kOctet == 0 && end - p >= kOctet) {
        const uint32_t sixteen = p - p % 16;
        if (sixteen != hashed) {
          if (sixteen != hashed + 16) hash(sixteen);
          if (p != sixteen) hash(sixteen + 16);  // otherwise the octet does it
          hashed = sixteen;
        }
        while (end - p >= kOctet && octet(p, data)) {
          p += kOctet;
          data += kOctet * kGroupBytes;
          if (F::kFloatSums && p % (kFloatOctets * kOctet) == 0) sums.Spill();
        }
        if constexpr (F::kFloatSums) sums.Spill();
        if (p == end) return;
      }
      // To the next octet, or all of it.
      const uint32_t left = kOctet - p % kOctet;
      const uint32_t stop = end - p < left ? end : p + left;
      Extremes<F> slow_extremes = extremes;
      Sums slow_sums = sums;
      exceptional |= GuardedSteps<F, kSketching, kCells>(s, p, stop, data, &slow_extremes, &slow_sums);
      extremes = slow_extremes;
      sums = slow_sums;
      data += (stop - p) * kGroupBytes;
      p = stop;
    }
  };

  if constexpr (!kCells) {
    run(s.p, s.end, s.data);
  } else {
    const uint8_t* data = s.data;
    for (uint32_t p = s.p; p < s.end;) {
      const uint32_t end = s.end - p < cursor->left ? s.end : p + cursor->left;
      for (__m512d& chain : sums.sum_sq) chain = _mm512_setzero_pd();
      sums.residues = _mm512_setzero_ps();
      run(p, end, data);
      const __m512d sum_sq = sums.SumSq();
      sums.all_sum_sq = _mm512_add_pd(sums.all_sum_sq, sum_sq);
      sums.all_residues = _mm512_add_ps(sums.all_residues, sums.residues);
      if (Cell* head = cursor->Current()) {
        _mm512_storeu_pd(head->sum_sq, _mm512_add_pd(_mm512_loadu_pd(head->sum_sq), sum_sq));
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

}  // namespace
}  // namespace assay
