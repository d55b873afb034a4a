// A regular file mapped read-only, for readers that hand out pointers into it.
// A file that another process truncates while it is mapped raises SIGBUS on access: inputs are taken to be at rest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/status.h"

namespace assay {

class MappedFile {
 public:
  // kBadInput: no such file, or not a regular one; kEnvironment: no permission, or the mapping failed.
  static Result<MappedFile> Open(const std::string& path);

  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  // Valid as long as this object; empty for an empty file.
  std::span<const std::byte> bytes() const { return {data_, size_bytes_}; }
  const std::string& path() const { return path_; }

 private:
  MappedFile() = default;

  std::string path_;
  const std::byte* data_ = nullptr;
  size_t size_bytes_ = 0;
};

// A whole small file as text. kBadInput when it is longer than limit_bytes; other errors as MappedFile::Open.
Result<std::string> ReadTextFile(const std::string& path, uint64_t limit_bytes);

}  // namespace assay
