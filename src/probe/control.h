// Arming from outside. Beside each trace file that is being written lies a control file of one page, NAME.control
// (host, process number and random digits of its own), which the host has mapped: its first word is the armed flag that
// every probe reads, so that `assay arm` and `assay disarm` act with a store into shared memory, without a signal, a
// thread or a look at the disk in the host. The rest of the page narrows what is recorded while armed: steps, requests.
//
// The page is written by others: whatever stands in it, the host reads bounded numbers of fields and nothing else of
// it. It does not survive somebody else shortening the file, as no shared mapping does; removing it is fine.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/status.h"
#include "probe/settings.h"

namespace assay {

// Room in the page; `assay arm` refuses more intervals or requests than fit.
inline constexpr size_t kControlSteps = 32;
inline constexpr size_t kControlRequests = 256;

// The control file; native-endian, as it never leaves the machine.
struct ControlPage {
  int32_t armed;        // first: read by assay_armed
  uint32_t version;     // kControlVersion
  uint32_t generation;  // odd while the rest is being written; changes with every change
  int32_t pid;          // of the process that records
  char host[64];        // ends with NUL
  uint32_t has_steps;   // 0: the settings' own
  uint32_t n_steps;
  uint32_t n_requests;  // 0: all
  uint32_t reserved;
  int64_t steps[kControlSteps][2];  // inclusive
  uint64_t requests[kControlRequests];
};
inline constexpr uint32_t kControlVersion = 0x31435341;  // "ASC1"
static_assert(sizeof(ControlPage) <= 4096 && offsetof(ControlPage, armed) == 0);

// What was asked for while armed.
struct Selection {
  bool has_steps = false;
  IntervalSet steps;
  std::vector<uint64_t> requests;  // sorted; empty: all
  // True for every request when none were named.
  bool wants_request(uint64_t request) const;
};

// The host's side. The page lies behind a private one whose last word is the owner's (owner()): a C handle that points
// at the armed flag leads back to its recorder.
class ArmSwitch {
 public:
  // dir: of the trace; empty: no control file, only this process can arm. A file that cannot be made is no error:
  // path() is empty then. nullptr: no memory.
  static std::unique_ptr<ArmSwitch> Create(const std::string& dir, const std::string& host, bool armed);
  ~ArmSwitch();  // removes the file
  ArmSwitch(const ArmSwitch&) = delete;

  bool armed() const { return armed_word().load(std::memory_order_relaxed) != 0; }
  // Relaxed: an observation that races with it may be recorded or not, and nothing else depends on the order.
  void arm(bool on) { armed_word().store(on ? 1 : 0, std::memory_order_relaxed); }
  // What the page asks for now; valid until the switch is destroyed. One relaxed load while nothing changes.
  const Selection& selection() {
    const auto generation = std::atomic_ref<uint32_t>(page_->generation).load(std::memory_order_acquire);
    if (generation != seen_.load(std::memory_order_acquire)) Reread(generation);
    return *current_.load(std::memory_order_acquire);
  }

  // The owner must outlive every handle to the page.
  void set_owner(void* owner) { *OwnerSlot(page_) = owner; }
  static void* OwnerOf(void* page) { return *OwnerSlot(page); }
  void* page() { return page_; }
  const std::string& path() const { return path_; }
  // After fork(), in the child: a file of its own, at the same address.
  void Renew();

 private:
  ArmSwitch() = default;
  // Last word of the private page before the control page: outside what other processes can write.
  static void** OwnerSlot(void* page) { return reinterpret_cast<void**>(page) - 1; }
  std::atomic_ref<int32_t> armed_word() const { return std::atomic_ref<int32_t>(page_->armed); }
  // False when there is no file; the page then stays private and works within this process.
  bool MapFile();
  // Takes over what the page says at this generation, if it can be read whole.
  void Reread(uint32_t generation);

  std::string dir_, host_, path_;
  size_t page_bytes_ = 0;
  // Never moves: C handles point at its first word.
  ControlPage* page_ = nullptr;
  std::mutex mutex_;                                    // of rereading
  std::atomic<uint32_t> seen_{0};                       // generation that current_ was read at
  std::vector<std::unique_ptr<Selection>> selections_;  // all that were ever current: another thread may read one
  std::atomic<const Selection*> current_{nullptr};
};

// ---- The side of `assay arm` ----

struct ControlledProcess {
  std::string path;  // of the control file
  std::string host;
  int32_t pid = 0;
  bool was_armed = false;
  std::string problem;  // why it could not be changed; empty: done
};

// Control files: target is a trace folder, or the number of a process, whose children are included.
// kBadInput: no such folder or process, or no recording runs there.
Result<std::vector<std::string>> FindControlFiles(const std::string& target);
// Changes one. selection: kept when on is false. The problem is in the result.
ControlledProcess WriteControl(const std::string& path, bool on, const Selection& selection);

}  // namespace assay
