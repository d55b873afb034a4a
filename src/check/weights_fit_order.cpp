// Explanations by place: whole rows or columns elsewhere, and among them the reorderings of rotary heads.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <unordered_map>

#include "base/hash.h"
#include "check/weights_slab.h"
#include "finding/finding.h"

namespace assay {
namespace {

using Order = std::vector<int64_t>;  // order[i]: row of expect that row i of memory is

// Hash of n values at `at`, `stride` elements apart, as float32 bits: lines are looked up by it, so that a permutation
// of thousands of rows is found in linear time. A collision (64 bits) would give a wrong name to a tensor that is wrong
// anyway.
uint64_t HashLine(const double* at, int64_t n, int64_t stride) {
  uint64_t hash = kGolden64;
  for (int64_t i = 0; i < n; ++i) {
    const float value = static_cast<float>(at[i * stride]) + 0.0f;  // -0 counts as 0
    uint32_t bits = 0;
    std::memcpy(&bits, &value, 4);
    hash = Mix64(hash ^ bits) + kGolden64;
  }
  return hash;
}

// Nothing unless each line is found once and some line moved.
// Where each row (or column) of memory stands in `expect`, by exact bits; `expect` has been rounded like memory.
// Equal lines (zero rows) are handed out in ascending order, so that lines that did not move stay where they are.
std::optional<Order> MovedLines(const WeightSlab& s, const std::vector<double>& expect, bool columns) {
  const int64_t n = columns ? s.cols : s.rows, length = columns ? s.rows : s.cols;
  const int64_t start = columns ? 1 : s.cols, stride = columns ? s.cols : 1;
  if (n < 2) return std::nullopt;
  std::unordered_map<uint64_t, Order> where;
  // Backwards, since the lists are taken from their ends.
  for (int64_t i = n - 1; i >= 0; --i) where[HashLine(expect.data() + i * start, length, stride)].push_back(i);
  Order order(static_cast<size_t>(n));
  bool moved = false;
  for (int64_t i = 0; i < n; ++i) {
    const auto found = where.find(HashLine(s.actual.data() + i * start, length, stride));
    if (found == where.end() || found->second.empty()) return std::nullopt;
    order[static_cast<size_t>(i)] = found->second.back();
    found->second.pop_back();
    moved = moved || order[static_cast<size_t>(i)] != i;
  }
  return moved ? std::optional<Order>(std::move(order)) : std::nullopt;
}

// Rounds expect as memory has it, so that equal lines have equal bits.
std::vector<double> RoundLike(const WeightSlab& s) {
  std::vector<double> out(s.expect.size());
  // Significand bits (the hidden one included) of bfloat16, float16 and float32, by the unit roundoff.
  const int bits = s.roundoff >= 0x1p-9 ? 8 : s.roundoff >= 0x1p-12 ? 11 : 24;
  for (size_t i = 0; i < out.size(); ++i) {
    int exponent = 0;
    std::frexp(s.expect[i], &exponent);
    const double step = std::ldexp(1.0, exponent - bits);
    out[i] = s.expect[i] == 0 || !std::isfinite(s.expect[i]) ? s.expect[i] : std::nearbyint(s.expect[i] / step) * step;
  }
  return out;
}

// The way back from SideBySide.
int64_t Apart(int64_t i, int64_t rows, int64_t heads) {
  const int64_t d = rows / heads, within = i % d;
  return i - within + within % (d / 2) * 2 + within / (d / 2);
}

// Names of weights whose rows meet a rotation; elsewhere a permutation is a matter of loading.
bool IsRotated(const std::string& name) {
  for (const char* stem :
       {".q_proj.", ".k_proj.", ".q_b_proj.", ".kv_a_proj_with_mqa.", ".wq_b.", ".wk.", ".indexer."}) {
    if (name.find(stem) != std::string::npos) return true;
  }
  return false;
}

template <class Predicted>
bool Fits(const Order& order, Predicted predicted) {
  for (size_t i = 0; i < order.size(); ++i) {
    if (order[i] != predicted(static_cast<int64_t>(i))) return false;
  }
  return true;
}

// The permutation in words: pairs put side by side or taken apart in a number of head groups that is not the right one.
std::string NamePermutation(const WeightSlab& s, const Order& order) {
  const int64_t rows = s.rows, right = s.rope_permuted;
  Order heads;
  // Each number of head groups that divides the rows into even heads: few (divisors), so that all pairs can be tried.
  for (int64_t h = 1; 2 * h <= rows; ++h) {
    if (rows % (2 * h) == 0) heads.push_back(h);
  }
  // To rows of the checkpoint: expect has been reordered in `right` groups already.
  Order plain = order;
  for (int64_t& row : plain) row = right > 0 ? SideBySide(row, rows, right) : row;
  const std::string asked = right > 0 ? " instead of " + NumberText(right) : " where the checkpoint's order belongs";
  if (right > 0 && Fits(plain, [](int64_t i) { return i; }))
    return "rows are in the checkpoint's order, not interleaved";
  for (const int64_t h : heads) {
    if (Fits(plain, [&](int64_t i) { return SideBySide(i, rows, h); })) {
      return "rows are interleaved in " + NumberText(h) + " head groups" + asked;
    }
    if (Fits(plain, [&](int64_t i) { return Apart(i, rows, h); })) {
      return "rows are taken apart in " + NumberText(h) + " head groups, and were not interleaved";
    }
  }
  // Both steps were made, with two different numbers: of query heads where those of the keys belong.
  for (const int64_t out : heads) {
    for (const int64_t back : heads) {
      if (out != back && Fits(plain, [&](int64_t i) { return SideBySide(Apart(i, rows, back), rows, out); })) {
        return "rows were interleaved in " + NumberText(out) + " head groups and taken apart in " + NumberText(back);
      }
    }
  }
  return "rows are those of the checkpoint in another order";
}

// Runs of `size` consecutive rows moved as a whole.
// True where each run keeps its inner order and begins at a multiple of `size`.
bool MovesWhole(const Order& order, int64_t size) {
  if (size <= 1 || static_cast<int64_t>(order.size()) % size != 0) return false;
  return Fits(order, [&](int64_t i) {
    const int64_t within = i % size, head = order[static_cast<size_t>(i - within)];
    return head % size == 0 ? head + within : -1;
  });
}

}  // namespace

// The most special name first: moved heads are moved rows, and exchanged halves are moved rows.
MaybeExplained FitOrder(const WeightSlab& s) {
  const std::vector<double> expect = RoundLike(s);
  if (const auto order = MovedLines(s, expect, false)) {
    int64_t first = -1, moved = 0;
    for (size_t i = 0; i < order->size(); ++i) {
      if ((*order)[i] == static_cast<int64_t>(i)) continue;
      if (first < 0) first = static_cast<int64_t>(i);
      ++moved;
    }
    const std::string count = NumberText(moved) + " of " + NumberText(s.rows) + " rows moved; row " +
                              NumberText(first) + " is row " + NumberText((*order)[static_cast<size_t>(first)]) +
                              " of the checkpoint";
    // A bias [rows, 1] may have equal heads by chance; a matrix has not.
    if (s.cols > 1 && MovesWhole(*order, s.head_dim)) {
      return Explained(fault_class::kTpShard, {}, {"whole heads are in another order", count});
    }
    if (s.rows % 2 == 0 && MovesWhole(*order, s.rows / 2)) {
      return Explained(fault_class::kLoad, {}, {"both halves of the rows are exchanged", count});
    }
    if (IsRotated(s.name) || s.rope_permuted > 0) {
      return Explained(fault_class::kRopeForm, {}, {NamePermutation(s, *order), count});
    }
    return Explained(fault_class::kLoad, {}, {"rows are in another order", count});
  }
  if (s.rows > 1 && MovedLines(s, expect, true)) {
    return Explained(s.quantised ? fault_class::kQLayout : fault_class::kLoad, {},
                     {"columns are those of the checkpoint in another order"});
  }
  if (s.rows < 2 || s.cols < 2) return std::nullopt;
  for (int64_t i = 0; i < s.size(); ++i) {  // the flat values of the transposed matrix, in the old shape
    const size_t from = static_cast<size_t>(i % s.rows * s.cols + i / s.rows);
    if (!NearlyEqual(s.actual[static_cast<size_t>(i)], s.expect[from], s.roundoff)) return std::nullopt;
  }
  return Explained(fault_class::kLoad, {}, {"the memory holds the transposed matrix"});
}

}  // namespace assay
