#include "oracle/activation.h"
#include "oracle/oracle_testing.h"
#include "oracle/softmax.h"

namespace assay::oracle {
namespace {

template <class T>
std::pair<Array, Array> NaiveSoftmax(const Array& x) {
  Array p = Array::Filled(x.shape), log_p = p;
  for (int64_t r = 0; r < x.rows(); ++r) {
    T max = -HUGE_VALF, sum = 0;
    for (const double v : x.row(r)) max = std::max(max, static_cast<T>(v));
    for (const double v : x.row(r)) sum += std::exp(static_cast<T>(v) - max);
    for (int64_t i = 0; i < x.cols(); ++i) {
      const T v = static_cast<T>(x[r * x.cols() + i]);
      p[r * x.cols() + i] = static_cast<double>(std::exp(v - max) / sum);
      log_p[r * x.cols() + i] = static_cast<double>(v - max - std::log(sum));
    }
  }
  return {p, log_p};
}

// Sizes of 1e4 push most probabilities below the smallest double.
TEST(Softmax, EveryWidthAndSizeMeetsItsBound) {
  for (const int64_t n : {1, 2, 50, 5000}) {
    for (const double size : {1e-5, 1.0, 20.0, 1e4}) {
      Array x = Random({3, n}, 1, size);
      if (n > 2) x[1] = -kInf;
      const auto exact = NaiveSoftmax<long double>(x);
      const auto engine = NaiveSoftmax<float>(x);
      const Computed p = Softmax(x).value(), log_p = LogSoftmax(x).value();
      Precision f64 = kF64;
      f64.floor = 0x1p-1022;  // probabilities below the range of a double
      ExpectWithin(exact.first, p, f64);
      ExpectWithin(exact.second, log_p, kF64);
      ExpectWithin(engine.first, p, kF32);
      ExpectWithin(engine.second, log_p, kF32);
    }
  }
}

// All -inf and +inf rows have no probabilities (0 / 0), as in every engine; a finite maximum beside -inf takes all.
TEST(Softmax, NonFiniteRowsFollowTheirRules) {
  const Array x = MakeArray({4, 2}, {-kInf, -kInf, kInf, 1, kNaN, 1, -kInf, 3}).value();
  const Array p = Softmax(x).value().value, log_p = LogSoftmax(x).value().value;
  for (int64_t i = 0; i < 6; ++i) EXPECT_TRUE(i == 3 || std::isnan(p[i])) << i;
  EXPECT_EQ(p[6], 0);
  EXPECT_EQ(p[7], 1);
  EXPECT_EQ(log_p[6], -kInf);
  EXPECT_EQ(log_p[7], 0);
  EXPECT_EQ(LogSumExp(std::vector<double>{}).lse, -kInf);
}

// Flash kernels work in base 2; a log that was never turned back is wrong everywhere, by log2(e).
TEST(Softmax, RowsSumToOneAndABaseTwoLogIsOut) {
  const Array x = Random({5, 100}, 2, 3);
  const Computed log_p = LogSoftmax(x).value();
  Array wrong = log_p.value;
  for (int64_t r = 0; r < 5; ++r) {
    double sum = 0;
    for (const double v : log_p.value.row(r)) sum += std::exp(v);
    EXPECT_NEAR(sum, 1, 1e-13);
  }
  for (double& v : wrong.values) v *= 1.4426950408889634;
  EXPECT_EQ(Compare(wrong, log_p, kBf16)->over, 500);
}

template <class T>
T Exact(T x, Activation kind) {
  switch (kind) {
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
    case Activation::kGelu:
      return x / 2 * (1 + std::erf(x / std::sqrt(T{2})));
    case Activation::kGeluTanh:
      return x / 2 * (1 + std::tanh(std::sqrt(2 / std::acos(T{-1})) * (x + T(0.044715) * x * x * x)));
    case Activation::kSwigluOai:
      return std::min(x, T{7}) / (1 + std::exp(T(-1.702) * std::min(x, T{7})));
    case Activation::kQuickGelu:
      return x / (1 + std::exp(T(-1.702) * x));
    case Activation::kRelu:
      return std::max(x, T{0});
    case Activation::kRelu2:
      return std::max(x, T{0}) * std::max(x, T{0});
    case Activation::kSigmoid:
      return 1 / (1 + std::exp(-x));
    case Activation::kTanh:
      return std::tanh(x);
    case Activation::kIdentity:
      return x;
  }
  return 0;
}

// From arguments near 0, where results are as small, to those where the exponential saturates.
TEST(Activation, EveryKindMeetsItsBound) {
  for (const Activation kind : AllActivations()) {
    for (const double size : {1e-6, 1.0, 10.0, 40.0}) {
      const Array x = Random({2000}, 3, size);
      const Computed c = Activate(x, {kind});
      Array exact = x, engine = x;
      for (double& v : exact.values) v = static_cast<double>(Exact<long double>(v, kind));
      for (double& v : engine.values) v = Exact<float>(static_cast<float>(v), kind);
      Precision f64 = kF64;
      f64.floor = 0x1p-1022;
      ExpectWithin(exact, c, f64);
      ExpectWithin(engine, c, kF32);
    }
  }
}

TEST(Activation, ExtremesAndNaNStay) {
  const Array x = Vector({-1e30, 1e30, 0, kNaN, kInf});
  for (const Activation kind :
       {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh, Activation::kQuickGelu, Activation::kRelu}) {
    const Array y = Activate(x, {kind}).value;
    EXPECT_EQ(y[0], 0);
    EXPECT_EQ(y[1], 1e30);
    EXPECT_EQ(y[2], 0);
    EXPECT_TRUE(std::isnan(y[3]));
    EXPECT_EQ(y[4], kInf);
  }
  const Array clamped = Gate(Vector({kNaN, 100}), Vector({1, 100}), {Activation::kSwigluOai}).value().value;
  EXPECT_TRUE(std::isnan(clamped[0]));
  EXPECT_NEAR(clamped[1], 8 * 7 / (1 + std::exp(-1.702 * 7)), 1e-12);
}

TEST(Activation, WordsOfTheMetadataNameEveryKind) {
  for (const Activation kind : AllActivations()) EXPECT_EQ(ParseActivation(NameOf(kind))->kind, kind);
  EXPECT_EQ(ParseActivation("gelu_pytorch_tanh")->kind, Activation::kGeluTanh);
  EXPECT_TRUE(ParseActivation("gelu_new")->composed);
  EXPECT_FALSE(ParseActivation("no such thing").has_value());
}

// A fused weight read in the other layout pairs a gate with a wrong up: beyond any bound.
TEST(Activation, HalvesAndInterleavedAreTwoLayoutsOfOneProduct) {
  const Array gate = Random({3, 8}, 4), up = Random({3, 8}, 5);
  Array halves = Array::Filled({3, 16}), pairs = halves;
  for (int64_t r = 0; r < 3; ++r) {
    for (int64_t i = 0; i < 8; ++i) {
      halves[r * 16 + i] = pairs[r * 16 + 2 * i] = gate[r * 8 + i];
      halves[r * 16 + 8 + i] = pairs[r * 16 + 2 * i + 1] = up[r * 8 + i];
    }
  }
  for (const Activation kind : {Activation::kSilu, Activation::kGelu, Activation::kSwigluOai}) {
    const Computed c = Gate(gate, up, {kind}).value();
    EXPECT_EQ(GateFused(halves, GateUpLayout::kHalves, {kind}).value().value.values, c.value.values);
    EXPECT_EQ(GateFused(pairs, GateUpLayout::kInterleaved, {kind}).value().value.values, c.value.values);
    EXPECT_FALSE(Compare(GateFused(pairs, GateUpLayout::kHalves, {kind}).value().value, c, kBf16)->ok());
  }
  EXPECT_FALSE(GateFused(Random({2, 3}, 1), GateUpLayout::kHalves, {}).ok());
  EXPECT_FALSE(Gate(gate, Random({3, 7}, 1), {}).ok());
}

// Engines round after each step of the formula; the clamped variant (gpt-oss) has five of them.
TEST(Activation, BfloatEnginesMeetTheBoundOfGate) {
  Array gate = Random({4, 64}, 6), up = Random({4, 64}, 7), y = gate, oai = gate;
  for (double& v : gate.values) v = ToBf16(v);
  for (double& v : up.values) v = ToBf16(v);
  for (int64_t i = 0; i < y.size(); ++i) {
    const double g = gate[i], u = up[i];
    y[i] = ToBf16(ToBf16(g / (1 + std::exp(-g))) * u);
    oai[i] = ToBf16(ToBf16(u + 1) * ToBf16(g * ToBf16(1 / (1 + std::exp(-ToBf16(1.702 * g))))));
  }
  ExpectWithin(y, Gate(gate, up, {}).value(), kBf16);
  ExpectWithin(oai, Gate(gate, up, {Activation::kSwigluOai}).value(), kBf16);
}

}  // namespace
}  // namespace assay::oracle
