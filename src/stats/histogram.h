// Exponent histogram of a segment from a seeded sample of its groups: at most kHistogramGroups of them, all of them
// when there are no more. Counting is exact, so the result is the same on every instruction set.
#pragma once

#include "stats/kernel.h"
#include "stats/layout.h"
#include "stats/stats.h"

namespace assay {

inline constexpr int64_t kHistogramGroups = 64;

// Samples rows [first_row, first_row + n_rows) of the layout into stats->histogram and histogram_samples.
void SampleHistogram(const Layout& layout, const Kernel& kernel, int64_t first_row, int64_t n_rows, Stats* stats);

}  // namespace assay
