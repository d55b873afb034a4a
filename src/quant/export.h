// Writes the decoded weights of a checkpoint as one plain safetensors file of float32: what assay reads, for other
// tools to compare with.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"
#include "quant/weight_source.h"

namespace assay {

// Every weight whose logical name passes the glob (* and ?; empty: all), in order of name. All of it is held in memory:
// kUsage above limit_bytes. kEnvironment: cannot be written.
Status ExportDecoded(const WeightSource& source, const std::string& pattern, uint64_t limit_bytes,
                     const std::string& path);

}  // namespace assay
