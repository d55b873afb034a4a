#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <set>

#include "tensor/decode.h"
#include "tensor/dtype.h"
#include "tensor/float_range.h"

namespace assay {
namespace {

constexpr DType kAll[] = {DType::kF64,    DType::kF32,        DType::kF16,        DType::kBF16,   DType::kF8E4M3FN,
                          DType::kF8E5M2, DType::kF8E4M3FNUZ, DType::kF8E5M2FNUZ, DType::kF8E8M0, DType::kF4E2M1,
                          DType::kI64,    DType::kI32,        DType::kI16,        DType::kI8,     DType::kU64,
                          DType::kU32,    DType::kU16,        DType::kU8,         DType::kBool};

TEST(DType, EveryNameParsesBackToItsType) {
  for (DType t : kAll) EXPECT_EQ(ParseDType(NameOf(t)), t) << NameOf(t);
}

TEST(DType, SpellingsOfTorchNumpyAndSafetensorsAreKnown) {
  EXPECT_EQ(ParseDType("torch.bfloat16"), DType::kBF16);
  EXPECT_EQ(ParseDType("bfloat16"), DType::kBF16);
  EXPECT_EQ(ParseDType("float32"), DType::kF32);
  EXPECT_EQ(ParseDType("torch.half"), DType::kF16);
  EXPECT_EQ(ParseDType("F8_E4M3"), DType::kF8E4M3FN);
  EXPECT_EQ(ParseDType("torch.float8_e5m2fnuz"), DType::kF8E5M2FNUZ);
  EXPECT_EQ(ParseDType("BF16"), DType::kBF16);
  EXPECT_EQ(ParseDType("torch.bool"), DType::kBool);
  EXPECT_EQ(ParseDType("torch.long"), DType::kI64);
}

TEST(DType, UnknownNameIsInvalid) {
  for (const char* name : {"", "torch.", "f33", "complex64", "torch.torch.float32", "f32 "}) {
    EXPECT_EQ(ParseDType(name), DType::kInvalid) << name;
  }
  EXPECT_EQ(BitsOf(static_cast<DType>(200)), 0);
  EXPECT_EQ(NameOf(static_cast<DType>(200)), "invalid");
}

// Every value of the type in order: the formula at MinExponent against the gaps that are there.
TEST(DType, NeighboursAreAsFarApartAsUnitRoundoffAndMinExponentSay) {
  for (DType dtype : {DType::kF16, DType::kBF16, DType::kF8E4M3FN, DType::kF8E5M2, DType::kF8E4M3FNUZ,
                      DType::kF8E5M2FNUZ, DType::kF8E8M0, DType::kF4E2M1}) {
    std::set<double> values;  // not negative
    for (uint32_t code = 0; code < 1u << BitsOf(dtype); ++code) {
      double value = 0;
      const auto bits = static_cast<uint16_t>(code);
      DecodeTo(&bits, 0, 1, dtype, &value);
      if (std::isfinite(value) && value >= 0) values.insert(value);
    }
    ASSERT_GE(values.size(), 8u) << NameOf(dtype);
    for (auto low = values.begin(), high = std::next(low); high != values.end(); ++low, ++high) {
      const int exponent = *low > 0 ? std::max(std::ilogb(*low), MinExponent(dtype)) : MinExponent(dtype);
      if (dtype == DType::kF8E8M0 && *low == 0) continue;
      ASSERT_EQ(*high - *low, std::ldexp(2 * UnitRoundoff(dtype), exponent)) << NameOf(dtype) << " " << *low;
    }
  }
  EXPECT_EQ(std::ldexp(2 * UnitRoundoff(DType::kF32), MinExponent(DType::kF32)),
            std::numeric_limits<float>::denorm_min());
  EXPECT_EQ(std::ldexp(2 * UnitRoundoff(DType::kF64), MinExponent(DType::kF64)),
            std::numeric_limits<double>::denorm_min());
}

TEST(DType, UnitRoundoffIsHalfTheGapAboveOne) {
  EXPECT_EQ(UnitRoundoff(DType::kF32), 0x1p-24);
  EXPECT_EQ(UnitRoundoff(DType::kBF16), 0x1p-8);
  EXPECT_EQ(UnitRoundoff(DType::kF8E4M3FN), 0x1p-4);
  EXPECT_EQ(UnitRoundoff(DType::kI32), 0);
  EXPECT_TRUE(IsFloat(DType::kF4E2M1));
  EXPECT_FALSE(IsFloat(DType::kBool));
}

}  // namespace
}  // namespace assay
