#include "runtime/event_fields.h"

#include <algorithm>
#include <cstring>

#include "runtime/row_runs.h"

namespace assay {
namespace {

// Fewer than the format's 64: the ABI promises 32, and OwnedObservation has room for as many strides.
constexpr int32_t kMaxRank = 32;
// A struct_size that is larger was never set: it is whatever stood in memory.
constexpr uint64_t kMaxStructSize = 65536;

std::string_view OrEmpty(const char* text) { return text == nullptr ? std::string_view() : std::string_view(text); }

// "assay_event.FIELD is VALUE, expected …".
Status BadField(std::string_view field, int64_t value, std::string_view expected) {
  return Status::Usage("assay_event." + std::string(field) + " is " + std::to_string(value) + ", expected " +
                       std::string(expected));
}

Status BadRun(uint64_t number, const assay_row_run& run) {
  return Status::Usage("assay_event.runs[" + std::to_string(number) + "] has first_row " +
                       std::to_string(run.first_row) + ", n_rows " + std::to_string(run.n_rows) + ", first_position " +
                       std::to_string(run.first_position) + "; expected 0 or above, and sums below 2^63");
}

// Fills the view; strides that the caller left out are those of a contiguous tensor.
Status ReadTensor(const assay_event& event, OwnedObservation* out) {
  if (event.ndim < 0 || event.ndim > kMaxRank) return BadField("ndim", event.ndim, "0 to 32");
  if (event.ndim > 0 && event.shape == nullptr) return Status::Usage("assay_event.shape is NULL with ndim above 0");
  if (event.dtype > UINT8_MAX) return BadField("dtype", event.dtype, "one of ASSAY_DTYPE_*");
  if (event.compute_dtype > UINT8_MAX) return BadField("compute_dtype", event.compute_dtype, "one of ASSAY_DTYPE_*");
  TensorView& view = out->observation.view;
  const auto rank = static_cast<size_t>(event.ndim);
  view.data = event.data;
  view.dtype = static_cast<DType>(event.dtype);
  view.offset_elems = event.offset;
  view.shape = {event.shape, rank};
  if (event.strides != nullptr) {
    view.strides = {event.strides, rank};
    return {};
  }
  int64_t stride = 1;
  for (size_t i = rank; i-- > 0;) {
    out->strides[i] = stride;
    // Overflow is found with the element count; the stride of an absurd shape is never used.
    if (__builtin_mul_overflow(stride, std::max<int64_t>(event.shape[i], 1), &stride)) stride = 0;
  }
  view.strides = {out->strides, rank};
  return {};
}

// Runs as given, or pressed from one entry a row. That they lie inside the tensor is checked with the axes, later.
Status ReadRows(const assay_event& event, OwnedObservation* out) {
  const bool by_row = event.row_requests != nullptr || event.row_positions != nullptr;
  if (by_row && event.n_runs != 0) {
    return Status::Usage("assay_event has runs and row_requests or row_positions; give one of the two");
  }
  if (by_row) {
    // Looked at before the arrays are: they are read as far as it says. The row axis may only be known later, by axes.
    int64_t longest = 0;
    for (const int64_t extent : out->observation.view.shape) longest = std::max(longest, extent);
    if (event.row_axis >= 0 && event.row_axis < event.ndim) longest = event.shape[event.row_axis];
    if (event.n_rows > static_cast<uint64_t>(std::max<int64_t>(longest, 0))) {
      return Status::Usage("assay_event.n_rows is " + std::to_string(event.n_rows) +
                           ", expected the extent of the row axis, at most " + std::to_string(longest));
    }
    // Another negative number would become padding in silence: mostly an unsigned one, or an index of the host's own.
    for (uint64_t i = 0; event.row_positions != nullptr && i < event.n_rows; ++i) {
      if (event.row_positions[i] < -1) {
        return Status::Usage("assay_event.row_positions[" + std::to_string(i) + "] is " +
                             std::to_string(event.row_positions[i]) +
                             ", expected a position from 0, or -1 for a padding row");
      }
    }
    out->runs = RunsFromRows(event.row_requests, event.row_positions, static_cast<int64_t>(event.n_rows));
    for (const RowRun& run : out->runs) {
      if (run.first_position > INT64_MAX - run.n_rows) {
        return Status::Usage("assay_event.row_positions ends a run at 2^63 or beyond; positions count from 0");
      }
    }
  } else {
    if (event.n_runs != 0 && event.runs == nullptr)
      return Status::Usage("assay_event.runs is NULL with n_runs above 0");
    out->runs.reserve(std::min<uint64_t>(event.n_runs, 1024));  // a forged number must not ask for memory
    for (uint64_t i = 0; i < event.n_runs; ++i) {
      const assay_row_run& run = event.runs[i];
      int64_t end = 0;
      if (run.first_row < 0 || run.n_rows < 0 || run.first_position < 0 ||
          __builtin_add_overflow(run.first_row, run.n_rows, &end) ||
          __builtin_add_overflow(run.first_position, run.n_rows, &end)) {
        return BadRun(i, run);
      }
      out->runs.push_back({run.request, run.first_row, run.n_rows, run.first_position, run.padding != 0});
    }
  }
  out->observation.runs = out->runs;
  return {};
}

// A count of 0 means that nothing was said: one shard.
Status ReadShard(const assay_event& event, Observation* out) {
  if (event.shard_count < 0) return BadField("shard_count", event.shard_count, "0 or above");
  out->shard.index = event.shard_index;
  out->shard.count = std::max(event.shard_count, 1);
  out->shard.col_offset = event.shard_col_offset;
  out->shard.full_cols = event.shard_full_cols;
  if (event.shard_index < 0 || event.shard_index >= out->shard.count) {
    return BadField("shard_index", event.shard_index, "0 to shard_count - 1");
  }
  if (event.shard_col_offset < 0) return BadField("shard_col_offset", event.shard_col_offset, "0 or above");
  if (event.shard_full_cols < 0) return BadField("shard_full_cols", event.shard_full_cols, "0 or above");
  return {};
}

}  // namespace

// Fields that an older caller's struct lacks keep what *out has; bytes of a newer one behind known_size are ignored.
Status ReadStructBytes(const void* in, uint64_t least_size, uint64_t known_size, const char* what, void* out) {
  if (in == nullptr) return Status::Usage(std::string(what) + " is NULL");
  uint64_t size = 0;
  std::memcpy(&size, in, sizeof(size));
  if (size < least_size || size > kMaxStructSize) {
    return Status::Usage(std::string(what) + ".struct_size is " + std::to_string(size) + ", expected at least " +
                         std::to_string(least_size) + "; make the struct with " + what + "_init()");
  }
  std::memcpy(out, in, std::min(size, known_size));
  return {};
}

Status ReadEvent(const assay_event& event, OwnedObservation* out) {
  Observation& o = out->observation;
  o.site = OrEmpty(event.name);
  if (event.site < 0 && o.site.empty()) return Status::Usage("assay_event has neither a site nor a name");
  if (event.layer >= 0 && !o.site.empty() && o.site.substr(0, 7) != "layers.") {
    out->name = "layers." + std::to_string(event.layer) + "." + std::string(o.site);
    o.site = out->name;
  }
  o.engine_name = OrEmpty(event.engine_name);
  o.axes = OrEmpty(event.axes);
  // Below -1, "not said", is nothing: mostly an unsigned number or an overflow of the caller's.
  for (const auto& [field, value] : {std::pair<const char*, int64_t>{"layer", event.layer},
                                     {"rank", event.rank},
                                     {"step", event.step},
                                     {"row_axis", event.row_axis},
                                     {"head_axis", event.head_axis}}) {
    if (value < -1) return BadField(field, value, "-1 or above");
  }
  o.rank = event.rank;
  o.step = event.step;
  if (event.phase > static_cast<uint32_t>(Phase::kLoad)) return BadField("phase", event.phase, "one of ASSAY_PHASE_*");
  o.phase = static_cast<Phase>(event.phase);
  constexpr uint32_t kFlags = ASSAY_FLAG_BEFORE_INPLACE | ASSAY_FLAG_IN_GRAPH;
  if ((event.flags & ~kFlags) != 0) return BadField("flags", event.flags, "a sum of ASSAY_FLAG_*");
  o.flags = event.flags;
  o.stream = event.stream;
  o.compute_dtype = static_cast<DType>(event.compute_dtype);
  o.row_axis = event.row_axis;
  o.head_axis = event.head_axis;
  o.base_address = event.base_address;
  ASSAY_RETURN_IF_ERROR(ReadTensor(event, out));
  ASSAY_RETURN_IF_ERROR(ReadRows(event, out));
  ASSAY_RETURN_IF_ERROR(ReadShard(event, &o));
  if (event.n_meta != 0 && event.meta == nullptr) return Status::Usage("assay_event.meta is NULL with n_meta above 0");
  for (uint64_t i = 0; i < event.n_meta; ++i) {
    out->meta.emplace_back(OrEmpty(event.meta[i].key), OrEmpty(event.meta[i].value));
  }
  o.meta = out->meta;
  return {};
}

}  // namespace assay
