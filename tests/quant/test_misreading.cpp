// Readings of grids and cells against memory that is really written by one rule and read by the other.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "quant/misreading.h"

namespace assay {
namespace {

const GridReading* Find(const std::vector<GridReading>& readings, const std::string& how) {
  const auto at =
      std::find_if(readings.begin(), readings.end(), [&](const GridReading& r) { return r.how.find(how) == 0; });
  return at == readings.end() ? nullptr : &*at;
}

TEST(Misreading, PitchesAreThoseOfMemory) {
  constexpr int64_t kRows = 6, kCols = 5, kPitch = 8;
  const auto readings = OtherGridReadings(kRows, kCols);
  // Packed on one side, padded on the other; -1 is padding.
  std::vector<int64_t> packed(kRows * kPitch, -1), padded(kRows * kPitch, -1);
  for (int64_t i = 0; i < kRows * kCols; ++i) {
    packed[static_cast<size_t>(i)] = i;
    padded[static_cast<size_t>(i / kCols * kPitch + i % kCols)] = i;
  }
  const GridReading* wide = Find(readings, "written with pitch 5 and read with pitch 8");
  const GridReading* tight = Find(readings, "written with pitch 8 and read with pitch 5");
  ASSERT_TRUE(wide != nullptr && tight != nullptr);
  for (int64_t m = 0; m < kRows; ++m) {
    for (int64_t k = 0; k < kCols; ++k) {
      const auto cell = static_cast<size_t>(m * kCols + k);
      EXPECT_EQ(wide->from[cell], packed[static_cast<size_t>(m * kPitch + k)]) << m << " " << k;
      EXPECT_EQ(tight->from[cell], padded[cell]) << m << " " << k;
    }
  }
}

TEST(Misreading, SwizzledAndLinearAreEachOthersInverse) {
  constexpr int64_t kRows = 128, kCols = 4;  // one full tile
  const auto readings = OtherGridReadings(kRows, kCols);
  const GridReading* to = Find(readings, "read as swizzled");
  const GridReading* back = Find(readings, "read by rows, they lie swizzled");
  ASSERT_TRUE(to != nullptr && back != nullptr);
  for (int64_t i = 0; i < kRows * kCols; ++i) {
    ASSERT_GE(to->from[static_cast<size_t>(i)], 0);
    EXPECT_EQ(back->from[static_cast<size_t>(to->from[static_cast<size_t>(i)])], i);
  }
}

TEST(Misreading, EveryReadingIsWithinTheGridAndAnother) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{1, 1}, {1, 7}, {9, 1}, {4, 4}, {3, 40}, {130, 6}}) {
    std::vector<int64_t> own;
    for (int64_t i = 0; i < rows * cols; ++i) own.push_back(i);
    for (const GridReading& r : OtherGridReadings(rows, cols)) {
      ASSERT_EQ(r.from.size(), own.size());
      EXPECT_NE(r.from, own) << r.how;
      for (int64_t i : r.from) EXPECT_TRUE(i >= -1 && i < rows * cols) << r.how;
    }
  }
  EXPECT_TRUE(OtherGridReadings(1, 7).empty());
}

TEST(Misreading, CellsAreWithinTheGrid) {
  for (const ScaleGrid& g :
       {ScaleGrid{40, 40, 40, 1, 1, 40}, ScaleGrid{40, 70, 40, 3, 1, 32}, ScaleGrid{100, 90, 2, 2, 64, 64},
        ScaleGrid{40, 96, 40, 3, 1, 0}, ScaleGrid{8, 40, 1, 40, 8, 1}}) {
    const auto cells = OtherCells(g);
    EXPECT_FALSE(cells.empty());
    for (const CellReading& r : cells) {
      for (int64_t i = 0; i < g.rows * g.cols; ++i) {
        const int64_t cell = r.cell(i / g.cols, i % g.cols);
        ASSERT_TRUE(cell >= 0 && cell < g.grid_rows * g.grid_cols) << r.how;
      }
    }
  }
  // More columns than scales: the wrong axis would be noticed.
  EXPECT_TRUE(OtherCells({40, 48, 40, 1, 1, 48}).empty());
}

TEST(Misreading, LongOrdersAreCut) {
  EXPECT_EQ(RunOrderText(true, {1, 0}), "of every 2 rows the codes are taken in the order 1 0");
  std::vector<int64_t> order(32);
  for (int64_t i = 0; i < 32; ++i) order[static_cast<size_t>(i)] = 31 - i;
  EXPECT_EQ(RunOrderText(false, order).find("order 31 30"),
            std::string("of every 32 columns the codes are taken in the ").size());
  EXPECT_TRUE(RunOrderText(false, order).ends_with(" 16 …"));
}

}  // namespace
}  // namespace assay
