#include "model/gemm.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "base/hash.h"
#include "model/dot_rows.h"

#ifdef ASSAY_HAVE_BLAS
#include <cblas.h>
#endif

namespace assay {
namespace {

// Blocks of rows of w in the outer loop: each is read from memory once and meets all rows of x, which stay in cache.
template <class T>
void PlainLinear(const T* x, int64_t ldx, const T* w, int64_t ldw, T* y, int64_t ldy, int64_t m, int64_t n, int64_t k,
                 bool accumulate) {
  // 64 rows of 4096 floats are 1 MiB: within the second-level cache.
  constexpr int64_t kBlock = 64;
  for (int64_t c = 0; c<n; c += m> 1 ? kBlock : n) {
    const int64_t rows = m > 1 ? std::min(kBlock, n - c) : n;
    for (int64_t r = 0; r < m; ++r) DotRows(x + r * ldx, w + c * ldw, ldw, rows, k, accumulate, y + r * ldy + c);
  }
}

#ifdef ASSAY_HAVE_BLAS
constexpr int64_t kMaxBlasSize = INT32_MAX;  // blasint of the usual builds

// Sizes are narrowed to int32 below.
bool BlasFits(int64_t ldx, int64_t ldw, int64_t ldy, int64_t m, int64_t n, int64_t k) {
  return std::max({ldx, ldw, ldy, m, n, k}) <= kMaxBlasSize;
}

void BlasLinear(const float* x, int64_t ldx, const float* w, int64_t ldw, float* y, int64_t ldy, int64_t m, int64_t n,
                int64_t k, bool accumulate) {
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<blasint>(m), static_cast<blasint>(n),
              static_cast<blasint>(k), 1.0f, x, static_cast<blasint>(ldx), w, static_cast<blasint>(ldw),
              accumulate ? 1.0f : 0.0f, y, static_cast<blasint>(ldy));
}

void BlasLinear(const double* x, int64_t ldx, const double* w, int64_t ldw, double* y, int64_t ldy, int64_t m,
                int64_t n, int64_t k, bool accumulate) {
  cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<blasint>(m), static_cast<blasint>(n),
              static_cast<blasint>(k), 1.0, x, static_cast<blasint>(ldx), w, static_cast<blasint>(ldw),
              accumulate ? 1.0 : 0.0, y, static_cast<blasint>(ldy));
}
#endif

// The one place that decides between a BLAS and the own loops.
template <class T>
void LinearOf(const T* x, int64_t ldx, const T* w, int64_t ldw, T* y, int64_t ldy, int64_t m, int64_t n, int64_t k,
              bool accumulate) {
  if (m <= 0 || n <= 0) return;
#ifdef ASSAY_HAVE_BLAS
  // Few rows are bound by reading w, which the own loops do at sgemv's rate and without packing: measured on Zen 5 with
  // k 256 to 4096, sgemm reached 0.2 of their rate for one row, 0.4 for two, 0.6 for three, and passed them at four.
  constexpr int64_t kOwnRows = 3;
  if (m > kOwnRows && k > 0 && BlasFits(ldx, ldw, ldy, m, n, k)) {
    return BlasLinear(x, ldx, w, ldw, y, ldy, m, n, k, accumulate);
  }
#endif
  PlainLinear(x, ldx, w, ldw, y, ldy, m, n, k, accumulate);
}

// One product of random entries in [-1, 1), element by element against the same sum in long double, whose own error
// (64 bits of mantissa on x86) is 2^-11 of a double's. terms is k + 1: a product each, and what was there before.
template <class T>
Status CheckShape(int64_t m, int64_t n, int64_t k, bool accumulate, uint64_t seed, const char* type) {
  SplitMix64 random(seed);
  // Rows longer than the matrix, so that a product that ignores the leading dimension is caught.
  const int64_t ldx = k + 3, ldw = k + 1, ldy = n + 2;
  std::vector<T> x(static_cast<size_t>(m * ldx)), w(static_cast<size_t>(n * ldw)), y(static_cast<size_t>(m * ldy));
  for (auto* v : {&x, &w, &y}) {
    for (T& e : *v) e = static_cast<T>(2 * random.NextDouble() - 1);
  }
  const std::vector<T> before = y;
  LinearOf(x.data(), ldx, w.data(), ldw, y.data(), ldy, m, n, k, accumulate);
  const long double u = sizeof(T) == 4 ? 0x1p-24L : 0x1p-53L;
  for (int64_t r = 0; r < m; ++r) {
    for (int64_t c = 0; c < ldy; ++c) {
      const size_t at = static_cast<size_t>(r * ldy + c);
      long double exact = 0, magnitude = 0;
      int64_t terms = 0;
      if (c < n) {
        if (accumulate) {
          exact = before[at];
          magnitude = std::fabs(exact);
        }
        for (int64_t i = 0; i < k; ++i) {
          const long double p = static_cast<long double>(x[static_cast<size_t>(r * ldx + i)]) *
                                static_cast<long double>(w[static_cast<size_t>(c * ldw + i)]);
          exact += p;
          magnitude += std::fabs(p);
        }
        terms = k + 1;
      } else {
        exact = before[at];  // between the rows: must not be touched
      }
      const long double n_u = static_cast<long double>(terms) * u, bound = n_u / (1 - n_u) * magnitude;
      const long double error = std::fabs(static_cast<long double>(y[at]) - exact);
      if (!(error <= bound)) {
        return Status::Environment("matrix products of this machine are wrong: " + GemmDescription() + ", " + type +
                                   ", m " + std::to_string(m) + " n " + std::to_string(n) + " k " + std::to_string(k) +
                                   ", element (" + std::to_string(r) + ", " + std::to_string(c) + ") is off by " +
                                   std::to_string(static_cast<double>(error)) + ", bound " +
                                   std::to_string(static_cast<double>(bound)) +
                                   "; update OpenBLAS or set OPENBLAS_CORETYPE to an older core (Haswell)");
      }
    }
  }
  return {};
}

}  // namespace

void Linear(const float* x, int64_t ldx, const float* w, int64_t ldw, float* y, int64_t ldy, int64_t m, int64_t n,
            int64_t k, bool accumulate) {
  LinearOf(x, ldx, w, ldw, y, ldy, m, n, k, accumulate);
}

void Linear(const double* x, int64_t ldx, const double* w, int64_t ldw, double* y, int64_t ldy, int64_t m, int64_t n,
            int64_t k, bool accumulate) {
  LinearOf(x, ldx, w, ldw, y, ldy, m, n, k, accumulate);
}

// What each thread needs is asked for at once and given back: 128 MiB of work buffer (BUFFER_SIZE of OpenBLAS's x86-64
// builds, the largest of all), its stack and some. Reserved and never touched, so it costs no memory.
Status SetGemmThreads(int threads) {
#if defined(ASSAY_HAVE_BLAS) && defined(OPENBLAS_VERSION)
  constexpr size_t kBytesOfThread = size_t{144} << 20;
  const auto n = static_cast<size_t>(std::max(1, threads));
  void* room = ::mmap(nullptr, n * kBytesOfThread, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) {
    return Status::Environment("OpenBLAS needs " + std::to_string(n * (kBytesOfThread >> 20)) +
                               " MiB of address space for " + std::to_string(n) +
                               " thread(s), and the process may not have them (ulimit -v): raise the limit" +
                               (n > 1 ? " or ask for fewer threads" : ""));
  }
  ::munmap(room, n * kBytesOfThread);
  openblas_set_num_threads(static_cast<int>(n));
#else
  static_cast<void>(threads);
#endif
  return {};
}

std::string GemmDescription() {
#if defined(ASSAY_HAVE_BLAS) && defined(OPENBLAS_VERSION)
  const int threads = openblas_get_num_threads();
  std::string config = openblas_get_config();
  const size_t digits = config.find_first_of("0123456789");
  const std::string version =
      digits == std::string::npos ? "" : config.substr(digits, config.find(' ', digits) - digits);
  return "OpenBLAS " + version + " (" + openblas_get_corename() + ", " + std::to_string(threads) +
         (threads == 1 ? " thread)" : " threads)");
#elif defined(ASSAY_HAVE_BLAS)
  return "BLAS";
#else
  return "built-in loops";
#endif
}

// Some builds of OpenBLAS choose kernels that are wrong on processors newer than they are.
Status CheckGemm() {
  // Below, at and beyond the block sizes of the usual kernels, tails in every dimension, and long sums.
  struct Shape {
    int64_t m, n, k;
  };
  constexpr Shape kShapes[] = {{1, 1, 1},     {1, 64, 257}, {2, 3, 5},     {4, 16, 16},  {7, 33, 65},
                               {16, 48, 256}, {33, 17, 31}, {64, 65, 128}, {3, 5, 2047}, {5, 130, 77}};
  uint64_t seed = 1;
  for (const Shape& s : kShapes) {
    for (const bool accumulate : {false, true}) {
      ASSAY_RETURN_IF_ERROR(CheckShape<float>(s.m, s.n, s.k, accumulate, seed++, "float"));
      ASSAY_RETURN_IF_ERROR(CheckShape<double>(s.m, s.n, s.k, accumulate, seed++, "double"));
    }
  }
  return {};
}

}  // namespace assay
