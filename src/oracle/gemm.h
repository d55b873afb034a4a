// Double-precision products of small and middle-sized matrices, and of their magnitudes in the same pass: what linear
// layers and attention are made of. Plain sums of products in order (error gamma(k) at 2^-53), no skipping of zeros:
// 0 times infinity is NaN as it is in an engine. Uses AVX2 where the machine has it, and no FMA: products and sums are
// rounded apart on every machine.
#pragma once

#include <cstdint>
#include <vector>

namespace assay::oracle {

// The right operand B [k, n], copied into panels of eight columns so that the kernel reads it in order.
class PackedMatrix {
 public:
  // B is given by its columns: n rows of k at stride `ld` elements (a weight [out, in], keys).
  static PackedMatrix FromColumns(const double* rows, int64_t ld, int64_t n, int64_t k);
  // B is given by its rows: k rows of n at stride `ld` (values).
  static PackedMatrix FromRows(const double* rows, int64_t ld, int64_t k, int64_t n);

  int64_t k() const { return k_; }
  int64_t n() const { return n_; }
  int64_t panels() const { return (n_ + kWidth - 1) / kWidth; }
  const double* panel(int64_t p) const { return data_.data() + p * k_ * kWidth; }

  static constexpr int64_t kWidth = 8;

 private:
  int64_t k_ = 0, n_ = 0;
  std::vector<double> data_;
};

// C = A · B[k_begin : k_end, panels first to last) for m rows of A at stride lda, whose column 0 meets row k_begin of
// B. C has B's column numbers at stride ldc; c_abs, where not null, gets |A| · |B|, the condition of the sums. With
// `add` both are added to what is there.
void Multiply(const double* a, int64_t lda, int64_t m, const PackedMatrix& b, int64_t k_begin, int64_t k_end,
              int64_t panel_begin, int64_t panel_end, double* c, double* c_abs, int64_t ldc, bool add = false);

}  // namespace assay::oracle
