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

inline float HalfAt(const void* at) { return static_cast<float>(DecodeSmallFloat(LoadAs<uint16_t>(at), kFormatF16)); }

// 2^(code - 127) as float, subnormal below code 1; 0xff is NaN.
inline float E8m0ToFloat(uint8_t code) { return static_cast<float>(DecodeBits(code, DType::kF8E8M0)); }

// Values of all 256 patterns of a one-byte float.
inline std::array<float, 256> ByteFloatTable(DType dtype) {
  std::array<float, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) table[i] = static_cast<float>(DecodeBits(i, dtype));
  return table;
}

// e2m1 times 2: integers.
inline constexpr int8_t kE2m1Doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

}  // namespace assay
