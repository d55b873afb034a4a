#include "probe/segment_pool.h"

#include <cstddef>
#include <utility>

namespace assay {
namespace {

// Kept by a thread at most: segments, and elements of each of a segment's arrays. About 1 MB in all.
constexpr size_t kMaxSegments = 64;
constexpr size_t kMaxCells = 64;

thread_local std::vector<Segment> kept;

}  // namespace

std::vector<Segment> TakeSegments() { return std::move(kept); }

void GiveSegments(std::vector<Segment> segments) {
  if (segments.capacity() > kMaxSegments) return;
  for (const Segment& segment : segments) {
    if (segment.rows.capacity() > kMaxCells || segment.heads.capacity() > kMaxCells) return;
  }
  kept = std::move(segments);
}

}  // namespace assay
