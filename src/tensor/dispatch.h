// From a dtype known at run time to one known at compile time: the one list of all types.
#pragma once

#include "tensor/dtype.h"

namespace assay {

// Returns f.operator()<kType>() for the dtype; <DType::kInvalid> for kInvalid and unknown numbers.
// A type that is missing here decodes to NaN everywhere: -Wswitch names it when the enum grows. f must return the
// same type for every argument.
template <class F>
constexpr auto WithDType(DType dtype, F&& f) {
  switch (dtype) {
// A macro, as the name of the enumerator is both the case label and the template argument; undefined again below.
#define ASSAY_CASE(type) \
  case DType::type:      \
    return f.template operator()<DType::type>();
    ASSAY_CASE(kF64)
    ASSAY_CASE(kF32)
    ASSAY_CASE(kF16)
    ASSAY_CASE(kBF16)
    ASSAY_CASE(kF8E4M3FN)
    ASSAY_CASE(kF8E5M2)
    ASSAY_CASE(kF8E4M3FNUZ)
    ASSAY_CASE(kF8E5M2FNUZ)
    ASSAY_CASE(kF8E8M0)
    ASSAY_CASE(kF4E2M1)
    ASSAY_CASE(kI64)
    ASSAY_CASE(kI32)
    ASSAY_CASE(kI16)
    ASSAY_CASE(kI8)
    ASSAY_CASE(kU64)
    ASSAY_CASE(kU32)
    ASSAY_CASE(kU16)
    ASSAY_CASE(kU8)
    ASSAY_CASE(kBool)
#undef ASSAY_CASE
    case DType::kInvalid:
      break;
  }
  return f.template operator()<DType::kInvalid>();
}

}  // namespace assay
