#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

#include "base/rounding.h"

namespace assay {
namespace {

// Through the hardware's float, which has 24 bits and nothing below 2^-149.
TEST(Rounding, To24BitsIsWhatAConversionToFloatGives) {
  uint64_t bits = 0x9E3779B97F4A7C15u;
  for (int i = 0; i < 20000; ++i) {
    bits ^= bits << 13, bits ^= bits >> 7, bits ^= bits << 17;
    // Exponents from -160 to 120: subnormal floats and what rounds to zero are among them.
    const double x = std::ldexp(1 + static_cast<double>(bits >> 12) * 0x1p-52, static_cast<int>(bits % 281) - 160);
    EXPECT_EQ(RoundToBits(x, 24, -149), double{static_cast<float>(x)}) << x;
    EXPECT_EQ(RoundToBits(-x, 24, -149), -double{static_cast<float>(x)}) << x;
  }
}

TEST(Rounding, TiesGoToTheEvenNumber) {
  EXPECT_EQ(RoundToBits(1 + 0x1p-8, 8), 1);
  EXPECT_EQ(RoundToBits(1 + 0x1.8p-7, 8), 1 + 0x1p-6);
  EXPECT_EQ(RoundToBits(2.5, 53, 0), 2);
}

TEST(Rounding, SpacingStopsAtTheLeastExponent) {
  EXPECT_EQ(SpacingAt(1, 8), 0x1p-7);
  EXPECT_EQ(SpacingAt(-3, 8), 0x1p-6);
  EXPECT_EQ(SpacingAt(0x1p-20, 11, -24), 0x1p-24);
  EXPECT_EQ(SpacingAt(0, 11, -24), 0x1p-24);
  EXPECT_GT(SpacingAt(0x1p-1074, 53), 0);
}

TEST(Rounding, WhatIsNotFiniteStaysAndHasNoSpacing) {
  EXPECT_EQ(RoundToBits(HUGE_VAL, 8), HUGE_VAL);
  EXPECT_TRUE(std::isnan(RoundToBits(std::nan(""), 8)));
  EXPECT_TRUE(std::signbit(RoundToBits(-0.0, 8)));
  EXPECT_TRUE(std::isnan(SpacingAt(-HUGE_VAL, 8)));
}

}  // namespace
}  // namespace assay
