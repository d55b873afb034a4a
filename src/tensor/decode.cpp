#include "tensor/decode.h"

#include <array>

namespace assay {
namespace {

// Types of 8 bits or fewer go through a table: 256 doubles a type, built on first use of the type.
template <DType kType>
const std::array<double, 256>& ByteTable() {
  static constexpr std::array<double, 256> kTable = [] {
    std::array<double, 256> t{};
    for (uint32_t b = 0; b < 256; ++b) t[b] = DecodeBits(b, kType);
    return t;
  }();
  return kTable;
}

template <DType kType, class Out>
void DecodeAs(const void* data, int64_t first, int64_t n, Out* out) {
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t bits = LoadBits(data, first + i, kType);
    if constexpr (kType == DType::kF8E4M3FN || kType == DType::kF8E5M2 || kType == DType::kF8E4M3FNUZ ||
                  kType == DType::kF8E5M2FNUZ || kType == DType::kF8E8M0 || kType == DType::kF4E2M1) {
      out[i] = static_cast<Out>(ByteTable<kType>()[bits]);
    } else {
      out[i] = static_cast<Out>(DecodeBits(bits, kType));
    }
  }
}

template <class Out>
void DecodeAny(const void* data, int64_t first, int64_t n, DType dtype, Out* out) {
  switch (dtype) {
#define ASSAY_CASE(type) \
  case DType::type:      \
    return DecodeAs<DType::type>(data, first, n, out);
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
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<Out>(kDecodedNaN);
}

}  // namespace

void DecodeTo(const void* data, int64_t first, int64_t n, DType dtype, double* out) {
  DecodeAny(data, first, n, dtype, out);
}

void DecodeTo(const void* data, int64_t first, int64_t n, DType dtype, float* out) {
  DecodeAny(data, first, n, dtype, out);
}

}  // namespace assay
