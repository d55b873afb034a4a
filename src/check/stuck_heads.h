// Heads of an attention's output that hold one and the same row everywhere, from stored values. What the head grid of
// the statistics cannot tell: a constant that is not 0, and a head that is right at position 0 alone.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "capture/capture.h"

namespace assay::check {

struct StuckHeads {
  std::vector<int32_t> zero;      // 0 in all rows
  std::vector<int32_t> constant;  // another row than 0 in all rows
  int64_t n_rows = 0;             // looked at; 0: values were not stored, or too few
};
// Over rows of requests behind position 0, where one key is all there is to see, of these events of one site and rank:
// at most 64 rows. Numbers count the heads of the recorded tensor, {rows, heads, size}. A head that may have attended
// to one key all the time, as its values hold that row or not all of them were recorded, is not constant; nor are heads
// when all of them are.
StuckHeads FindStuckHeads(const Capture& capture, std::span<const EventId> events);

}  // namespace assay::check
