// Exact decoding of every element type to double.
//
// Every value of every type of 32 bits or fewer is a double, so decoding loses nothing; integers beyond 2^53 round to
// nearest even. NaN payloads are not kept: callers that need bits read bits. The minifloats follow the OCP and IEEE
// definitions: e4m3fn has no infinity (S.1111.111 is NaN), the fnuz forms have neither infinity nor negative zero
// (0x80 is NaN), e8m0 is a power of two with 0xff = NaN, e2m1 has neither infinity nor NaN.
// The inline functions are the kernels' building blocks; DecodeTo is what everybody else needs.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

#include "tensor/dtype.h"

namespace assay {

static_assert(std::endian::native == std::endian::little, "tensors are read in place: little-endian machines only");

// 2^exponent for a normal double: -1022 <= exponent <= 1023.
constexpr double PowerOfTwo(int exponent) {
  return std::bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52);
}

// What a float format of 16 bits or fewer looks like. Value of S.E.M: E = 0 gives M * 2^(1 - bias - mantissa_bits),
// else (2^mantissa_bits + M) * 2^(E - bias - mantissa_bits).
struct SmallFloat {
  int exponent_bits;
  int mantissa_bits;
  int bias;
  // Magnitude bits (sign removed) from which on the pattern is not finite; 0 bits past the top: all finite.
  uint32_t first_nonfinite;
  bool has_infinity;          // first_nonfinite is the infinity, what is above it NaN
  bool negative_zero_is_nan;  // the fnuz forms
};

inline constexpr SmallFloat kFormatF16{5, 10, 15, 0x7c00, true, false};
inline constexpr SmallFloat kFormatF8E4M3FN{4, 3, 7, 0x7f, false, false};
inline constexpr SmallFloat kFormatF8E5M2{5, 2, 15, 0x7c, true, false};
inline constexpr SmallFloat kFormatF8E4M3FNUZ{4, 3, 8, 0x80, false, true};
inline constexpr SmallFloat kFormatF8E5M2FNUZ{5, 2, 16, 0x80, false, true};
inline constexpr SmallFloat kFormatF4E2M1{2, 1, 1, 0x8, false, false};

inline constexpr double kDecodedNaN = std::bit_cast<double>(uint64_t{0x7ff8000000000000});
inline constexpr double kDecodedInf = std::bit_cast<double>(uint64_t{0x7ff0000000000000});

constexpr double DecodeSmallFloat(uint32_t bits, const SmallFloat& f) {
  const uint32_t sign_bit = 1u << (f.exponent_bits + f.mantissa_bits);
  const uint32_t magnitude = bits & (sign_bit - 1);
  const bool negative = (bits & sign_bit) != 0;
  if (f.negative_zero_is_nan && negative && magnitude == 0) return kDecodedNaN;
  // The fields, moved to where a double has them, and the bias made its own: right but for subnormal numbers, which
  // have no leading 1 and twice the unit. (No subnormal double occurs: hosts may have them flushed.)
  const uint64_t fields = uint64_t{magnitude} << (52 - f.mantissa_bits);
  double value = std::bit_cast<double>(fields + (static_cast<uint64_t>(1023 - f.bias) << 52));
  if (magnitude >> f.mantissa_bits == 0) value = (value - PowerOfTwo(-f.bias)) * 2;
  if (magnitude >= f.first_nonfinite) {
    value = f.has_infinity && magnitude == f.first_nonfinite ? kDecodedInf : kDecodedNaN;
  }
  // No branch: signs are random.
  return std::bit_cast<double>(std::bit_cast<uint64_t>(value) | uint64_t{negative} << 63);
}

// One element from its bits (low bits of `bits`; higher ones are ignored). kInvalid gives NaN.
constexpr double DecodeBits(uint64_t bits, DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return std::bit_cast<double>(bits);
    case DType::kF32:
      return static_cast<double>(std::bit_cast<float>(static_cast<uint32_t>(bits)));
    case DType::kF16:
      return DecodeSmallFloat(static_cast<uint32_t>(bits & 0xffff), kFormatF16);
    // The upper half of an f32.
    case DType::kBF16:
      return static_cast<double>(std::bit_cast<float>(static_cast<uint32_t>(bits & 0xffff) << 16));
    case DType::kF8E4M3FN:
      return DecodeSmallFloat(static_cast<uint32_t>(bits & 0xff), kFormatF8E4M3FN);
    case DType::kF8E5M2:
      return DecodeSmallFloat(static_cast<uint32_t>(bits & 0xff), kFormatF8E5M2);
    case DType::kF8E4M3FNUZ:
      return DecodeSmallFloat(static_cast<uint32_t>(bits & 0xff), kFormatF8E4M3FNUZ);
    case DType::kF8E5M2FNUZ:
      return DecodeSmallFloat(static_cast<uint32_t>(bits & 0xff), kFormatF8E5M2FNUZ);
    // Exponents from -127 to 127, all of them normal as doubles; no sign, no zero.
    case DType::kF8E8M0:
      return (bits & 0xff) == 0xff ? kDecodedNaN : PowerOfTwo(static_cast<int>(bits & 0xff) - 127);
    case DType::kF4E2M1:
      return DecodeSmallFloat(static_cast<uint32_t>(bits & 0xf), kFormatF4E2M1);
    case DType::kI64:
      return static_cast<double>(static_cast<int64_t>(bits));
    case DType::kI32:
      return static_cast<double>(static_cast<int32_t>(static_cast<uint32_t>(bits)));
    case DType::kI16:
      return static_cast<double>(static_cast<int16_t>(static_cast<uint16_t>(bits)));
    case DType::kI8:
      return static_cast<double>(static_cast<int8_t>(static_cast<uint8_t>(bits)));
    case DType::kU64:
      return static_cast<double>(bits);
    case DType::kU32:
      return static_cast<double>(static_cast<uint32_t>(bits));
    case DType::kU16:
      return static_cast<double>(static_cast<uint16_t>(bits));
    case DType::kU8:
      return static_cast<double>(static_cast<uint8_t>(bits));
    case DType::kBool:
      return (bits & 0xff) != 0 ? 1.0 : 0.0;
    case DType::kInvalid:
      break;
  }
  return kDecodedNaN;
}

// All values of a type of 8 bits or fewer.
template <DType kType>
inline constexpr std::array<double, 256> kByteValues = [] {
  std::array<double, 256> values{};
  for (uint32_t b = 0; b < 256; ++b) values[b] = DecodeBits(b, kType);
  return values;
}();

// DecodeBits of a type known at compile time: one load for small floats. bits: below 256 for types of 8 bits or fewer.
template <DType kType>
constexpr double DecodeElement(uint64_t bits) {
  if constexpr (BitsOf(kType) > 0 && BitsOf(kType) <= 8 && kType != DType::kI8 && kType != DType::kU8) {
    return kByteValues<kType>[bits];
  } else {
    return DecodeBits(bits, kType);
  }
}

// Bits of element `index` (elements, not bytes, from data; may be negative). Reads that element's bytes only, at any
// alignment. For kF4E2M1 the even element of a byte is its low nibble.
inline uint64_t LoadBits(const void* data, int64_t index, DType dtype) {
  const uint8_t* bytes = static_cast<const uint8_t*>(data);
  switch (BitsOf(dtype)) {
    // memcpy: a tensor from a file or a packed buffer has no alignment, and a load through a cast pointer would need
    // it.
    case 64: {
      uint64_t v;
      std::memcpy(&v, bytes + index * 8, 8);
      return v;
    }
    case 32: {
      uint32_t v;
      std::memcpy(&v, bytes + index * 4, 4);
      return v;
    }
    case 16: {
      uint16_t v;
      std::memcpy(&v, bytes + index * 2, 2);
      return v;
    }
    case 8:
      return bytes[index];
    // The arithmetic shift rounds towards minus infinity and index & 1 is 0 or 1 for negative indexes too.
    case 4:
      return (bytes[index >> 1] >> ((index & 1) * 4)) & 0xf;
    default:
      return 0;
  }
}

// n consecutive elements from element `first` of data, to out[0, n).
void DecodeTo(const void* data, int64_t first, int64_t n, DType dtype, double* out);
void DecodeTo(const void* data, int64_t first, int64_t n, DType dtype, float* out);  // rounds f64 and wide integers

}  // namespace assay
