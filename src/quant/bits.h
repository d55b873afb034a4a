// Loads and exact conversions that the decoders share. All little-endian, at any alignment.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "tensor/decode.h"

namespace assay {

template <class T>
inline T LoadAs(const void* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

// Exact: every f16 is a float.
inline float HalfAt(const void* at) { return static_cast<float>(DecodeSmallFloat(LoadAs<uint16_t>(at), kFormatF16)); }

// 2^(code - 127) as float, subnormal below code 1; 0xff is NaN.
inline float E8m0ToFloat(uint8_t code) { return static_cast<float>(DecodeBits(code, DType::kF8E8M0)); }

// Values of all 256 patterns of a one-byte float.
// One load an element where decoding would take some ten operations.
inline std::array<float, 256> ByteFloatTable(DType dtype) {
  std::array<float, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) table[i] = static_cast<float>(DecodeBits(i, dtype));
  return table;
}

// e2m1 times 2: integers.
// 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, so that codes of all formats are integers.
inline constexpr int8_t kE2m1Doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

}  // namespace assay
