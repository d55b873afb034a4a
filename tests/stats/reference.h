// The definition of the statistics, element by element, in long double: slow, no pieces, no groups cut out, no kernels.
// It shares the hash functions and the table with the library; those are checked against tests/stats/golden.py.
#pragma once

#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "stats/hash.h"
#include "stats/measure.h"
#include "tensor/decode.h"

namespace assay::testing {

// An element with its place in the view and in the logical tensor.
struct Element {
  uint64_t bits;
  int64_t row;     // of the view
  int64_t column;  // local
  uint64_t row_major;
};

// In row-major order of the view; columns count over all axes but row_axis.
inline std::vector<Element> ElementsOf(const TensorView& view, int row_axis) {
  std::vector<Element> out;
  int64_t total = 1;
  for (int64_t s : view.shape) total *= s;
  for (int64_t k = 0; k < total; ++k) {
    int64_t rest = k, at = view.offset_elems, column = 0, row = 0, scale = 1;
    for (int a = view.rank(); a-- > 0;) {
      const int64_t i = rest % view.shape[a];
      rest /= view.shape[a];
      at += i * view.strides[a];
      if (a == row_axis) {
        row = i;
      } else {
        column += i * scale;
        scale *= view.shape[a];
      }
    }
    out.push_back({LoadBits(view.data, at, view.dtype), row, column, static_cast<uint64_t>(k)});
  }
  return out;
}

// All 64 buckets: the tests fold them.
struct ReferenceCell {
  long double sum_sq = 0;
  long double sketch[kSketchSize] = {};
  uint64_t digest = 0;
  uint32_t nonfinite = 0;
};

struct Reference {
  Stats stats;  // counts, extremes, digest
  long double sum = 0, sum_sq = 0;
  long double sum_abs = 0;  // for bounds
  long double sketch[kSketchSize] = {};
  long double sketch_abs[kSketchSize] = {};
  std::map<int64_t, ReferenceCell> rows;  // by view row
  std::map<int64_t, ReferenceCell> heads;
};

// Digest of elements by their logical index: words of each group, pairs of words that hold any element.
inline uint64_t ReferenceDigest(const std::vector<std::pair<uint64_t, uint64_t>>& index_bits, uint64_t request,
                                DType dtype) {
  const int bits = BitsOf(dtype);
  struct Group {
    uint32_t words[kDigestWords] = {};
    bool present[kDigestWords] = {};
  };
  std::map<uint64_t, Group> groups;
  for (auto [index, value] : index_bits) {
    Group& group = groups[index >> 3];
    for (int b = 0; b < bits; ++b) {
      const int at = static_cast<int>(index & 7) * bits + b;
      group.present[at / 32] = true;
      group.words[at / 32] |= static_cast<uint32_t>(value >> b & 1) << (at % 32);
    }
  }
  uint64_t digest = 0;
  for (const auto& [number, group] : groups) {
    const Salt salt = SaltOf(request, static_cast<uint32_t>(number >> 32));
    const uint32_t g = GroupHash(static_cast<uint32_t>(number), salt.group);
    for (int w = 0; w < kDigestWords; w += 2) {
      if (!group.present[w] && !group.present[w + 1]) continue;
      digest += uint64_t{static_cast<uint32_t>(group.words[w] + g + kDigestKeys.word[w])} *
                static_cast<uint32_t>(group.words[w + 1] + g + kDigestKeys.word[w + 1]);
    }
  }
  return digest;
}

// View rows [first_row, first_row + n_rows), the first of which is logical row first_t.
inline Reference MeasureReference(const TensorView& view, const LogicalLayout& logical, uint64_t request,
                                  int64_t first_row, int64_t n_rows, int64_t first_t) {
  Reference ref;
  const int row_axis = logical.row_axis >= 0 ? logical.row_axis : view.rank() >= 2 ? 0 : -1;
  int64_t cols = 1, inner = 1;
  for (int a = 0; a < view.rank(); ++a) {
    if (a != row_axis) cols *= view.shape[a];
    if (a != row_axis && logical.head_axis >= 0 && a > logical.head_axis) inner *= view.shape[a];
  }
  const int64_t full = logical.full_cols > 0 ? logical.full_cols : cols;
  const uint64_t pitch = static_cast<uint64_t>((full + 7) / 8 * 8);
  std::vector<std::pair<uint64_t, uint64_t>> all;
  std::map<int64_t, std::vector<std::pair<uint64_t, uint64_t>>> by_row;
  Stats& s = ref.stats;
  s.min = s.max = s.abs_max = std::nan("");
  for (const Element& e : ElementsOf(view, row_axis)) {
    if (e.row < first_row || e.row >= first_row + n_rows) continue;
    const uint64_t column = static_cast<uint64_t>(logical.col_offset + e.column);
    const uint64_t index = static_cast<uint64_t>(first_t + e.row - first_row) * pitch + column;
    all.emplace_back(index, e.bits);
    by_row[e.row].emplace_back(column, e.bits);
    ++s.count;
    const double x = DecodeBits(e.bits, view.dtype);
    ReferenceCell& row = ref.rows[e.row];
    ReferenceCell dummy;
    ReferenceCell& head = logical.head_axis >= 0 ? ref.heads[e.column / inner % view.shape[logical.head_axis]] : dummy;
    if (!std::isfinite(x)) {
      s.nan += std::isnan(x);
      s.pos_inf += x > 0;
      s.neg_inf += x < 0;
      ++row.nonfinite;
      ++head.nonfinite;
      continue;
    }
    s.zero += x == 0;
    if (IsFloat(view.dtype) && x != 0) {
      const double smallest_normal = view.dtype == DType::kF64          ? 0x1p-1022
                                     : view.dtype == DType::kF32        ? 0x1p-126
                                     : view.dtype == DType::kBF16       ? 0x1p-126
                                     : view.dtype == DType::kF16        ? 0x1p-14
                                     : view.dtype == DType::kF8E4M3FN   ? 0x1p-6
                                     : view.dtype == DType::kF8E4M3FNUZ ? 0x1p-7
                                     : view.dtype == DType::kF8E5M2     ? 0x1p-14
                                     : view.dtype == DType::kF8E5M2FNUZ ? 0x1p-15
                                     : view.dtype == DType::kF4E2M1     ? 1.0
                                                                        : 0.0;
      s.subnormal += std::abs(x) < smallest_normal;
    }
    if (std::isnan(s.min) || x < s.min) s.min = x;
    if (std::isnan(s.max) || x > s.max) s.max = x;
    if (std::isnan(s.abs_max) || std::abs(x) > s.abs_max) {
      s.abs_max = std::abs(x);
      s.abs_max_index = e.row_major;
    }
    const long double lx = x;
    ref.sum += lx;
    ref.sum_abs += lx < 0 ? -lx : lx;
    ref.sum_sq += lx * lx;
    const uint64_t number = index >> 3;
    const Salt salt = SaltOf(request, static_cast<uint32_t>(number >> 32));
    const uint32_t group = static_cast<uint32_t>(number);
    const uint32_t slot = (group & 255) ^ SlotRotation(group, salt);
    const int lane = static_cast<int>(index & 7);
    const int bucket = kSketchTable.bucket[slot][lane];
    const int flips = static_cast<int>(GroupHash(group, salt.group) >> 31) + (kSketchTable.minus[slot] >> lane & 1);
    const long double term = flips == 1 ? -lx : lx;
    ref.sketch[bucket] += term;
    ref.sketch_abs[bucket] += lx < 0 ? -lx : lx;
    for (ReferenceCell* cell : {&row, &head}) {
      cell->sum_sq += lx * lx;
      cell->sketch[bucket] += term;
    }
  }
  // -0 counts as +0.
  if (s.min == 0) s.min = 0;
  if (s.max == 0) s.max = 0;
  s.digest = ReferenceDigest(all, request, view.dtype);
  for (auto& [number, elements] : by_row) ref.rows[number].digest = ReferenceDigest(elements, 0, view.dtype);
  return ref;
}

}  // namespace assay::testing
