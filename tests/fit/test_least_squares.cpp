// Coefficients that are known, and those that nothing tells.
#include <gtest/gtest.h>

#include <cmath>
#include <span>
#include <vector>

#include "base/hash.h"
#include "fit/least_squares.h"

namespace assay::fit {
namespace {

using Values = std::vector<double>;

Values Noise(size_t n, uint64_t seed) {
  SplitMix64 random(seed);
  Values values(n);
  for (double& v : values) v = random.NextDouble() - 0.5;
  return values;
}

TEST(LeastSquares, CoefficientsOfASumAreFound) {
  constexpr size_t kTerms = 8, kLength = 64;
  std::vector<Values> terms;
  Values y(kLength, 0);
  for (size_t j = 0; j < kTerms; ++j) {
    terms.push_back(Noise(kLength, j + 1));
    for (size_t c = 0; c < kLength; ++c) y[c] += (static_cast<double>(j) - 3) * terms[j][c];
  }
  const std::vector<std::span<const double>> spans(terms.begin(), terms.end());
  const Values found = SolveLeastSquares(y, spans);
  ASSERT_EQ(found.size(), kTerms);
  // Condition of the normal equations of 8 random vectors of 64: below 100, of double's 2^-53.
  for (size_t j = 0; j < kTerms; ++j) EXPECT_NEAR(found[j], static_cast<double>(j) - 3, 1e-12);
}

TEST(LeastSquares, TermsThatAreNotIndependentGiveNone) {
  const Values a = Noise(16, 1), b = Noise(16, 2);
  Values sum(16);
  for (size_t i = 0; i < 16; ++i) sum[i] = a[i] + b[i];
  EXPECT_TRUE(SolveLeastSquares(a, std::vector<std::span<const double>>{a, b, sum}).empty());
  const Values zero(16, 0.0);
  EXPECT_TRUE(SolveLeastSquares(a, std::vector<std::span<const double>>{zero}).empty());
  Values broken = a;
  broken[3] = NAN;
  EXPECT_TRUE(SolveLeastSquares(broken, std::vector<std::span<const double>>{a, b}).empty());
}

// Unknown 1 enters no equation; the others are told all the same.
TEST(LeastSquares, UnknownThatIsLeftOpenIsNotGuessed) {
  Values a{2, 0, 1, 0, 0, 0, 1, 0, 3}, b{5, 0, 10};
  SolveSymmetric(a, b);
  EXPECT_NEAR(b[0], 1, 1e-15);
  EXPECT_TRUE(std::isnan(b[1]));
  EXPECT_NEAR(b[2], 3, 1e-15);
}

}  // namespace
}  // namespace assay::fit
