#include "quant/misreading.h"

#include <algorithm>
#include <set>

namespace assay {
namespace {

// What pitches are padded to.
constexpr int64_t kPaddings[] = {2, 4, 8, 16, 32, 64, 128};

std::set<int64_t> PaddedPitches(int64_t pitch) {
  std::set<int64_t> out;
  for (const int64_t to : kPaddings) out.insert((pitch + to - 1) / to * to);
  out.erase(pitch);
  return out;
}

int64_t Divided(int64_t a, int64_t b) { return (a + b - 1) / std::max<int64_t>(b, 1); }

}  // namespace

// The layout of scales in memory that block-scaled tensor cores read: tiles of 128 rows by 4 scales, 512 bytes each, in
// it rows of 32 interleaved four by four.
int64_t SwizzledPlace(int64_t m, int64_t k, int64_t columns) {
  return (m / 128 * ((columns + 3) / 4) + k / 4) * 512 + m % 32 * 16 + m % 128 / 32 * 4 + k % 4;
}

std::vector<GridReading> OtherGridReadings(int64_t rows, int64_t cols) {
  std::vector<GridReading> out;
  const int64_t n = rows * cols;
  const auto add = [&](std::string how, const auto& from) {
    GridReading reading{std::move(how), std::vector<int64_t>(static_cast<size_t>(n), -1)};
    bool right = true;
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t k = 0; k < cols; ++k) {
        const int64_t at = from(m, k);
        if (at >= 0 && at < n) reading.from[static_cast<size_t>(m * cols + k)] = at;
        right = right && at == m * cols + k;
      }
    }
    if (!right) out.push_back(std::move(reading));
  };
  if (rows > 1 && cols > 1) {
    // Read by rows out of memory that was written by columns, and the reverse.
    add("transposed and read in the shape of the grid",
        [&](int64_t m, int64_t k) { return (m * cols + k) % rows * cols + (m * cols + k) / rows; });
    add("stored by columns and read by rows", [&](int64_t m, int64_t k) { return k * rows + m; });
    add("read as swizzled in tiles of 128 x 4, they lie in rows",
        [&](int64_t m, int64_t k) { return SwizzledPlace(m, k, cols); });
    std::vector<int64_t> cell(static_cast<size_t>(n), -1);  // at each of the first n places of the swizzled buffer
    for (int64_t i = 0; i < n; ++i) {
      const int64_t place = SwizzledPlace(i / cols, i % cols, cols);
      if (place < n) cell[static_cast<size_t>(place)] = i;
    }
    add("read by rows, they lie swizzled in tiles of 128 x 4",
        [&](int64_t m, int64_t k) { return cell[static_cast<size_t>(m * cols + k)]; });
  }
  const auto pitches = [](int64_t written, int64_t read) {
    return "written with pitch " + std::to_string(written) + " and read with pitch " + std::to_string(read);
  };
  if (rows < 2) return out;
  for (const int64_t pitch : PaddedPitches(cols)) {
    add(pitches(cols, pitch), [&](int64_t m, int64_t k) { return m * pitch + k; });
    add(pitches(pitch, cols), [&](int64_t m, int64_t k) {
      const int64_t place = m * cols + k;
      return place % pitch < cols ? place / pitch * cols + place % pitch : -1;
    });
  }
  if (cols < 2) return out;
  // Scales stored group by group, as GPTQ does: the pitch is that of the outputs.
  for (const int64_t pitch : PaddedPitches(rows)) {
    add(pitches(rows, pitch) + ", group by group", [&](int64_t m, int64_t k) {
      const int64_t place = k * pitch + m;
      return place < n ? place % rows * cols + place / rows : -1;
    });
    add(pitches(pitch, rows) + ", group by group", [&](int64_t m, int64_t k) {
      const int64_t place = k * rows + m;
      return place % pitch < rows ? place % pitch * cols + place / pitch : -1;
    });
  }
  return out;
}

std::vector<CellReading> OtherCells(const ScaleGrid& g) {
  std::vector<CellReading> out;
  const int64_t block = std::max<int64_t>(g.block_rows, 1), columns = g.grid_cols, size = g.block_cols;
  if (size == 0) {
    const int64_t own = std::max<int64_t>(Divided(g.cols, columns), 1);
    out.push_back({"of the place of each column, not of its group: g_idx was ignored",
                   [=](int64_t r, int64_t c) { return r / block * columns + std::min(c / own, columns - 1); }});
    return out;
  }
  // Twice, half, four times and a quarter of the declared size: what configs of one model family use. A group that is
  // wider than the row has no other size that matters, and may be a number that cannot be multiplied.
  const int64_t within = size <= g.cols ? size : 0;
  for (const int64_t other : {within * 2, within / 2, within * 4, within / 4}) {
    if (other < 1 || columns < 2) continue;
    out.push_back({"of groups of " + std::to_string(other) + " columns, " + std::to_string(size) + " declared",
                   [=](int64_t r, int64_t c) { return r / block * columns + c / other % columns; }});
  }
  if (columns > 1) {
    out.push_back({"that alternate from column to column",
                   [=](int64_t r, int64_t c) { return r / block * columns + c % columns; }});
  }
  if (block > 1 && g.grid_rows > 1) {
    out.push_back({"that alternate from row to row",
                   [=, rows = g.grid_rows](int64_t r, int64_t c) { return r % rows * columns + c / size; }});
  }
  // One scale a row where there is one a column, or the reverse: only shapes that leave none outside go unnoticed.
  const std::string along = "broadcast along the other axis";
  if (columns == 1 && block == 1 && g.cols > 1 && g.cols <= g.grid_rows)
    out.push_back({along, [](int64_t, int64_t c) { return c; }});
  if (g.grid_rows == 1 && size == 1 && g.rows > 1 && g.rows <= columns)
    out.push_back({along, [](int64_t r, int64_t) { return r; }});
  return out;
}

std::string RunOrderText(bool by_rows, const std::vector<int64_t>& from) {
  constexpr size_t kShown = 16;
  std::string order;
  for (size_t p = 0; p < from.size() && p < kShown; ++p) order.append(" ").append(std::to_string(from[p]));
  return "of every " + std::to_string(from.size()) + (by_rows ? " rows" : " columns") +
         " the codes are taken in the order" + order + (from.size() > kShown ? " …" : "");
}

}  // namespace assay
