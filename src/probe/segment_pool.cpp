#include "probe/segment_pool.h"

#include <cstddef>
#include <utility>

namespace assay {
namespace {

// Kept by a thread at most: segments, and elements of each of a segment's arrays. About 1 MB in all.
constexpr size_t kMaxSegments = 64;
constexpr size_t kMaxCells = 64;

// A thread records on behind the end of its thread_locals: from atexit handlers, static destructors and the host's own
// thread_locals. Without a destructor itself, `ended` holds until the thread's memory goes.
thread_local bool ended = false;

struct Kept {
  std::vector<Segment> segments;
  ~Kept() { ended = true; }
};
thread_local Kept kept;

}  // namespace

std::vector<Segment> TakeSegments() {
  if (ended) return {};
  return std::move(kept.segments);
}

void GiveSegments(std::vector<Segment> segments) {
  if (ended || segments.capacity() > kMaxSegments) return;
  for (const Segment& segment : segments) {
    if (segment.rows.capacity() > kMaxCells || segment.heads.capacity() > kMaxCells) return;
  }
  kept.segments = std::move(segments);
}

}  // namespace assay
