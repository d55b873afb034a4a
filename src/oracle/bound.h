// What an oracle returns, and how far a right engine may be from it. Derivations: docs/numerics.md, "Oracles".
//
// Every operation states, for each element, how the roundings of an engine grow on the way to it; the caller says how
// coarse these roundings were. So one computed result serves every declared precision. It does not know which
// precision an engine had: that is metadata of the trace.
#pragma once

#include <cstdint>

#include "oracle/array.h"
#include "tensor/dtype.h"

namespace assay::oracle {

// |engine - value| <= (gamma(k, u_accum) + stores u_store) scale + gamma(k_inner, u_accum) inner + floor
// (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1, has gamma and how such terms add up.)
struct Computed {
  Array value;
  Array scale;   // sum of the magnitudes of the terms that were added up last; same shape
  Array inner;   // growth of roundings inside the operation (scores, angles, ...); no values: none
  double k = 0;  // accumulator roundings on the way of any term of `scale`
  double k_inner = 0;
  double stores = 1;  // roundings to the storing type that usual engines make on the way, the last one included
  Array floors = {};  // times Precision::floor, where what underflowed was multiplied; no values: 1
};

// Unit roundoffs. operand: where the engine worked on operands that were rounded once more than those recorded (P to
// bf16 before P V, an activation quantised to fp8): their relative error, which counts for scale and inner.
struct Precision {
  double accum = 0x1p-24;
  double store = 0x1p-24;
  double operand = 0;
  double floor = 0;   // absolute: what underflow may cost (half the smallest subnormal, 2^-119 with f32's range)
  bool walk = false;  // roundings as a random walk (8 sigma): gamma(8 sqrt(k)) where that is less than gamma(k)
};
// Accumulator and storing type; an accumulator coarser than the storing type stays as declared. Types that are not
// floats count as f32.
Precision PrecisionOf(DType accum, DType store);

// k u / (1 - k u), the bound of k roundings in a row; infinite from k u = 1.
double Gamma(double k, double u);

// Bound of element i. The oracle's own roundings (2^-53) are included. NaN or infinite where scale is.
double BoundAt(const Computed& computed, int64_t i, const Precision& precision);
Array Bound(const Computed& computed, const Precision& precision);

// Element by element. Non-finite elements are right only where the oracle has the same one (NaN for NaN, either sign).
struct Agreement {
  int64_t count = 0;
  int64_t over = 0;             // elements beyond their bound, non-finite ones that should not be among them
  int64_t wrong_nonfinite = 0;  // of these: one side not finite, or another infinity
  int64_t first_over = -1;      // row-major, -1: none
  int64_t worst_at = -1;        // of the largest error / bound; a wrong non-finite element is the worst
  double worst = 0;             // largest error / bound; infinite for a wrong non-finite element
  double relative_l2 = 0;       // |actual - value| / |value| over the elements that are finite in both
  bool ok() const { return over == 0; }
};
// kBadInput when the number of elements differs.
Result<Agreement> Compare(const Array& actual, const Computed& computed, const Precision& precision);

}  // namespace assay::oracle
