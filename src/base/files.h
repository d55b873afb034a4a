// Small file-system helpers over POSIX calls: no iostreams, no exceptions, messages with path and errno text.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace assay {

// Owns one descriptor; closes it.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.release()) {}
  // Closes what this object held; the source is left invalid.
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  ~FileDescriptor() { Reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  // Gives the descriptor away: the caller closes it, or checks that close() succeeded, which the destructor cannot.
  int release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }
  void Reset();

 private:
  int fd_ = -1;
};

// "PATH: WHAT: No space left on device", code kEnvironment.
Status ErrnoStatus(const std::string& path, std::string_view what, int error);
// Like mkdir -p; an existing folder is fine.
Status MakeDirs(const std::string& path);
// Names (without the folder) of the entries of dir, sorted bytewise, without "." and "..".
Result<std::vector<std::string>> ListDir(const std::string& dir);
// What cannot be looked at (no permission on a folder above) counts as absent. A symbolic link that leads nowhere or to
// itself is there: whoever opens it learns why that fails.
bool FileExists(const std::string& path);
bool IsDirectory(const std::string& path);  // follows symbolic links
// Whole file as bytes. limit_bytes: a larger file is kBadInput, so that a wrong path cannot fill memory.
Result<std::string> ReadFile(const std::string& path, uint64_t limit_bytes = uint64_t{1} << 30);
// All bytes to fd, over short writes and EINTR; returns 0 or an errno.
int WriteAll(int fd, const void* data, size_t size_bytes);
// Bytes that may be written into one file before the kernel sends SIGXFSZ (RLIMIT_FSIZE). Check before growing a file
// inside a host: the signal's default is to end the process.
uint64_t FileSizeLimit();
// Writes to a temporary name in the same folder and renames: readers see the old file or the new one, never a part.
Status AtomicWriteFile(const std::string& path, std::string_view content);
// Random bits from the kernel; never fails (falls back to clock and pid).
uint64_t RandomBits();

}  // namespace assay
