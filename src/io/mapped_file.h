// Text of small input files, over the mapping that base has.
#pragma once

#include <cstdint>
#include <string>

#include "base/mapped_file.h"
#include "base/status.h"

namespace assay {

// A whole small file as text. kBadInput when it is longer than limit_bytes; other errors as MappedFile::Open.
Result<std::string> ReadTextFile(const std::string& path, uint64_t limit_bytes);

}  // namespace assay
