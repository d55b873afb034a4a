// The sink "stderr": one line an event, for a first look without a trace.
#pragma once

#include <string>

#include "trace/event.h"

namespace assay {

// "assay layers.3.attn.q bf16 [12, 8, 192] step 4 decode rank 0 norm 12.31 min -1.2 max 3.4 nan 0 inf 0\n". Norm, range
// and counts are of the real rows; "padding N" follows when there are padding rows, with their non-finite count.
// Without statistics (levels names and shapes) the line ends before "norm".
std::string FormatEventLine(const std::string& site, const Event& event);

// One write(2) to descriptor 2; an error is ignored: the host's stderr may be closed.
void WriteToStderr(const std::string& line);

}  // namespace assay
