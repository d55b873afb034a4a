#include "model/layer_input.h"

#include <algorithm>
#include <limits>

#include "tensor/decode.h"

namespace assay {

// Rows are decoded to T as they are found: the payload is only mapped while it is read.
template <class T>
Status LayerInput<T>::Open(const std::string& trace_path, int64_t layer, int64_t hidden) {
  path_ = trace_path;
  site_ = "layers." + std::to_string(layer) + ".out";
  hidden_ = hidden;
  ASSAY_ASSIGN_OR_RETURN(const std::unique_ptr<Trace> trace, Trace::Open(trace_path));
  const std::vector<std::string>& names = trace->site_names();
  const auto name = std::find(names.begin(), names.end(), site_);
  if (name == names.end()) {
    return Status::BadInput(trace_path + ": no site " + site_ + "; record it there with --level payload");
  }
  const auto site = static_cast<uint32_t>(name - names.begin());
  int32_t lowest = std::numeric_limits<int32_t>::max();  // every rank holds the same rows: take one
  for (uint64_t i = 0; i < trace->event_count(); ++i) {
    if (trace->event(i).global_site() == site) lowest = std::min(lowest, trace->event(i).rank());
  }
  bool payload_seen = false;
  for (uint64_t i = 0; i < trace->event_count(); ++i) {
    if (trace->event(i).global_site() != site || trace->event(i).rank() != lowest) continue;
    const Event event = trace->event(i).Decode();
    // Samples hold some rows only; a run needs all of them.
    if (event.payload.sha256.empty() || !event.payload.rows.empty()) continue;
    payload_seen = true;
    const int64_t bits = BitsOf(event.dtype);
    if (event.shape.size() != 2 || event.shape[1] != hidden || event.shape[0] < 0 || event.shard.count > 1 ||
        bits < 8 || !IsFloat(event.dtype)) {
      return Status::BadInput(trace_path + ": the payload of " + site_ + " is not a whole [rows, " +
                              std::to_string(hidden) + "] tensor of floats");
    }
    ASSAY_ASSIGN_OR_RETURN(const std::span<const std::byte> bytes, trace->payload(event.payload));
    if (bytes.size() / static_cast<size_t>(hidden * bits / 8) < static_cast<size_t>(event.shape[0])) {
      return Status::BadInput(trace_path + ": the payload of " + site_ + " is shorter than its shape says");
    }
    for (const Segment& segment : event.segments) {
      if (segment.padding) continue;
      if (segment.first_row < 0 || segment.n_rows > event.shape[0] ||
          segment.first_row > event.shape[0] - segment.n_rows) {
        return Status::BadInput(trace_path + ": an event of " + site_ + " has rows that its tensor lacks");
      }
      for (int64_t r = 0; r < segment.n_rows; ++r) {
        std::vector<T>& row = rows_[{segment.request, segment.first_position + r}];
        row.resize(static_cast<size_t>(hidden));
        DecodeTo(bytes.data(), (segment.first_row + r) * hidden, hidden, event.dtype, row.data());
      }
    }
  }
  if (!payload_seen) {
    return Status::BadInput(trace_path + ": " + site_ +
                            " was recorded without payload; record it again with --level payload");
  }
  return {};
}

template <class T>
Status LayerInput<T>::Rows(std::span<const RowRun> runs, T* out) const {
  for (const RowRun& run : runs) {
    for (int64_t r = 0; r < run.n_rows; ++r) {
      const auto found = rows_.find({run.request, run.first_position + r});
      if (found == rows_.end()) {
        return Status::BadInput(path_ + ": " + site_ + " has no row for position " +
                                std::to_string(run.first_position + r) +
                                " of this prompt; the same prompts and tokens are needed (--like)");
      }
      std::copy(found->second.begin(), found->second.end(), out + (run.first_row + r) * hidden_);
    }
  }
  return {};
}

template class LayerInput<float>;
template class LayerInput<double>;

}  // namespace assay
