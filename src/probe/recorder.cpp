#include "probe/recorder.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <new>
#include <vector>

#include "base/wall_clock.h"
#include "probe/anomaly_ring.h"
#include "probe/fork_guard.h"
#include "probe/observe.h"
#include "probe/segment_pool.h"
#include "probe/site_registry.h"
#include "probe/stderr_sink.h"
#include "trace/request_key.h"

namespace assay {
namespace {

// What path() and dir() refer to with the sink stderr.
const std::string kNoPath;

}  // namespace

// Locks, in the order in which they may be taken together: registry, ring. The writer has its own and calls nothing
// here.
struct Recorder::Impl final : ForkGuarded {
  Impl(const Settings& s, const ProcessInfo& p)
      : settings(s), rank(p.rank), registry(settings), ring(s.ring_steps, s.payload_budget) {}

  const Settings settings;
  const int32_t rank;  // of the process
  SiteRegistry registry;
  std::mutex ring_mutex;
  AnomalyRing ring;
  std::unique_ptr<ArmSwitch> control;
  std::unique_ptr<TraceWriter> writer;  // null with the sink stderr; opens a file of its own in a child by itself
  std::atomic<bool> closed{false};
  std::atomic<uint64_t> recorded{0};
  std::atomic<uint64_t> lost{0};  // observations that never reached the writer

  bool to_stderr() const { return settings.sink == "stderr"; }

  // The sink stderr has no file, so no writer; everything that would go through it is then left out.
  Status OpenWriter(const ProcessInfo& process) {
    if (to_stderr()) return {};
    TraceWriterOptions options;
    options.dir = settings.dir;
    options.byte_cap = settings.byte_cap;
    options.payload_budget = settings.payload_budget;
    ASSAY_ASSIGN_OR_RETURN(writer, TraceWriter::Open(options, process));
    return {};
  }

  // An observation that never reached the writer.
  Status Lose(ProbeSite* site, Status why) {
    lost.fetch_add(1, std::memory_order_relaxed);
    registry.CountDrop(site, why.message());
    return why;
  }

  // Relaxed: statistics, read after the threads are joined or as a hint.
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
    // Two threads may both ask the writer at first sight: it gives the same name the same id.
    uint64_t id = site->writer_id.load(std::memory_order_acquire);
    if (id == 0) {
      const Result<uint32_t> fresh = writer->AddSite(site->name, site->engine_name, site->axes);
      if (!fresh.ok()) return Lose(site, fresh.status());
      id = uint64_t{*fresh} + 1;
      site->writer_id.store(id, std::memory_order_release);
    }
    event.site = static_cast<uint32_t>(id - 1);
    Status status;
    if (pending->has_payload) {
      Result<PayloadRef> stored = writer->WritePayload(pending->payload.data(), pending->payload.size());
      if (stored.ok()) {
        event.payload = std::move(stored).value();
        event.payload.rows = std::move(pending->payload_rows);
      } else {
        status = stored.status();
      }
    }
    if (const Status written = writer->Write(event); !written.ok()) status = written;
    if (!status.ok()) registry.CountDrop(site, status.message());
    return status;
  }

  // All are tried; the first error is the one that is told. Runs without the ring's lock, as it may wait for the
  // disk.
  Status WriteAll(std::vector<PendingEvent> events) {
    Status first;
    for (PendingEvent& event : events) {
      const Status status = Write(&event, kEventAnomalyRing);
      if (!status.ok() && first.ok()) first = status;
    }
    return first;
  }

  // Order of the tests: what filters turn away costs no measuring. Selecting requests (`assay arm --request`) narrows
  // the rows; padding belongs to no request and is left out then.
  Status RecordOrThrow(const Observation& observation, ProbeSite* site) {
    const int32_t event_rank = observation.rank >= 0 ? observation.rank : rank;
    if (!site->wanted || !InSteps(event_rank, observation.step)) {
      site->skipped.fetch_add(1, std::memory_order_relaxed);
      return {};
    }
    PendingEvent pending;
    pending.site = site;
    pending.event.rank = event_rank;
    pending.event.time_ns = WallClockNs();  // here: the ring may write the event much later
    const Selection& selection = control->selection();
    Observation narrowed;
    std::vector<RowRun> runs;
    const Observation* observed = &observation;
    // A tensor without rows of requests (weights, a head's scale) is not narrowed.
    if (!selection.requests.empty() && !observation.runs.empty()) {
      for (const RowRun& run : observation.runs) {
        if (!run.padding && selection.wants_request(run.request)) runs.push_back(run);
      }
      if (runs.empty()) {
        site->skipped.fetch_add(1, std::memory_order_relaxed);
        return {};
      }
      narrowed = observation;
      narrowed.runs = runs;
      observed = &narrowed;
    }
    if (Status status = Observe(settings, *observed, &pending); !status.ok()) return Lose(site, std::move(status));
    if (!ring.enabled()) {
      const Status written = Write(&pending, 0);
      GiveSegments(std::move(pending.event.segments));
      ASSAY_RETURN_IF_ERROR(written);
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

  // event_rank -1: the process's; step -1: not known, which passes.
  bool InSteps(int32_t event_rank, int64_t step) const {
    if (!settings.ranks.contains(event_rank >= 0 ? event_rank : rank)) return false;
    const Selection& selection = control->selection();
    return step < 0 || (selection.has_steps ? selection.steps : settings.steps).contains(step);
  }

  // The last things in the file: coverage, and what the ring did.
  Status WriteClosingNotes(int* not_found, uint64_t* ring_evicted) {
    for (const CoverageNote& note : registry.Coverage(not_found)) {
      if (writer != nullptr) ASSAY_RETURN_IF_ERROR(writer->WriteCoverage(note));
    }
    if (!ring.enabled() || writer == nullptr) return {};
    uint64_t triggers = 0;
    {
      std::lock_guard lock(ring_mutex);
      triggers = ring.triggers();
      *ring_evicted = ring.evicted();
      ring.Clear();
    }
    if (*ring_evicted != 0) {
      ASSAY_RETURN_IF_ERROR(writer->WriteCoverage(
          {"*", "dropped", *ring_evicted, "the on-anomaly ring outgrew ASSAY_BUDGET's payload bytes"}));
    }
    return writer->WriteProcessMeta("ring.triggers", std::to_string(triggers));
  }

  // In the order of the locks above, and released in reverse.
  void BeforeFork() override {
    registry.LockForFork();
    ring_mutex.lock();
  }
  void AfterForkInParent() override {
    ring_mutex.unlock();
    registry.UnlockInParent();
  }
  void AfterForkInChild() override {
    control->Renew();
    new (&ring_mutex) std::mutex();
    registry.ResetInChild();
    ring.Clear();  // the parent's events
    recorded.store(0);
    lost.store(0);
  }
};

Recorder::Recorder() = default;

// Guard comes last: once it is in the list, a fork may call into the object at any time.
Result<std::unique_ptr<Recorder>> Recorder::Open(const Settings& settings, const ProcessInfo& process) try {
  if (!settings.on()) return Status::Usage("the recorder is off: set ASSAY to a profile, such as ASSAY=all");
  std::unique_ptr<Recorder> recorder(new Recorder);
  recorder->impl_ = std::make_unique<Impl>(settings, process);
  Impl& impl = *recorder->impl_;
  ASSAY_RETURN_IF_ERROR(impl.OpenWriter(process));
  impl.control =
      ArmSwitch::Create(impl.writer == nullptr ? std::string() : impl.writer->dir(), process.host, settings.armed);
  if (impl.control == nullptr) return Status::Environment("no memory to open a recorder");
  impl.control->set_owner(recorder.get());
  recorder->armed_ = static_cast<int32_t*>(impl.control->page());
  Guard(recorder->impl_.get());
  return recorder;
} catch (const std::bad_alloc&) {
  return Status::Environment("no memory to open a recorder");
}

Recorder::~Recorder() {
  if (impl_ == nullptr || armed_ == nullptr) return;  // never opened
  // Its error has nobody to go to; whoever wants it closes first.
  (void)Close();
  Unguard(impl_.get());
}

bool Recorder::wants(const ProbeSite* site, int32_t rank, int64_t step) const {
  return site != nullptr && site->wanted && impl_->InSteps(rank, step);
}

bool Recorder::wants(std::string_view site, int32_t rank, int64_t step) const try {
  return impl_->registry.Wants(site) && impl_->InSteps(rank, step);
} catch (const std::bad_alloc&) {
  return false;
}

ProbeSite* Recorder::AddSite(std::string_view name, std::string_view engine_name, std::string_view axes) try {
  return impl_->registry.Find(name, engine_name, axes);
} catch (const std::bad_alloc&) {
  return nullptr;
}

uint32_t Recorder::NumberOf(const ProbeSite* site) { return site->number; }
ProbeSite* Recorder::SiteAt(uint32_t number) const { return impl_->registry.At(number); }

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

void Recorder::CountLost(const Observation& observation, std::string_view why) try {
  ProbeSite* site = observation.handle;
  if (site == nullptr && !observation.site.empty()) site = impl_->registry.Find(observation.site, {}, {});
  if (site != nullptr) {
    (void)impl_->Lose(site, Status::Usage(std::string(why)));
  } else {
    impl_->lost.fetch_add(1, std::memory_order_relaxed);
  }
} catch (const std::bad_alloc&) {
  impl_->lost.fetch_add(1, std::memory_order_relaxed);
}

Status Recorder::AddRequest(const RequestInfo& request) try {
  RequestInfo stored = request;
  if (stored.key == 0) {
    if (stored.tokens.empty()) return Status::Usage("a request needs its key or its prompt's token ids");
    stored.key = RequestKey(stored.tokens, stored.ordinal);
  }
  // The length is no content: it is kept at every level.
  if (stored.prompt_tokens == 0) stored.prompt_tokens = static_cast<int64_t>(stored.tokens.size());
  if (!StoresTokens(impl_->settings)) stored.tokens.clear();
  return impl_->writer == nullptr ? Status() : impl_->writer->WriteRequest(stored);
} catch (const std::bad_alloc&) {
  return Status::Environment("no memory for a request");
}

Status Recorder::AddCoverage(const CoverageNote& note) {
  return impl_->writer == nullptr ? Status() : impl_->writer->WriteCoverage(note);
}

Status Recorder::AddMeta(const std::string& key, const std::string& value) {
  return impl_->writer == nullptr ? Status() : impl_->writer->WriteProcessMeta(key, value);
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

Status Recorder::Flush() { return impl_->writer == nullptr ? Status() : impl_->writer->Flush(); }

// closed goes up first: what begins from here on is ignored.
Status Recorder::Close() try {
  if (impl_->closed.exchange(true)) return {};
  int not_found = 0;
  uint64_t ring_evicted = 0;
  Status notes = impl_->WriteClosingNotes(&not_found, &ring_evicted);
  Status close;
  if (impl_->writer != nullptr) close = impl_->writer->Close();
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
const std::string& Recorder::dir() const { return impl_->writer == nullptr ? kNoPath : impl_->writer->dir(); }
const std::string& Recorder::path() const { return impl_->writer == nullptr ? kNoPath : impl_->writer->path(); }
uint64_t Recorder::recorded() const { return impl_->recorded.load(); }

DropCounts Recorder::drops() const {
  DropCounts counts;
  if (impl_->writer != nullptr) counts = impl_->writer->drops();
  counts.internal += impl_->lost.load();
  return counts;
}

}  // namespace assay
