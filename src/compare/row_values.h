// One side's value of each row of a site, whatever it was cut into: chunks are put together, tensor-parallel shards and
// partial sums are added through their sketches, replicas are checked against each other.
#pragma once

#include <cstdint>
#include <vector>

#include "compare/joint_index.h"
#include "stats/stats.h"

namespace assay {

// A row, or, without row grids, the rows of one request inside a block of 64 positions.
struct RowValue {
  int32_t position = 0;    // of the first row
  uint32_t n_rows = 1;     // more than 1 without row grids
  uint32_t piece = 0;      // number of a piece that holds it (the lowest rank's)
  uint32_t nonfinite = 0;  // elements, in all shards together
  uint64_t digest = 0;
  bool digest_whole = false;    // digest says all about the value: no group of 8 columns was cut
  int16_t deviating_rank = -1;  // replicas: a rank whose value differs from the first rank's
  float deviation = 0;          // … and by how much (L2)
  double sum_sq = 0;            // of the finite elements, in all shards together
  bool estimated = false;       // sum_sq is no exact one: of several ranks' partial results added up
  double sketch[kRowSketchSize] = {0, 0, 0, 0};
};

struct SideRows {
  std::vector<RowValue> rows;    // ascending position
  std::vector<double> sketches;  // without row grids: kSketchSize a row value, else empty
  double roundoff = 0;           // coarsest of the events read
  uint64_t repeated = 0;         // rows recorded more than once by one rank; the last is taken
  uint64_t incomplete = 0;       // rows left out because a shard is missing
  bool has_sketch = false;       // any sketch bucket is not 0
  void clear();
};

// How a side recorded the site: what two sides must have in common to be compared.
struct SideFormat {
  bool row_grid = true;                   // every segment with token rows has its row cells
  int64_t cols = 0;                       // logical columns of the whole row; of the whole tensor without token rows
  DType dtype = DType::kInvalid;          // of the stored elements
  DType compute_dtype = DType::kInvalid;  // as events say; kInvalid: they do not
};
// Looks at the first events of the site.
SideFormat FormatOf(const JointIndex& index, int side, const JointSite& site);

// Reads pieces [begin, end) of one site and request. by_rows: from the row grids; else by blocks of 64 positions.
// only_rank >= 0: that rank's part alone (a partial sum or shard by itself).
void ReadRows(const JointIndex& index, int side, size_t begin, size_t end, bool by_rows, int32_t only_rank,
              SideRows* out);

}  // namespace assay
