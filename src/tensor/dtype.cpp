#include "tensor/dtype.h"

#include <cstddef>

namespace assay {
namespace {

// A row a type. The table is short and looked up once a tensor, so a linear search will do.
struct DTypeInfo {
  DType dtype;
  bool is_float;
  double unit_roundoff;
  std::string_view name;
  // Other spellings, lower case: NumPy, torch and safetensors; empty when there is none.
  std::string_view aliases[3];
};

constexpr DTypeInfo kInfos[] = {
    {DType::kF64, true, 0x1p-53, "f64", {"float64", "double", ""}},
    {DType::kF32, true, 0x1p-24, "f32", {"float32", "float", ""}},
    {DType::kF16, true, 0x1p-11, "f16", {"float16", "half", ""}},
    {DType::kBF16, true, 0x1p-8, "bf16", {"bfloat16", "", ""}},
    {DType::kF8E4M3FN, true, 0x1p-4, "f8_e4m3fn", {"float8_e4m3fn", "f8_e4m3", ""}},
    {DType::kF8E5M2, true, 0x1p-3, "f8_e5m2", {"float8_e5m2", "", ""}},
    {DType::kF8E4M3FNUZ, true, 0x1p-4, "f8_e4m3fnuz", {"float8_e4m3fnuz", "", ""}},
    {DType::kF8E5M2FNUZ, true, 0x1p-3, "f8_e5m2fnuz", {"float8_e5m2fnuz", "", ""}},
    {DType::kF8E8M0, true, 0x1p-1, "f8_e8m0", {"float8_e8m0fnu", "f8_e8m0fnu", ""}},
    {DType::kF4E2M1, true, 0x1p-2, "f4_e2m1", {"float4_e2m1fn_x2", "float4_e2m1fn", "f4"}},
    {DType::kI64, false, 0, "i64", {"int64", "long", ""}},
    {DType::kI32, false, 0, "i32", {"int32", "int", ""}},
    {DType::kI16, false, 0, "i16", {"int16", "short", ""}},
    {DType::kI8, false, 0, "i8", {"int8", "", ""}},
    {DType::kU64, false, 0, "u64", {"uint64", "", ""}},
    {DType::kU32, false, 0, "u32", {"uint32", "", ""}},
    {DType::kU16, false, 0, "u16", {"uint16", "", ""}},
    {DType::kU8, false, 0, "u8", {"uint8", "", ""}},
    {DType::kBool, false, 0, "bool", {"bool_", "", ""}},
};

// nullptr for kInvalid and for numbers of a later version of the format.
const DTypeInfo* Find(DType dtype) {
  for (const DTypeInfo& info : kInfos) {
    if (info.dtype == dtype) return &info;
  }
  return nullptr;
}

// Names are ASCII; the locale must not matter.
bool EqualIgnoringCase(std::string_view text, std::string_view lower) {
  if (text.size() != lower.size()) return false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i] >= 'A' && text[i] <= 'Z' ? static_cast<char>(text[i] - 'A' + 'a') : text[i];
    if (c != lower[i]) return false;
  }
  return true;
}

}  // namespace

bool IsFloat(DType dtype) {
  const DTypeInfo* info = Find(dtype);
  return info && info->is_float;
}

// Half a unit in the last place of [1, 2): 2^-(mantissa bits + 1).
double UnitRoundoff(DType dtype) {
  const DTypeInfo* info = Find(dtype);
  return info ? info->unit_roundoff : 0;
}

std::string_view NameOf(DType dtype) {
  const DTypeInfo* info = Find(dtype);
  return info ? info->name : std::string_view("invalid");
}

// Ignores case, so that safetensors' "BF16" and NumPy's "float32" need no rows of their own.
DType ParseDType(std::string_view name) {
  constexpr std::string_view kTorch = "torch.";
  if (name.substr(0, kTorch.size()) == kTorch) name.remove_prefix(kTorch.size());
  if (name.empty()) return DType::kInvalid;
  for (const DTypeInfo& info : kInfos) {
    if (EqualIgnoringCase(name, info.name)) return info.dtype;
    for (std::string_view alias : info.aliases) {
      if (!alias.empty() && EqualIgnoringCase(name, alias)) return info.dtype;
    }
  }
  return DType::kInvalid;
}

}  // namespace assay
