#include "trace/append_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>

#include "base/crc32c.h"
#include "trace/codec.h"

namespace assay {
namespace {

using format::kHeaderBytes;

constexpr uint64_t kPage = 4096;
constexpr uint64_t kTable = uint64_t{2} << 20;       // of addresses that a page table of x86 covers
constexpr uint64_t kSlack = uint64_t{64} << 20;      // behind the cap, for records that are not events
constexpr uint64_t kLargestCap = uint64_t{1} << 46;  // 64 TiB, half of the addresses of a process
constexpr uint64_t kMinReserve = uint64_t{64} << 10;

// f_type of statfs(2); not all of them are in every linux/magic.h.
constexpr uint32_t kExt4Magic = 0xef53;  // and its predecessors
constexpr uint32_t kXfsMagic = 0x58465342;
constexpr uint32_t kTmpfsMagic = 0x01021994;

uint64_t RoundUp(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

// Tag and size as the one 8-byte word that is stored atomically.
void StoreTag(unsigned char* record, uint32_t tag, uint32_t size_bytes, std::memory_order order) {
  std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(record)).store(uint64_t{size_bytes} << 32 | tag, order);
}

// Addresses that begin at a multiple of kTable, so that what lies together in the file lies in one page table too:
// Linux 6.18 then maps a large folio by one fault. nullptr with errno when there are none.
unsigned char* SetAside(uint64_t size_bytes) {
  void* got = ::mmap(nullptr, size_bytes + kTable, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) return nullptr;
  auto* range = static_cast<unsigned char*>(got);
  const uint64_t before = RoundUp(reinterpret_cast<uintptr_t>(range), kTable) - reinterpret_cast<uintptr_t>(range);
  if (before > 0) ::munmap(range, before);
  if (before < kTable) ::munmap(range + before + size_bytes, kTable - before);
  return range + before;
}

// A word that reads 1 here and 0 in every forked child, whichever way it was forked.
std::atomic<uint32_t>* MakeForkGuard() {
  void* page = ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return nullptr;
  if (::madvise(page, kPage, MADV_WIPEONFORK) != 0) {
    ::munmap(page, kPage);
    return nullptr;
  }
  auto* word = new (page) std::atomic<uint32_t>(1);
  return word;
}

}  // namespace

Result<std::unique_ptr<AppendFile>> AppendFile::Create(const AppendFileOptions& options) {
  std::unique_ptr<AppendFile> file(new AppendFile(options));
  ASSAY_RETURN_IF_ERROR(file->Map());
  return file;
}

Status AppendFile::Map() {
  guard_ = MakeForkGuard();
  if (guard_ == nullptr) return ErrnoStatus(options_.path, "cannot make a fork guard", errno);
  options_.reserve_step = RoundUp(std::max(options_.reserve_step, kMinReserve), kPage);
  options_.ready_step = RoundUp(std::max(options_.ready_step, kPage), kPage);
  fd_ = FileDescriptor(::open(options_.path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!fd_.valid()) return ErrnoStatus(options_.path, "cannot create the trace file", errno);
  struct statfs system;
  if (::fstatfs(fd_.get(), &system) == 0) {
    const auto magic = static_cast<uint32_t>(system.f_type);
    if (magic == kExt4Magic || magic == kXfsMagic) storage_ = Storage::kDisk;
    if (magic == kTmpfsMagic) storage_ = Storage::kMemory;
  }

  // PROT_NONE and MAP_NORESERVE: neither memory nor commit charge, so a cap of gigabytes costs nothing until it is
  // used.
  // Addresses only, no memory. Under a tight RLIMIT_AS a smaller cap is better than no trace.
  event_cap_ = kHeaderBytes + RoundUp(std::clamp(options_.byte_cap, kPage, kLargestCap), kPage);
  for (;; event_cap_ = RoundUp(event_cap_ / 2, kPage)) {
    range_bytes_ = event_cap_ + kSlack;
    base_ = SetAside(range_bytes_);
    if (base_ != nullptr) break;
    if (event_cap_ <= uint64_t{1} << 20) {
      const Status status = ErrnoStatus(options_.path, "cannot set addresses aside", errno);
      ::unlink(options_.path.c_str());
      return status;
    }
  }
  ::madvise(base_, range_bytes_, MADV_DONTFORK);

  // The first two pages: the header's, and one for the process record, so that a file that was made can be filled.
  format::DropReason why{};
  if (!Grow(2 * kHeaderBytes, &why)) {
    const Status status = ErrnoStatus(options_.path, "cannot reserve space for the trace", last_errno());
    ::unlink(options_.path.c_str());
    return status;
  }
  format::FileHeader header{};
  std::memcpy(header.magic, format::kMagic, sizeof header.magic);
  header.major = format::kMajor;
  header.minor = format::kMinor;
  header.min_reader_minor = format::kMinReaderMinor;
  header.header_bytes = kHeaderBytes;
  header.file_id = RandomBits();
  header.crc = Crc32c(&header, offsetof(format::FileHeader, crc));
  // The tail before the magic: a reader that sees the magic finds a tail that it can use.
  LiveWord(&format::LiveArea::tail).store(kHeaderBytes, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  std::memcpy(base_, &header, sizeof header);
  return {};
}

AppendFile::~AppendFile() {
  // In a forked child the range was not inherited, and its addresses may belong to somebody else by now.
  if (base_ != nullptr && !forked()) ::munmap(base_, range_bytes_);
  if (guard_ != nullptr) ::munmap(guard_, kPage);
}

// One small buffer again and again: a large one would throw out of the caches what the host keeps there. 256 KiB in a
// call, which the file system may take in one folio: fewer cost more a page, and more would cost kernels that do not
// map a folio by one fault (ext4 on Linux 6.16: a fault takes time by the folio's size).
int AppendFile::WriteZeros(uint64_t offset, uint64_t size_bytes) {
  static const char zeros[2 * kPage] = {};
  for (uint64_t done = 0; done < size_bytes;) {
    iovec parts[32];
    int n = 0;
    for (uint64_t at = done; n < 32 && at < size_bytes; ++n) {
      const size_t part = static_cast<size_t>(std::min<uint64_t>(sizeof zeros, size_bytes - at));
      parts[n] = {const_cast<char*>(zeros), part};
      at += part;
    }
    const ssize_t put = ::pwritev(fd_.get(), parts, n, static_cast<off_t>(offset + done));
    if (put < 0 && errno == EINTR) continue;
    // A write of 0 bytes is no progress and must not become an endless loop.
    if (put <= 0) return put < 0 ? errno : ENOSPC;
    done += static_cast<uint64_t>(put);
  }
  return 0;
}

// Space on disk and addresses for it. Returns 0 or an errno.
int AppendFile::ReserveMapped(uint64_t end) {
  if (options_.reserve_hook != nullptr) {
    if (const int error = options_.reserve_hook(reserved_end_, end - reserved_end_); error != 0) return error;
  }
  // Beyond RLIMIT_FSIZE the kernel would send SIGXFSZ, which ends a host that does not expect it.
  if (end > FileSizeLimit()) return EFBIG;
  const uint64_t size_bytes = end - reserved_end_;
  int failed = 0;
  do {
    if (storage_ == Storage::kMemory) break;
    failed = ::fallocate(fd_.get(), 0, static_cast<off_t>(reserved_end_), static_cast<off_t>(size_bytes));
  } while (failed != 0 && errno == EINTR);
  // Without fallocate on this file system, and in memory, the zeros of MakeReady allocate, a piece at a time.
  if (failed != 0 && errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL) return errno;
  void* at = base_ + reserved_end_;
  void* got = ::mmap(at, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_.get(),
                     static_cast<off_t>(reserved_end_));
  if (got == MAP_FAILED) return errno;
  ::madvise(at, size_bytes, MADV_DONTFORK);
  // What was written long ago need not count as memory of the host; it stays in the page cache until it is on disk.
  if (reserved_end_ > 2 * options_.reserve_step) {
    ::madvise(base_ + kPage, reserved_end_ - options_.reserve_step - kPage, MADV_DONTNEED);
  }
  reserved_end_ = end;
  return 0;
}

// Takes the page faults of [from, end), which holds zeros. Touching the pages costs a third of what populating them
// does, which looks every page up again (ext4, Linux 6.18: 60 ns a page beside 190). A read is enough in memory and
// maps 16 pages at a time; on a disk only a write makes a page writable.
int AppendFile::TakeFaults(uint64_t from, uint64_t end) {
  if (storage_ == Storage::kUnknown) {
#ifdef MADV_POPULATE_WRITE
    // EINVAL: Linux before 5.14, the faults then come one by one.
    if (::madvise(base_ + from, end - from, MADV_POPULATE_WRITE) != 0 && errno != EINVAL) {
      return errno == EFAULT ? ENOSPC : errno;
    }
#endif
    return 0;
  }
  for (uint64_t at = from; at < end; at += kPage) {
    volatile unsigned char* byte = base_ + at;
    if (storage_ == Storage::kDisk) {
      *byte = 0;
    } else {
      (void)*byte;
    }
  }
  return 0;
}

// Writes zeros and takes the page faults of [ready_end_, end). Zeros through the file turn unwritten extents into
// written ones in bulk: a first touch of such a page then costs 0.06 us where it cost 1 (ext4, Linux 6.18). And what
// the file system still could refuse (copy on write, quota) is refused here, as an error instead of SIGBUS.
int AppendFile::MakeReady(uint64_t end) {
  const uint64_t from = ready_end_.load(std::memory_order_relaxed);
  if (end > FileSizeLimit()) return EFBIG;
  if (const int error = WriteZeros(from, end - from); error != 0) return error;
  if (const int error = TakeFaults(from, end); error != 0) return error;
  ready_end_.store(end, std::memory_order_release);
  return 0;
}

// Only the first of several threads that ran out of space pays; the others find the work done when they get the lock. A
// large step is tried first and halved while the disk refuses, down to what the record needs.
bool AppendFile::Grow(uint64_t needed_end, format::DropReason* why) {
  const std::lock_guard<std::mutex> lock(grow_mutex_);
  const uint64_t ready = ready_end_.load(std::memory_order_relaxed);
  // Grown by another thread while this one waited for the lock.
  if (needed_end <= ready) return true;
  if (needed_end > range_bytes_) {
    *why = format::kDropByteCap;
    return false;
  }
  needed_end = RoundUp(needed_end, kPage);
  int error = 0;
  if (needed_end > reserved_end_) {
    const uint64_t least = needed_end - reserved_end_;
    uint64_t step = std::min(std::max(options_.reserve_step, least), range_bytes_ - reserved_end_);
    error = ReserveMapped(reserved_end_ + step);
    while (error != 0 && step > std::max(least, kMinReserve)) {
      step = std::max({RoundUp(step / 2, kPage), least, kMinReserve});
      error = ReserveMapped(reserved_end_ + step);
    }
  }
  // To a multiple of the step, so that folios can be as large as it; less where that is refused.
  if (error == 0) error = MakeReady(std::min(reserved_end_, RoundUp(needed_end, options_.ready_step)));
  if (error != 0 && needed_end <= reserved_end_) error = MakeReady(needed_end);
  if (error != 0) {
    last_errno_.store(error, std::memory_order_relaxed);
    *why = format::kDropDiskFull;
    return false;
  }
  return true;
}

unsigned char* AppendFile::Reserve(uint32_t size_bytes, bool aux, format::DropReason* why) {
  auto tail_word = LiveWord(&format::LiveArea::tail);
  uint64_t tail = tail_word.load(std::memory_order_relaxed);
  for (;;) {
    if ((tail & format::kTailClosed) != 0) {
      *why = format::kDropInternal;
      return nullptr;
    }
    const uint64_t end = tail + size_bytes;
    if (!aux && end > event_cap_) {
      *why = format::kDropByteCap;
      return nullptr;
    }
    if (end > ready_end_.load(std::memory_order_acquire)) {
      if (!Grow(end, why)) return nullptr;
      tail = tail_word.load(std::memory_order_relaxed);
      continue;
    }
    // A compare-exchange and not an add: a refused reservation leaves no hole, and smaller records may still fit.
    if (!tail_word.compare_exchange_weak(tail, end, std::memory_order_relaxed)) continue;
    unsigned char* record = base_ + tail;
    StoreTag(record, format::kTagReserved, size_bytes, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);  // the length stands before any byte of the body
    return record;
  }
}

void AppendFile::Commit(unsigned char* record) {
  uint32_t size_bytes;
  std::memcpy(&size_bytes, record + 4, 4);
  const uint32_t crc = codec::RecordCrc(record, size_bytes);
  std::memcpy(record + 8, &crc, 4);
  StoreTag(record, format::kTagCommitted, size_bytes, std::memory_order_release);
  LiveWord(&format::LiveArea::committed_bytes).fetch_add(size_bytes, std::memory_order_release);
}

Status AppendFile::Flush() {
  const uint64_t end = ready_end_.load(std::memory_order_acquire);
  if (::msync(base_, end, MS_SYNC) != 0) return ErrnoStatus(path(), "cannot flush", errno);
  return {};
}

Status AppendFile::Close() {
  const uint64_t tail = LiveWord(&format::LiveArea::tail).fetch_or(format::kTailClosed, std::memory_order_acq_rel);
  if ((tail & format::kTailClosed) != 0) return {};
  const auto in_flight = [&] {
    return LiveWord(&format::LiveArea::committed_bytes).load(std::memory_order_acquire) != tail - kHeaderBytes;
  };
  // Polled and not signalled: a committing thread must not pay for a wake-up at every record.
  for (int waited_ms = 0; in_flight(); ++waited_ms) {
    if (waited_ms == 1000) {
      return Status::Internal(path() + ": closed with records in flight; their space stays reserved");
    }
    const timespec pause{0, 1000 * 1000};
    ::nanosleep(&pause, nullptr);
  }
  LiveWord(&format::LiveArea::closed).store(1, std::memory_order_release);
  const std::lock_guard<std::mutex> lock(grow_mutex_);
  // The counters stay usable: only whole pages behind the last record are given back.
  const uint64_t keep = RoundUp(tail, kPage);
  if (keep < reserved_end_) {
    ::mmap(base_ + keep, reserved_end_ - keep, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
           0);
    reserved_end_ = keep;
  }
  ready_end_.store(keep, std::memory_order_relaxed);
  if (::ftruncate(fd_.get(), static_cast<off_t>(tail)) != 0) return ErrnoStatus(path(), "cannot trim", errno);
  struct stat info;
  if (::fstat(fd_.get(), &info) == 0 && info.st_nlink == 0) {
    return Status::Environment(path() + ": was deleted while it was written; what was recorded is lost");
  }
  return {};
}

}  // namespace assay
