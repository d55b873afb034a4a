// Which rows and columns of which weights a tensor in memory is made of: shards, fused projections, experts together.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "check/weights_audit.h"
#include "trace/event.h"

namespace assay {

// A tensor recorded in phase load, with its payload.
struct MemoryTensor {
  int64_t sequence = 0;  // number of the event in the trace
  std::string name;
  std::string axes;
  Event event;
  const std::byte* data = nullptr;  // contiguous

  std::string Meta(std::string_view key) const;  // empty: absent
  int64_t rows() const;                          // all axes but the last
  int64_t cols() const;
};

// rows x cols elements of memory, row i at first + i * step, are rows of `weight` from first_row, columns from
// first_col.
struct WeightPiece {
  std::string name;  // canonical
  const Weight* weight = nullptr;
  int64_t first = 0, step = 1, rows = 0, cols = 0;
  int64_t first_row = 0, first_col = 0;
  int64_t rope_permuted = 0;  // head groups of this piece, 0: rows as in the checkpoint
};

// Weights by canonical name.
using WeightIndex = std::map<std::string, const Weight*, std::less<>>;

// The pieces of a tensor; empty with the reason in *note when the checkpoint has nothing of it, or its shape fits no
// layout that the event declares.
std::vector<WeightPiece> PiecesOf(const WeightSource& source, const WeightIndex& index, const MemoryTensor& tensor,
                                  std::string* note);

}  // namespace assay
