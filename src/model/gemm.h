// Matrix products of the native runtime, row-major: y[M, N] = x[M, K] * w[N, K]^T, as a linear layer has them.
//
// From OpenBLAS where it was found at build time, otherwise (and for up to three rows) from own loops. Error bound of
// every path, element by element, u the unit roundoff of T:
//   |y - exact| <= gamma(K) * sum_k |x_k w_k|,  gamma(n) = n u / (1 - n u)
// (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1: any order of summation, with or without fused
// multiply-adds). The own loops sum in lanes, so their error is nearer to (K / 16 + 4) u.
// Results depend on M (few rows go through the own loops, which sum in another order), on the instruction set and, with
// a BLAS, on the thread count.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"

namespace assay {

// Leading dimensions (elements between rows) allow slices: ldx >= K, ldw >= K, ldy >= N. Any size may be 0 (K = 0 gives
// zeros). y must not overlap x or w. accumulate: y += instead of y =.
void Linear(const float* x, int64_t ldx, const float* w, int64_t ldw, float* y, int64_t ldy, int64_t m, int64_t n,
            int64_t k, bool accumulate = false);
void Linear(const double* x, int64_t ldx, const double* w, int64_t ldw, double* y, int64_t ldy, int64_t m, int64_t n,
            int64_t k, bool accumulate = false);
// Contiguous: ldx = ldw = k, ldy = n.
template <class T>
void Linear(const T* x, const T* w, T* y, int64_t m, int64_t n, int64_t k, bool accumulate = false) {
  Linear(x, k, w, k, y, n, m, n, k, accumulate);
}

// Threads used inside one product (1 by default: callers that run one thread a rank must not multiply them).
// Process-wide; call it before other threads compute. kEnvironment when the address space that is left (ulimit -v) does
// not hold the work buffers of so many: OpenBLAS would ask for them in an endless loop.
Status SetGemmThreads(int threads);
// "OpenBLAS 0.3.21 (Zen, 1 thread)" or "built-in loops".
std::string GemmDescription();

// Multiplies random matrices of several shapes in float and double and holds every element against the bound above,
// computed in long double. kEnvironment when the BLAS of this machine is wrong: some builds are, on processors newer
// than they are. About 10 ms; call once before relying on results.
Status CheckGemm();

}  // namespace assay
