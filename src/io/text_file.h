// Whole small files as text, for configs and other JSON.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"

namespace assay {

// kBadInput when it is longer than limit_bytes; other errors as MappedFile::Open.
Result<std::string> ReadTextFile(const std::string& path, uint64_t limit_bytes);

}  // namespace assay
