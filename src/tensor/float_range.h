// Where the numbers of a floating type end: below the smallest normal one its neighbours stay equally far apart.
#pragma once

#include "tensor/dtype.h"

namespace assay {

// Exponent of the smallest normal number; 0 for integers. Neighbours of the type are 2 u 2^e apart, u its unit roundoff
// (dtype.h) and e the exponent of the lower one, or this one where that is less. kF8E8M0 has no other numbers.
constexpr int MinExponent(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return -1022;
    case DType::kF32:
    case DType::kBF16:
      return -126;
    case DType::kF16:
    case DType::kF8E5M2:
      return -14;
    case DType::kF8E4M3FN:
      return -6;
    case DType::kF8E4M3FNUZ:
      return -7;
    case DType::kF8E5M2FNUZ:
      return -15;
    case DType::kF8E8M0:
      return -127;
    default:  // kF4E2M1 counts from 0, as integers do
      return 0;
  }
}

}  // namespace assay
