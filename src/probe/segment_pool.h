// Memory for the segments of events that are written at once: an event of eight requests has eight segments with three
// arrays each, and making and freeing them would take a third of the time that recording a small tensor takes.
#pragma once

#include <vector>

#include "stats/stats.h"

namespace assay {

// What the calling thread gave back last, in whatever state; empty when there is nothing, and from the end of its
// thread_locals on.
std::vector<Segment> TakeSegments();

// Keeps them for the thread's next TakeSegments(), unless they hold much memory. Does not throw.
void GiveSegments(std::vector<Segment> segments);

}  // namespace assay
