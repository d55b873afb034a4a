// A trace as JSON for Python: the keys are the fields of docs/fields.md and the columns of the Arrow table.
#pragma once

#include <string>

#include "trace/reader.h"

namespace assay {

// Path, processes (identity, sites, requests, coverage, drops) and damage. 64-bit numbers are JSON numbers in full.
std::string DescribeTrace(const Trace& trace);
// One event with its segments, without sketches and grids' sketches.
std::string DescribeEvent(const Trace& trace, const EventView& view);

}  // namespace assay
