#include "oracle/oracle_testing.h"
#include "oracle/rope.h"
#include "oracle/rope_fit.h"

namespace assay::oracle {
namespace {

std::vector<double> Positions(int64_t n, double first = 0) {
  std::vector<double> p(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) p[static_cast<size_t>(i)] = first + static_cast<double>(i);
  return p;
}

RopeFrequencies Default(int64_t dim, double theta = 10000) {
  RopeSpec spec;
  spec.dim = dim;
  spec.theta = theta;
  return MakeFrequencies(spec).value();
}

// What transformers 5 gives (float32) for dim 64, pairs 0, 5, 10, 15, 20, 25, 31.
void ExpectFrequencies(const RopeSpec& spec, const std::vector<double>& at, double magnitude) {
  const RopeFrequencies f = MakeFrequencies(spec).value();
  ASSERT_EQ(f.inverse.size(), 32U);
  const size_t pairs[] = {0, 5, 10, 15, 20, 25, 31};
  for (size_t i = 0; i < 7; ++i) EXPECT_NEAR(f.inverse[pairs[i]] / at[i], 1, 2e-6) << pairs[i];
  EXPECT_NEAR(f.magnitude, magnitude, 1e-12);
}

TEST(RopeFrequencies, LinearLlama3AndYarnAreThoseOfTransformers) {
  RopeSpec spec;
  spec.dim = 64;
  spec.scaling = RopeScaling::kLinear;
  spec.factor = 4;
  ExpectFrequencies(spec,
                    {0.25, 0.05928434059023857, 0.014058532193303108, 0.0033338037319481373, 0.0007905694656074047,
                     0.00018747354624792933, 3.333803761051968e-05},
                    1);
  spec.scaling = RopeScaling::kLlama3;
  spec.theta = 500000;
  spec.factor = 8;
  spec.original_max_position = 8192;
  ExpectFrequencies(spec,
                    {1.0, 0.12868738174438477, 0.016560440883040428, 0.0013718936825171113, 3.428102354519069e-05,
                     4.411534519022098e-06, 3.76732259610435e-07},
                    1);
  spec.scaling = RopeScaling::kYarn;
  spec.theta = 10000;
  spec.factor = 40;
  spec.original_max_position = 4096;
  spec.mscale = 0.707;
  spec.mscale_all_dim = 1;
  ExpectFrequencies(spec,
                    {1.0, 0.23713736236095428, 0.05623412877321243, 0.0083345090970397, 0.0007905694073997438,
                     1.8747354260995053e-05, 3.3338035336782923e-06},
                    0.9210423553163399);
  spec.mscale.reset();
  spec.mscale_all_dim.reset();
  spec.theta = 150000;
  spec.factor = 32;
  spec.truncate = false;
  ExpectFrequencies(spec,
                    {1.0, 0.15532298386096954, 0.019334999844431877, 0.00105260219424963, 1.818833698052913e-05,
                     2.8250667583051836e-06, 3.023511396804679e-07},
                    1.3465735902799727);
  spec.attention_factor = 1.25;
  EXPECT_EQ(MakeFrequencies(spec)->magnitude, 1.25);
}

TEST(RopeFrequencies, BadKeysAreRefused) {
  RopeSpec spec;
  EXPECT_FALSE(MakeFrequencies(spec).ok());
  spec.dim = 7;
  EXPECT_FALSE(MakeFrequencies(spec).ok());
  spec.dim = 8;
  spec.theta = 0;
  EXPECT_FALSE(MakeFrequencies(spec).ok());
  spec.theta = 10000;
  spec.scaling = RopeScaling::kYarn;
  EXPECT_FALSE(MakeFrequencies(spec).ok());
  spec.scaling = RopeScaling::kLlama3;
  spec.original_max_position = 100;
  spec.high_freq_factor = 1;
  EXPECT_FALSE(MakeFrequencies(spec).ok());
}

// Both ways in which engines come to a frequency, in float, times the largest position: within what is allowed, which
// is what the longer of the two needs and not the sum of both.
TEST(RopeFrequencies, PowersAndProductsInFloatMeetTheirRoundings) {
  for (const int64_t dim : {64, 96, 256}) {
    for (const double theta : {1e4, 5e5, 1e7}) {
      const RopeFrequencies f = Default(dim, theta);
      const float base = static_cast<float>(theta), factor = std::pow(base, -2.0F / static_cast<float>(dim));
      float product = 65535;
      for (size_t i = 0; i < f.inverse.size(); ++i) {
        const float power = 65535 * (1 / std::pow(base, static_cast<float>(2 * i) / static_cast<float>(dim)));
        const double allowed = f.roundings[i] * 0x1p-24, right = 65535 * f.inverse[i];
        EXPECT_NEAR(static_cast<double>(power) / right, 1, allowed) << dim << " " << theta << " " << i;
        EXPECT_NEAR(static_cast<double>(product) / right, 1, allowed) << dim << " " << theta << " " << i;
        const double exponent = -std::log(f.inverse[i]), pair = static_cast<double>(i);
        EXPECT_LE(f.roundings[i], std::max({20.0, exponent + 4, exponent + 3 * pair + 1}) * (1 + 1e-12));
        product *= factor;
      }
    }
  }
}

template <class T>
Array NaiveRotate(const Array& x, const std::vector<double>& at, const RopeFrequencies& f, const RopeLayout& layout) {
  Array y = x;
  const int64_t half = static_cast<int64_t>(f.inverse.size()), d = x.cols(), heads = x.rows() / x.shape[0];
  for (int64_t r = 0; r < x.rows(); ++r) {
    for (int64_t i = 0; i < half; ++i) {
      const bool pairs = layout.pairing == Pairing::kInterleaved;
      const int64_t a = r * d + (layout.from_end ? d - 2 * half : 0) + (pairs ? 2 * i : i), b = a + (pairs ? 1 : half);
      const T angle =
          static_cast<T>(at[static_cast<size_t>(r / heads)]) * static_cast<T>(f.inverse[static_cast<size_t>(i)]);
      const T c = std::cos(angle) * static_cast<T>(f.magnitude), s = std::sin(angle) * static_cast<T>(f.magnitude);
      y[a] = static_cast<double>(static_cast<T>(x[a]) * c - static_cast<T>(x[b]) * s);
      y[b] = static_cast<double>(static_cast<T>(x[b]) * c + static_cast<T>(x[a]) * s);
    }
  }
  return y;
}

// At position 100000 a float angle has an absolute error of 4e-3: the bound has to grow with the position.
TEST(Rotate, BothPairingsWholeAndPartialMeetTheirBound) {
  for (const int64_t d : {16, 24}) {
    for (const double first : {0.0, 1000.0, 100000.0}) {
      for (const Pairing pairing : {Pairing::kHalf, Pairing::kInterleaved}) {
        for (const bool from_end : {false, true}) {
          const Array x = Random({5, 3, d}, 1);
          RopeFrequencies f = Default(16);
          f.magnitude = 1.3;
          const std::vector<double> at = Positions(5, first);
          const Computed c = Rotate(x, at, f, {pairing, from_end}).value();
          ExpectWithin(NaiveRotate<long double>(x, at, f, {pairing, from_end}), c, kF64);
          ExpectWithin(NaiveRotate<float>(x, at, f, {pairing, from_end}), c, kF32);
          // What is not rotated passes untouched.
          for (int64_t i = 0; i < d - 16; ++i) EXPECT_EQ(c.value[from_end ? i : 16 + i], x[from_end ? i : 16 + i]);
          if (first > 0) {
            const Pairing other = pairing == Pairing::kHalf ? Pairing::kInterleaved : Pairing::kHalf;
            EXPECT_FALSE(Compare(Rotate(x, at, f, {other, from_end}).value().value, c, kBf16)->ok());
          }
        }
      }
    }
  }
}

// The property that rotary embeddings are made for (RoFormer, section 3.2): equal at 12 apart, another at 13.
TEST(Rotate, ProductsDependOnTheDistanceAlone) {
  const Array q = Random({1, 1, 32}, 2), k = Random({1, 1, 32}, 3);
  const RopeFrequencies f = Default(32);
  const auto dot = [&](double qp, double kp) {
    const Array a = Rotate(q, std::vector<double>{qp}, f, {}).value().value;
    const Array b = Rotate(k, std::vector<double>{kp}, f, {}).value().value;
    double sum = 0;
    for (int64_t i = 0; i < 32; ++i) sum += a[i] * b[i];
    return sum;
  };
  EXPECT_NEAR(dot(17, 5), dot(112, 100), 1e-12);
  EXPECT_GT(std::abs(dot(17, 5) - dot(18, 5)), 1e-3);
}

// Element 3 of 16 is paired with element 11 in the half-split form.
TEST(Rotate, PositionZeroIsTheIdentityAndNaNStaysInItsPair) {
  Array x = Random({1, 1, 16}, 4);
  const RopeFrequencies f = Default(16);
  EXPECT_EQ(Rotate(x, Positions(1), f, {}).value().value.values, x.values);
  x[3] = kNaN;
  const Array y = Rotate(x, Positions(1, 9), f, {}).value().value;
  for (int64_t i = 0; i < 16; ++i) EXPECT_EQ(std::isnan(y[i]), i == 3 || i == 11);
  EXPECT_FALSE(Rotate(x, Positions(2), f, {}).ok());
  EXPECT_FALSE(Rotate(Random({1, 1, 8}, 1), Positions(1), f, {}).ok());
}

TEST(CosSinTable, CosinesThenSinesTimesTheMagnitude) {
  RopeFrequencies f = Default(8);
  f.magnitude = 2;
  const Computed c = CosSinTable(f, Positions(50));
  EXPECT_EQ(c.value.shape, (std::vector<int64_t>{50, 8}));
  Array engine = c.value;
  for (int64_t p = 0; p < 50; ++p) {
    for (int64_t i = 0; i < 4; ++i) {
      EXPECT_NEAR(c.value[p * 8 + i],
                  2 * std::cos(static_cast<double>(p) * std::pow(10000, -0.25 * static_cast<double>(i))), 1e-13);
      EXPECT_NEAR(c.value[p * 8 + 4 + i],
                  2 * std::sin(static_cast<double>(p) * std::pow(10000, -0.25 * static_cast<double>(i))), 1e-13);
      const float angle = static_cast<float>(p) * (1 / std::pow(10000.0F, static_cast<float>(2 * i) / 8.0F));
      engine[p * 8 + i] = 2 * std::cos(angle);
      engine[p * 8 + 4 + i] = 2 * std::sin(angle);
    }
  }
  ExpectWithin(engine, c, kF32);
}

// From a bf16 result alone; at position 0 every pairing fits, so the second residual says nothing there.
TEST(FitRotation, PositionPairingAndMagnitudeAreFound) {
  for (const Pairing pairing : {Pairing::kHalf, Pairing::kInterleaved}) {
    for (const double offset : {0.0, 7.0, 3000.0}) {
      const Array x = Random({6, 2, 24}, 5);
      RopeFrequencies f = Default(16);
      f.magnitude = 1.25;
      Array y = Rotate(x, Positions(6, offset), f, {pairing, true}).value().value;
      for (double& v : y.values) v = ToBf16(v);
      const std::vector<RotationFit> fits = FitPairings(x, y, f, true, 0, 4000).value();
      EXPECT_EQ(fits[0].layout.pairing, pairing);
      EXPECT_LT(fits[0].residual, 0.01);
      EXPECT_GT(fits[1].residual, offset > 0 ? 0.1 : 0.0);
      for (int64_t t = 0; t < 6; ++t) {
        const RowRotation& row = fits[0].rows[static_cast<size_t>(t)];
        EXPECT_EQ(row.position, offset + static_cast<double>(t));
        EXPECT_NEAR(row.magnitude, 1.25, 0.01);
        EXPECT_GT(row.runner_up, 2 * row.residual);
      }
    }
  }
}

TEST(FitRotation, FractionalPositionsAreRefined) {
  const Array x = Random({3, 4, 32}, 6);
  const RopeFrequencies f = Default(32);
  const Array y = Rotate(x, std::vector<double>{2.75, 10.3, 100.125}, f, {}).value().value;
  const RotationFit fit = FitRotation(x, y, f, {}, 0, 200).value();
  EXPECT_NEAR(fit.rows[0].position, 2.75, 1e-4);
  EXPECT_NEAR(fit.rows[1].position, 10.3, 1e-4);
  EXPECT_NEAR(fit.rows[2].position, 100.125, 1e-4);
}

TEST(FitRotation, ZeroAndNaNRowsAreNotDecided) {
  Array x = Random({3, 1, 16}, 7), y = x;
  for (int64_t i = 0; i < 16; ++i) y[i] = 0;
  y[16] = kNaN;
  const RotationFit fit = FitRotation(x, y, Default(16), {}, -5, 5).value();
  EXPECT_FALSE(fit.rows[0].decidable);
  EXPECT_FALSE(fit.rows[1].decidable);
  EXPECT_TRUE(std::isnan(fit.rows[1].residual));
  EXPECT_TRUE(fit.rows[2].decidable);
  EXPECT_EQ(fit.rows[2].position, 0);
  EXPECT_FALSE(FitRotation(x, y, Default(16), {}, 5, 4).ok());
  EXPECT_FALSE(FitRotation(x, Random({2, 1, 16}, 1), Default(16), {}, 0, 4).ok());
}

// No position of the declared theta explains it: the search must not return its best as an explanation.
TEST(FitRotation, AnotherThetaLeavesAResidual) {
  const Array x = Random({4, 2, 32}, 8);
  const Array y = Rotate(x, Positions(4, 500), Default(32, 1e6), {}).value().value;
  EXPECT_GT(FitRotation(x, y, Default(32), {}, 0, 1000)->residual, 0.2);
}

}  // namespace
}  // namespace assay::oracle
