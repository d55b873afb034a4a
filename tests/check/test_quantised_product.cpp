// Products of quantised weights whose parts were recorded, right and taken otherwise, judged without a checkpoint.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "check/check.h"
#include "check/op_quant_explain.h"
#include "finding/finding.h"
#include "oracle/linear.h"
#include "small_trace.h"
#include "tensor/decode.h"
#include "verdicts.h"

namespace assay {
namespace {

using testing::Judge;
using testing::Noise;
using testing::SmallTrace;

constexpr int64_t kRows = 14, kIn = 32, kOut = 10, kGroup = 8, kGroups = kIn / kGroup;

struct Parts {
  std::vector<float> code, scale, zero;
};
// Value of element (n, k) as the kernel takes it.
using Decode = std::function<double(const Parts&, int64_t n, int64_t k)>;

double Right(const Parts& p, int64_t n, int64_t k) {
  const auto at = static_cast<size_t>(n * kGroups + k / kGroup);
  return double{p.code[static_cast<size_t>(n * kIn + k)] - p.zero[at]} * double{p.scale[at]};
}

CheckResult Recorded(const Decode& decode, std::string_view quant = "gptq_v2") {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3, 4, 5, 6, 7, 8}), b = t.Request({9, 10, 11, 12, 13, 14});
  const std::vector<float> x = Noise(kRows * kIn, 1), s = Noise(kOut * kGroups, 2), c = Noise(kOut * kIn, 3);
  Parts p;
  for (float v : c) p.code.push_back(static_cast<float>(static_cast<int>(v * 997) & 15));
  for (float v : s) p.scale.push_back(0.02F + 0.01F * v * v);
  for (float v : s) p.zero.push_back(static_cast<float>(5 + (static_cast<int>(v * 1009) & 3)));
  std::vector<float> y;
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t n = 0; n < kOut; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < kIn; ++k) sum += double{x[static_cast<size_t>(r * kIn + k)]} * decode(p, n, k);
      y.push_back(static_cast<float>(sum));
    }
  }
  const std::string name = "layers.3.mlp.down_proj.weight.";
  const testing::Put load{.step = -1, .phase = Phase::kLoad};
  testing::Put codes = load;
  codes.meta = {{"quant", quant}, {"group_size", "8"}, {"packed", "0"}};
  t.Record(name + "codes", "out in", {kOut, kIn}, p.code, codes);
  t.Record(name + "scale", "out g", {kOut, kGroups}, p.scale, load);
  t.Record(name + "zero", "out g", {kOut, kGroups}, p.zero, load);
  const std::vector<RowRun> rows = {{a, 0, 8, 0, false}, {b, 8, 6, 0, false}};
  t.Record("layers.3.mlp.act", "T f", {kRows, kIn}, x, {.rows = rows});
  t.Record("layers.3.mlp.down", "T h", {kRows, kOut}, y, {.rows = rows});
  return Judge(t, {"linear"});
}

void ExpectFault(const CheckResult& r, std::string_view cls,
                 double constant = std::numeric_limits<double>::quiet_NaN()) {
  ASSERT_EQ(r.findings.size(), 1U);
  const FirstBad& bad = r.findings[0];
  EXPECT_EQ(bad.name, "layers.3.mlp.down");
  EXPECT_EQ(bad.cls, cls) << bad.evidence[0];
  if (std::isnan(constant)) {
    EXPECT_TRUE(std::isnan(bad.constant_value)) << bad.evidence[0];
  } else {
    EXPECT_NEAR(bad.constant_value, constant, 1e-3 * std::abs(constant)) << bad.evidence[0];
  }
  EXPECT_NE(bad.evidence[0].find("bits beyond chance"), std::string::npos) << bad.evidence[0];
}

TEST(QuantisedProduct, RightOneIsJudgedAndNothingIsFound) {
  const CheckResult r = Recorded(Right);
  EXPECT_TRUE(r.findings.empty());
  EXPECT_EQ(r.coverage.results_judged, 1U);
  // gptq stores zero points less 1.
  EXPECT_TRUE(Recorded(
                  [](const Parts& p, int64_t n, int64_t k) {
                    return Right(p, n, k) - double{p.scale[static_cast<size_t>(n * kGroups + k / kGroup)]};
                  },
                  "gptq")
                  .findings.empty());
}

TEST(QuantisedProduct, ZeroPointThreeOffIsItsConstant) {
  ExpectFault(Recorded([](const Parts& p, int64_t n, int64_t k) {
                return Right(p, n, k) + 3 * double{p.scale[static_cast<size_t>(n * kGroups + k / kGroup)]};
              }),
              fault_class::kQZero, 3);
}

TEST(QuantisedProduct, ScaleOfOneGroupHalvedIsItsConstant) {
  ExpectFault(
      Recorded([](const Parts& p, int64_t n, int64_t k) { return Right(p, n, k) * (k / kGroup == 2 ? 0.5 : 1); }),
      fault_class::kQScale, 0.5);
}

TEST(QuantisedProduct, CodesOfWordsInAnotherOrderAreAMatterOfLayout) {
  ExpectFault(Recorded([](const Parts& p, int64_t n, int64_t k) {
                constexpr int64_t kFrom[8] = {0, 2, 4, 6, 1, 3, 5, 7};
                const auto at = static_cast<size_t>(n * kGroups + k / kGroup);
                return double{p.code[static_cast<size_t>(n * kIn + k / 8 * 8 + kFrom[k % 8])] - p.zero[at]} *
                       double{p.scale[at]};
              }),
              fault_class::kQLayout);
}

// What the kernel takes four bits for.
using Value = double (*)(int bits);
double Float4(int bits) {
  constexpr double kValues[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return bits & 8 ? -kValues[bits & 7] : kValues[bits & 7];
}
double ThreeIsTwo(int bits) { return std::abs(Float4(bits)) == 3 ? Float4(bits) * 2 / 3 : Float4(bits); }
double Integer(int bits) { return bits < 8 ? bits : bits - 16; }

// Four-bit floats, two to a byte or one a value.
CheckResult FourBits(bool packed, Value value) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14});
  const std::vector<float> x = Noise(kRows * kIn, 1), c = Noise(kOut * kIn, 3);
  std::vector<float> scale, code, y;
  for (float v : Noise(kOut * 2, 2)) scale.push_back(0.02F + 0.01F * v * v);
  for (float v : c) code.push_back(static_cast<float>(static_cast<int>(v * 997) & 15));
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t n = 0; n < kOut; ++n) {
      double sum = 0;
      for (size_t k = 0; k < kIn; ++k) {
        sum += double{x[r * kIn + k]} * value(static_cast<int>(code[n * kIn + k])) * double{scale[n * 2 + k / 16]};
      }
      y.push_back(static_cast<float>(sum));
    }
  }
  if (packed) {
    std::vector<float> bytes;
    for (size_t i = 0; i < code.size(); i += 2) bytes.push_back(code[i] + 16 * code[i + 1]);
    code = bytes;
  }
  const testing::Put load{.step = -1, .phase = Phase::kLoad};
  testing::Put codes = load;
  codes.meta = {{"quant", "mxfp4"}, {"group_size", "16"}, {"packed", packed ? "1" : "0"}};
  const std::string name = "layers.3.mlp.down_proj.weight.";
  t.Record(name + "codes", "out in", {kOut, packed ? kIn / 2 : kIn}, code, codes);
  t.Record(name + "scale", "out g", {kOut, 2}, scale, load);
  const std::vector<RowRun> rows = {{a, 0, kRows, 0, false}};
  t.Record("layers.3.mlp.act", "T f", {kRows, kIn}, x, {.rows = rows});
  t.Record("layers.3.mlp.down", "T h", {kRows, kOut}, y, {.rows = rows});
  return Judge(t, {"linear"});
}

TEST(QuantisedProduct, OneValueOfTheCodesTakenForAnotherIsNamed) {
  for (const bool packed : {true, false}) {
    EXPECT_TRUE(FourBits(packed, Float4).findings.empty());
    const CheckResult r = FourBits(packed, ThreeIsTwo);
    ASSERT_EQ(r.findings.size(), 1U);
    EXPECT_EQ(r.findings[0].evidence[0], "fits codes of 3 decoded as 2") << packed;
  }
}

TEST(QuantisedProduct, CodesOfAnotherTableAreAMatterOfLayout) {
  const CheckResult r = FourBits(true, Integer);
  ExpectFault(r, fault_class::kQLayout);
  EXPECT_NE(r.findings[0].evidence[0].find("stand for other values"), std::string::npos) << r.findings[0].evidence[0];
}

// Bytes under one scale for 16 columns, which the kernel takes for `used`.
CheckResult Bytes(DType used) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14});
  const std::vector<float> x = Noise(kRows * kIn, 1), c = Noise(kOut * kIn, 3);
  std::vector<int8_t> code;
  std::vector<float> scale, y;
  for (float v : Noise(kOut * 2, 2)) scale.push_back(0.02F + 0.01F * v * v);
  for (float v : c) code.push_back(static_cast<int8_t>(static_cast<int>(std::abs(v) * 997) % 100));
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t n = 0; n < kOut; ++n) {
      double sum = 0;
      for (size_t k = 0; k < kIn; ++k) {
        sum += double{x[r * kIn + k]} * DecodeBits(static_cast<uint8_t>(code[n * kIn + k]), used) *
               double{scale[n * 2 + k / 16]};
      }
      y.push_back(static_cast<float>(sum));
    }
  }
  const testing::Put load{.step = -1, .phase = Phase::kLoad};
  testing::Put codes = load;
  codes.meta = {{"quant", "int8_group"}, {"group_size", "16"}};
  t.Record("layers.3.mlp.down_proj.weight.codes", "out in", {kOut, kIn}, code, codes);
  t.Record("layers.3.mlp.down_proj.weight.scale", "out g", {kOut, 2}, scale, load);
  const std::vector<RowRun> rows = {{a, 0, kRows, 0, false}};
  t.Record("layers.3.mlp.act", "T f", {kRows, kIn}, x, {.rows = rows});
  t.Record("layers.3.mlp.down", "T h", {kRows, kOut}, y, {.rows = rows});
  return Judge(t, {"linear"});
}

TEST(QuantisedProduct, BytesReadAsAnotherTypeAreAMatterOfLayout) {
  EXPECT_TRUE(Bytes(DType::kI8).findings.empty());
  for (const DType used : {DType::kF8E4M3FN, DType::kF8E5M2}) {
    const CheckResult r = Bytes(used);
    ExpectFault(r, fault_class::kQLayout);
    EXPECT_NE(r.findings[0].evidence[0].find(NameOf(used)), std::string::npos) << r.findings[0].evidence[0];
  }
}

TEST(QuantisedProduct, WhatNoConventionGivesStaysWithoutACause) {
  uint64_t state = 1;
  const CheckResult r = Recorded([&](const Parts& p, int64_t n, int64_t k) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    return Right(p, n, k) * (0.5 + static_cast<double>(state >> 40) / 0x1p24);
  });
  ASSERT_EQ(r.findings.size(), 1U);
  EXPECT_EQ(r.findings[0].cls, fault_class::kKernel) << r.findings[0].evidence[0];
}

// A cause that does not fit is refused by one row of the weight, however large that is: what 4096 x 4096 would cost.
TEST(QuantisedProduct, AFewElementsRefuseACauseThatDoesNotFit) {
  constexpr int64_t kN = 64;
  SmallTrace t;
  const uint64_t a = t.Request(std::vector<int64_t>(8, 1));
  const std::vector<float> x = Noise(8 * kN, 1), codes = Noise(kN * kN, 2);
  op::DequantParts parts;
  parts.rows = parts.cols = parts.block_rows = parts.block_cols = kN;
  parts.code = codes;
  parts.scale = {0.5};
  parts.group.assign(codes.size(), 0);
  const oracle::Array input = op::ToArray({8, kN}, std::vector<double>(x.begin(), x.end()));
  const auto product = [&](const oracle::Array& w) { return oracle::Linear(input, w, {{0}, {}}); };
  const oracle::Computed right = product(parts.Values()).value();
  std::vector<float> y;
  for (const double v : right.value.values) y.push_back(static_cast<float>(3 * v));
  t.Record("layers.0.mlp.down", "T h", {8, kN}, y, {.rows = {{a, 0, 8, 0, false}}});
  const auto capture = t.Open();
  CheckReport report;
  const op::Subject s(*capture, *capture->Load(capture->EventsOf("layers.0.mlp.down")[0]), report);
  int64_t asked = 0, products = 0;
  op::QuantisedProduct q;
  q.name = "w";
  q.other = input;
  q.product = [&](const oracle::Array& w) {
    ++products;
    return product(w);
  };
  const op::QuantTrial trial(s, q, right, parts);
  const auto of = [&](double times) {
    return [&, times](int64_t r, int64_t c) {
      ++asked;
      return times * double{codes[static_cast<size_t>(r * kN + c)]};
    };
  };
  EXPECT_FALSE(trial.Try(of(2.5), {fault_class::kQScale, "other scales"}));
  EXPECT_LE(asked, kN);
  EXPECT_EQ(products, 0);
  EXPECT_TRUE(trial.Try(of(1.5), {fault_class::kQScale, "the scales used"}));
  EXPECT_GE(asked, kN * kN);
  EXPECT_EQ(products, 1);
}

}  // namespace
}  // namespace assay
