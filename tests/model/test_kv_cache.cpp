// Blocks, prefix index, storage types and gathering of the paged cache.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "model/kv_cache.h"
#include "tensor/decode.h"

namespace assay {
namespace {

// Determined by the order of calls alone, so that two runs have the same tables.
TEST(BlockPool, IdsAscendAndFreedOnesComeBackLastFirst) {
  BlockPool pool;
  EXPECT_EQ(pool.Allocate(), 0);
  EXPECT_EQ(pool.Allocate(), 1);
  EXPECT_EQ(pool.Allocate(), 2);
  pool.Release(0);
  pool.Release(2);
  EXPECT_EQ(pool.Allocate(), 2);
  EXPECT_EQ(pool.Allocate(), 0);
  EXPECT_EQ(pool.Allocate(), 3);
  EXPECT_EQ(pool.capacity(), 4);
}

TEST(BlockPool, SharedBlockIsFreedWithItsLastOwner) {
  BlockPool pool;
  const int32_t block = pool.Allocate();
  pool.Retain(block);
  pool.Release(block);
  EXPECT_NE(pool.Allocate(), block);
  pool.Release(block);
  EXPECT_EQ(pool.Allocate(), block);
}

// The key of a block is its tokens and the block before it, not its tokens alone.
TEST(BlockPool, PrefixIsKnownByItsWholeHistory) {
  BlockPool pool;
  const std::vector<int64_t> a = {1, 2}, b = {3, 4};
  const int32_t first = pool.Allocate(), second = pool.Allocate();
  pool.RegisterPrefix(-1, a, first);
  pool.RegisterPrefix(first, b, second);
  EXPECT_EQ(pool.FindPrefix(-1, a), first);
  EXPECT_EQ(pool.FindPrefix(first, b), second);
  EXPECT_EQ(pool.FindPrefix(-1, b), -1);  // the same tokens behind another history
  EXPECT_EQ(pool.FindPrefix(second, a), -1);
  pool.Release(first);
  EXPECT_NE(pool.Allocate(), first);  // the index keeps it
}

TEST(E4M3, EveryCodeSurvivesTheRoundTrip) {
  for (uint32_t code = 0; code < 256; ++code) {
    const float value = DecodeE4M3(static_cast<uint8_t>(code));
    if (std::isnan(value)) {
      EXPECT_EQ(EncodeE4M3(value) & 0x7f, 0x7f);
      continue;
    }
    EXPECT_EQ(EncodeE4M3(value), code);
  }
}

TEST(E4M3, EncodesToTheNearestCodeTiesToEven) {
  // All finite non-negative codes are ascending values: midpoints go to the even code, neighbours to the nearer one.
  for (uint8_t code = 0; code < 0x7e; ++code) {
    const double low = DecodeE4M3(code), high = DecodeE4M3(static_cast<uint8_t>(code + 1));
    const auto middle = static_cast<float>((low + high) / 2);
    const auto even = static_cast<uint8_t>(code % 2 == 0 ? code : code + 1);
    EXPECT_EQ(EncodeE4M3(middle), even);
    EXPECT_EQ(EncodeE4M3(std::nextafterf(middle, 0.0f)), code);
    EXPECT_EQ(EncodeE4M3(std::nextafterf(middle, 1000.0f)), code + 1);
    EXPECT_EQ(EncodeE4M3(-middle), 0x80 | even);
  }
}

// e4m3fn has no infinity; 448 is its largest number.
TEST(E4M3, LargeValuesSaturateAndNanStays) {
  EXPECT_EQ(DecodeE4M3(EncodeE4M3(1e30f)), 448.0f);
  EXPECT_EQ(DecodeE4M3(EncodeE4M3(-std::numeric_limits<float>::infinity())), -448.0f);
  EXPECT_TRUE(std::isnan(DecodeE4M3(EncodeE4M3(std::nanf("")))));
}

template <class T>
// A row that says which position and column each element is of, exact in every storage type but e4m3.
std::vector<T> RowOf(int64_t position, int64_t width) {
  std::vector<T> row(static_cast<size_t>(width));
  for (int64_t i = 0; i < width; ++i) row[static_cast<size_t>(i)] = static_cast<T>(position) + static_cast<T>(i) / T{8};
  return row;
}

template <class T>
void WriteAndGather(DType dtype, double scale, double relative) {
  constexpr int64_t kWidth = 5, kBlock = 4, kRows = 14;
  const std::vector<int32_t> table = {3, 4, 0, 2};  // blocks 3 and 4 are neighbours, the others are not
  KvLayer<T> kv;
  kv.Configure(dtype, kWidth, kBlock);
  kv.set_scale(scale);
  kv.Grow(5);
  for (int64_t p = 0; p < kRows; ++p) {
    kv.Write(table[static_cast<size_t>(p / kBlock)] * kBlock + p % kBlock, RowOf<T>(p, kWidth).data());
  }
  std::vector<T> scratch;
  std::vector<KvRun<T>> runs;
  for (int64_t begin = 0; begin < kRows; ++begin) {
    for (int64_t end = begin; end <= kRows; ++end) {
      kv.Gather(table, begin, end, kv.scale(), &scratch, &runs);
      int64_t p = begin;
      for (const KvRun<T>& run : runs) {
        EXPECT_EQ(run.first_position, p);
        for (int64_t r = 0; r < run.n; ++r, ++p) {
          for (int64_t i = 0; i < kWidth; ++i) {
            const T expected = RowOf<T>(p, kWidth)[static_cast<size_t>(i)];
            EXPECT_NEAR(run.rows[r * kWidth + i], expected, relative * std::fabs(static_cast<double>(expected)));
          }
        }
      }
      EXPECT_EQ(p, end);
    }
  }
}

TEST(KvLayer, GathersEveryRangeInEveryStorageType) {
  WriteAndGather<float>(DType::kF32, 1, 0);
  WriteAndGather<double>(DType::kF64, 1, 0);
  WriteAndGather<float>(DType::kBF16, 1, UnitRoundoff(DType::kBF16));
  WriteAndGather<double>(DType::kF32, 1, UnitRoundoff(DType::kF32));
  // Normal codes down to 2^-6 * scale: the smallest value above zero is 1/8.
  WriteAndGather<float>(DType::kF8E4M3FN, 0.05, UnitRoundoff(DType::kF8E4M3FN) * 1.001);
}

TEST(KvLayer, NeighbouringBlocksAreOneRun) {
  KvLayer<float> kv;
  kv.Configure(DType::kF32, 2, 4);
  kv.Grow(8);
  std::vector<float> scratch;
  std::vector<KvRun<float>> runs;
  kv.Gather(std::vector<int32_t>{5, 6, 7}, 0, 11, 1, &scratch, &runs);
  EXPECT_EQ(runs.size(), 1u);
  kv.Gather(std::vector<int32_t>{5, 7, 6}, 0, 11, 1, &scratch, &runs);
  EXPECT_EQ(runs.size(), 3u);
}

TEST(KvLayer, GrowKeepsTheRows) {
  KvLayer<float> kv;
  kv.Configure(DType::kF32, 3, 2);
  kv.Grow(1);
  const std::vector<float> row = {1, 2, 3};
  kv.Write(1, row.data());
  kv.Grow(100);
  std::vector<float> back(3);
  kv.Read(1, back.data());
  EXPECT_EQ(back, row);
}

TEST(KvLayer, SliceRunsCutsAtBothEnds) {
  const std::vector<float> a(8), b(8);
  std::vector<KvRun<float>> out;
  SliceRuns<float>({{a.data(), 4, 0}, {b.data(), 4, 4}}, 2, 3, 6, &out);
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(out[0].rows, a.data() + 6);
  EXPECT_EQ(out[0].n, 1);
  EXPECT_EQ(out[1].rows, b.data());
  EXPECT_EQ(out[1].n, 2);
  SliceRuns<float>({{a.data(), 4, 0}}, 2, 4, 4, &out);
  EXPECT_TRUE(out.empty());
}

}  // namespace
}  // namespace assay
