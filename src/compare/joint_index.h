// Both traces under one numbering: sites in causal order, requests, rows. Millions of events are scanned in place
// through EventView; what stays in memory is 24 bytes a segment and side.
//
// Rows of unknown requests (request 0) and tensors without token rows cannot be aligned by identity; the k-th recording
// of a site by a rank on one side is aligned with the k-th on the other.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "sites/site_table.h"
#include "trace/reader.h"

namespace assay {

enum Side : int { kA = 0, kB = 1 };

// One segment of one event.
struct Piece {
  uint32_t site;     // index into JointIndex::sites
  uint32_t request;  // index into JointIndex::requests
  int32_t position;  // of the first row
  uint32_t n_rows;   // 0: no token rows; the piece then stands for row 0
  uint32_t event;    // Trace::event number
  uint32_t segment;
  uint32_t rows() const { return n_rows == 0 ? 1 : n_rows; }
};

struct JointSite {
  std::string name;
  SiteName parsed;
  bool recorded[2] = {false, false};  // events on the side, whether usable or not
  bool has_rows = false;              // any piece with token rows
  bool per_step = false;              // recorded in steps and no parameter by its name
  uint64_t first_sequence = ~uint64_t{0};
  // Pieces of the site: [begin, end) of JointIndex::pieces[side], sorted by request, position, event.
  size_t begin[2] = {0, 0};
  size_t end[2] = {0, 0};
};

struct JointRequest {
  uint64_t key = 0;  // 0: the ordinal-th recording of rows without a request
  uint32_t ordinal = 0;
  int64_t prompt_tokens = -1;  // -1: not known
};

// Consecutive positions of one request; together the intervals number all rows that any piece covers.
struct RowInterval {
  uint32_t request;
  int32_t first;
  uint32_t count;
  uint32_t base;  // row number of the first
};

// Borrows both traces. Immutable once built; may be read from several threads.
struct JointIndex {
  const Trace* trace[2] = {nullptr, nullptr};
  std::vector<JointSite> sites;  // causal order
  std::vector<JointRequest> requests;
  std::vector<Piece> pieces[2];
  std::vector<RowInterval> intervals;  // ascending (request, first), disjoint
  uint32_t n_rows = 0;                 // numbered by the intervals: [0, n_rows)
  std::vector<std::string> notes;      // what was left out, counted

  // kBadInput when the rows cannot be numbered in 32 bits.
  static Result<JointIndex> Build(const Trace& a, const Trace& b, int threads);

  // Row number of a position, or -1. *hint speeds up ascending look-ups; start it at 0.
  int64_t row(uint32_t request, int32_t position, size_t* hint) const;
  // The interval of a row number.
  const RowInterval& interval_of(uint32_t row) const;
};

// The value of a key in the metadata of the first process that has it; empty: none.
std::string MetaOf(const Trace& trace, std::string_view key);

}  // namespace assay
