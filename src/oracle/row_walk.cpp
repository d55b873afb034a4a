#include "oracle/row_walk.h"

#include <algorithm>
#include <unordered_map>

namespace assay::oracle {
namespace {

// Bounds that keep strides of a hostile trace from overflowing, and its sizes from filling memory.
constexpr int64_t kFarthest = int64_t{1} << 62;
constexpr int64_t kMostPlaces = int64_t{1} << 26;

// Elements from the first place of the walk to the last; -1: too far, or no walk.
int64_t Reach(const RowWalk& w, int64_t rows) {
  if (rows < 0 || w.heads < 0 || w.row_stride < 0 || w.head_stride < 0) return -1;
  if (rows == 0 || w.heads == 0) return 0;
  int64_t down = 0, across = 0, sum = 0;
  if (__builtin_mul_overflow(rows - 1, w.row_stride, &down) ||
      __builtin_mul_overflow(w.heads - 1, w.head_stride, &across) || __builtin_add_overflow(down, across, &sum) ||
      sum > kFarthest) {
    return -1;
  }
  return sum;
}

// Strides of an axis of one entry do not matter.
bool SamePlaces(const RowWalk& a, const RowWalk& b, int64_t rows) {
  return a.heads == b.heads && (rows < 2 || a.row_stride == b.row_stride) &&
         (a.heads < 2 || a.head_stride == b.head_stride);
}

}  // namespace

// At most 16 walks; duplicates fall out, so each hypothesis is tested once.
std::vector<RowWalk> OtherWalks(const RowWalk& view, int64_t rows, int64_t cols) {
  std::vector<RowWalk> out;
  for (const int64_t heads : {int64_t{1}, view.heads}) {
    // Heads side by side, or as the view has them.
    for (const int64_t head_stride : {cols, view.head_stride}) {
      int64_t gapless = 0;
      if (__builtin_mul_overflow(view.heads, cols, &gapless)) continue;
      for (const int64_t row_stride : {view.row_stride, view.head_stride, cols, gapless}) {
        const RowWalk walk{row_stride, heads, heads > 1 ? head_stride : 0};
        const auto same = [&](const RowWalk& other) { return SamePlaces(walk, other, rows); };
        if (row_stride < 1 || same(view) || std::any_of(out.begin(), out.end(), same)) continue;
        out.push_back(walk);
      }
    }
  }
  return out;
}

Result<std::vector<std::vector<int64_t>>> RowsThatMeet(const RowWalk& view, int64_t rows, const RowWalk& walk) {
  int64_t places = 0, steps = 0;
  if (Reach(view, rows) < 0 || Reach(walk, rows) < 0 || __builtin_mul_overflow(rows, view.heads, &places) ||
      __builtin_mul_overflow(rows, walk.heads, &steps) || std::max(places, steps) > kMostPlaces) {
    return Status::BadInput("rows and strides of a walk do not fit");
  }
  // Both walks count from the same first element. emplace keeps the first of places that share an address (stride 0).
  std::unordered_map<int64_t, int64_t> place_at;  // address, in elements from the first place -> place
  for (int64_t i = 0; i < places; ++i) {
    place_at.emplace(i / view.heads * view.row_stride + i % view.heads * view.head_stride, i);
  }
  std::vector<std::vector<int64_t>> met(static_cast<size_t>(places));
  for (int64_t j = 0; j < rows; ++j) {
    for (int64_t g = 0; g < walk.heads; ++g) {
      const auto at = place_at.find(j * walk.row_stride + g * walk.head_stride);
      if (at != place_at.end()) met[static_cast<size_t>(at->second)].push_back(j);
    }
  }
  return met;
}

}  // namespace assay::oracle
