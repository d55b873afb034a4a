// y[c] (+)= sum_k x[k] w[c, k] for n rows of w: the product of one row, which is bound by reading w once.
// The instruction set is the one that the statistics use (stats/measure.h, ASSAY_ISA); error bound as in model/gemm.h.
#pragma once

#include <cstdint>

namespace assay {

// x [k]; w [n, k], rows ldw elements apart; y [n]. Any size may be 0. y must not overlap x or w.
void DotRows(const float* x, const float* w, int64_t ldw, int64_t n, int64_t k, bool accumulate, float* y);
void DotRows(const double* x, const double* w, int64_t ldw, int64_t n, int64_t k, bool accumulate, double* y);

}  // namespace assay
