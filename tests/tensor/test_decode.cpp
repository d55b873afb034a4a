// Exhaustive where a type has 16 bits or fewer. The expected values come from another formulation than the decoder's:
// the non-negative values of a format are walked upwards, each one unit in the last place above the one before, the
// unit doubling at every binade.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "tensor/decode.h"

namespace assay {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

// Values of magnitude patterns 0, 1, 2, ... of a format with `mantissa_bits` and smallest subnormal 2^lowest.
std::vector<double> Walk(int exponent_bits, int mantissa_bits, int lowest) {
  const int per_binade = 1 << mantissa_bits;
  std::vector<double> values = {0};
  double unit = std::ldexp(1.0, lowest);
  for (int e = 0; e < 1 << exponent_bits; ++e) {
    for (int m = 0; m < per_binade; ++m) values.push_back(values.back() + unit);
    if (e > 0) unit *= 2;
  }
  values.resize(static_cast<size_t>(per_binade) << exponent_bits);
  return values;
}

void ExpectSame(double got, double want, DType dtype, uint64_t bits) {
  if (std::isnan(want)) {
    EXPECT_TRUE(std::isnan(got)) << NameOf(dtype) << " bits " << bits;
  } else {
    EXPECT_EQ(std::bit_cast<uint64_t>(got), std::bit_cast<uint64_t>(want)) << NameOf(dtype) << " bits " << bits;
  }
}

void CheckFloatFormat(DType dtype, std::vector<double> magnitudes) {
  const uint64_t n = magnitudes.size();
  for (uint64_t bits = 0; bits < 2 * n; ++bits) {
    const double magnitude = magnitudes[bits % n];
    ExpectSame(DecodeBits(bits, dtype), bits < n ? magnitude : -magnitude, dtype, bits);
  }
}

TEST(Decode, EveryF16Pattern) {
  std::vector<double> v = Walk(5, 10, -24);
  v[0x7c00] = kInf;
  for (int b = 0x7c01; b < 0x8000; ++b) v[b] = kNaN;
  EXPECT_EQ(v[0x3c00], 1.0);
  EXPECT_EQ(v[0x7bff], 65504.0);
  CheckFloatFormat(DType::kF16, v);
}

TEST(Decode, EveryBF16Pattern) {
  std::vector<double> v = Walk(8, 7, -133);
  v[0x7f80] = kInf;
  for (int b = 0x7f81; b < 0x8000; ++b) v[b] = kNaN;
  EXPECT_EQ(v[0x3f80], 1.0);
  CheckFloatFormat(DType::kBF16, v);
}

TEST(Decode, EveryF8E4M3FNPattern) {
  std::vector<double> v = Walk(4, 3, -9);
  EXPECT_EQ(v[0x7e], 448.0);
  v[0x7f] = kNaN;
  CheckFloatFormat(DType::kF8E4M3FN, v);
}

TEST(Decode, EveryF8E5M2Pattern) {
  std::vector<double> v = Walk(5, 2, -16);
  EXPECT_EQ(v[0x7b], 57344.0);
  v[0x7c] = kInf;
  v[0x7d] = v[0x7e] = v[0x7f] = kNaN;
  CheckFloatFormat(DType::kF8E5M2, v);
}

TEST(Decode, EveryF8FnuzPattern) {
  for (DType dtype : {DType::kF8E4M3FNUZ, DType::kF8E5M2FNUZ}) {
    const std::vector<double> v = dtype == DType::kF8E4M3FNUZ ? Walk(4, 3, -10) : Walk(5, 2, -17);
    EXPECT_EQ(v[0x7f], dtype == DType::kF8E4M3FNUZ ? 240.0 : 57344.0);
    for (uint64_t bits = 0; bits < 256; ++bits) {
      const double want = bits == 0x80 ? kNaN : bits < 128 ? v[bits] : -v[bits - 128];
      ExpectSame(DecodeBits(bits, dtype), want, dtype, bits);
    }
  }
}

TEST(Decode, EveryF8E8M0Pattern) {
  for (uint64_t bits = 0; bits < 255; ++bits) {
    ExpectSame(DecodeBits(bits, DType::kF8E8M0), std::exp2(static_cast<double>(bits) - 127), DType::kF8E8M0, bits);
  }
  ExpectSame(DecodeBits(255, DType::kF8E8M0), kNaN, DType::kF8E8M0, 255);
}

TEST(Decode, EveryF4E2M1Pattern) {
  const double v[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (uint64_t bits = 0; bits < 16; ++bits) {
    ExpectSame(DecodeBits(bits, DType::kF4E2M1), bits < 8 ? v[bits] : -v[bits - 8], DType::kF4E2M1, bits);
  }
}

TEST(Decode, EveryIntegerPatternOfEightAndSixteenBits) {
  for (int v = 0; v < 65536; ++v) {
    const uint64_t bits = static_cast<uint64_t>(v);
    EXPECT_EQ(DecodeBits(bits, DType::kU16), v);
    EXPECT_EQ(DecodeBits(bits, DType::kI16), v < 32768 ? v : v - 65536);
    if (v >= 256) continue;
    EXPECT_EQ(DecodeBits(bits, DType::kU8), v);
    EXPECT_EQ(DecodeBits(bits, DType::kI8), v < 128 ? v : v - 256);
    EXPECT_EQ(DecodeBits(bits, DType::kBool), v == 0 ? 0 : 1);
  }
}

TEST(Decode, WideIntegersRoundToNearestEvenBeyond53Bits) {
  EXPECT_EQ(DecodeBits((uint64_t{1} << 53) + 1, DType::kI64), 0x1p53);
  EXPECT_EQ(DecodeBits(~uint64_t{0}, DType::kU64), 0x1p64);
  EXPECT_EQ(DecodeBits(~uint64_t{0}, DType::kI64), -1.0);
  EXPECT_EQ(DecodeBits(0x80000000u, DType::kI32), -0x1p31);
  EXPECT_EQ(DecodeBits(0x80000000u, DType::kU32), 0x1p31);
}

TEST(Decode, F32AndF64AreTakenAsTheyAre) {
  std::mt19937_64 rng(11);
  for (int k = 0; k < 10000; ++k) {
    const uint64_t bits = rng();
    const double d = std::bit_cast<double>(bits);
    const float f = std::bit_cast<float>(static_cast<uint32_t>(bits));
    ExpectSame(DecodeBits(bits, DType::kF64), d, DType::kF64, bits);
    ExpectSame(DecodeBits(bits, DType::kF32), static_cast<double>(f), DType::kF32, bits);
  }
}

// The span decoder agrees with the single one for every type, at odd offsets and unaligned addresses.
TEST(Decode, SpansAgreeWithSingleElements) {
  std::mt19937 rng(5);
  std::vector<uint8_t> bytes(400);
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(rng());
  for (int t = 0; t <= 24; ++t) {
    const DType dtype = static_cast<DType>(t);
    if (BitsOf(dtype) == 0) continue;
    std::vector<double> d(21);
    std::vector<float> f(21);
    DecodeTo(bytes.data() + 1, 3, 21, dtype, d.data());
    DecodeTo(bytes.data() + 1, 3, 21, dtype, f.data());
    for (int k = 0; k < 21; ++k) {
      const double want = DecodeBits(LoadBits(bytes.data() + 1, 3 + k, dtype), dtype);
      ExpectSame(d[k], want, dtype, static_cast<uint64_t>(k));
      if (std::isnan(want)) continue;
      EXPECT_EQ(f[k], static_cast<float>(want)) << NameOf(dtype);
    }
  }
}

TEST(Decode, EvenElementOfPackedFp4IsTheLowNibble) {
  const uint8_t bytes[] = {0x21, 0xf3};
  EXPECT_EQ(LoadBits(bytes, 0, DType::kF4E2M1), 1u);
  EXPECT_EQ(LoadBits(bytes, 1, DType::kF4E2M1), 2u);
  EXPECT_EQ(LoadBits(bytes, 2, DType::kF4E2M1), 3u);
  EXPECT_EQ(LoadBits(bytes, 3, DType::kF4E2M1), 15u);
  EXPECT_EQ(LoadBits(bytes + 1, -1, DType::kF4E2M1), 2u);
}

}  // namespace
}  // namespace assay
