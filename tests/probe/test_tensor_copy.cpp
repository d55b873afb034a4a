#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <set>

#include "probe/tensor_copy.h"

namespace assay {
namespace {

// A view with the extents and strides that it points at; the view of a copy would still point into the original.
struct Owned {
  std::vector<int64_t> shape, strides;
  TensorView view;
  Owned(const void* data, DType dtype, std::vector<int64_t> sh, std::vector<int64_t> st, int64_t offset = 0)
      : shape(std::move(sh)), strides(std::move(st)) {
    view = {data, dtype, shape, strides, offset};
  }
};

// Element by element, by the definition of a view: the slow and obvious way.
std::vector<std::byte> Reference(const TensorView& view) {
  const auto bytes = static_cast<size_t>(BitsOf(view.dtype) / 8);
  std::vector<std::byte> out;
  std::vector<int64_t> index(view.shape.size(), 0);
  for (int64_t extent : view.shape) {
    if (extent == 0) return out;
  }
  for (;;) {
    int64_t at = view.offset_elems;
    for (size_t i = 0; i < index.size(); ++i) at += index[i] * view.strides[i];
    const auto* from = static_cast<const std::byte*>(view.data) + at * static_cast<int64_t>(bytes);
    out.insert(out.end(), from, from + bytes);
    size_t axis = index.size();
    while (axis > 0 && ++index[axis - 1] == view.shape[axis - 1]) index[--axis] = 0;
    if (axis == 0) return out;
  }
}

TEST(TensorCopy, StridedBroadcastNegativeAndEmptyViewsAreCopiedByDefinition) {
  std::vector<uint64_t> storage(4096);
  std::mt19937_64 rng(7);
  for (uint64_t& word : storage) word = rng();
  for (DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kU8}) {
    const Owned cases[] = {
        {storage.data(), dtype, {}, {}, 5},
        {storage.data(), dtype, {7}, {1}, 3},
        {storage.data(), dtype, {3, 5}, {5, 1}},
        {storage.data(), dtype, {3, 5}, {1, 3}},             // transposed
        {storage.data(), dtype, {4, 3, 5}, {40, 8, 1}, 11},  // padded rows
        {storage.data(), dtype, {4, 3, 5}, {40, 0, 2}},      // broadcast
        {storage.data(), dtype, {6, 4}, {-4, -1}, 100},      // reversed
        {storage.data(), dtype, {4, 0, 5}, {40, 8, 1}},      // empty
        {storage.data(), dtype, {2, 1, 2, 1, 3}, {50, 9, 7, 1, 2}},
    };
    for (const Owned& c : cases) {
      std::vector<std::byte> copy;
      const Status status = CopyContiguous(c.view, &copy);
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(copy, Reference(c.view)) << "dtype " << NameOf(dtype) << " rank " << c.view.rank();
    }
  }
}

TEST(TensorCopy, PackedNibblesStayPacked) {
  const uint8_t storage[] = {0x21, 0x43, 0x65, 0x87};  // elements 1 2 3 4 5 6 7 8
  std::vector<std::byte> copy;
  Owned odd(storage, DType::kF4E2M1, {3}, {1}, 1);  // 2 3 4
  ASSERT_TRUE(CopyContiguous(odd.view, &copy).ok());
  EXPECT_EQ(copy, (std::vector<std::byte>{std::byte{0x32}, std::byte{0x04}}));
  Owned strided(storage, DType::kF4E2M1, {2, 2}, {1, 4});  // 1 5 2 6
  ASSERT_TRUE(CopyContiguous(strided.view, &copy).ok());
  EXPECT_EQ(copy, (std::vector<std::byte>{std::byte{0x51}, std::byte{0x62}}));
}

TEST(TensorCopy, RowsOfAnyAxisEqualTheViewRestrictedToThem) {
  std::vector<float> storage(600);
  for (size_t i = 0; i < storage.size(); ++i) storage[i] = static_cast<float>(i);
  const Owned whole(storage.data(), DType::kF32, {4, 5, 6}, {60, 10, 1}, 2);
  const std::vector<int64_t> rows = {0, 3};
  for (int axis : {0, 1, 2}) {
    std::vector<float> expected;
    for (int64_t i = 0; i < (axis == 0 ? 2 : 4); ++i) {
      for (int64_t j = 0; j < (axis == 1 ? 2 : 5); ++j) {
        for (int64_t k = 0; k < (axis == 2 ? 2 : 6); ++k) {
          const auto row = [&](int64_t n) { return rows[static_cast<size_t>(n)]; };
          expected.push_back(storage[static_cast<size_t>(2 + 60 * (axis == 0 ? row(i) : i) +
                                                         10 * (axis == 1 ? row(j) : j) + (axis == 2 ? row(k) : k))]);
        }
      }
    }
    std::vector<std::byte> copy;
    const Status status = CopyRows(whole.view, axis, rows, &copy);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_EQ(copy.size(), expected.size() * sizeof(float));
    EXPECT_EQ(std::memcmp(copy.data(), expected.data(), copy.size()), 0) << "axis " << axis;
  }
}

TEST(TensorCopy, PackedRowsOfOddLengthShareBytes) {
  const uint8_t storage[] = {0x21, 0x43, 0x65, 0x87, 0x09};
  const Owned whole(storage, DType::kF4E2M1, {3, 3}, {3, 1});  // 1 2 3 | 4 5 6 | 7 8 9
  std::vector<std::byte> copy;
  const std::vector<int64_t> rows = {0, 2};
  ASSERT_TRUE(CopyRows(whole.view, 0, rows, &copy).ok());
  EXPECT_EQ(copy, (std::vector<std::byte>{std::byte{0x21}, std::byte{0x73}, std::byte{0x98}}));
}

TEST(TensorCopy, ImpossibleViewsAreRefused) {
  float x = 0;
  std::vector<std::byte> copy;
  EXPECT_EQ(CopyContiguous(Owned(&x, DType::kF32, {-1}, {1}).view, &copy).code(), Code::kUsage);
  EXPECT_EQ(CopyContiguous(Owned(&x, DType::kF32, {1, 1}, {1}).view, &copy).code(), Code::kUsage);
  EXPECT_EQ(CopyContiguous(Owned(nullptr, DType::kF32, {1}, {1}).view, &copy).code(), Code::kUsage);
  EXPECT_EQ(CopyContiguous(Owned(&x, DType::kInvalid, {1}, {1}).view, &copy).code(), Code::kUsage);
  EXPECT_FALSE(CountElements(Owned(&x, DType::kF32, {INT64_MAX, 4}, {0, 0}).view).ok());
  EXPECT_EQ(*CountElements(Owned(&x, DType::kF32, {INT64_MAX, 4, 0}, {0, 0, 0}).view), 0u);
  const std::vector<int64_t> rows = {1};
  EXPECT_EQ(CopyRows(Owned(&x, DType::kF32, {1}, {1}).view, 0, rows, &copy).code(), Code::kUsage);
  EXPECT_EQ(CopyRows(Owned(&x, DType::kF32, {1}, {1}).view, 1, rows, &copy).code(), Code::kUsage);
}

TEST(SampleRows, ChunksChooseFromTheWholesOrder) {
  const RowRun whole[] = {{.request = 9, .first_row = 0, .n_rows = 300, .first_position = 0}};
  const std::vector<int64_t> of_whole = SampleRows(whole, 8, 1);
  ASSERT_EQ(of_whole.size(), 8u);
  std::set<int64_t> of_chunks;
  for (int64_t begin = 0; begin < 300; begin += 100) {
    const RowRun chunk[] = {{.request = 9, .first_row = 0, .n_rows = 100, .first_position = begin}};
    for (int64_t row : SampleRows(chunk, 8, 1)) of_chunks.insert(begin + row);
  }
  for (int64_t row : of_whole) EXPECT_TRUE(of_chunks.count(row)) << row;
}

TEST(SampleRows, SeedAndRequestChangeTheChoiceAndPaddingIsNotChosen) {
  const RowRun run[] = {{.request = 9, .first_row = 0, .n_rows = 300, .first_position = 0}};
  const RowRun other[] = {{.request = 10, .first_row = 0, .n_rows = 300, .first_position = 0}};
  EXPECT_EQ(SampleRows(run, 8, 1), SampleRows(run, 8, 1));
  EXPECT_NE(SampleRows(run, 8, 1), SampleRows(run, 8, 2));
  EXPECT_NE(SampleRows(run, 8, 1), SampleRows(other, 8, 1));
  const RowRun padded[] = {{.request = 9, .first_row = 0, .n_rows = 3, .first_position = 0},
                           {.request = 0, .first_row = 3, .n_rows = 5, .first_position = 0, .padding = true}};
  EXPECT_EQ(SampleRows(padded, 8, 1), (std::vector<int64_t>{0, 1, 2}));
}

}  // namespace
}  // namespace assay
