// Selects, measures and writes observations: the one way into a trace for the C ABI, Python and the native runtime.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"
#include "probe/settings.h"
#include "stats/measure.h"
#include "tensor/view.h"
#include "trace/event.h"
#include "trace/writer.h"

namespace assay {

// One tensor at one site. Everything is borrowed for the call.
struct Observation {
  std::string_view site;  // canonical name, "layers.3.attn.q" (or an engine's name)
  std::string_view engine_name;
  std::string_view axes;  // "T H d"; gives row_axis and head_axis when they are -1 (axis T rows, axis H heads)
  TensorView view;
  int32_t rank = -1;  // -1: the process's
  int64_t step = -1;
  Phase phase = Phase::kUnknown;
  DType compute_dtype = DType::kInvalid;
  int row_axis = -1;
  int head_axis = -1;
  std::span<const RowRun> runs;  // empty with a row axis: rows of no known request (request 0, positions from 0)
  Shard shard;
  uint64_t stream = 0;
  uint32_t flags = 0;
  std::span<const std::pair<std::string_view, std::string_view>> meta;
};

class Recorder {
 public:
  static Result<std::unique_ptr<Recorder>> Open(const Settings& settings, const ProcessInfo& process);
  ~Recorder();

  // One relaxed load; callers test it before they build an Observation.
  bool armed() const { return armed_.load(std::memory_order_relaxed); }
  void arm(bool on) { armed_.store(on, std::memory_order_relaxed); }
  // False when the filters (include, exclude, layers, ranks, steps) leave the site out.
  bool wants(std::string_view site, int32_t rank, int64_t step) const;

  Status Record(const Observation& observation);
  Status AddRequest(const RequestInfo& request);
  Status AddCoverage(const CoverageNote& note);
  Status AddMeta(const std::string& key, const std::string& value);
  Status Flush();
  Status Close();

  const std::string& dir() const;
  const std::string& path() const;
  DropCounts drops() const;

 private:
  Recorder();
  std::atomic<bool> armed_{true};
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace assay
