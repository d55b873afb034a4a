#include "trace/payload_store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "base/files.h"
#include "base/hex.h"
#include "base/sha256.h"

namespace assay {

// A file of the right size under the name counts as the content: hashing it again would double the cost of every
// repeated tensor, and a reader checks. Two writers of the same content at once write two temporaries; the second
// rename replaces the first by the same bytes.
Result<PayloadRef> StorePayload(const std::string& dir, const void* data, uint64_t size_bytes, uint64_t limit_bytes,
                                uint64_t* written_bytes) {
  *written_bytes = 0;
  PayloadRef ref;
  // The name before anything is written: content that is there already costs the hash alone.
  ref.sha256 = Sha256::HexOf(data, size_bytes);
  ref.size_bytes = size_bytes;
  const std::string folder = dir + "/" + kPayloadFolder;
  const std::string path = folder + "/" + ref.sha256;
  struct stat info;
  if (::stat(path.c_str(), &info) == 0 && static_cast<uint64_t>(info.st_size) == size_bytes) return ref;
  if (size_bytes > limit_bytes) {
    return Status::Usage(path + ": payload of " + std::to_string(size_bytes) + " bytes exceeds the budget left, " +
                         std::to_string(limit_bytes) + " bytes");
  }
  ASSAY_RETURN_IF_ERROR(MakeDirs(folder));
  if (size_bytes > FileSizeLimit()) return ErrnoStatus(path, "cannot write the payload", EFBIG);
  const std::string temporary = folder + "/.tmp-" + Hex64(RandomBits());
  FileDescriptor fd(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!fd.valid()) return ErrnoStatus(temporary, "cannot create", errno);
  int error = WriteAll(fd.get(), data, size_bytes);
  if (error == 0 && ::close(fd.release()) != 0) error = errno;
  if (error == 0 && ::rename(temporary.c_str(), path.c_str()) != 0) error = errno;
  if (error != 0) {
    ::unlink(temporary.c_str());
    return ErrnoStatus(path, "cannot write the payload", error);
  }
  *written_bytes = size_bytes;
  return ref;
}

}  // namespace assay
