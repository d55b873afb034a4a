#include "oracle/norm.h"
#include "oracle/oracle_testing.h"

namespace assay::oracle {
namespace {

template <class T>
Array NaiveRms(const Array& x, const Array& w, double eps) {
  Array y = Array::Filled(x.shape);
  for (int64_t r = 0; r < x.rows(); ++r) {
    T sum = 0;
    for (const double v : x.row(r)) sum += static_cast<T>(v) * static_cast<T>(v);
    const T factor = 1 / std::sqrt(sum / static_cast<T>(x.cols()) + static_cast<T>(eps));
    for (int64_t i = 0; i < x.cols(); ++i) {
      y[r * x.cols() + i] = static_cast<double>(static_cast<T>(x[r * x.cols() + i]) * factor *
                                                static_cast<T>(w.values.empty() ? 1 : w[i]));
    }
  }
  return y;
}

// The one-pass variance, the worse of the usual ways.
template <class T>
Array NaiveLayer(const Array& x, const Array& w, const Array& b, double eps, bool one_pass) {
  Array y = Array::Filled(x.shape);
  const T n = static_cast<T>(x.cols());
  for (int64_t r = 0; r < x.rows(); ++r) {
    T sum = 0, squares = 0, centred = 0;
    for (const double v : x.row(r)) {
      sum += static_cast<T>(v);
      squares += static_cast<T>(v) * static_cast<T>(v);
    }
    const T mean = sum / n;
    for (const double v : x.row(r)) centred += (static_cast<T>(v) - mean) * (static_cast<T>(v) - mean);
    const T variance = one_pass ? squares / n - mean * mean : centred / n;
    const T factor = 1 / std::sqrt(variance + static_cast<T>(eps));
    for (int64_t i = 0; i < x.cols(); ++i) {
      y[r * x.cols() + i] = static_cast<double>(
          (static_cast<T>(x[r * x.cols() + i]) - mean) * factor * static_cast<T>(w[i]) + static_cast<T>(b[i]));
    }
  }
  return y;
}

// Inputs of 1e-12 are dominated by eps, those of 1e10 do not notice it.
TEST(RmsNorm, EveryWidthAndSizeMeetsItsBound) {
  for (const int64_t d : {1, 2, 7, 64, 1000}) {
    for (const double size : {1e-12, 1e-3, 1.0, 1e10}) {
      const Array x = Random({3, d}, 1, size), w = d % 2 ? Array{} : Random({d}, 2);
      const Computed c = RmsNorm(x, w, 1e-6).value();
      ExpectWithin(NaiveRms<long double>(x, w, 1e-6), c, kF64);
      ExpectWithin(NaiveRms<float>(x, w, 1e-6), c, kF32);
    }
  }
}

// Engines round the normed row before they multiply by the weight: within the bound for bf16, and beyond that for f32.
TEST(RmsNorm, BfloatStoresTwice) {
  const Array x = Random({4, 128}, 3), w = Random({128}, 4);
  const Computed c = RmsNorm(x, w, 1e-6).value();
  Array y = NaiveRms<float>(x, {}, 1e-6);
  for (int64_t i = 0; i < y.size(); ++i) y[i] = ToBf16(ToBf16(y[i]) * ToBf16(w[i % 128]));
  Array rounded = w;
  for (double& v : rounded.values) v = ToBf16(v);
  ExpectWithin(y, RmsNorm(x, rounded, 1e-6).value(), kBf16);
  EXPECT_FALSE(Compare(y, c, kF32)->ok());
}

// The fault of a norm over one rank's shard: each row is off by the constant sqrt(mean square of all / of the shard).
TEST(RmsNorm, AnotherSubsetsMeanSquareIsAFactor) {
  const Array x = Random({5, 48}, 5);
  const std::vector<double> shard = MeanSquares(x, 0, 24).value(), whole = MeanSquares(x, 0, 48).value();
  const Array with_shard = RmsNormGiven(x, {}, 0, shard).value().value, right = RmsNorm(x, {}, 0).value().value;
  for (int64_t i = 0; i < x.size(); ++i) {
    const size_t r = static_cast<size_t>(i / 48);
    EXPECT_NEAR(with_shard[i] / right[i], std::sqrt(whole[r] / shard[r]), 1e-12);
  }
  EXPECT_FALSE(RmsNormGiven(x, {}, 0, std::vector<double>(4)).ok());
  EXPECT_FALSE(MeanSquares(x, 3, 3).ok());
  EXPECT_FALSE(RmsNorm(x, Random({47}, 1), 0).ok());
}

TEST(RmsNorm, NonFiniteRowsAreNotFinite) {
  Array x = Random({3, 4}, 6);
  x[1] = kNaN;
  x[4] = kInf;
  const Array y = RmsNorm(x, {}, 1e-6).value().value;
  for (int64_t i = 0; i < 4; ++i) EXPECT_TRUE(std::isnan(y[i]));
  EXPECT_TRUE(std::isnan(y[4]));  // inf · 0
  EXPECT_EQ(y[5], 0);
  EXPECT_TRUE(std::isfinite(y[8]));
}

// The one-pass variance cancels where the mean is much larger than the spread; there only two passes are right.
TEST(LayerNorm, OneAndTwoPassesMeetTheBoundWithAnyMean) {
  for (const double mean : {0.0, 1.0, 300.0}) {
    for (const int64_t d : {2, 33, 512}) {
      Array x = Random({4, d}, 7);
      for (double& v : x.values) v = static_cast<float>(v + mean);
      const Array w = Random({d}, 8), b = Random({d}, 9);
      const Computed c = LayerNorm(x, w, b, 1e-5).value();
      ExpectWithin(NaiveLayer<long double>(x, w, b, 1e-5, false), c, kF64);
      ExpectWithin(NaiveLayer<float>(x, w, b, 1e-5, false), c, kF32);
      if (mean <= 1) ExpectWithin(NaiveLayer<float>(x, w, b, 1e-5, true), c, kF32);
    }
  }
}

TEST(LayerNorm, RowsHaveMeanZeroAndVarianceOne) {
  const Array x = Random({3, 100}, 10, 5);
  const Array y = LayerNorm(x, {}, {}, 0).value().value;
  for (int64_t r = 0; r < 3; ++r) {
    double sum = 0, squares = 0;
    for (const double v : y.row(r)) {
      sum += v;
      squares += v * v;
    }
    EXPECT_NEAR(sum, 0, 1e-12);
    EXPECT_NEAR(squares, 100, 1e-11);
  }
}

}  // namespace
}  // namespace assay::oracle
