// Rows given one by one, pressed into runs.
#pragma once

#include <cstdint>
#include <vector>

#include "stats/measure.h"

namespace assay {

// requests and positions: n_rows entries each, either may be null, as assay_event has it: without requests all rows are
// of request 0; without positions they count from 0 anew in each stretch of equal requests; position < 0 is a padding
// row. Consecutive rows of one request at consecutive positions become one run. May throw std::bad_alloc.
std::vector<RowRun> RunsFromRows(const uint64_t* requests, const int64_t* positions, int64_t n_rows);

}  // namespace assay
