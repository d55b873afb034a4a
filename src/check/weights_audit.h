// The audit of a checkpoint: every weight decoded and measured, its scales and its place among the others held against
// what such things can be; and, with a trace that has the weights in memory, memory against the checkpoint.
//
// docs/weights.md describes the rules. Findings are FirstBad in the order of loading: the first is the first wrong
// tensor. What cannot be judged is counted and said.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "finding/finding.h"
#include "quant/weight_source.h"
#include "trace/reader.h"

namespace assay {

// Of the decoded elements of one weight. sum_sq is in double; counts are of elements, not bytes.
struct WeightStats {
  uint64_t count = 0, nan = 0, inf = 0, zero = 0;
  double min = 0, max = 0, abs_max = 0, sum_sq = 0;  // over finite elements
  uint64_t digest = 0;                               // of the stored bytes of all parts
  bool constant = false;                             // all elements are the same finite number
};

// Of the stored scales (a stored global scale is not among them).
struct ScaleStats {
  uint64_t count = 0, zero = 0, negative = 0, nonfinite = 0, not_power_of_two = 0;
  double min = 0, max = 0, median = 0;  // of the finite ones
};

struct WeightAudit {
  const Weight* weight = nullptr;
  std::string canonical;
  WeightStats stats;
  ScaleStats scales;
};

// One tensor in memory and what came of it.
struct MemoryCheck {
  std::string name;  // as recorded
  int32_t rank = 0;
  std::string checkpoint;  // names of the weights that it was held against, joined by " + "; empty: none
  std::string note;        // why it was not compared
  uint64_t elements = 0, different = 0;
};

struct WeightsOptions {
  std::string only;  // glob over checkpoint names; empty: all
  int threads = 0;   // 0: all cores
  // The configuration is one that the runtime reads, and this is what of the checkpoint does not fit it (missing,
  // unexpected, other shapes). Without it only whole layers and the head are missed.
  bool held_against_config = false;
  std::vector<WeightProblem> mismatches;
};

struct WeightsResult {
  std::vector<FirstBad> findings;
  std::vector<WeightAudit> weights;  // ascending checkpoint name
  std::vector<MemoryCheck> memory;   // in the order of recording
  std::vector<std::string> notes;
  uint64_t stored_bytes = 0, elements = 0;
  double seconds = 0;  // decoding and measuring the checkpoint
  bool with_trace = false;
};

// The source (and the trace) must outlive the result. trace may be null.
Result<WeightsResult> AuditWeights(const WeightSource& source, const Trace* trace, const WeightsOptions& options);

// ---- Parts of the audit, one file each -------------------------------------------------------------------------

// Where findings are collected before they are put in order.
struct WeightFinding {
  int64_t sequence = -1;  // of the event in the trace; -1: of the checkpoint alone
  FirstBad bad;
};

// Looks at every element: by a tally of the stored bytes where the format has one, else decoded in bands of rows that
// stay in the first cache. A view (part of a fused tensor) gets no digest and no scales of its own. Thread-safe.
WeightAudit MeasureWeight(const Weight& weight);
// Each appends to `found` (and `notes`) and never removes; none of them fails: what cannot be judged becomes a note.
void CheckScales(const WeightSource& source, const std::vector<WeightAudit>& weights,
                 std::vector<WeightFinding>* found);
void CheckStructure(const WeightSource& source, const std::vector<WeightAudit>& weights, const WeightsOptions& options,
                    std::vector<WeightFinding>* found, std::vector<std::string>* notes);
void CheckMemory(const WeightSource& source, const Trace& trace, const WeightsOptions& options, WeightsResult* result,
                 std::vector<WeightFinding>* found);

// A finding on a tensor of the checkpoint or of memory; layer is read off the name.
FirstBad WeightBad(const std::string& canonical, std::string_view cls, std::string method, double confidence,
                   std::vector<std::string> evidence);
// A key of the configuration, of its inner ones for multimodal models, or nullptr.
const Json* ConfigKey(const WeightSource& source, std::string_view key);
// `absent` where the key is missing or is no integer.
int64_t ConfigInt(const WeightSource& source, std::string_view key, int64_t absent);

}  // namespace assay
