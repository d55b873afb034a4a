// Appends records to one process's file of a trace folder, through a shared mapping: what was committed survives
// kill -9 of the host. Space is reserved before it is mapped; a full disk stops recording (counted), never the host.
// Thread-safe: any number of threads may write; each record is committed by a release store.
//
// fork(): the child's first call opens a file of its own (same folder, same sites and metadata) and never touches the
// parent's; only the child's own events and drops are in it. exec() closes the descriptor. Close(), Flush() and the
// destructor must not run at the same time as other calls on the same object.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "trace/event.h"

namespace assay {

struct TraceWriterOptions {
  std::string dir;                              // created when missing; %r rank, %p pid, %i next free number, %h host
  uint64_t byte_cap = uint64_t{4} << 30;        // event bytes of this process; beyond it events are dropped and counted
  uint64_t payload_budget = uint64_t{1} << 30;  // bytes of payload of this process
  uint64_t reserve_step = uint64_t{64} << 20;   // growth of the reserved file
  uint64_t ready_step = uint64_t{256} << 10;    // zeroed and made present ahead of the writers at a time
  bool manifest = true;                         // Close() renews manifest.json
  int (*reserve_hook)(uint64_t offset, uint64_t size_bytes) = nullptr;  // tests: an errno to fail a growth with, or 0
};

class TraceWriter {
 public:
  // process: pid and start time are filled in when 0. kUsage: no folder named. kEnvironment: the folder or the file
  // cannot be made.
  static Result<std::unique_ptr<TraceWriter>> Open(const TraceWriterOptions& options, const ProcessInfo& process);
  ~TraceWriter();  // closes

  // Assigns and writes the site's id; the same name gives the same id.
  Result<uint32_t> AddSite(const std::string& name, const std::string& engine_name, const std::string& axes);
  // event.sequence is set here, event.time_ns too when it is 0. A dropped event is counted and still returns an error
  // Status (kEnvironment); recording stays usable. Never throws.
  Status Write(const Event& event);
  // These are few and may use 64 MiB behind the byte cap, so that a trace that is full still says what it holds.
  Status WriteRequest(const RequestInfo& request);
  Status WriteCoverage(const CoverageNote& note);
  Status WriteProcessMeta(const std::string& key, const std::string& value);  // later wins
  // Stores content under its SHA-256 unless it is there already; counts against payload_budget.
  Result<PayloadRef> WritePayload(const void* data, uint64_t size_bytes);

  // Of the file of this process: a forked child counts from 0.
  DropCounts drops() const;
  const std::string& path() const;  // of the process's file
  const std::string& dir() const;   // of the trace, with % expanded
  Status Flush();                   // msync; not needed for kill -9 safety, only for power loss
  Status Close();                   // writes drop counts, trims the reserved tail, renews the manifest

 private:
  TraceWriter();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace assay
