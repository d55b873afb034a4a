// One segment of an event: statistics, sketch, row and head cells, histogram (format.h has the layout).
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "trace/event.h"
#include "trace/format.h"

namespace assay::codec {

// Encoded size, a multiple of 8; 0 when a count does not fit its field or the row cells are not one a row.
uint64_t SegmentSize(const Segment& segment);
// Returns the first byte behind the segment.
// REQUIRES: SegmentSize was not 0, and so many bytes at out.
unsigned char* EncodeSegment(const Segment& segment, unsigned char* out);
// Size of the segment at `at`; 0 unless it lies within the `available` bytes that follow.
uint64_t CheckSegment(const unsigned char* at, uint64_t available);
// REQUIRES: CheckSegment passed, here and below.
void DecodeSegment(const unsigned char* at, Segment* out);

// Where the parts of a checked segment lie.
struct SegmentParts {
  format::SegmentFixed fixed;
  const unsigned char* rare = nullptr;    // nullptr: all zero
  const unsigned char* sketch = nullptr;  // nullptr: all zero
  const unsigned char* rows = nullptr;    // n_row_cells RowCellBytes
  const unsigned char* heads = nullptr;   // n_head_cells HeadCellBytes
  const unsigned char* bins = nullptr;    // n_bins bins, wide or not by the flags
};
// Pointers into the record; they live as long as its bytes. rows, heads and bins are set even where they have no
// elements. Cells are read by index below n_row_cells and n_head_cells of `fixed`.
SegmentParts PartsOf(const unsigned char* at);
void ReadSketch(const SegmentParts& parts, double out[kSketchSize]);
void ReadRowCell(const SegmentParts& parts, uint32_t row, RowCell* out);
void ReadHeadCell(const SegmentParts& parts, uint32_t head, HeadCell* out);
uint64_t ReadHistogram(const SegmentParts& parts, std::vector<ExponentBin>* out);  // returns the number of samples

// First byte of segment i of a checked event record.
// The table lacks the first segment's offset, which follows the table: most events have one segment and then no
// table.
inline const unsigned char* SegmentAt(const unsigned char* record, uint32_t i) {
  format::EventFixed fixed;
  std::memcpy(&fixed, record + sizeof(format::RecordHeader), sizeof fixed);
  if (i == 0) {
    const uint64_t n = fixed.n_segments;
    return record + fixed.segments_at + (n > 1 ? format::PadTo8(4 * (n - 1)) : 0);
  }
  uint32_t entry;
  std::memcpy(&entry, record + fixed.segments_at + 4 * uint64_t{i - 1}, 4);
  return record + entry;
}

}  // namespace assay::codec
