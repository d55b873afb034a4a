#include "oracle/gemm.h"
#include "oracle/linear.h"
#include "oracle/oracle_testing.h"

namespace assay::oracle {
namespace {

Array ExactLinear(const Array& x, const Array& w, const Array& bias) {
  const int64_t k = x.cols(), n = w.shape[0];
  Array y = Array::Filled({x.rows(), n});
  for (int64_t r = 0; r < x.rows(); ++r) {
    for (int64_t j = 0; j < n; ++j) {
      long double sum = bias.values.empty() ? 0 : static_cast<long double>(bias[j]);
      for (int64_t i = 0; i < k; ++i) sum += static_cast<long double>(x[r * k + i]) * w[j * k + i];
      y[r * n + j] = static_cast<double>(sum);
    }
  }
  return y;
}

// An engine in float32, products and sums rounded one by one.
Array FloatLinear(const Array& x, const Array& w, const Array& bias) {
  const int64_t k = x.cols(), n = w.shape[0];
  Array y = Array::Filled({x.rows(), n});
  for (int64_t r = 0; r < x.rows(); ++r) {
    for (int64_t j = 0; j < n; ++j) {
      float sum = 0;
      for (int64_t i = 0; i < k; ++i) {
        const float product = static_cast<float>(x[r * k + i]) * static_cast<float>(w[j * k + i]);
        sum += product;
      }
      y[r * n + j] = bias.values.empty() ? sum : sum + static_cast<float>(bias[j]);
    }
  }
  return y;
}

// One row and column, and sizes on both sides of multiples of 8 and 32.
TEST(Linear, EveryShapeIsExactToItsBound) {
  for (const int64_t m : {1, 2, 3, 5, 33}) {
    for (const int64_t n : {1, 7, 8, 9, 70}) {
      for (const int64_t k : {1, 2, 17, 300}) {
        const Array x = Random({m, k}, 1), w = Random({n, k}, 2), bias = n % 2 ? Random({n}, 3) : Array{};
        const Computed c = Linear(x, w, bias).value();
        EXPECT_EQ(c.value.shape, (std::vector<int64_t>{m, n}));
        ExpectWithin(ExactLinear(x, w, bias), c, kF64);
        ExpectWithin(FloatLinear(x, w, bias), c, kF32);
      }
    }
  }
}

TEST(Linear, ScaleIsTheSumOfMagnitudes) {
  const Computed c =
      Linear(MakeArray({1, 2}, {3, -4}).value(), MakeArray({1, 2}, {2, 1.5}).value(), Vector({-1})).value();
  EXPECT_EQ(c.value[0], -1);
  EXPECT_EQ(c.scale[0], 13);
  EXPECT_EQ(c.k, 3);
}

// Terms of 1e6 that cancel to nothing: an error of their rounding is right, three times the bound is a fault.
TEST(Linear, CancellationStaysWithinTheBoundAndAFaultDoesNot) {
  Array x = Random({4, 256}, 5, 1e6);
  for (int64_t i = 0; i < x.size(); i += 2) x[i + 1] = -x[i];
  const Array w = MakeArray({1, 256}, std::vector<double>(256, 0.125)).value();
  const Computed c = Linear(x, w, {}).value();
  Array y = FloatLinear(x, w, {});
  ExpectWithin(y, c, kF32);
  y[2] += 3 * BoundAt(c, 2, kF32);
  const Agreement a = Compare(y, c, kF32).value();
  EXPECT_EQ(a.over, 1);
  EXPECT_EQ(a.worst_at, 2);
}

// An infinite x makes its row infinite (NaN where it meets a weight of 0); a NaN weight makes its column NaN.
TEST(Linear, NonFiniteOperandsReachTheirResultsAlone) {
  Array x = Random({3, 40}, 6);
  Array w = Random({20, 40}, 7);
  x[40 + 3] = kInf;
  w[5 * 40 + 3] = 0;  // infinity times zero
  w[6 * 40 + 9] = kNaN;
  const Computed c = Linear(x, w, {}).value();
  for (int64_t r = 0; r < 3; ++r) {
    for (int64_t j = 0; j < 20; ++j) {
      const double v = c.value[r * 20 + j];
      if (j == 6 || (r == 1 && j == 5)) {
        EXPECT_TRUE(std::isnan(v));
      } else {
        EXPECT_EQ(std::isinf(v), r == 1);
      }
    }
  }
}

TEST(Linear, ChosenRowsAndColumnsAreThoseOfTheWhole) {
  const Array x = Random({6, 30}, 8), w = Random({25, 30}, 9), bias = Random({25}, 10);
  const Computed whole = Linear(x, w, bias).value();
  const std::vector<int64_t> rows{5, 0}, columns{24, 3, 3};
  const Computed some = LinearAt(x, w, bias, rows, columns).value();
  for (size_t r = 0; r < 2; ++r) {
    for (size_t j = 0; j < 3; ++j) {
      EXPECT_EQ(some.value[static_cast<int64_t>(r * 3 + j)], whole.value[rows[r] * 25 + columns[j]]);
    }
  }
  EXPECT_FALSE(LinearAt(x, w, bias, std::vector<int64_t>{6}, {}).ok());
  EXPECT_FALSE(Linear(x, Random({25, 31}, 1), {}).ok());
  EXPECT_FALSE(Linear(x, w, Random({24}, 1)).ok());
}

// Freivalds' check: rows of y are compared by random combinations. A row that is 1 % off everywhere is found for every
// seed, no other one is, and the error's norm is estimated to within 60 %.
TEST(CheckLinear, RightRowsPassAndWrongRowsAreFound) {
  const Array x = Random({40, 64}, 11), w = Random({300, 64}, 12), bias = Random({300}, 13);
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Array y = FloatLinear(x, w, bias);
    const std::vector<RowCheck> right = CheckLinear(x, w, bias, y, kF32, seed).value();
    for (const RowCheck& row : right) EXPECT_LE(row.largest, row.bound);
    double norm = 0;
    for (int64_t j = 0; j < 300; ++j) {
      const double error = 0.01 * std::abs(y[7 * 300 + j]);
      y[7 * 300 + j] += error;
      norm += error * error;
    }
    const std::vector<RowCheck> checks = CheckLinear(x, w, bias, y, kF32, seed).value();
    for (size_t r = 0; r < checks.size(); ++r) EXPECT_EQ(checks[r].largest > checks[r].bound, r == 7);
    EXPECT_NEAR(checks[7].error / std::sqrt(norm), 1, 0.6);
  }
}

TEST(CheckLinear, ANaNIsNeverSkipped) {
  const Array x = Random({3, 8}, 14), w = Random({9, 8}, 15);
  Array y = FloatLinear(x, w, {});
  y[9] = kNaN;
  const std::vector<RowCheck> checks = CheckLinear(x, w, {}, y, kF32, 1).value();
  EXPECT_TRUE(std::isnan(checks[1].largest));
  EXPECT_LE(checks[0].largest, checks[0].bound);
  EXPECT_FALSE(CheckLinear(x, w, {}, x, kF32, 1).ok());
}

TEST(LinearCombination, FactorsAndCancellationAreKept) {
  const Array a = Random({5, 7}, 16), b = Random({5, 7}, 17);
  const std::vector<Term> terms{{2, &a}, {-0.5, &b}};
  const Computed c = LinearCombination(terms).value();
  for (int64_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(c.value[i], 2 * a[i] - 0.5 * b[i]);
    EXPECT_EQ(c.scale[i], 2 * std::abs(a[i]) + 0.5 * std::abs(b[i]));
  }
  EXPECT_FALSE(LinearCombination({}).ok());
}

// Bit for bit, as the order of the sums is the same; in two parts only to rounding.
TEST(PackedMatrix, BothOrientationsGiveTheSameProduct) {
  const int64_t m = 7, n = 21, k = 13;
  const Array a = Random({m, k}, 18), b = Random({n, k}, 19);
  Array transposed = Array::Filled({k, n});
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t i = 0; i < k; ++i) transposed[i * n + j] = b[j * k + i];
  }
  const PackedMatrix columns = PackedMatrix::FromColumns(b.values.data(), k, n, k);
  const PackedMatrix rows = PackedMatrix::FromRows(transposed.values.data(), n, k, n);
  std::vector<double> c(static_cast<size_t>(m * n)), d(c), parts(c);
  Multiply(a.values.data(), k, m, columns, 0, k, 0, columns.panels(), c.data(), nullptr, n);
  Multiply(a.values.data(), k, m, rows, 0, k, 0, rows.panels(), d.data(), nullptr, n);
  EXPECT_EQ(c, d);
  Multiply(a.values.data(), k, m, rows, 0, 6, 0, 3, parts.data(), nullptr, n);
  Multiply(a.values.data() + 6, k, m, rows, 6, k, 0, 3, parts.data(), nullptr, n, true);
  for (size_t i = 0; i < c.size(); ++i) EXPECT_NEAR(parts[i], c[i], 1e-13);
}

}  // namespace
}  // namespace assay::oracle
