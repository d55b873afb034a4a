// The value model of a trace: what the recorder writes, the reader yields, compare and report consume.
// docs/trace-format.md has the bytes; docs/fields.md has the same fields for users of the C ABI and Python.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "stats/stats.h"
#include "tensor/dtype.h"

namespace assay {

// What the engine was doing. The numbers are in the format and the ABI. kMixed: prefill and decode in one batch;
// kWarmup, kDummy and kCapture are runs whose values nobody uses, so comparisons leave them out; kLoad: weights as
// they were loaded.
enum class Phase : uint8_t {
  kUnknown = 0,
  kPrefill = 1,
  kDecode = 2,
  kMixed = 3,
  kWarmup = 4,
  kDummy = 5,
  kCapture = 6,
  kLoad = 7
};
std::string_view NameOf(Phase phase);
Phase ParsePhase(std::string_view name);  // kUnknown for an unknown name

using Metadata = std::vector<std::pair<std::string, std::string>>;

// One site of one process; written once, referred to by id.
struct SiteInfo {
  uint32_t id = 0;   // unique in one trace file, from 0
  std::string name;  // canonical, with the layer and without a shard suffix: "layers.3.attn.q", "….o_proj.partial"
  std::string engine_name;  // the engine's own name, may be empty
  std::string axes;         // "T H d"; empty when unknown
};

// Where this rank's columns lie in the whole tensor. count 1: not sharded.
struct Shard {
  int32_t index = 0;
  int32_t count = 1;
  int64_t col_offset = 0;  // first logical column of the shard
  int64_t full_cols = 0;   // logical columns of the whole; 0: the view's own
};

// A stored copy of a tensor or of some of its rows: payloads/<sha256 in hex>, contiguous, row-major, little-endian.
struct PayloadRef {
  std::string sha256;  // 64 hex digits; empty: none
  uint64_t size_bytes = 0;
  std::vector<int64_t> rows;  // sampled rows of the tensor; empty: all of it
};

// Bits of Event::flags; unknown ones of a newer writer are kept and ignored.
enum EventFlags : uint32_t {
  kEventBeforeInplace = 1u << 0,  // value taken before a later in-place write
  kEventInGraph = 1u << 1,        // recorded from inside a captured graph
  kEventAnomalyRing = 1u << 2,    // written out by the on-anomaly ring
};

// One observation of one tensor. At level names only identity, phase, flags and metadata are filled in; segments come
// with level stats.
struct Event {
  uint64_t sequence = 0;  // order of recording in one process
  uint64_t time_ns = 0;   // of the observation, CLOCK_REALTIME
  uint32_t site = 0;      // SiteInfo::id
  int32_t rank = 0;
  int64_t step = -1;  // engine step, -1 unknown
  Phase phase = Phase::kUnknown;
  DType dtype = DType::kInvalid;
  DType compute_dtype = DType::kInvalid;  // coarsest rounding the value has been through: of a bf16 result in f32, bf16
  uint32_t flags = 0;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // elements
  int64_t storage_offset = 0;    // elements
  uint64_t base_address = 0;     // identity of the storage, for aliasing; not content
  uint64_t stream = 0;           // stream or graph identity, 0 unknown
  // Axes of token rows and of heads in shape, -1: none.
  int32_t row_axis = -1;
  int32_t head_axis = -1;
  Shard shard;
  Metadata meta;
  // Runs of rows of one request, in order of rows; a tensor without a row axis is one segment of request 0.
  std::vector<Segment> segments;
  PayloadRef payload;
};

// One traced process (one file). What it could not see stands in coverage records (CoverageNote) and drop counts.
struct ProcessInfo {
  std::string host;
  int64_t pid = 0;
  int32_t rank = 0;
  int32_t world_size = 1;
  uint64_t start_time_ns = 0;
  std::vector<std::string> command;  // argv, to run again
  std::string cwd;
  Metadata meta;  // engine, versions, settings (ASSAY*), model, path, dtype …
};

// A request as seen by one process. Token ids are content: kept at level payload or with ASSAY_TOKENS=on only.
struct RequestInfo {
  uint64_t key = 0;
  // Length of the prompt, at every level.
  int64_t prompt_tokens = 0;
  int64_t ordinal = 0;    // among equal prompts of the run, from 0
  std::string engine_id;  // the engine's own id, may be empty
  std::vector<int64_t> tokens;
};

// Observations lost, by reason; the same numbers stand in the file's live area (format::DropReason).
struct DropCounts {
  uint64_t byte_cap = 0;
  uint64_t disk_full = 0;
  uint64_t payload_budget = 0;
  uint64_t internal = 0;
  uint64_t total() const { return byte_cap + disk_full + payload_budget + internal; }
  // Names as in manifest.json, in the order of the file's words.
  std::array<std::pair<const char*, uint64_t>, 4> by_reason() const {
    return {
        {{"byte_cap", byte_cap}, {"disk_full", disk_full}, {"payload_budget", payload_budget}, {"internal", internal}}};
  }
};

struct CoverageNote {
  std::string site;    // or a pattern that was asked for
  std::string reason;  // "not found", "never fired", "skipped", "dropped", "absent on this path", "dummy"
  // Of observations; 0 where the reason is about the site as a whole ("not found").
  uint64_t count = 0;
  std::string detail;  // nearest candidates, errno text …
};

}  // namespace assay
