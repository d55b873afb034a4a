#include "model/dot_rows.h"

#include "stats/measure.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace assay {
namespace {

// Independent partial sums that the compiler keeps in vector registers: without -ffast-math it may not reorder one sum.
constexpr int kLanes = 16;

// Lanes are folded pairwise, so the error is that of sums of k / 16 + 4 terms.
template <class T>
T PortableDot(const T* a, const T* b, int64_t k) {
  T lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) lanes[j] += a[i + j] * b[i + j];
  }
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  }
  T sum = lanes[0];
  for (; i < k; ++i) sum += a[i] * b[i];
  return sum;
}

template <class T>
void PortableRows(const T* x, const T* w, int64_t ldw, int64_t n, int64_t k, bool accumulate, T* y) {
  for (int64_t c = 0; c < n; ++c) {
    const T dot = PortableDot(x, w + c * ldw, k);
    y[c] = accumulate ? y[c] + dot : dot;
  }
}

#if defined(__x86_64__)
// Rows of w taken together: x is loaded once for all of them, and eight sums in flight hide the latency of the
// multiply-add.
constexpr int kRows = 4;

__attribute__((target("avx2,fma"))) float SumLanes(__m256 v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// The dot products of x with kRows rows.
__attribute__((target("avx2,fma"))) void Avx2Block(const float* x, const float* const* w, int64_t k, float* dots) {
  __m256 even[kRows], odd[kRows];
  for (int r = 0; r < kRows; ++r) even[r] = odd[r] = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + 16 <= k; i += 16) {
    const __m256 x0 = _mm256_loadu_ps(x + i), x1 = _mm256_loadu_ps(x + i + 8);
    for (int r = 0; r < kRows; ++r) {
      even[r] = _mm256_fmadd_ps(x0, _mm256_loadu_ps(w[r] + i), even[r]);
      odd[r] = _mm256_fmadd_ps(x1, _mm256_loadu_ps(w[r] + i + 8), odd[r]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    float sum = SumLanes(_mm256_add_ps(even[r], odd[r]));
    // The tail of up to 15 channels, summed one by one behind the lanes.
    for (int64_t j = i; j < k; ++j) sum += x[j] * w[r][j];
    dots[r] = sum;
  }
}

__attribute__((target("avx512f,avx2,fma"))) void Avx512Block(const float* x, const float* const* w, int64_t k,
                                                             float* dots) {
  __m512 even[kRows], odd[kRows];
  for (int r = 0; r < kRows; ++r) even[r] = odd[r] = _mm512_setzero_ps();
  int64_t i = 0;
  for (; i + 32 <= k; i += 32) {
    const __m512 x0 = _mm512_loadu_ps(x + i), x1 = _mm512_loadu_ps(x + i + 16);
    for (int r = 0; r < kRows; ++r) {
      even[r] = _mm512_fmadd_ps(x0, _mm512_loadu_ps(w[r] + i), even[r]);
      odd[r] = _mm512_fmadd_ps(x1, _mm512_loadu_ps(w[r] + i + 16), odd[r]);
    }
  }
  for (; i < k; i += 16) {  // tail: lanes beyond k are not read and count as zero
    const auto mask = static_cast<__mmask16>(k - i >= 16 ? 0xffffu : (1u << (k - i)) - 1);
    const __m512 x0 = _mm512_maskz_loadu_ps(mask, x + i);
    for (int r = 0; r < kRows; ++r) even[r] = _mm512_fmadd_ps(x0, _mm512_maskz_loadu_ps(mask, w[r] + i), even[r]);
  }
  for (int r = 0; r < kRows; ++r) {
    float lanes[16];
    _mm512_storeu_ps(lanes, _mm512_add_ps(even[r], odd[r]));
    dots[r] = SumLanes(_mm256_add_ps(_mm256_loadu_ps(lanes), _mm256_loadu_ps(lanes + 8)));
  }
}

using Block = void (*)(const float*, const float* const*, int64_t, float*);

// The last block is filled up with its first row again, whose products are then thrown away.
void BlockRows(Block block, const float* x, const float* w, int64_t ldw, int64_t n, int64_t k, bool accumulate,
               float* y) {
  for (int64_t c = 0; c < n; c += kRows) {
    const float* rows[kRows];
    float dots[kRows];
    for (int r = 0; r < kRows; ++r) rows[r] = w + (c + r < n ? c + r : c) * ldw;
    block(x, rows, k, dots);
    for (int r = 0; r < kRows && c + r < n; ++r) y[c + r] = accumulate ? y[c + r] + dots[r] : dots[r];
  }
}
#endif

}  // namespace

void DotRows(const float* x, const float* w, int64_t ldw, int64_t n, int64_t k, bool accumulate, float* y) {
#if defined(__x86_64__)
  // Asked once a process: rows of one product must not change their order of summation.
  static const Isa isa = ActiveIsa();
  if (isa == Isa::kAvx512) return BlockRows(Avx512Block, x, w, ldw, n, k, accumulate, y);
  if (isa == Isa::kAvx2) return BlockRows(Avx2Block, x, w, ldw, n, k, accumulate, y);
#endif
  PortableRows(x, w, ldw, n, k, accumulate, y);
}

void DotRows(const double* x, const double* w, int64_t ldw, int64_t n, int64_t k, bool accumulate, double* y) {
  PortableRows(x, w, ldw, n, k, accumulate, y);
}

}  // namespace assay
