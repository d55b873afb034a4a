#include "oracle/gemm.h"

#include <algorithm>
#include <cstring>

namespace assay::oracle {
namespace {

constexpr int64_t kWidth = PackedMatrix::kWidth;
// Four doubles; the compiler splits them where registers are narrower.
typedef double Lanes __attribute__((vector_size(32), aligned(8), may_alias));
typedef int64_t Bits __attribute__((vector_size(32)));

// Rows of A against one panel. kAbs: the product of the magnitudes instead.
template <int kRows, bool kAbs>
// Inlined into each instruction set's entry, or it would be compiled for the baseline. `columns` <= 8 of the panel are
// written: the last panel is padded with zeros.
[[gnu::always_inline]] inline void Tile(const double* a, int64_t lda, const double* panel, int64_t k, double* c,
                                        int64_t ldc, int64_t columns, bool add) {
  const Bits magnitude = {INT64_MAX, INT64_MAX, INT64_MAX, INT64_MAX};
  Lanes sum[kRows][2] = {};
  for (int64_t i = 0; i < k; ++i) {
    Lanes b0 = *reinterpret_cast<const Lanes*>(panel + i * kWidth);
    Lanes b1 = *reinterpret_cast<const Lanes*>(panel + i * kWidth + 4);
    if constexpr (kAbs) {
      b0 = reinterpret_cast<Lanes>(reinterpret_cast<Bits>(b0) & magnitude);
      b1 = reinterpret_cast<Lanes>(reinterpret_cast<Bits>(b1) & magnitude);
    }
    for (int r = 0; r < kRows; ++r) {
      // No test for zero: 0 · inf must be NaN here as it is in an engine.
      const double x = kAbs ? __builtin_fabs(a[r * lda + i]) : a[r * lda + i];
      sum[r][0] += x * b0;
      sum[r][1] += x * b1;
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int64_t j = 0; j < columns; ++j) {
      const double value = sum[r][j / 4][j % 4];
      c[r * ldc + j] = add ? c[r * ldc + j] + value : value;
    }
  }
}

// Arguments of Multiply in one place, so that each instruction set has one entry.
struct Job {
  const double* a;
  int64_t lda, m;
  const PackedMatrix* b;
  int64_t k_begin, k_end, panel_begin, panel_end;
  double* c;
  double* c_abs;
  int64_t ldc;
  bool add;
};

// kRows x 8 sums stay in registers: 4 rows need 8 of AVX2's 16, 2 rows 8 of SSE2's.
template <int kRows>
[[gnu::always_inline]] inline void Run(const Job& job) {
  const int64_t k = job.k_end - job.k_begin;
  for (int64_t p = job.panel_begin; p < job.panel_end; ++p) {
    const double* panel = job.b->panel(p) + job.k_begin * kWidth;
    const int64_t columns = std::min(kWidth, job.b->n() - p * kWidth);
    int64_t r = 0;
    for (; r + kRows <= job.m; r += kRows) {
      const int64_t at = r * job.ldc + (p - job.panel_begin) * kWidth;
      Tile<kRows, false>(job.a + r * job.lda, job.lda, panel, k, job.c + at, job.ldc, columns, job.add);
      if (job.c_abs)
        Tile<kRows, true>(job.a + r * job.lda, job.lda, panel, k, job.c_abs + at, job.ldc, columns, job.add);
    }
    for (; r < job.m; ++r) {
      const int64_t at = r * job.ldc + (p - job.panel_begin) * kWidth;
      Tile<1, false>(job.a + r * job.lda, job.lda, panel, k, job.c + at, job.ldc, columns, job.add);
      if (job.c_abs) Tile<1, true>(job.a + r * job.lda, job.lda, panel, k, job.c_abs + at, job.ldc, columns, job.add);
    }
  }
}

#if defined(__x86_64__)
// Without "fma" among the targets: products and sums are rounded apart on every machine.
[[gnu::target("avx2")]] void RunAvx2(const Job& job) { Run<4>(job); }
bool HasAvx2() { return __builtin_cpu_supports("avx2") != 0; }
#else
void RunAvx2(const Job& job) { Run<4>(job); }
bool HasAvx2() { return false; }
#endif

}  // namespace

// Element (i, j) goes to panel j / 8, row i, lane j % 8; lanes beyond n stay 0.
PackedMatrix PackedMatrix::FromColumns(const double* rows, int64_t ld, int64_t n, int64_t k) {
  PackedMatrix m;
  m.k_ = k;
  m.n_ = n;
  m.data_.assign(static_cast<size_t>(m.panels() * k * kWidth), 0.0);
  for (int64_t j = 0; j < n; ++j) {
    double* out = m.data_.data() + (j / kWidth) * k * kWidth + j % kWidth;
    for (int64_t i = 0; i < k; ++i) out[i * kWidth] = rows[j * ld + i];
  }
  return m;
}

PackedMatrix PackedMatrix::FromRows(const double* rows, int64_t ld, int64_t k, int64_t n) {
  PackedMatrix m;
  m.k_ = k;
  m.n_ = n;
  m.data_.assign(static_cast<size_t>(m.panels() * k * kWidth), 0.0);
  for (int64_t p = 0; p < m.panels(); ++p) {
    const size_t bytes = static_cast<size_t>(std::min(kWidth, n - p * kWidth)) * sizeof(double);
    double* out = m.data_.data() + p * k * kWidth;
    for (int64_t i = 0; i < k; ++i) std::memcpy(out + i * kWidth, rows + i * ld + p * kWidth, bytes);
  }
  return m;
}

void Multiply(const double* a, int64_t lda, int64_t m, const PackedMatrix& b, int64_t k_begin, int64_t k_end,
              int64_t panel_begin, int64_t panel_end, double* c, double* c_abs, int64_t ldc, bool add) {
  const Job job{a, lda, m, &b, k_begin, k_end, panel_begin, panel_end, c, c_abs, ldc, add};
  if (HasAvx2()) {
    RunAvx2(job);
  } else {
    Run<2>(job);
  }
}

}  // namespace assay::oracle
