// Rounding points of the native runtime.
//
// The runtime computes in float or double. A bf16 run is a float run whose values are rounded to the nearest bf16
// (ties to even) wherever eager bf16 code stores a tensor: after the embedding, every linear layer (its bias included),
// norm, rotation, activation product, residual add, reduction, routed sum and attention output. Accumulation inside a
// product, the interior of softmax, the log-sum-exp, router scores and the final choice stay in float
// (docs/reference.md has the list). Nothing here allocates.
#pragma once

#include <bit>
#include <cstdint>

namespace assay {

// Nearest bf16, ties to even. NaN stays NaN (quiet), infinities and signed zeros stay; large values round to infinity.
inline float RoundToBf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return std::bit_cast<float>((bits | 0x00400000u) & 0xffff0000u);
  return std::bit_cast<float>((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}

// What a run does with a finished tensor.
struct Numerics {
  bool bf16 = false;

  template <class T>
  void Round(T* values, int64_t n) const {
    if (!bf16) return;
    for (int64_t i = 0; i < n; ++i) values[i] = static_cast<T>(RoundToBf16(static_cast<float>(values[i])));
  }
};

}  // namespace assay
