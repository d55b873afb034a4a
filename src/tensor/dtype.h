// Element types. The numbers are part of the C ABI and of the trace format: never reused.
#pragma once

#include <cstdint>
#include <string_view>

namespace assay {

// Where a name has several definitions in the wild, the comment says which one is meant.
enum class DType : uint8_t {
  kInvalid = 0,
  // 1 to 15 floats, from 16 on integers; the gap leaves room.
  kF64 = 1,
  kF32 = 2,
  kF16 = 3,
  kBF16 = 4,
  kF8E4M3FN = 5,    // bias 7, largest 448, no infinity, NaN 0x7f and 0xff
  kF8E5M2 = 6,      // bias 15, largest 57344, infinities and NaN as IEEE 754
  kF8E4M3FNUZ = 7,  // bias 8, largest 240, one zero, NaN 0x80
  kF8E5M2FNUZ = 8,  // bias 16, largest 57344, one zero, NaN 0x80
  kF8E8M0 = 9,      // 2^(code - 127), NaN 0xff (OCP microscaling formats)
  kF4E2M1 = 10,     // packed, two to a byte, the even element in the low nibble
  kI64 = 16,
  kI32 = 17,
  kI16 = 18,
  kI8 = 19,
  kU64 = 20,
  kU32 = 21,
  kU16 = 22,
  kU8 = 23,
  kBool = 24,  // one byte, 0 or not
};

// Bits of one element in memory (4 for kF4E2M1); 0 for kInvalid and unknown numbers.
constexpr int BitsOf(DType dtype) {
  switch (dtype) {
    case DType::kF64:
    case DType::kI64:
    case DType::kU64:
      return 64;
    case DType::kF32:
    case DType::kI32:
    case DType::kU32:
      return 32;
    case DType::kF16:
    case DType::kBF16:
    case DType::kI16:
    case DType::kU16:
      return 16;
    case DType::kF8E4M3FN:
    case DType::kF8E5M2:
    case DType::kF8E4M3FNUZ:
    case DType::kF8E5M2FNUZ:
    case DType::kF8E8M0:
    case DType::kI8:
    case DType::kU8:
    case DType::kBool:
      return 8;
    case DType::kF4E2M1:
      return 4;
    case DType::kInvalid:
      break;
  }
  return 0;
}
// kF8E8M0 and kF4E2M1 included.
bool IsFloat(DType dtype);
// Unit roundoff u of the type (half the gap above 1): 2^-53 f64, 2^-24 f32, 2^-11 f16, 2^-8 bf16, 2^-4 e4m3,
// 2^-3 e5m2, 2^-1 e8m0, 2^-2 e2m1; 0 for integers.
double UnitRoundoff(DType dtype);
// Short lower-case names: "f32", "bf16", "f8_e4m3fn", "f4_e2m1", "i64", "bool". ParseDType also takes the spellings
// of torch ("torch.bfloat16", "bfloat16"), NumPy ("float32") and safetensors ("F8_E4M3"); kInvalid when unknown.
std::string_view NameOf(DType dtype);
DType ParseDType(std::string_view name);

}  // namespace assay
