// How readers mistake the layout of a quantised weight: which scale a cell of the grid, or an element, then gets, and
// which runs of codes packers reorder.
//
// Places only, no numbers: whether one of them explains something is for the caller to find out. Weights in memory
// (assay weights) and results of products (assay check) are held against the same list.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace assay {

// Scales of a matrix [rows, cols] of elements: a row-major grid, a cell of it for each block.
struct ScaleGrid {
  int64_t rows = 0, cols = 0;
  int64_t grid_rows = 1, grid_cols = 1;
  int64_t block_rows = 1, block_cols = 1;  // block_cols 0: columns are in groups by a list (g_idx)
};

// The grid read by another rule: cell i gets what belongs to cell from[i]; -1: something outside of the grid (padding).
struct GridReading {
  std::string how;  // "written with pitch 5 and read with pitch 8", behind "scales"
  std::vector<int64_t> from;
};
// Transposed, swizzled or not, with a padded pitch on one side. Readings that are the right one are left out.
std::vector<GridReading> OtherGridReadings(int64_t grid_rows, int64_t grid_cols);

// The right grid, whose cells the reader spreads over the elements by another rule.
struct CellReading {
  std::string how;                                        // "of groups of 64 columns, 32 declared", behind "scales"
  std::function<int64_t(int64_t row, int64_t col)> cell;  // always within the grid
};
// Groups of another size, alternating, along the other axis, or by place where a list says otherwise.
std::vector<CellReading> OtherCells(const ScaleGrid& grid);

// Place of cell (m, k) in a swizzled buffer of tiles of 128 rows by 4 columns, `columns` the columns of the buffer.
int64_t SwizzledPlace(int64_t m, int64_t k, int64_t columns);

// Lengths of words, groups and tiles in which packers keep an order, ascending.
inline constexpr int64_t kRunLengths[] = {2, 4, 8, 16, 32, 64, 128, 256};
// "of every 16 columns the codes are taken in the order 0 1 8 9 …": place p of each run holds that of place from[p].
std::string RunOrderText(bool by_rows, const std::vector<int64_t>& from);

}  // namespace assay
