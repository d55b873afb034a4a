// A regular file mapped read-only. For files that nobody shortens while they are read: touching a page that was cut off
// ends the process, as with every mapping.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/status.h"

namespace assay {

class MappedFile {
 public:
  // kBadInput: no such file, or not a regular one (a FIFO is not waited for). kEnvironment: no permission, or the
  // mapping failed. The message has the path and the errno text. An empty file maps to an empty span.
  static Result<MappedFile> Open(const std::string& path);

  // Moving keeps the addresses: spans that were handed out stay valid in the new owner.
  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept { *this = std::move(other); }
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  // Lives as long as this object.
  std::span<const std::byte> bytes() const { return {data_, size_bytes_}; }
  const std::string& path() const { return path_; }
  // First offset at or behind `from` whose byte is not zero, or the size. Reads instead of touching the mapping, so a
  // file that shrinks meanwhile is safe; unallocated ranges are skipped.
  uint64_t FirstNonZero(uint64_t from) const;

 private:
  std::string path_;
  const std::byte* data_ = nullptr;
  size_t size_bytes_ = 0;
};

}  // namespace assay
