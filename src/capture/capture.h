// A recording as the checks see it: operations looked up by name, step and rank, and their tensors as numbers whose
// rows know which request and position they are.
//
// It follows docs/adding-a-case.md: which event is the operand of a result, what a metadata key that was left out
// means, where keys and values of earlier steps are. It judges nothing. Payloads stay mapped and are decoded on demand;
// decoded tensors are kept up to a limit of bytes. Not thread-safe.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "sites/site_table.h"
#include "trace/event.h"
#include "trace/reader.h"

namespace assay {

using EventId = uint64_t;  // number of an event in its Trace
inline constexpr EventId kNoEvent = std::numeric_limits<EventId>::max();

// Which request and position a row holds. Rows that no segment names have known == false.
struct RowId {
  uint64_t request = 0;
  int64_t position = 0;
  bool padding = false;
  bool known = false;
  bool real() const { return known && !padding; }
};

// One event without its statistics grids, and its name taken apart.
// Owned by the Capture's cache and by whoever holds the pointer; nothing in it points into the trace.
struct EventInfo {
  EventId id = kNoEvent;
  uint32_t file = 0;
  std::string name;        // "layers.3.attn.out"
  SiteName site;           // layer, chunk, stem …
  std::string prefix;      // "layers.3." or "": prefix + "attn.q" is a sibling
  std::string axes;        // as recorded; may be empty
  Event event;             // segments keep their statistics, not their row and head cells
  std::string audit;       // metadata `audit`, empty without
  int64_t repeat = -1;     // metadata `repeat`, -1 without
  int64_t n_rows() const;  // extent of the row axis, 0 without one
};

// A tensor in float64, exact for every dtype but wide integers beyond 2^53. With token rows the row axis comes first,
// whatever the event's axes: shape {rows, rest…}, row-major.
struct Tensor {
  std::shared_ptr<const EventInfo> info;  // never null
  std::vector<int64_t> shape;             // row-major
  std::vector<double> values;
  std::vector<RowId> rows;           // one a row of `values`; empty without token rows
  std::vector<int64_t> row_numbers;  // rows of the event that are here: all, or those of a sampled payload
  bool sampled = false;              // only some rows were stored
  std::span<const std::byte> bytes;  // as stored: contiguous in the event's own axes order (raw bits of dtype)

  int64_t n() const { return static_cast<int64_t>(values.size()); }
  int64_t n_rows() const { return shape.empty() ? 1 : shape[0]; }
  int64_t row_size() const { return n_rows() == 0 ? 0 : n() / n_rows(); }
  std::span<const double> row(int64_t r) const {
    return std::span<const double>(values).subspan(static_cast<size_t>(r * row_size()),
                                                   static_cast<size_t>(row_size()));
  }
  // Extent of axis i counted from the end: dim(-1) is the last; 1 when there is none.
  int64_t dim(int i) const;
};
using TensorPtr = std::shared_ptr<const Tensor>;

// Rows of one request by position, taken from several events (keys and values so far).
// values is row-major: positions.size() rows of row_size() numbers each.
struct RequestRows {
  uint64_t request = 0;
  std::vector<int64_t> positions;         // ascending
  std::vector<int64_t> row_shape;         // of one row: {Hkv, d}
  std::vector<double> values;             // positions.size() rows
  std::vector<EventId> sources;           // events that a row came from, ascending
  DType compute_dtype = DType::kInvalid;  // coarsest of the sources
  int64_t row_size() const;
  // Row of a position; empty when it is not there.
  std::span<const double> at(int64_t position) const;
};

// What selects events of one site. Unset fields take everything.
struct EventFilter {
  std::optional<int64_t> step = {};
  std::optional<int32_t> rank = {};
  std::optional<std::string> audit = {};  // "" : only events without audit
  std::optional<int64_t> repeat = {};
  std::optional<Phase> phase = {};
  EventId before = kNoEvent;  // only events recorded earlier than this one
};

class Capture {
 public:
  // kBadInput, kEnvironment: as Trace::Open.
  static Result<std::unique_ptr<Capture>> Open(const std::string& path);
  // The trace must outlive the capture.
  explicit Capture(const Trace& trace);
  ~Capture();
  Capture(const Capture&) = delete;

  const Trace& trace() const { return *trace_; }
  uint64_t event_count() const;
  uint64_t payload_count() const;  // events that have a payload
  int32_t world_size() const { return world_size_; }
  int32_t n_ranks() const;                             // distinct ranks that events name
  bool has_payloads() const { return has_payloads_; }  // of one event at least

  // Order of execution over all processes: by recording order within one; over several by step, then by the number of
  // the event in its process and step. a == b only for the same event of one process.
  bool Earlier(EventId a, EventId b) const;

  // ---- events ----
  std::vector<std::string> Names() const;  // all site names
  bool HasSite(std::string_view name) const;
  // Names whose stem (without layer) is this: {"layers.0.attn.out", "layers.1.attn.out"}.
  std::vector<std::string> NamesOfStem(std::string_view stem) const;
  std::span<const EventId> EventsOf(std::string_view name) const;  // in order of recording
  const SiteName& SiteOf(EventId id) const;
  std::vector<EventId> Find(std::string_view name, const EventFilter& filter) const;
  std::shared_ptr<const EventInfo> Info(EventId id) const;

  // The operand of `result` that stands under `name` (full): same rank (else the one of another rank when it is not
  // sharded), same step, same repeat; the last one recorded before the result, never a look "before" the operation.
  std::optional<EventId> Operand(const EventInfo& result, std::string_view name) const;
  // A weight: of this rank, else of any rank when it is replicated; recorded at load, or last before the result.
  std::optional<EventId> Weight(const EventInfo& result, std::string_view name) const;

  // ---- metadata ----
  // Of the event, else model.* of the process, else the default of docs/adding-a-case.md. nullopt: no value anywhere,
  // or text that is no finite number.
  std::optional<std::string> Text(const EventInfo& event, std::string_view key) const;
  std::optional<double> Number(const EventInfo& event, std::string_view key) const;
  std::optional<int64_t> Integer(const EventInfo& event, std::string_view key) const;
  // "1" and "true" are true; any other text is false.
  bool Flag(const EventInfo& event, std::string_view key) const;  // false when there is no value
  // Of the event alone.
  static std::optional<std::string> OwnText(const EventInfo& event, std::string_view key);
  // Of the process that recorded the event: "model.hidden_size", "engine".
  std::optional<std::string> ProcessText(const EventInfo& event, std::string_view key) const;

  // ---- tensors ----
  // kBadInput with the reason and what to record when there is no payload ("… was recorded at level stats: record it
  // with ASSAY_LEVEL=payload"), or it is damaged or larger than the limit.
  Result<TensorPtr> Load(EventId id) const;
  Result<TensorPtr> LoadOperand(const EventInfo& result, std::string_view name) const;
  Result<TensorPtr> LoadWeight(const EventInfo& result, std::string_view name) const;
  // Rows of a request that were recorded under `name` up to and including `until` on this rank; a position recorded
  // twice has its latest row.
  Result<RequestRows> RowsOf(std::string_view name, uint64_t request, EventId until, int32_t rank) const;
  // All columns of a sharded result: the shards of every rank at the same step beside each other. A tensor that is not
  // sharded is itself.
  Result<TensorPtr> Stitched(const EventInfo& part) const;

  // ---- requests ----
  const RequestInfo* Request(uint64_t key) const;        // nullptr: not announced
  std::vector<uint64_t> RequestKeys() const;             // announced, ascending
  static std::string RecordHint(std::string_view name);  // "record NAME with ASSAY_LEVEL=payload"

  // 2 GiB as doubles: a larger payload is refused, not truncated.
  static constexpr uint64_t kMaxTensorElements = uint64_t{1} << 28;
  // Of decoded tensors; a check reads the same operands for every row of a step.
  static constexpr uint64_t kCacheBytes = uint64_t{256} << 20;

 private:
  struct Index;
  Result<TensorPtr> Decode(EventId id) const;
  const Trace* trace_;
  std::unique_ptr<Trace> owned_;
  std::unique_ptr<Index> index_;
  int32_t world_size_ = 1;
  bool has_payloads_ = false;
};

// Identity of each row of an event from its segments; rows outside of all segments are not known.
// Empty without a row axis or beyond kMaxTensorElements rows. Segments that reach outside the tensor are cut.
std::vector<RowId> RowIdsOf(const Event& event);

}  // namespace assay
