// Shapes that do not fit each other are refused with a reason; the values are the business of tests/weights, which
// compares with the packages that write the formats.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "base/hash.h"
#include "quant/weight.h"
#include "quant/weight_source.h"

namespace assay {
namespace {

struct Stored {
  std::vector<std::byte> bytes;
  CheckpointTensor tensor;
  Stored(DType dtype, std::vector<int64_t> shape, std::vector<uint8_t> data) {
    for (const uint8_t b : data) bytes.push_back(std::byte{b});
    tensor.name = "t";
    tensor.file = "f";
    tensor.dtype = dtype;
    tensor.shape = std::move(shape);
    tensor.data = bytes.data();
    tensor.size_bytes = bytes.size();
  }
};

std::vector<uint8_t> Floats(std::vector<float> values) {
  std::vector<uint8_t> out(values.size() * 4);
  std::memcpy(out.data(), values.data(), out.size());
  return out;
}

TEST(ByteWeight, BlocksAtTheEdgeTakeTheLastScale) {
  // e4m3: 0x38 is 1, 0x40 is 2.
  const Stored code(DType::kF8E4M3FN, {3, 3}, {0x38, 0x38, 0x40, 0x38, 0x38, 0x40, 0x38, 0x38, 0x40});
  const Stored scale(DType::kF32, {2, 2}, Floats({1, 10, 100, 1000}));
  const auto weight = MakeByteWeight("w", code.tensor, &scale.tensor, nullptr, 2, 2);
  ASSERT_TRUE(weight.ok()) << weight.status().message();
  std::vector<double> out(9);
  (*weight)->Decode(0, 3, out.data());
  EXPECT_EQ(out, (std::vector<double>{1, 1, 20, 1, 1, 20, 100, 100, 2000}));
}

TEST(ByteWeight, TransposedGridIsNamed) {
  const Stored code(DType::kF8E4M3FN, {4, 2}, std::vector<uint8_t>(8, 0x38));
  const Stored scale(DType::kF32, {1, 2}, Floats({1, 2}));
  const auto weight = MakeByteWeight("w", code.tensor, &scale.tensor, nullptr, 2, 2);
  ASSERT_FALSE(weight.ok());
  EXPECT_NE(weight.status().message().find("is transposed"), std::string::npos) << weight.status().message();
}

TEST(Fp4Weight, LowNibbleFirstAndGlobalScaleDivides) {
  std::vector<uint8_t> codes(8, 0x00);
  codes[0] = 0x72;  // 1, then 6
  const Stored code(DType::kU8, {1, 8}, codes);
  const Stored scale(DType::kF8E4M3FN, {1, 1}, {0x40});  // 2
  const Stored global(DType::kF32, {1}, Floats({4}));
  Fp4Layout layout;
  layout.divide_global = true;
  const auto weight = MakeFp4Weight("w", code.tensor, scale.tensor, &global.tensor, layout);
  ASSERT_TRUE(weight.ok()) << weight.status().message();
  std::vector<float> out(16);
  (*weight)->Decode(0, 1, out.data());
  EXPECT_EQ(out[0], 0.5f);
  EXPECT_EQ(out[1], 3.0f);
}

TEST(Fp4Weight, FloatScalesWhereBytesBelongAreRefused) {
  const Stored code(DType::kU8, {1, 8}, std::vector<uint8_t>(8, 0));
  const Stored scale(DType::kF32, {1, 1}, Floats({1}));
  const auto weight = MakeFp4Weight("w", code.tensor, scale.tensor, nullptr, {});
  ASSERT_FALSE(weight.ok());
  EXPECT_NE(weight.status().message().find("scales of one byte"), std::string::npos) << weight.status().message();
}

TEST(PackedIntWeight, GroupOfAColumnOutsideTheScalesIsRefused) {
  const Stored code(DType::kI32, {1, 8}, std::vector<uint8_t>(32, 0));
  const Stored scale(DType::kF16, {1, 8}, std::vector<uint8_t>(16, 0));
  const Stored index(DType::kI32, {8},
                     {1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0});
  PackedIntTensors tensors;
  tensors.code = &code.tensor;
  tensors.scale = &scale.tensor;
  tensors.g_idx = &index.tensor;
  const auto weight = MakePackedIntWeight("w", IntPacking::kGptq, 4, tensors);
  ASSERT_FALSE(weight.ok());
  EXPECT_NE(weight.status().message().find("column 0 has group 1 of 1"), std::string::npos)
      << weight.status().message();
}

// The tally counts codes, decoding makes values: both must see the same elements.
void ExpectTallyOfDecoded(const Weight& weight) {
  WeightTally tally, want;
  ASSERT_TRUE(weight.Tally(&tally));
  std::vector<float> values(static_cast<size_t>(weight.rows() * weight.cols()));
  weight.Decode(0, weight.rows(), values.data());
  for (const float value : values) want.Add(value, 1);
  EXPECT_EQ(tally.nan, want.nan);
  EXPECT_EQ(tally.inf, want.inf);
  EXPECT_EQ(tally.zero, want.zero);
  EXPECT_EQ(tally.min, want.min);
  EXPECT_EQ(tally.max, want.max);
  EXPECT_NEAR(tally.sum_sq, want.sum_sq, 1e-12 * want.sum_sq);
}

TEST(WeightTally, CountsWhatDecodingGives) {
  std::vector<uint8_t> codes, scales;
  SplitMix64 random(7);
  for (int i = 0; i < 70 * 66; ++i) codes.push_back(static_cast<uint8_t>(random.Next()));
  const Stored bytes(DType::kF8E4M3FN, {70, 66}, codes);
  const Stored grid(DType::kF32, {2, 2}, Floats({0.5f, 3, 0.001f, 100}));
  const auto float8 = MakeByteWeight("w", bytes.tensor, &grid.tensor, nullptr, 64, 64);
  ASSERT_TRUE(float8.ok()) << float8.status().message();
  ExpectTallyOfDecoded(**float8);

  codes.resize(33 * 32);
  for (int i = 0; i < 33 * 4; ++i) scales.push_back(static_cast<uint8_t>(random.Next()));
  const Stored packed(DType::kU8, {33, 32}, codes);
  const Stored scale(DType::kF8E4M3FN, {33, 4}, scales);
  const Stored global(DType::kF32, {}, Floats({0.003f}));
  const auto fp4 = MakeFp4Weight("w", packed.tensor, scale.tensor, &global.tensor, {});
  ASSERT_TRUE(fp4.ok()) << fp4.status().message();
  ExpectTallyOfDecoded(**fp4);
}

TEST(WeightShape, AZeroExtentHidesNoOverflow) {
  EXPECT_EQ(ElementCount({int64_t{1} << 62, int64_t{1} << 62, 0}), 0);
  EXPECT_EQ(ElementCount({}), 1);
  EXPECT_EQ(ElementCount({3, 5}), 15);
}

TEST(CanonicalWeightName, TracesNames) {
  EXPECT_EQ(CanonicalWeightName("model.layers.3.self_attn.k_proj.weight"), "layers.3.attn.k_proj.weight");
  EXPECT_EQ(CanonicalWeightName("model.language_model.layers.0.mlp.gate.weight"), "layers.0.mlp.gate.weight");
  EXPECT_EQ(CanonicalWeightName("language_model.lm_head.weight"), "lm_head.weight");
  EXPECT_EQ(CanonicalWeightName("model.embed_tokens.weight"), "embed_tokens.weight");
}

}  // namespace
}  // namespace assay
