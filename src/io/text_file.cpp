#include "io/text_file.h"

#include "base/mapped_file.h"

namespace assay {

// The limit is asked before anything is copied.
Result<std::string> ReadTextFile(const std::string& path, uint64_t limit_bytes) {
  ASSAY_ASSIGN_OR_RETURN(MappedFile file, MappedFile::Open(path));
  const auto bytes = file.bytes();
  if (bytes.size() > limit_bytes) {
    return Status::BadInput(path + ": " + std::to_string(bytes.size()) + " bytes, more than the limit of " +
                            std::to_string(limit_bytes));
  }
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

}  // namespace assay
