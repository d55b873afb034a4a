#include "trace/writer.h"

#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <unordered_map>

#include "base/file_name.h"
#include "base/hex.h"
#include "base/wall_clock.h"
#include "trace/append_file.h"
#include "trace/codec.h"
#include "trace/manifest.h"
#include "trace/payload_store.h"

namespace assay {
namespace {

using format::DropReason;

// In one pass: what stands in the place of a % is not searched for others, and "%%p" is a percent and a p.
std::string Expanded(std::string_view pattern, const ProcessInfo& process, int number) {
  std::string out;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char what = pattern[i] == '%' && i + 1 < pattern.size() ? pattern[i + 1] : '\0';
    std::string with(1, pattern[i]);  // what means nothing stays
    if (what == 'r') with = std::to_string(process.rank);
    if (what == 'p') with = std::to_string(process.pid);
    if (what == 'h') with = SafeFileName(process.host);
    if (what == 'i') with = std::to_string(number);
    i += std::string_view("rphi%").find(what) != std::string_view::npos;
    out += with;
  }
  while (out.size() > 1 && out.back() == '/') out.pop_back();
  return out;
}

// Expands % and makes the folder. %i takes the first number whose folder does not exist yet.
Result<std::string> MakeTraceDir(const std::string& pattern, const ProcessInfo& process) {
  if (pattern.empty()) return Status::Usage("trace folder: empty path; set ASSAY_DIR or pass a folder");
  const std::string dir = Expanded(pattern, process, 0);
  if (dir == Expanded(pattern, process, 1)) {  // no %i
    ASSAY_RETURN_IF_ERROR(MakeDirs(dir));
    return dir;
  }
  for (int i = 0; i < 1000000; ++i) {
    const std::string candidate = Expanded(pattern, process, i);
    const size_t slash = candidate.rfind('/');
    if (slash != std::string::npos && slash > 0) ASSAY_RETURN_IF_ERROR(MakeDirs(candidate.substr(0, slash)));
    if (::mkdir(candidate.c_str(), 0777) == 0) return candidate;  // atomic: two processes never get the same number
    if (errno != EEXIST) return ErrnoStatus(candidate, "cannot make the trace folder", errno);
  }
  return Status::Environment(pattern + ": no free number for %i below 1000000");
}

// A record that a forked child must have in its own file too: process metadata and sites. The list only grows, and
// nodes are published by an atomic store, so a child may walk it whatever the parent's threads did when it forked.
struct Replay {
  format::RecordKind kind;
  std::string body;
  SiteInfo site;
  std::atomic<Replay*> next{nullptr};
};

// Everything that belongs to one file. A forked child makes a new one and leaves the parent's copy alone.
struct Session {
  std::unique_ptr<AppendFile> file;  // null: could not be opened, every event is a drop
  ProcessInfo process;
  std::string error;  // why file is null
  std::atomic<uint64_t> orphan_drops{0};
  std::atomic<uint64_t> payload_left{0};
  std::mutex aux_mutex;  // site table, aux chain, replay list
  std::unordered_map<std::string, uint32_t> site_ids;
  // Of the process that opened it; tells a fork where there is no file whose guard would.
  pid_t pid = 0;
  bool closed = false;
};

// For a user: names the setting that would let the event in.
const char* ReasonText(DropReason why) {
  switch (why) {
    case format::kDropByteCap:
      return "byte cap reached (ASSAY_BUDGET)";
    case format::kDropDiskFull:
      return "no space for the trace";
    case format::kDropPayloadBudget:
      return "payload budget reached (ASSAY_BUDGET)";
    case format::kDropInternal:
      break;
  }
  return "trace is closed";
}

}  // namespace

// session is replaced at most once a process, by the first call after a fork; everything else about a file hangs on
// it.
struct TraceWriter::Impl {
  TraceWriterOptions options;
  std::string dir;
  ProcessInfo process;
  std::atomic<Session*> session{nullptr};
  // pid of the process whose thread is opening a child's file, 0: none. A lock that no fork can leave locked.
  std::atomic<pid_t> reopening{0};
  Replay replay_head;  // sentinel
  // Last node; only moved under aux_mutex.
  std::atomic<Replay*> replay_tail{nullptr};
  // Of the current session's file; changes with it.
  std::string path;

  ~Impl() {
    Session* s = session.load(std::memory_order_relaxed);
    delete s;
    for (Replay* node = replay_head.next.load(); node != nullptr;) {
      Replay* next = node->next.load();
      delete node;
      node = next;
    }
  }

  // Always gives a session; without a file it counts what it cannot write. The random part of the name keeps hosts
  // with one pid (containers) apart.
  std::unique_ptr<Session> NewSession(const ProcessInfo& info) {
    auto s = std::make_unique<Session>();
    s->process = info;
    s->pid = ::getpid();
    s->payload_left.store(options.payload_budget);
    AppendFileOptions file_options;
    file_options.path = dir + "/" + SafeFileName(info.host) + "-" + std::to_string(info.pid) + "-" +
                        Hex64(RandomBits()) + format::kFileSuffix;
    file_options.byte_cap = options.byte_cap;
    file_options.reserve_step = options.reserve_step;
    file_options.ready_step = options.ready_step;
    file_options.reserve_hook = options.reserve_hook;
    Result<std::unique_ptr<AppendFile>> file = AppendFile::Create(file_options);
    if (!file.ok()) {
      s->error = file.status().message();
      return s;
    }
    s->file = std::move(file).value();
    if (const Status status = WriteAux(s.get(), format::kKindProcess, codec::EncodeProcess(info)); !status.ok()) {
      s->error = status.message();
      s->file.reset();
    }
    return s;
  }

  // The session of this process; after a fork the child's first caller opens the child's file.
  Session* Current() {
    Session* s = session.load(std::memory_order_acquire);
    if (s->file == nullptr ? s->pid == ::getpid() : !s->file->forked()) return s;
    return Reopen(s);
  }

  // A forked child's file begins with the parent's sites, under the same ids, and its metadata: ids that callers
  // cached before the fork stay good.
  Session* Reopen(Session* parents) {
    const pid_t self = ::getpid();
    pid_t owner = reopening.load();
    // The lock of the parent may have been held by a thread that does not exist here; a lock that is named by pid
    // cannot be.
    while (owner == self || !reopening.compare_exchange_strong(owner, self)) {
      if (session.load(std::memory_order_acquire) != parents) return session.load(std::memory_order_acquire);
      ::sched_yield();
      owner = reopening.load();
    }
    if (Session* others = session.load(std::memory_order_acquire); others != parents) {
      reopening.store(0);  // another thread was done between our two looks
      return others;
    }
    ProcessInfo info = process;
    info.meta.emplace_back("forked_from", std::to_string(info.pid));
    info.pid = self;
    info.start_time_ns = WallClockNs();
    std::unique_ptr<Session> s = NewSession(info);
    for (const Replay* node = replay_head.next.load(std::memory_order_acquire); node != nullptr;
         node = node->next.load(std::memory_order_acquire)) {
      if (node->kind == format::kKindSite) s->site_ids.emplace(node->site.name, node->site.id);
      if (s->file != nullptr) (void)WriteAux(s.get(), node->kind, node->body);
    }
    process.pid = self;
    if (s->file != nullptr) path = s->file->path();
    Session* mine = s.release();
    // The parent's session is leaked on purpose: its mutex may be locked for ever, its mapping is not here.
    session.store(mine, std::memory_order_release);
    reopening.store(0);  // a number left here could be that of a later child, which would then wait for itself
    return mine;
  }

  // REQUIRES: aux_mutex held, or the session not yet shared.
  Status WriteAux(Session* s, format::RecordKind kind, const std::string& body) {
    const uint64_t size_bytes =
        format::PadTo8(sizeof(format::RecordHeader) + sizeof(format::AuxHead) + uint64_t{body.size()});
    if (size_bytes > format::kMaxRecordBytes) {
      s->file->CountDrop(format::kDropInternal);
      return Status::Usage(s->file->path() + ": a record of more than 64 MiB");
    }
    DropReason why{};
    unsigned char* record = s->file->Reserve(static_cast<uint32_t>(size_bytes), true, &why);
    if (record == nullptr) return Refused(s, why);
    format::AuxHead head{s->file->aux_head()};
    const uint16_t kind_and_zero[2] = {kind, 0};
    // Offset 12 is RecordHeader::kind; tag and size stand since Reserve, the checksum comes with Commit.
    std::memcpy(record + 12, kind_and_zero, 4);
    std::memcpy(record + sizeof(format::RecordHeader), &head, sizeof head);
    std::memcpy(record + sizeof(format::RecordHeader) + sizeof head, body.data(), body.size());
    s->file->Commit(record);
    // After the commit: the chain never leads to a record that is not whole.
    s->file->set_aux_head(s->file->OffsetOf(record));
    return {};
  }

  // Counts the drop and says why, for the caller's Status.
  Status Refused(Session* s, DropReason why) {
    s->file->CountDrop(why);
    if (why == format::kDropDiskFull)
      return ErrnoStatus(s->file->path(), "no space for the trace", s->file->last_errno());
    return Status::Environment(s->file->path() + ": " + ReasonText(why));
  }

  // The drop is counted in memory: there is no file to count it in.
  static Status NoFile(Session* s) {
    s->orphan_drops.fetch_add(1, std::memory_order_relaxed);
    return Status::Environment(s->error);
  }

  // REQUIRES: aux_mutex held.
  void AppendReplay(format::RecordKind kind, const std::string& body, const SiteInfo& site) {
    auto* node = new Replay;
    node->kind = kind;
    node->body = body;
    node->site = site;
    replay_tail.load(std::memory_order_relaxed)->next.store(node, std::memory_order_release);
    replay_tail.store(node, std::memory_order_relaxed);
  }

  // A record that is neither event nor site.
  Status Aux(format::RecordKind kind, const std::string& body, bool replay) {
    Session* s = Current();
    if (s->file == nullptr) return NoFile(s);
    const std::lock_guard<std::mutex> lock(s->aux_mutex);
    if (replay) AppendReplay(kind, body, {});
    return WriteAux(s, kind, body);
  }
};

namespace {

// Runs a call of the writer; no exception leaves it. The only ones possible are of memory that cannot be had.
template <class F>
auto Guarded(F&& body) -> decltype(body()) {
  try {
    return body();
  } catch (const std::exception&) {
    return Status(Code::kEnvironment, {});  // an empty message needs no memory
  }
}

}  // namespace

TraceWriter::TraceWriter() : impl_(std::make_unique<Impl>()) {}

TraceWriter::~TraceWriter() { (void)Close(); }

Result<std::unique_ptr<TraceWriter>> TraceWriter::Open(const TraceWriterOptions& options, const ProcessInfo& process) {
  return Guarded([&]() -> Result<std::unique_ptr<TraceWriter>> {
    std::unique_ptr<TraceWriter> writer(new TraceWriter());
    Impl& impl = *writer->impl_;
    impl.options = options;
    impl.process = process;
    if (impl.process.pid == 0) impl.process.pid = ::getpid();
    if (impl.process.start_time_ns == 0) impl.process.start_time_ns = WallClockNs();
    impl.replay_tail.store(&impl.replay_head);
    ASSAY_ASSIGN_OR_RETURN(impl.dir, MakeTraceDir(options.dir, impl.process));
    std::unique_ptr<Session> session = impl.NewSession(impl.process);
    if (session->file == nullptr) {
      const Status status = Status::Environment(session->error);
      impl.session.store(session.release());
      return status;
    }
    impl.path = session->file->path();
    impl.session.store(session.release(), std::memory_order_release);
    return writer;
  });
}

// Number, record and replay entry are made under one lock: ids are dense, and a child never misses a site whose id a
// caller has.
Result<uint32_t> TraceWriter::AddSite(const std::string& name, const std::string& engine_name,
                                      const std::string& axes) {
  return Guarded([&]() -> Result<uint32_t> {
    Session* s = impl_->Current();
    if (s->file == nullptr) return Impl::NoFile(s);
    const std::lock_guard<std::mutex> lock(s->aux_mutex);
    if (const auto found = s->site_ids.find(name); found != s->site_ids.end()) return found->second;
    const SiteInfo site{static_cast<uint32_t>(s->site_ids.size()), name, engine_name, axes};
    const std::string body = codec::EncodeSite(site);
    ASSAY_RETURN_IF_ERROR(impl_->WriteAux(s, format::kKindSite, body));
    s->site_ids.emplace(name, site.id);
    impl_->AppendReplay(format::kKindSite, body, site);
    return site.id;
  });
}

// The event's sequence is taken after space is: numbers have no gaps for events that were dropped.
Status TraceWriter::Write(const Event& event) {
  return Guarded([&]() -> Status {
    Session* s = impl_->Current();
    if (s->file == nullptr) return Impl::NoFile(s);
    Result<uint32_t> size_bytes = codec::EventSize(event);
    if (!size_bytes.ok()) {
      s->file->CountDrop(format::kDropInternal);
      return Status::Environment(s->file->path() + ": " + size_bytes.status().message());
    }
    DropReason why{};
    unsigned char* record = s->file->Reserve(size_bytes.value(), false, &why);
    if (record == nullptr) return impl_->Refused(s, why);
    codec::EncodeEvent(event, record);
    codec::PatchEvent(record, s->file->NextSequence(), event.time_ns != 0 ? event.time_ns : WallClockNs());
    s->file->Commit(record);
    return {};
  });
}

Status TraceWriter::WriteRequest(const RequestInfo& request) {
  return Guarded([&] { return impl_->Aux(format::kKindRequest, codec::EncodeRequest(request), false); });
}

Status TraceWriter::WriteCoverage(const CoverageNote& note) {
  return Guarded([&] { return impl_->Aux(format::kKindCoverage, codec::EncodeCoverage(note), false); });
}

Status TraceWriter::WriteProcessMeta(const std::string& key, const std::string& value) {
  return Guarded([&] { return impl_->Aux(format::kKindMeta, codec::EncodeMeta(key, value), true); });
}

Result<PayloadRef> TraceWriter::WritePayload(const void* data, uint64_t size_bytes) {
  return Guarded([&]() -> Result<PayloadRef> {
    Session* s = impl_->Current();
    if (s->file == nullptr) return Impl::NoFile(s);
    // Space in the budget is taken before the write, so that threads together never exceed it, and given back after.
    uint64_t left = s->payload_left.load(std::memory_order_relaxed);
    uint64_t take = size_bytes < left ? size_bytes : left;
    while (!s->payload_left.compare_exchange_weak(left, left - take, std::memory_order_relaxed)) {
      take = size_bytes < left ? size_bytes : left;
    }
    uint64_t written_bytes = 0;
    Result<PayloadRef> ref = StorePayload(impl_->dir, data, size_bytes, take, &written_bytes);
    s->payload_left.fetch_add(take - written_bytes, std::memory_order_relaxed);
    if (ref.ok()) return ref;
    s->file->CountDrop(ref.status().code() == Code::kUsage ? format::kDropPayloadBudget : format::kDropDiskFull);
    return Status::Environment(ref.status().message());
  });
}

DropCounts TraceWriter::drops() const {
  Session* s = impl_->Current();
  DropCounts counts;
  if (s->file == nullptr) {
    counts.disk_full = s->orphan_drops.load(std::memory_order_relaxed);
    return counts;
  }
  counts.byte_cap = s->file->drops(format::kDropByteCap);
  counts.disk_full = s->file->drops(format::kDropDiskFull);
  counts.payload_budget = s->file->drops(format::kDropPayloadBudget);
  counts.internal = s->file->drops(format::kDropInternal);
  return counts;
}

const std::string& TraceWriter::path() const { return impl_->path; }

const std::string& TraceWriter::dir() const { return impl_->dir; }

Status TraceWriter::Flush() {
  return Guarded([&]() -> Status {
    Session* s = impl_->Current();
    return s->file != nullptr ? s->file->Flush() : Impl::NoFile(s);
  });
}

Status TraceWriter::Close() {
  return Guarded([&]() -> Status {
    Session* s = impl_->session.load(std::memory_order_acquire);
    if (s == nullptr || s->file == nullptr || s->closed) return {};
    if (s->file->forked()) return {};  // the file is the parent's, and this process wrote nothing
    s->closed = true;
    const Status status = s->file->Close();
    if (!impl_->options.manifest || status.code() == Code::kEnvironment) return status;
    const Status manifest = RebuildManifest(impl_->dir);
    return status.ok() ? manifest : status;
  });
}

}  // namespace assay
