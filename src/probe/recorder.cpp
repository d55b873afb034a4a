#include "probe/recorder.h"

#include <unistd.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <new>
#include <vector>

#include "probe/anomaly_ring.h"
#include "probe/fork_guard.h"
#include "probe/observe.h"
#include "probe/site_registry.h"
#include "probe/stderr_sink.h"
#include "trace/request_key.h"

namespace assay {

struct Recorder::Impl final : ForkGuarded {
  Impl(const Settings& s, const ProcessInfo& p)
      : settings(s), process(p), registry(settings), ring(s.ring_steps, s.payload_budget) {}

  const Settings settings;
  ProcessInfo process;  // meta grows by AddMeta, so that a child's file has it too
  SiteRegistry registry;
  std::mutex meta_mutex;
  std::mutex ring_mutex;
  std::mutex reopen_mutex;
  AnomalyRing ring;
  std::unique_ptr<TraceWriter> writer;  // null with the sink stderr, or when a child could not open its file
  std::string dir, path;
  std::atomic<bool> forked{false};
  std::atomic<bool> closed{false};
  std::atomic<uint64_t> recorded{0};
  std::atomic<uint64_t> lost{0};  // observations that never reached the writer

  bool to_stderr() const { return settings.sink == "stderr"; }

  Status OpenWriter(const std::string& folder) {
    if (to_stderr()) return {};
    TraceWriterOptions options;
    options.dir = folder;
    options.byte_cap = settings.byte_cap;
    options.payload_budget = settings.payload_budget;
    ASSAY_ASSIGN_OR_RETURN(writer, TraceWriter::Open(options, process));
    dir = writer->dir();
    path = writer->path();
    return {};
  }

  // First use in a child of fork(): the parent's writer is left alone, never closed, for its file is the parent's.
  void ReopenAfterFork() {
    std::lock_guard lock(reopen_mutex);
    if (!forked.load(std::memory_order_acquire)) return;
    [[maybe_unused]] TraceWriter* parents = writer.release();
    process.pid = ::getpid();
    std::string folder;
    for (char c : dir) folder += c == '%' ? std::string("%%") : std::string(1, c);
    (void)OpenWriter(folder);  // without a writer every record counts as lost
    forked.store(false, std::memory_order_release);
  }

  TraceWriter* CurrentWriter() {
    if (forked.load(std::memory_order_acquire)) ReopenAfterFork();
    return writer.get();
  }

  Status NoWriter() const {
    return Status::Environment("the trace file of this process could not be opened in " + dir +
                               "; observations are dropped and counted");
  }

  // An observation that never reached the writer.
  Status Lose(ProbeSite* site, Status why) {
    lost.fetch_add(1, std::memory_order_relaxed);
    registry.CountDrop(site, why.message());
    return why;
  }

  void CountRecorded(ProbeSite* site) {
    site->recorded.fetch_add(1, std::memory_order_relaxed);
    recorded.fetch_add(1, std::memory_order_relaxed);
  }

  // Fills in what only the writer knows and writes the event. A payload beyond its budget is counted and is this
  // call's error, but the event itself is written.
  Status Write(PendingEvent* pending, uint32_t extra_flags) {
    Event& event = pending->event;
    ProbeSite* site = pending->site;
    event.flags |= extra_flags;
    if (to_stderr()) {
      WriteToStderr(FormatEventLine(site->name, event));
      return {};
    }
    TraceWriter* out = CurrentWriter();
    if (out == nullptr) return Lose(site, NoWriter());
    uint64_t id = site->writer_id.load(std::memory_order_acquire);
    if (id == 0) {
      const Result<uint32_t> fresh = out->AddSite(site->name, site->engine_name, site->axes);
      if (!fresh.ok()) return Lose(site, fresh.status());
      id = uint64_t{*fresh} + 1;
      site->writer_id.store(id, std::memory_order_release);
    }
    event.site = static_cast<uint32_t>(id - 1);
    Status status;
    if (pending->has_payload) {
      Result<PayloadRef> stored = out->WritePayload(pending->payload.data(), pending->payload.size());
      if (stored.ok()) {
        event.payload = std::move(stored).value();
        event.payload.rows = std::move(pending->payload_rows);
      } else {
        status = stored.status();
      }
    }
    if (const Status written = out->Write(event); !written.ok()) status = written;
    if (!status.ok()) registry.CountDrop(site, status.message());
    return status;
  }

  Status WriteAll(std::vector<PendingEvent> events) {
    Status first;
    for (PendingEvent& event : events) {
      const Status status = Write(&event, kEventAnomalyRing);
      if (!status.ok() && first.ok()) first = status;
    }
    return first;
  }

  Status RecordOrThrow(const Observation& observation, ProbeSite* site) {
    const int32_t rank = observation.rank >= 0 ? observation.rank : process.rank;
    if (!Wants(site, rank, observation.step)) {
      site->skipped.fetch_add(1, std::memory_order_relaxed);
      return {};
    }
    PendingEvent pending;
    pending.site = site;
    pending.event.rank = rank;
    if (Status status = Observe(settings, observation, &pending); !status.ok()) return Lose(site, std::move(status));
    if (!ring.enabled()) {
      ASSAY_RETURN_IF_ERROR(Write(&pending, 0));
      CountRecorded(site);
      return {};
    }
    const bool anomaly = HasAnomaly(pending);
    std::vector<PendingEvent> due;
    {
      std::lock_guard lock(ring_mutex);
      due = ring.Push(std::move(pending), site->recorded.load(std::memory_order_relaxed), anomaly);
    }
    CountRecorded(site);
    return WriteAll(std::move(due));
  }

  bool Wants(const ProbeSite* site, int32_t rank, int64_t step) const {
    return site->wanted && settings.ranks.contains(rank) && (step < 0 || settings.steps.contains(step));
  }

  Status WriteClosingNotes(int* not_found, uint64_t* ring_evicted) {
    TraceWriter* out = CurrentWriter();
    for (const CoverageNote& note : registry.Coverage(not_found)) {
      if (out != nullptr) ASSAY_RETURN_IF_ERROR(out->WriteCoverage(note));
    }
    if (!ring.enabled()) return {};
    uint64_t triggers = 0;
    {
      std::lock_guard lock(ring_mutex);
      triggers = ring.triggers();
      *ring_evicted = ring.evicted();
      ring.Clear();
    }
    if (out == nullptr) return {};
    if (*ring_evicted != 0) {
      ASSAY_RETURN_IF_ERROR(out->WriteCoverage(
          {"*", "dropped", *ring_evicted, "the on-anomaly ring outgrew ASSAY_BUDGET's payload bytes"}));
    }
    return out->WriteProcessMeta("ring.triggers", std::to_string(triggers));
  }

  void BeforeFork() override {
    reopen_mutex.lock();
    registry.LockForFork();
    meta_mutex.lock();
    ring_mutex.lock();
  }
  void AfterForkInParent() override {
    ring_mutex.unlock();
    meta_mutex.unlock();
    registry.UnlockInParent();
    reopen_mutex.unlock();
  }
  void AfterForkInChild() override {
    new (&ring_mutex) std::mutex();
    new (&meta_mutex) std::mutex();
    new (&reopen_mutex) std::mutex();
    registry.ResetInChild();
    ring.Clear();  // the parent's events
    recorded.store(0);
    lost.store(0);
    forked.store(!to_stderr(), std::memory_order_release);
  }
};

Recorder::Recorder() = default;

Result<std::unique_ptr<Recorder>> Recorder::Open(const Settings& settings, const ProcessInfo& process) try {
  if (!settings.on()) return Status::Usage("the recorder is off: set ASSAY to a profile, such as ASSAY=all");
  std::unique_ptr<Recorder> recorder(new Recorder);
  recorder->impl_ = std::make_unique<Impl>(settings, process);
  ASSAY_RETURN_IF_ERROR(recorder->impl_->OpenWriter(settings.dir));
  Guard(recorder->impl_.get());
  return recorder;
} catch (const std::bad_alloc&) {
  return Status::Environment("no memory to open a recorder");
}

Recorder::~Recorder() {
  if (impl_ == nullptr) return;
  (void)Close();
  Unguard(impl_.get());
}

bool Recorder::wants(const ProbeSite* site, int32_t rank, int64_t step) const {
  return site != nullptr && impl_->Wants(site, rank >= 0 ? rank : impl_->process.rank, step);
}

bool Recorder::wants(std::string_view site, int32_t rank, int64_t step) const try {
  return wants(impl_->registry.Find(site, {}, {}), rank, step);
} catch (const std::bad_alloc&) {
  return false;
}

ProbeSite* Recorder::AddSite(std::string_view name, std::string_view engine_name, std::string_view axes) try {
  return impl_->registry.Find(name, engine_name, axes);
} catch (const std::bad_alloc&) {
  return nullptr;
}

Status Recorder::Record(const Observation& observation) {
  if (!armed() || impl_->closed.load(std::memory_order_relaxed)) return {};
  ProbeSite* site = observation.handle;
  try {
    if (site == nullptr) site = impl_->registry.Find(observation.site, observation.engine_name, observation.axes);
    return impl_->RecordOrThrow(observation, site);
  } catch (const std::bad_alloc&) {
    if (site != nullptr) return impl_->Lose(site, Status::Environment("no memory"));
  } catch (...) {
    if (site != nullptr) return impl_->Lose(site, Status::Internal("unexpected exception"));
  }
  impl_->lost.fetch_add(1, std::memory_order_relaxed);
  return Status::Environment("no memory");
}

Status Recorder::AddRequest(const RequestInfo& request) try {
  RequestInfo stored = request;
  if (stored.key == 0) {
    if (stored.tokens.empty()) return Status::Usage("a request needs its key or its prompt's token ids");
    stored.key = RequestKey(stored.tokens, stored.ordinal);
  }
  if (stored.prompt_tokens == 0) stored.prompt_tokens = static_cast<int64_t>(stored.tokens.size());
  if (!StoresTokens(impl_->settings)) stored.tokens.clear();
  if (impl_->to_stderr()) return {};
  TraceWriter* out = impl_->CurrentWriter();
  return out == nullptr ? impl_->NoWriter() : out->WriteRequest(stored);
} catch (const std::bad_alloc&) {
  return Status::Environment("no memory for a request");
}

Status Recorder::AddCoverage(const CoverageNote& note) {
  if (impl_->to_stderr()) return {};
  TraceWriter* out = impl_->CurrentWriter();
  return out == nullptr ? impl_->NoWriter() : out->WriteCoverage(note);
}

Status Recorder::AddMeta(const std::string& key, const std::string& value) try {
  {
    std::lock_guard lock(impl_->meta_mutex);
    impl_->process.meta.emplace_back(key, value);
  }
  if (impl_->to_stderr()) return {};
  TraceWriter* out = impl_->CurrentWriter();
  return out == nullptr ? impl_->NoWriter() : out->WriteProcessMeta(key, value);
} catch (const std::bad_alloc&) {
  return Status::Environment("no memory for metadata");
}

Status Recorder::Trigger(std::string_view reason) try {
  if (!impl_->ring.enabled() || !armed()) return {};
  std::vector<PendingEvent> due;
  {
    std::lock_guard lock(impl_->ring_mutex);
    due = impl_->ring.Trigger();
  }
  ASSAY_RETURN_IF_ERROR(AddMeta("ring.trigger", std::string(reason)));
  return impl_->WriteAll(std::move(due));
} catch (const std::bad_alloc&) {
  return Status::Environment("no memory to write the on-anomaly ring");
}

Status Recorder::Flush() {
  if (impl_->to_stderr()) return {};
  TraceWriter* out = impl_->CurrentWriter();
  return out == nullptr ? impl_->NoWriter() : out->Flush();
}

Status Recorder::Close() try {
  if (impl_->closed.exchange(true)) return {};
  int not_found = 0;
  uint64_t ring_evicted = 0;
  Status notes = impl_->WriteClosingNotes(&not_found, &ring_evicted);
  Status close;
  if (TraceWriter* out = impl_->CurrentWriter()) close = out->Close();
  ASSAY_RETURN_IF_ERROR(notes);
  ASSAY_RETURN_IF_ERROR(close);
  if (!impl_->settings.strict) return {};
  if (not_found != 0) {
    return Status::Usage("ASSAY_STRICT: " + std::to_string(not_found) +
                         " pattern(s) of ASSAY_INCLUDE matched no site; the trace's coverage names them");
  }
  const uint64_t dropped = drops().total() + ring_evicted;
  if (dropped != 0) {
    return Status::Environment("ASSAY_STRICT: " + std::to_string(dropped) +
                               " observation(s) were dropped; the trace's coverage has the reasons");
  }
  return {};
} catch (const std::bad_alloc&) {
  return Status::Environment("no memory to close the recorder");
}

const Settings& Recorder::settings() const { return impl_->settings; }
const std::string& Recorder::dir() const { return impl_->dir; }
const std::string& Recorder::path() const { return impl_->path; }
uint64_t Recorder::recorded() const { return impl_->recorded.load(); }

DropCounts Recorder::drops() const {
  DropCounts counts;
  if (impl_->writer != nullptr && !impl_->forked.load()) counts = impl_->writer->drops();
  counts.internal += impl_->lost.load();
  return counts;
}

}  // namespace assay
