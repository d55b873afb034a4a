// Selects, measures and writes observations: the one way into a trace for the C ABI, Python and the native runtime.
//
// It never changes what it observes: tensors are read, only from level stats on, and nothing is kept of them beyond
// the call. What it cannot record it counts, by site and reason, and writes into the trace at Close. It does not print
// (except to the sink stderr, when asked), throw, abort or touch signals. Any number of threads may record; a child
// of fork() goes on in a file of its own in the same folder.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "base/status.h"
#include "probe/control.h"
#include "probe/settings.h"
#include "stats/measure.h"
#include "tensor/view.h"
#include "trace/event.h"
#include "trace/writer.h"

namespace assay {

struct ProbeSite;  // a site of one recorder with its cached filter answers (probe/site_registry.h)

// One tensor at one site. Everything is borrowed for the call.
struct Observation {
  std::string_view site;         // canonical name, "layers.3.attn.q" (or an engine's name)
  std::string_view engine_name;  // the engine's own name; kept with the site
  std::string_view axes;         // "T H d"; gives row_axis and head_axis when they are -1 (axis T rows, axis H heads).
                                 // Empty: the canonical site's own, when its rank fits
  TensorView view;               // read from level stats on
  int32_t rank = -1;             // -1: the process's
  int64_t step = -1;             // of the engine; -1: not known
  Phase phase = Phase::kUnknown;
  DType compute_dtype = DType::kInvalid;  // coarsest rounding so far; kInvalid: not said
  int row_axis = -1;                      // -1: as axes say
  int head_axis = -1;                     // -1: as axes say
  std::span<const RowRun> runs;  // empty with a row axis: rows of no known request (request 0, positions from 0)
  Shard shard;                   // which columns of the whole row these are
  uint64_t stream = 0;           // stream or graph; 0: not known
  uint32_t flags = 0;            // EventFlags
  std::span<const std::pair<std::string_view, std::string_view>> meta;
  uint64_t base_address = 0;    // identity of the storage; 0: view.data
  ProbeSite* handle = nullptr;  // from AddSite of the same recorder; saves the look-up of site, engine_name, axes
};

class Recorder {
 public:
  // settings must be on. kEnvironment when the trace folder cannot be written.
  static Result<std::unique_ptr<Recorder>> Open(const Settings& settings, const ProcessInfo& process);
  ~Recorder();  // closes

  // One relaxed load; callers test it before they build an Observation. Record tests it too. Another process may arm
  // and disarm, and narrow what is recorded (control.h); at the start it is as the settings say.
  bool armed() const { return __atomic_load_n(armed_, __ATOMIC_RELAXED) != 0; }
  void arm(bool on) { __atomic_store_n(armed_, on ? 1 : 0, __ATOMIC_RELAXED); }
  // The page that begins with the armed flag; FromControl leads back.
  void* control() const { return armed_; }
  static Recorder* FromControl(void* control) { return static_cast<Recorder*>(ArmSwitch::OwnerOf(control)); }
  // False when the filters (include, exclude, layers, ranks, steps) leave the site out. rank -1: the process's.
  // Callers use it to save the work of describing an observation; Record decides anew, and counts what it turns away.
  bool wants(std::string_view site, int32_t rank, int64_t step) const;
  bool wants(const ProbeSite* site, int32_t rank, int64_t step) const;

  // Announces a site that may fire: what is announced and never recorded stands in the coverage. The same name gives
  // the same site. Valid until the recorder is destroyed. nullptr only when memory ran out.
  ProbeSite* AddSite(std::string_view name, std::string_view engine_name, std::string_view axes);

  // A site's number, from 0, and back; nullptr for a number that AddSite did not give.
  static uint32_t NumberOf(const ProbeSite* site);
  ProbeSite* SiteAt(uint32_t number) const;

  // OK when recorded, filtered out or disarmed. kUsage: the observation does not fit together (rank against shape,
  // an axis or run out of range, unknown dtype); kEnvironment: dropped, budget or disk. Both are counted.
  Status Record(const Observation& observation);
  // Counts an observation that its caller could not even describe, under its site as far as that is known.
  void CountLost(const Observation& observation, std::string_view why);
  // A key of 0 is computed from tokens and ordinal. Tokens are stored as ASSAY_TOKENS and the level say.
  Status AddRequest(const RequestInfo& request);
  // Coverage and metadata go into the file at once; with the sink stderr they go nowhere. Of equal keys the later
  // holds.
  Status AddCoverage(const CoverageNote& note);
  Status AddMeta(const std::string& key, const std::string& value);
  // On-anomaly: writes out what the ring holds and the rest of the current step. Nothing without a ring.
  Status Trigger(std::string_view reason);
  // msync of the file: for power loss only, as what was recorded survives the end of the process without it.
  Status Flush();
  // Writes coverage and drop counts and closes the file; later records are ignored. With ASSAY_STRICT an error:
  // kUsage for patterns that matched no site, kEnvironment for drops. Safe to call twice.
  Status Close();

  const Settings& settings() const;
  const std::string& dir() const;   // of the trace, with % expanded; empty with the sink stderr
  const std::string& path() const;  // of this process's file; empty with the sink stderr
  DropCounts drops() const;         // the writer's; what this recorder lost itself counts as internal
  uint64_t recorded() const;        // events written, printed or put into the ring since Open (or since fork)

 private:
  // Only Open makes one.
  Recorder();
  int32_t* armed_ = nullptr;  // of the control page
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace assay
