#include "io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace assay {
namespace {

Status OpenError(const std::string& path, int error) {
  const std::string message = path + ": cannot be read: " + std::strerror(error);
  if (error == ENOENT || error == ENOTDIR || error == EISDIR) return Status::BadInput(message);
  return Status::Environment(message);
}

}  // namespace

Result<MappedFile> MappedFile::Open(const std::string& path) {
  // O_NONBLOCK: opening a FIFO must not wait for a writer; it has no effect on regular files.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return OpenError(path, errno);
  struct stat info {};
  if (::fstat(fd, &info) != 0) {
    const int error = errno;
    ::close(fd);
    return OpenError(path, error);
  }
  if (!S_ISREG(info.st_mode)) {
    ::close(fd);
    return Status::BadInput(path + ": not a regular file");
  }
  MappedFile file;
  file.path_ = path;
  file.size_bytes_ = static_cast<size_t>(info.st_size);
  if (file.size_bytes_ > 0) {
    void* map = ::mmap(nullptr, file.size_bytes_, PROT_READ, MAP_PRIVATE, fd, 0);
    const int error = errno;
    ::close(fd);
    if (map == MAP_FAILED) {
      file.size_bytes_ = 0;
      return Status::Environment(path + ": cannot be mapped: " + std::strerror(error));
    }
    file.data_ = static_cast<const std::byte*>(map);
  } else {
    ::close(fd);
  }
  return file;
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_bytes_);
}

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
