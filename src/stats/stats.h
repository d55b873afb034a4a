// What one pass over a tensor yields: see DESIGN section 3 of the format's specification (docs/trace-format.md,
// docs/numerics.md). Values here are in memory form (double); the trace stores sketches as float32 with one shared
// exponent.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace assay {

// Buckets of the sketches of a segment, a row and a head: with k of them the estimated norm has a standard deviation of
// about 1/sqrt(2 k), for 4 k bytes as float32 in the trace.
inline constexpr int kSketchSize = 64;
inline constexpr int kRowSketchSize = 4;
inline constexpr int kHeadSketchSize = 16;

struct ExponentBin {
  int16_t exponent;  // floor(log2 |x|) of the finite, non-zero elements that fall in the bin
  uint32_t count;    // number of sampled elements
};

// Non-finite elements are counted and enter sum, sum_sq and sketch as 0. min, max and abs_max cover the finite elements
// only; they are NaN when there is none. abs_max_index is the row-major number of the first such element in the view.
struct Stats {
  uint64_t count = 0;  // elements, finite or not
  uint64_t nan = 0;    // of them, as the next two
  uint64_t pos_inf = 0;
  uint64_t neg_inf = 0;
  uint64_t zero = 0;       // +0 and -0
  uint64_t subnormal = 0;  // of float formats; 0 for other types
  double min = 0;
  double max = 0;
  double abs_max = 0;
  uint64_t abs_max_index = 0;
  double sum = 0;             // of the finite elements, in double
  double sum_sq = 0;          // of their squares
  uint64_t digest = 0;        // hash of the bits at their positions (docs/numerics.md)
  bool digest_split = false;  // a group of 8 logical elements was cut: the digest does not add up with its neighbour's
  uint64_t histogram_samples = 0;            // elements looked at for the histogram
  std::vector<ExponentBin> histogram;        // ascending exponent, sampled elements (stated, seeded; docs/numerics.md)
  std::array<double, kSketchSize> sketch{};  // linear: sketches of parts add up

  uint64_t nonfinite() const { return nan + pos_inf + neg_inf; }
};

// One row of a segment; kept for each row of the batch, so it is small. sum_sq covers the finite elements; digest is 0
// without a sketch.
struct RowCell {
  double sum_sq = 0;
  std::array<double, kRowSketchSize> sketch{};  // the segment's sketch folded to 4 buckets, this row alone
  uint64_t digest = 0;                          // independent of position and request
  uint32_t nonfinite = 0;                       // elements of the row
};

// One head over all rows of a segment. The sketch is the segment's folded to 16 buckets, this head alone.
struct HeadCell {
  double sum_sq = 0;
  std::array<double, kHeadSketchSize> sketch{};
  uint32_t nonfinite = 0;  // elements of the head
};

// Rows that belong together: one request, positions [first_position, first_position + n_rows), never across a multiple
// of segment_rows, so that chunks of any size give the same segments but for the first and the last.
//
// Tensors without token rows are one segment: request 0, first_position 0, n_rows 0.
struct Segment {
  uint64_t request = 0;         // key; 0: of no known request
  int64_t first_position = 0;   // in tokens of the request
  int64_t n_rows = 0;           // 0: a tensor without token rows
  int64_t first_row = 0;        // row of the tensor at which the segment begins
  bool padding = false;         // rows that belong to no request
  Stats stats;                  // of all elements of the segment
  std::vector<RowCell> rows;    // n_rows entries or empty
  std::vector<HeadCell> heads;  // one a local head or empty
};

}  // namespace assay
