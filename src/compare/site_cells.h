// Both sides' values of one site, row against row: what the judge holds against its bounds. Nothing is judged here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "compare/diff.h"
#include "compare/joint_index.h"
#include "compare/row_values.h"

namespace assay {

// kAbsent: a side lacks the row. kRoot: wrong, with inputs that agree. kConsequence: wrong behind a wrong input.
// kAside: not judged, as a choice before it went the other way by right.
enum class CellState : uint8_t { kAbsent, kOk, kRoot, kConsequence, kAside };

// One row of one site on both sides.
struct Cell {
  float diff = 0;                              // L2 of the difference, as the sketch says, or between replicas
  float norm = 0;                              // larger of both L2 norms
  float delta[kRowSketchSize] = {0, 0, 0, 0};  // sketch(B) - sketch(A); 0 without row grids
  float sketch_a[kRowSketchSize] = {0, 0, 0, 0};
  CellState state = CellState::kAbsent;
  bool nonfinite_differs = false;
  int8_t replicas_of = -1;  // the side whose ranks are `diff` from each other while the first ranks agree; -1: none
  bool grid = false;        // delta and sketch_a hold
  bool decode = false;      // recorded alone, by either side
  bool same_cut = false;    // both sides computed it in a piece of the same rows
  double relative() const { return norm > 0 ? double{diff} / norm : (diff > 0 ? 1e30 : 0); }
};

struct SiteCells {
  std::vector<Cell> cells;      // by row number; kAbsent where a side lacks the row
  int64_t cols = 0;             // logical columns of the whole row
  double roundoff[2] = {0, 0};  // coarsest of each side
  uint64_t rows = 0;            // on both sides
  bool by_rows = true;  // from the row grids of both sides; else rows of a block of positions share their values
  bool any_difference = false;          // some row is not equal in its bits
  double dot = 0, norm_sq[2] = {0, 0};  // of the segments' sketches, where by_rows does not hold
};

class CellReader {
 public:
  explicit CellReader(const JointIndex& index) : index_(index) {}

  // Adds rows that only one side has, or that cannot be aligned, to *coverage.
  SiteCells Read(uint32_t site, Coverage* coverage);

  // Of all sites read: rows recorded more than once by one rank, rows left out because a shard is missing.
  uint64_t repeated(int side) const { return repeated_[side]; }
  uint64_t incomplete(int side) const { return incomplete_[side]; }

 private:
  // rows_ of both sides, aligned by position, into cells.
  void JoinRows(uint32_t request, SiteCells* out, Coverage* coverage);
  void AddCell(uint32_t request, size_t i, size_t j, size_t* hint, SiteCells* out, Coverage* coverage);
  // "first:last" of a chunk's keys; empty: not said.
  const std::string& KeysOf(int side, const RowValue& value);
  // Not-a-number, +inf and -inf are different values: counted apart, over the segment that holds the row. Rows hold one
  // count alone, and sketches none of them.
  struct NonFinite {
    uint64_t nan = 0, pos_inf = 0, neg_inf = 0;
    bool operator==(const NonFinite&) const = default;
  };
  const NonFinite& NonFiniteOf(int side, const Piece& piece);

  const JointIndex& index_;
  SideRows rows_[2];  // of the request at hand
  // Of the site at hand.
  bool same_dtype_ = true, chunk_ = false;
  // The event that keys_ was read from; a cache of one.
  uint32_t keys_event_[2] = {~uint32_t{0}, ~uint32_t{0}};
  std::string keys_[2];
  // As keys_: of each segment of the event.
  uint32_t nonfinite_event_[2] = {~uint32_t{0}, ~uint32_t{0}};
  std::vector<NonFinite> nonfinite_[2];
  uint64_t repeated_[2] = {0, 0}, incomplete_[2] = {0, 0};
};

// Which sites of the index can be compared: recorded on both sides with equal columns; says why not in notes.
std::vector<uint8_t> ComparableSites(const JointIndex& index, std::vector<std::string>* notes);

}  // namespace assay
