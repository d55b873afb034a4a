#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>
#include <vector>

#include "base/files.h"

namespace assay {

Result<MappedFile> MappedFile::Open(const std::string& path) {
  // O_NONBLOCK: opening a FIFO that lies in the folder must not wait for its other end.
  const FileDescriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.valid()) {
    const bool wrong_path = errno == ENOENT || errno == ENOTDIR || errno == ELOOP || errno == ENAMETOOLONG;
    const Status status = ErrnoStatus(path, "cannot be read", errno);
    return wrong_path ? Status::BadInput(status.message()) : status;
  }
  struct stat info;
  if (::fstat(fd.get(), &info) != 0) return ErrnoStatus(path, "cannot stat", errno);
  if (!S_ISREG(info.st_mode)) return Status::BadInput(path + ": not a regular file");
  MappedFile file;
  file.path_ = path;
  const size_t size_bytes = static_cast<size_t>(info.st_size);
  if (size_bytes > 0) {
    // mmap refuses a length of 0, so an empty file has no mapping. MAP_SHARED: bytes that a writer puts into the mapped
    // range later (a trace that is being recorded) are seen. The descriptor may be closed, the mapping stays.
    void* data = ::mmap(nullptr, size_bytes, PROT_READ, MAP_SHARED, fd.get(), 0);
    if (data == MAP_FAILED) return ErrnoStatus(path, "cannot map", errno);
    file.data_ = static_cast<const std::byte*>(data);
    file.size_bytes_ = size_bytes;
  }
  return file;
}

// A swap: the source's destructor unmaps what this object held.
MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_bytes_);
}

// Each error ends the search as if all were zero: the answer only decides whether a scan looks there at all.
uint64_t MappedFile::FirstNonZero(uint64_t from) const {
  const FileDescriptor fd(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.valid()) return size_bytes_;
  // Bounded, whatever the size of the file; large enough that the system calls do not count.
  std::vector<unsigned char> buffer(256 * 1024);
  while (from < size_bytes_) {
    const off_t data = ::lseek(fd.get(), static_cast<off_t>(from), SEEK_DATA);
    if (data < 0 && errno == ENXIO) return size_bytes_;  // nothing but unallocated space behind
    // SEEK_DATA is refused by some file systems (EINVAL); every byte is then read.
    if (data > 0) from = static_cast<uint64_t>(data);
    const ssize_t got = ::pread(fd.get(), buffer.data(), buffer.size(), static_cast<off_t>(from));
    // 0: the file was cut off below `from` meanwhile.
    if (got <= 0) return size_bytes_;
    for (ssize_t i = 0; i < got; ++i) {
      if (buffer[static_cast<size_t>(i)] != 0) return from + static_cast<uint64_t>(i);
    }
    from += static_cast<uint64_t>(got);
  }
  return size_bytes_;
}

}  // namespace assay
