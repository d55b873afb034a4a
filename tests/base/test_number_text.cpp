#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/number_text.h"

namespace assay {
namespace {

TEST(FactorText, NearOneDiffersFromOneAndFromItsNeighbours) {
  EXPECT_EQ(FactorText(1025.0 / 1024), "1.000977");
  EXPECT_EQ(FactorText(1024.0 / 1023), "1.000978");
  EXPECT_EQ(FactorText(448.0 / 447), "1.002237");
  EXPECT_EQ(FactorText(447.0 / 446), "1.002242");
  EXPECT_EQ(FactorText(-1025.0 / 1024), "-1.000977");
  EXPECT_EQ(FactorText(1023.0 / 1024), "0.9990234");
  EXPECT_EQ(FactorText(1.00001), "1.00001");
}

TEST(FactorText, FarFromOneKeepsTheDigitsAskedFor) {
  EXPECT_EQ(FactorText(2), "2");
  EXPECT_EQ(FactorText(0), "0");
  EXPECT_EQ(FactorText(-0.5), "-0.5");
  EXPECT_EQ(FactorText(1.4426950408889634), "1.443");
  EXPECT_EQ(FactorText(1.4426950408889634, 6), "1.4427");
  EXPECT_EQ(FactorText(448.0 / 240), "1.867");
  EXPECT_EQ(FactorText(1e-5), "1e-05");
}

TEST(FactorText, IsOneOnlyWithinHalfAUnitOfTheSeventhDigit) {
  EXPECT_EQ(FactorText(1), "1");
  EXPECT_EQ(FactorText(1 + 4e-7), "1");
  EXPECT_EQ(FactorText(1 + 6e-7), "1.000001");
  EXPECT_EQ(FactorText(1 - 6e-8), "0.9999999");
}

TEST(FactorText, WhatIsNotFiniteHasNoDigits) {
  EXPECT_EQ(FactorText(std::numeric_limits<double>::infinity()), "inf");
  EXPECT_EQ(FactorText(std::nan("")), "nan");
}

// Every step of bf16, f16 and e4m3 about 1: neighbours are told apart.
TEST(FactorText, RatiosOfNeighboursOfSmallFormatsAreTold) {
  for (const int bits : {3, 7, 10}) {
    std::string before;
    for (int k = -4; k <= 4; ++k) {
      const std::string text = FactorText(1 + std::ldexp(k, -bits));
      EXPECT_NE(text, before) << k << " of 2^-" << bits;
      EXPECT_EQ(text == "1", k == 0) << text;
      before = text;
    }
  }
}

}  // namespace
}  // namespace assay
