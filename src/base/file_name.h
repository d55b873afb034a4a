// Names of hosts and the like as parts of file names.
#pragma once

#include <string>
#include <string_view>

namespace assay {

// Letters, digits, '-' and '.' of the text, others as '_', 64 bytes at most. Never empty, and never with a dot in
// front, which would hide the file.
std::string SafeFileName(std::string_view text);

}  // namespace assay
