#include "base/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/hash.h"
#include "base/hex.h"
#include "base/wall_clock.h"

namespace assay {

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  if (this != &other) {
    Reset();
    fd_ = other.release();
  }
  return *this;
}

void FileDescriptor::Reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

Status ErrnoStatus(const std::string& path, std::string_view what, int error) {
  char buffer[128] = "";
  // The GNU strerror_r returns its text, the POSIX one fills the buffer; this build uses the GNU one.
  const char* text = ::strerror_r(error, buffer, sizeof buffer);
  std::string message = path;
  message.append(": ").append(what).append(": ").append(text);
  return Status::Environment(std::move(message));
}

// lstat and not stat: a link that leads nowhere is there, so that opening it says what is wrong with it.
bool FileExists(const std::string& path) {
  struct stat info;
  return ::lstat(path.c_str(), &info) == 0;
}

bool IsDirectory(const std::string& path) {
  struct stat info;
  return ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

// Parents first. Two processes may make the same folder at once, so EEXIST is only an error when what exists is no
// folder.
Status MakeDirs(const std::string& path) {
  for (size_t end = 0; end != std::string::npos;) {
    end = path.find('/', end + 1);
    const std::string part = path.substr(0, end);
    if (part.empty() || IsDirectory(part)) continue;
    const int error = ::mkdir(part.c_str(), 0777) == 0 ? 0 : errno;  // looking at the folder sets another
    if (error != 0 && !(error == EEXIST && IsDirectory(part))) {
      return ErrnoStatus(part, "cannot make the folder", error);
    }
  }
  return {};
}

// readdir has no order of its own; sorted, a folder of traces reads the same on every machine and file system.
Result<std::vector<std::string>> ListDir(const std::string& dir) {
  DIR* handle = ::opendir(dir.c_str());
  if (handle == nullptr) return ErrnoStatus(dir, "cannot list the folder", errno);
  std::vector<std::string> names;
  while (const dirent* entry = ::readdir(handle)) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  ::closedir(handle);
  std::sort(names.begin(), names.end());
  return names;
}

// A file that shrinks while it is read gives the bytes that were there, one that grows the size at the start.
// O_NONBLOCK: opening a FIFO must not wait for a writer.
Result<std::string> ReadFile(const std::string& path, uint64_t limit_bytes) {
  const FileDescriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.valid()) return ErrnoStatus(path, "cannot open", errno);
  struct stat info;
  if (::fstat(fd.get(), &info) != 0) return ErrnoStatus(path, "cannot stat", errno);
  if (!S_ISREG(info.st_mode)) return Status::BadInput(path + ": not a regular file");
  const uint64_t size_bytes = static_cast<uint64_t>(info.st_size);
  if (size_bytes > limit_bytes) {
    return Status::BadInput(path + ": " + std::to_string(size_bytes) + " bytes, more than the " +
                            std::to_string(limit_bytes) + " that are read at once");
  }
  // The limit has been asked: a size from fstat is backed by the file or, if sparse, still below limit_bytes.
  std::string content(size_bytes, '\0');
  size_t done = 0;
  while (done < content.size()) {
    const ssize_t got = ::read(fd.get(), content.data() + done, content.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus(path, "cannot read", errno);
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  content.resize(done);
  return content;
}

// EIO for a write of 0 bytes without an errno: it must not become an endless loop.
int WriteAll(int fd, const void* data, size_t size_bytes) {
  const auto* p = static_cast<const char*>(data);
  while (size_bytes > 0) {
    const ssize_t put = ::write(fd, p, size_bytes);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return put < 0 ? errno : EIO;
    p += put;
    size_bytes -= static_cast<size_t>(put);
  }
  return 0;
}

// The soft limit, which is the one that the kernel enforces; one that cannot be asked for counts as none.
uint64_t FileSizeLimit() {
  rlimit limit;
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return UINT64_MAX;
  return limit.rlim_cur;
}

// No fsync: after power loss the new name may hold an empty file. What is written so (the manifest) is derived and
// can be made again.
Status AtomicWriteFile(const std::string& path, std::string_view content) {
  if (content.size() > FileSizeLimit()) return ErrnoStatus(path, "cannot write", EFBIG);
  // Beside the target: rename is atomic inside one file system only. O_EXCL: two writers never share the temporary
  // file.
  const std::string temporary = path + ".tmp-" + Hex64(RandomBits());
  FileDescriptor fd(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!fd.valid()) return ErrnoStatus(temporary, "cannot create", errno);
  int error = WriteAll(fd.get(), content.data(), content.size());
  // close reports what a network file system could not store; the destructor would lose that.
  if (error == 0 && ::close(fd.release()) != 0) error = errno;
  if (error == 0 && ::rename(temporary.c_str(), path.c_str()) != 0) error = errno;
  if (error != 0) {
    ::unlink(temporary.c_str());
    return ErrnoStatus(path, "cannot write", error);
  }
  return {};
}

// GRND_NONBLOCK: before the kernel's pool is ready (early boot, some containers) names from clock and pid must do;
// they are made unique by O_EXCL, not by this.
uint64_t RandomBits() {
  uint64_t bits = 0;
  if (::getrandom(&bits, sizeof bits, GRND_NONBLOCK) == sizeof bits) return bits;
  return Mix64(WallClockNs() + kGolden64 * static_cast<uint64_t>(::getpid()));
}

}  // namespace assay
