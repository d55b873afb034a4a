// A rotation in place that took another stride for that of its rows (oracle/row_walk.h).
#include <algorithm>

#include "check/op_rope.h"
#include "oracle/row_walk.h"

namespace assay::op {
namespace {

using oracle::RowWalk;

// The result as rows and heads in memory; nothing when its axes are not rows first and columns last.
std::optional<RowWalk> ViewOf(const Subject& s) {
  const Event& e = s.info().event;
  const size_t rank = e.shape.size();
  if (s.tensor()->sampled || e.strides.size() != rank || (rank != 2 && rank != 3) || e.strides.back() != 1 ||
      e.shape != s.actual().shape) {
    return std::nullopt;
  }
  // An axis of one head has a stride that nobody steps by.
  if (rank == 2 || e.shape[1] == 1) return RowWalk{e.strides[0], 1, rank == 2 ? 0 : e.strides[1]};
  return RowWalk{e.strides[0], e.shape[1], e.strides[1]};
}

// What such a walk leaves: each head of each row turned by the positions of the rows that met it, one after the other.
Result<oracle::Computed> Walked(const oracle::Computed& before, std::span<const double> positions, const Rotation& r,
                                const std::vector<std::vector<int64_t>>& met) {
  oracle::Array x = before.value;
  const std::vector<int64_t> shape = x.shape;
  x.shape = {static_cast<int64_t>(met.size()), x.cols()};
  // Rotations of one pair add their angles, so a row that was met several times is turned by the sum of the positions.
  // A magnitude would multiply each time, which the oracle's one rotation cannot say.
  std::vector<double> sums(met.size());
  for (size_t i = 0; i < met.size(); ++i) {
    if (met[i].size() > 1 && r.frequencies.magnitude != 1) return Status::BadInput("a magnitude that counts twice");
    for (const int64_t j : met[i]) sums[i] += positions[static_cast<size_t>(j)];
  }
  ASSAY_ASSIGN_OR_RETURN(oracle::Computed out, oracle::Rotate(x, sums, r.frequencies, r.layout));
  for (size_t i = 0; i < met.size(); ++i) {
    const int64_t row = static_cast<int64_t>(i);
    if (met[i].empty()) std::copy(x.row(row).begin(), x.row(row).end(), out.value.row(row).begin());
    out.stores = std::max(out.stores, static_cast<double>(met[i].size() + 1));
  }
  out.k += before.k;  // of a norm before the rotation
  if (!before.scale.values.empty()) out.stores += before.stores;
  out.value.shape = out.scale.shape = shape;
  if (!out.inner.values.empty()) out.inner.shape = shape;
  return out;
}

// For the evidence: both strides, one place that was turned by another row's position, and how many were left alone.
std::string Described(const RowWalk& walk, const RowWalk& view, const std::vector<std::vector<int64_t>>& met) {
  const auto place = [&](size_t i) {
    const int64_t row = static_cast<int64_t>(i) / view.heads, head = static_cast<int64_t>(i) % view.heads;
    return "row " + std::to_string(row) + (view.heads > 1 ? " head " + std::to_string(head) : std::string());
  };
  std::string example;
  size_t untouched = 0;
  for (size_t i = 0; i < met.size(); ++i) {
    untouched += met[i].empty();
    const int64_t row = static_cast<int64_t>(i) / view.heads;
    if (example.empty() && !met[i].empty() && met[i] != std::vector<int64_t>{row}) {
      example = "; " + place(i) + " was turned by the position of row " + std::to_string(met[i][0]);
    }
  }
  std::string text = "fits a kernel in place that steps " + std::to_string(walk.row_stride) +
                     " elements from row to row and turns " + std::to_string(walk.heads) +
                     " head(s) a row; the rows lie " + std::to_string(view.row_stride) + " apart";
  if (view.heads > 1)
    text += ", " + std::to_string(view.heads) + " heads " + std::to_string(view.head_stride) + " apart";
  text += example + "; " + std::to_string(untouched) + " of " + std::to_string(met.size()) +
          (view.heads > 1 ? " heads of rows" : " rows") + " were not turned at all";
  return text;
}

}  // namespace

// Tries the walks that strides of this tensor suggest (oracle/row_walk.h); a walk that fits is named by its stride.
std::optional<Explanation> ExplainRowWalk(const Subject& s, const Rotation& r, const oracle::Computed& before,
                                          std::span<const double> positions) {
  const auto view = ViewOf(s);
  if (!view) return std::nullopt;
  const int64_t rows = s.actual().shape[0];
  for (const RowWalk& walk : oracle::OtherWalks(*view, rows, s.actual().cols())) {
    const auto met = oracle::RowsThatMeet(*view, rows, walk);
    if (!met.ok() || !Fits(s, Walked(before, positions, r, *met))) continue;
    // Rows turned by positions that are not theirs: no other form of rotation gives that. A step too short to hold such
    // a row looks unrotated, so this outranks what is said there.
    return Explanation{.cls = fault_class::kStride,
                       .text = Described(walk, *view, *met),
                       .constant = static_cast<double>(walk.row_stride),
                       .meaning = "row stride used, in elements; the tensor's is " + std::to_string(view->row_stride),
                       .rank = 3};
  }
  return std::nullopt;
}

}  // namespace assay::op
