// One append-only trace file, reserved on disk before it is mapped, shared by the threads of one process.
//
// A record is reserved (atomic compare-exchange of the tail), filled in place, and committed by a release store of its
// tag. No system call lies on that path while reserved space lasts; growing takes a mutex and a few system calls. The
// address range of the whole cap is set aside at the start, so that a record never straddles two mappings. Nothing is
// ever touched beyond space that the file system has promised: a full disk is an error code here, never SIGBUS.
//
// It does not survive somebody else shortening the file, as no shared mapping does. After fork() the child must not
// touch it (the mapping is not inherited); forked() tells.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "base/files.h"
#include "base/status.h"
#include "trace/format.h"

namespace assay {

struct AppendFileOptions {
  std::string path;                            // must not exist
  uint64_t byte_cap = uint64_t{4} << 30;       // events are refused beyond it
  uint64_t reserve_step = uint64_t{64} << 20;  // growth; halved down to 64 KiB when the disk refuses
  uint64_t ready_step = uint64_t{256} << 10;   // zeroed and made present ahead of the writers at a time
  int (*reserve_hook)(uint64_t offset, uint64_t size_bytes) = nullptr;  // tests: errno to fail with, 0 to go on
};

class AppendFile {
 public:
  // kEnvironment: the file exists, the disk refused the first pages, or no addresses can be set aside. The caller's
  // byte_cap is halved, down to 1 MiB, where addresses are short (RLIMIT_AS).
  static Result<std::unique_ptr<AppendFile>> Create(const AppendFileOptions& options);
  // Unmaps and closes; call Close() first for a trimmed file.
  ~AppendFile();

  // Space for one record of size_bytes (a multiple of 8, at least 16, at most format::kMaxRecordBytes), its reserved
  // tag in place, everything else zero; nullptr when refused, *why then tells (kDropByteCap, kDropDiskFull,
  // kDropInternal after Close). aux: the record is no event and may use the slack behind the cap.
  unsigned char* Reserve(uint32_t size_bytes, bool aux, format::DropReason* why);
  // Computes the checksum and publishes. record comes from Reserve; its kind and body are in place.
  void Commit(unsigned char* record);

  // record comes from Reserve.
  uint64_t OffsetOf(const unsigned char* record) const { return static_cast<uint64_t>(record - base_); }
  // Unique in the file; threads that record at once may commit in another order.
  uint64_t NextSequence() { return LiveWord(&format::LiveArea::next_sequence).fetch_add(1, std::memory_order_relaxed); }
  // In the file itself, so the count survives kill -9 and needs no space.
  void CountDrop(format::DropReason why) {
    std::atomic_ref<uint64_t>(live()->drops[why]).fetch_add(1, std::memory_order_relaxed);
  }
  // Observations refused for this reason so far; a hint while other threads record.
  uint64_t drops(format::DropReason why) const {
    return std::atomic_ref<uint64_t>(live()->drops[why]).load(std::memory_order_relaxed);
  }
  // Head of the chain of non-event records. The caller serialises writers of such records; the release store lets a
  // reader of the live file find the record that the offset names.
  uint64_t aux_head() const { return LiveWord(&format::LiveArea::aux_head).load(std::memory_order_relaxed); }
  void set_aux_head(uint64_t offset) { LiveWord(&format::LiveArea::aux_head).store(offset, std::memory_order_release); }

  // In the child of a fork: this object belongs to the parent's file and must only be destroyed.
  bool forked() const { return guard_->load(std::memory_order_relaxed) == 0; }
  const std::string& path() const { return options_.path; }
  // Of the last growth that failed, 0: none did.
  int last_errno() const { return last_errno_.load(std::memory_order_relaxed); }

  Status Flush();  // msync
  // Refuses further reservations, waits up to a second for records in flight, gives the unused tail back and marks the
  // file closed. With records still in flight after that, the tail stays reserved. kEnvironment when the file has been
  // deleted meanwhile: writing to it went well, and nothing of it is left.
  Status Close();

 private:
  explicit AppendFile(AppendFileOptions options) : options_(std::move(options)) {}
  // Opens, sets the address range aside, writes the header.
  Status Map();
  // Makes [0, needed_end) ready, or says why not; true when another thread has done it meanwhile.
  bool Grow(uint64_t needed_end, format::DropReason* why);
  // These four return 0 or an errno; under grow_mutex_, or from Map before the object is shared.
  int WriteZeros(uint64_t offset, uint64_t size_bytes);
  int TakeFaults(uint64_t from, uint64_t end);
  int ReserveMapped(uint64_t end);
  int MakeReady(uint64_t end);

  // Inside the mapping: the one struct of the format that is used in place, since its words are atomics.
  format::LiveArea* live() const { return reinterpret_cast<format::LiveArea*>(base_ + format::kLiveOffset); }
  std::atomic_ref<uint64_t> LiveWord(uint64_t format::LiveArea::*word) const {
    return std::atomic_ref<uint64_t>(live()->*word);
  }

  AppendFileOptions options_;
  // Kept for growing and for trimming at Close.
  FileDescriptor fd_;
  // What zeros that were written are worth there.
  enum class Storage : uint8_t {
    kUnknown,  // may refuse a page when it is touched: copy on write, network, overlays
    kDisk,     // blocks are there: touching a page cannot fail for want of space
    kMemory,   // the same, and space that is reserved is memory that is used up: none is ahead of the zeros
  } storage_ = Storage::kUnknown;
  // First byte of the file in memory; never moves, as records are addressed by pointer while they are filled.
  unsigned char* base_ = nullptr;
  uint64_t range_bytes_ = 0;            // address range, cap and slack
  uint64_t event_cap_ = 0;              // first offset refused to events
  uint64_t reserved_end_ = 0;           // reserved on disk and mapped; under grow_mutex_
  std::atomic<uint64_t> ready_end_{0};  // zeroed and present: where records may be put
  std::atomic<int> last_errno_{0};
  std::mutex grow_mutex_;
  std::atomic<uint32_t>* guard_ = nullptr;  // a page that the kernel wipes in a forked child
};

}  // namespace assay
