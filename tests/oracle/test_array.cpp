#include "oracle/array.h"
#include "oracle/oracle_testing.h"

namespace assay::oracle {
namespace {

// Element (i, j, k) lies at 20 - 12 i + 4 j: a negative stride, a gap, and an axis of stride 0.
TEST(ArrayDecode, StridesOffsetsAndBroadcastAreFollowed) {
  std::vector<float> memory(40);
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<float>(i);
  const std::vector<int64_t> shape{2, 3, 2}, strides{-12, 4, 0};
  TensorView view{memory.data(), DType::kF32, shape, strides, 20};
  const Array a = Decode(view).value();
  EXPECT_EQ(a.shape, shape);
  EXPECT_EQ(a.values, (std::vector<double>{20, 20, 24, 24, 28, 28, 8, 8, 12, 12, 16, 16}));
}

// e2m1 from the second nibble on: codes 2, 0xf, 7.
TEST(ArrayDecode, PackedNibblesAndScalarsAreDecoded) {
  const std::vector<uint8_t> memory{0x21, 0x7f};
  const std::vector<int64_t> shape{3}, strides{1};
  const Array a = Decode({memory.data(), DType::kF4E2M1, shape, strides, 1}).value();
  EXPECT_EQ(a.values, (std::vector<double>{1, -6, 6}));
  const double one = 1.5;
  EXPECT_EQ(Decode({&one, DType::kF64, {}, {}, 0}).value().values, std::vector<double>{1.5});
}

TEST(ArrayDecode, NonFiniteElementsSurvive) {
  const std::vector<uint16_t> memory{0x7c00, 0xfc00, 0x7e00, 0x3c00};
  const std::vector<int64_t> shape{4}, strides{1};
  const Array a = Decode({memory.data(), DType::kF16, shape, strides, 0}).value();
  EXPECT_EQ(a[0], kInf);
  EXPECT_EQ(a[1], -kInf);
  EXPECT_TRUE(std::isnan(a[2]));
  EXPECT_EQ(a[3], 1);
}

// Products of 2^80, negative extents and types without a size; an extent of 0 makes any other one harmless.
TEST(ArrayDecode, ForgedSizesAreRefused) {
  const std::vector<int64_t> huge{int64_t{1} << 40, int64_t{1} << 40}, strides{1, 1}, negative{-1, 2};
  const float x = 0;
  EXPECT_FALSE(Decode({&x, DType::kF32, huge, strides, 0}).ok());
  EXPECT_FALSE(Decode({&x, DType::kF32, negative, strides, 0}).ok());
  EXPECT_FALSE(Decode({&x, DType::kInvalid, strides, strides, 0}).ok());
  EXPECT_EQ(ElementsOf(std::vector<int64_t>{int64_t{1} << 62, 0}), 0);
}

TEST(ArrayShapes, PartsAndJoinsKeepTheirPlaces) {
  const Array a = MakeArray({2, 3}, {1, 2, 3, 4, 5, 6}).value();
  EXPECT_EQ(TakeRows(a, std::vector<int64_t>{1, 1, 0}).value().values,
            (std::vector<double>{4, 5, 6, 4, 5, 6, 1, 2, 3}));
  EXPECT_EQ(TakeColumns(a, 1, 3).value().values, (std::vector<double>{2, 3, 5, 6}));
  const Array b = MakeArray({2, 1}, {7, 8}).value();
  EXPECT_EQ(Concat(a, b).value().values, (std::vector<double>{1, 2, 3, 7, 4, 5, 6, 8}));
  EXPECT_FALSE(TakeRows(a, std::vector<int64_t>{2}).ok());
  EXPECT_FALSE(TakeColumns(a, 2, 4).ok());
  EXPECT_FALSE(Concat(a, Vector({1})).ok());
  EXPECT_FALSE(Reshape(a, {5}).ok());
  EXPECT_FALSE(MakeArray({2, 2}, {1}).ok());
}

// Equal infinities and NaN beside NaN agree; the other sign, a number, or NaN in another place does not.
TEST(Bounds, NonFiniteElementsMustBeTheSame) {
  Computed c{Vector({1, kInf, kNaN, -kInf, 2}), Vector({1, 0, 0, 0, 2}), {}, 1, 0, 1};
  EXPECT_TRUE(Compare(c.value, c, kF32)->ok());
  const Agreement a = Compare(Vector({1, -kInf, 0, kNaN, kInf}), c, kF32).value();
  EXPECT_EQ(a.over, 4);
  EXPECT_EQ(a.wrong_nonfinite, 4);
  EXPECT_EQ(a.first_over, 1);
  EXPECT_FALSE(Compare(Vector({1}), c, kF32).ok());
}

// Higham and Mary's probabilistic bound grows with sqrt(k) instead of k; for short sums the worst case is the smaller.
TEST(Bounds, RandomWalkIsTheSmallerForLongSums) {
  Precision walk = kF32;
  walk.walk = true;
  Computed c{Vector({1}), Vector({1}), {}, 10000, 0, 1};
  EXPECT_LT(BoundAt(c, 0, walk), BoundAt(c, 0, kF32) / 10);
  c.k = 16;  // 8 sqrt(16) > 16
  EXPECT_EQ(BoundAt(c, 0, walk), BoundAt(c, 0, kF32));
  // k u = 1: the bound k u / (1 - k u) is void.
  EXPECT_EQ(Gamma(1 << 24, 0x1p-24), kInf);
}

// Unit roundoffs 2^-24 and 2^-8; the floor is half of the smallest subnormal of f16.
TEST(Bounds, PrecisionOfTypesFollowsTheirFormats) {
  const Precision p = PrecisionOf(DType::kF32, DType::kBF16);
  EXPECT_EQ(p.accum, 0x1p-24);
  EXPECT_EQ(p.store, 0x1p-8);
  EXPECT_EQ(PrecisionOf(DType::kF16, DType::kF16).floor, 0x1p-25);
  EXPECT_EQ(PrecisionOf(DType::kI64, DType::kI64).store, 0x1p-24);
}

}  // namespace
}  // namespace assay::oracle
