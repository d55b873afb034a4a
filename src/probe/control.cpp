#include "probe/control.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <set>

#include "base/file_name.h"
#include "base/files.h"
#include "base/hex.h"

namespace assay {
namespace {

// Not ".assay": readers of the trace must not take it for a trace file.
constexpr const char* kSuffix = ".control";
constexpr size_t kFileBytes = 4096;

// A page that others write: copied out, then bounded.
// page is a copy that nobody else writes.
Selection ReadSelection(const ControlPage& page) {
  Selection selection;
  selection.has_steps = page.has_steps != 0;
  for (size_t i = 0; i < std::min<size_t>(page.n_steps, kControlSteps); ++i) {
    selection.steps.ranges.emplace_back(page.steps[i][0], page.steps[i][1]);
  }
  const size_t n = std::min<size_t>(page.n_requests, kControlRequests);
  selection.requests.assign(page.requests, page.requests + n);
  std::sort(selection.requests.begin(), selection.requests.end());
  return selection;
}

// Word by word, as another process may be writing it.
void CopyPage(const ControlPage* from, ControlPage* to) {
  static_assert(sizeof(ControlPage) % sizeof(uint64_t) == 0);
  auto* source = reinterpret_cast<uint64_t*>(const_cast<ControlPage*>(from));
  auto* target = reinterpret_cast<uint64_t*>(to);
  for (size_t i = 0; i < sizeof(ControlPage) / sizeof(uint64_t); ++i) {
    target[i] = std::atomic_ref<uint64_t>(source[i]).load(std::memory_order_relaxed);
  }
}

// Two hosts may share the trace folder over a network; a process number means nothing on the other one.
std::string HostName() {
  char text[256] = {};
  return ::gethostname(text, sizeof(text) - 1) == 0 ? text : "";
}

}  // namespace

bool Selection::wants_request(uint64_t request) const {
  return requests.empty() || std::binary_search(requests.begin(), requests.end(), request);
}

// ---- The host's side ----

// Two pages at one mapping: private for the owner's word, and behind it the one that a file is mapped over.
std::unique_ptr<ArmSwitch> ArmSwitch::Create(const std::string& dir, const std::string& host, bool armed) try {
  std::unique_ptr<ArmSwitch> made(new ArmSwitch);
  // Pages may be larger than the file's 4096 bytes (64 KiB on some machines); the file is then as large as a page.
  made->page_bytes_ = std::max(static_cast<size_t>(::sysconf(_SC_PAGESIZE)), kFileBytes);
  void* pages = ::mmap(nullptr, 2 * made->page_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) return nullptr;
  made->page_ = reinterpret_cast<ControlPage*>(static_cast<unsigned char*>(pages) + made->page_bytes_);
  made->selections_.push_back(std::make_unique<Selection>());
  made->current_.store(made->selections_.back().get());
  made->dir_ = dir;
  made->host_ = host;
  made->page_->version = kControlVersion;
  made->arm(armed);
  (void)made->MapFile();
  return made;
} catch (const std::bad_alloc&) {
  return nullptr;
}

ArmSwitch::~ArmSwitch() {
  if (page_ == nullptr) return;
  if (!path_.empty()) ::unlink(path_.c_str());
  ::munmap(reinterpret_cast<unsigned char*>(page_) - page_bytes_, 2 * page_bytes_);
}

// Puts a new file in the page's place, with what the page says now. Every byte is written before it is mapped, so that
// a full disk is an error here and no SIGBUS later.
bool ArmSwitch::MapFile() {
  path_.clear();
  if (dir_.empty() || FileSizeLimit() < page_bytes_) return false;
  std::vector<unsigned char> bytes(page_bytes_);
  ControlPage content{};
  CopyPage(page_, &content);
  content.pid = ::getpid();
  std::memset(content.host, 0, sizeof(content.host));
  host_.copy(content.host, sizeof(content.host) - 1);
  std::memcpy(bytes.data(), &content, sizeof(content));
  std::string path =
      dir_ + "/" + SafeFileName(host_) + "-" + std::to_string(content.pid) + "-" + Hex64(RandomBits()) + kSuffix;
  FileDescriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!file.valid()) return false;
  if (WriteAll(file.get(), bytes.data(), bytes.size()) != 0 ||
      ::mmap(page_, page_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file.get(), 0) == MAP_FAILED) {
    ::unlink(path.c_str());
    return false;
  }
  path_ = std::move(path);
  return true;
}

// Runs in the handler of fork(), where the child has a single thread.
void ArmSwitch::Renew() {
  new (&mutex_) std::mutex();
  path_.clear();  // the parent's file, which is not for this process to remove
  // The page is the parent's: from here on it is this process's alone, whether a file can be made or not.
  ControlPage content{};
  CopyPage(page_, &content);
  if (::mmap(page_, page_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
      MAP_FAILED) {
    return;  // stays shared with the parent
  }
  std::memcpy(page_, &content, sizeof(content));
  try {
    (void)MapFile();
  } catch (const std::bad_alloc&) {
    path_.clear();
  }
}

// A sequence lock: the copy counts only when the generation is even and the same before and after. A torn or stale
// read keeps the selection that held before, until the next observation looks again.
void ArmSwitch::Reread(uint32_t generation) {
  if (generation % 2 != 0) return;  // being written: what holds, holds until it is done
  std::lock_guard lock(mutex_);
  ControlPage content{};
  CopyPage(page_, &content);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (std::atomic_ref<uint32_t>(page_->generation).load(std::memory_order_relaxed) != generation) return;
  if (seen_.load(std::memory_order_relaxed) == generation) return;
  try {
    // Whoever writes on without end costs memory here: a bound, beyond which changes are no longer followed.
    if (selections_.size() >= 4096) return;
    selections_.push_back(std::make_unique<Selection>(ReadSelection(content)));
    current_.store(selections_.back().get(), std::memory_order_release);
  } catch (const std::bad_alloc&) {
    return;
  }
  seen_.store(generation, std::memory_order_release);
}

// ---- The side of `assay arm` ----

namespace {

// A process number rather than a folder.
bool IsNumber(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
}

// A file of /proc, which has no size; empty when it cannot be read.
std::string ReadProc(const std::string& path) {
  std::string text;
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  char buffer[16384];
  for (ssize_t got = 0; file.valid() && text.size() < (size_t{1} << 26);) {
    got = ::read(file.get(), buffer, sizeof(buffer));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    text.append(buffer, static_cast<size_t>(got));
  }
  return text;
}

// The parent of a process by /proc/PID/stat, or 0.
int ParentOf(const std::string& pid) {
  const std::string stat = ReadProc("/proc/" + pid + "/stat");
  const size_t behind_name = stat.rfind(") ");
  // The name in parentheses may hold anything; behind its last ") " follow a letter of state, a space, and the parent.
  if (behind_name == std::string::npos || behind_name + 4 > stat.size()) return 0;
  return static_cast<int>(std::strtol(stat.c_str() + behind_name + 4, nullptr, 10));
}

// A process and all its descendants.
// By the parents that /proc names at one moment; a child whose parent has ended belongs to init and is missed.
std::set<int> FamilyOf(int root) {
  std::set<int> family{root};
  const Result<std::vector<std::string>> entries = ListDir("/proc");
  if (!entries.ok()) return family;
  // Repeated until nothing is added: /proc has no order, so a child may come before its parent is known to belong.
  std::vector<std::pair<int, int>> parents;
  for (const std::string& entry : *entries) {
    if (IsNumber(entry)) parents.emplace_back(std::atoi(entry.c_str()), ParentOf(entry));
  }
  for (bool grew = true; grew;) {
    grew = false;
    for (const auto& [pid, parent] : parents) grew = (family.count(parent) && family.insert(pid).second) || grew;
  }
  return family;
}

// Control files that a process has mapped.
// Deleted files end in " (deleted)" there and so do not match.
void AddMapped(int pid, std::vector<std::string>* paths) {
  const std::string maps = ReadProc("/proc/" + std::to_string(pid) + "/maps");
  for (size_t start = 0; start < maps.size();) {
    const size_t end = std::min(maps.find('\n', start), maps.size());
    const std::string line = maps.substr(start, end - start);
    // A line of maps: addresses, rights, offset, device, inode, then the path, which begins with the first slash.
    const size_t slash = line.find('/');
    if (slash != std::string::npos && line.size() > std::strlen(kSuffix) &&
        line.compare(line.size() - std::strlen(kSuffix), std::string::npos, kSuffix) == 0) {
      paths->push_back(line.substr(slash));
    }
    start = end + 1;
  }
}

}  // namespace

// 9 digits bound the number to an int; process numbers have at most 7.
Result<std::vector<std::string>> FindControlFiles(const std::string& target) {
  std::vector<std::string> paths;
  if (IsDirectory(target)) {
    ASSAY_ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDir(target));
    for (const std::string& name : names) {
      if (name.size() > std::strlen(kSuffix) && name.ends_with(kSuffix)) paths.push_back(target + "/" + name);
    }
    if (paths.empty()) return Status::BadInput(target + ": no recording is running in this folder");
    return paths;
  }
  if (!IsNumber(target) || target.size() > 9) {
    return Status::BadInput(target + ": neither a trace folder nor the number of a process");
  }
  const int pid = std::atoi(target.c_str());
  // kill() takes 0 for the caller's own group, and every process descends from it.
  if (pid == 0) return Status::BadInput(target + ": not the number of a process");
  if (::kill(pid, 0) != 0 && errno == ESRCH) return Status::BadInput("no process " + target);
  for (int member : FamilyOf(pid)) AddMapped(member, &paths);
  std::sort(paths.begin(), paths.end());
  paths.erase(std::unique(paths.begin(), paths.end()), paths.end());
  if (paths.empty()) {
    return Status::BadInput("process " + target +
                            " and its children record nothing that can be armed from outside: start it with ASSAY set "
                            "(ASSAY_ARMED=off to begin disarmed), into a trace folder");
  }
  return paths;
}

// The flag is written last on arming, when the selection is in place. A writer that dies between the two stores of
// the generation leaves it odd: the host ignores the page then, and the next writer makes it even.
ControlledProcess WriteControl(const std::string& path, bool on, const Selection& selection) {
  ControlledProcess result;
  result.path = path;
  FileDescriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));
  struct stat info {};
  if (!file.valid() || ::fstat(file.get(), &info) != 0) {
    result.problem = std::string("cannot open: ") + std::strerror(errno);
    return result;
  }
  if (!S_ISREG(info.st_mode) || info.st_size < static_cast<off_t>(kFileBytes)) {
    result.problem = "no control file";
    return result;
  }
  void* mapped = ::mmap(nullptr, kFileBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (mapped == MAP_FAILED) {
    result.problem = std::string("cannot map: ") + std::strerror(errno);
    return result;
  }
  auto* page = static_cast<ControlPage*>(mapped);
  ControlPage now{};
  CopyPage(page, &now);
  now.host[sizeof(now.host) - 1] = '\0';
  result.host = now.host;
  result.pid = now.pid;
  result.was_armed = now.armed != 0;
  // A control file outlives a host that was killed: whether its process is alive is asked before anything is changed.
  if (now.version != kControlVersion) {
    result.problem = "no control file of this version";
  } else if (result.host != HostName().substr(0, sizeof(now.host) - 1)) {
    result.problem = "its process runs on host " + result.host + "; run this there";
  } else if (now.pid <= 0 || (::kill(now.pid, 0) != 0 && errno == ESRCH)) {
    result.problem = "its process " + std::to_string(now.pid) + " has ended without closing";
  } else {
    std::atomic_ref<uint32_t> generation(page->generation);
    if (on) {
      // Whatever a writer that died has left, the next odd number begins a change.
      const uint32_t even = (now.generation + 1) & ~1u;
      generation.store(even + 1, std::memory_order_release);
      std::atomic_thread_fence(std::memory_order_release);
      page->has_steps = selection.has_steps ? 1 : 0;
      // Counts of our own bound the loops: the page is shared, and what stands in it may change at any moment.
      const size_t n_steps = std::min(selection.steps.ranges.size(), kControlSteps);
      const size_t n_requests = std::min(selection.requests.size(), kControlRequests);
      page->n_steps = static_cast<uint32_t>(n_steps);
      for (size_t i = 0; i < n_steps; ++i) {
        page->steps[i][0] = selection.steps.ranges[i].first;
        page->steps[i][1] = selection.steps.ranges[i].second;
      }
      page->n_requests = static_cast<uint32_t>(n_requests);
      std::copy_n(selection.requests.begin(), n_requests, page->requests);
      generation.store(even + 2, std::memory_order_release);
    }
    std::atomic_ref<int32_t>(page->armed).store(on ? 1 : 0, std::memory_order_release);
  }
  ::munmap(mapped, kFileBytes);
  return result;
}

}  // namespace assay
