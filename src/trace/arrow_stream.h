// The events of a trace as one Arrow table, through the Arrow C stream interface: pyarrow, pandas, polars and DuckDB
// read it without a copy and without this project knowing any of them.
//
// One row a segment of an event, in the order of Trace::event; an event without segments (levels names and shapes) is
// one row whose segment columns are null. docs/trace-format.md, "The Arrow table", has every column.
#pragma once

#include <cstdint>
#include <memory>

#include "trace/arrow_abi.h"
#include "trace/reader.h"

namespace assay {

struct ArrowExportOptions {
  // Batches bound the memory of a consumer that reads one at a time, whatever the trace's size.
  int64_t batch_rows = 16384;                 // at most so many rows a batch
  uint64_t batch_bytes = uint64_t{64} << 20;  // a batch ends with the row that reaches this size
};

// Fills *out; the caller calls out->release. The stream keeps the trace alive. One thread at a time may use a stream.
// Errors of the stream's functions are errno values, with text from get_last_error; nothing throws.
void ExportEvents(std::shared_ptr<const Trace> trace, const ArrowExportOptions& options, ArrowArrayStream* out);

}  // namespace assay
