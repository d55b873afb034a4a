// Payloads as float64 arrays: decoding, unions over steps, shards beside each other.
#include <algorithm>
#include <map>

#include "capture/capture.h"
#include "capture/index.h"
#include "tensor/decode.h"

namespace assay {
namespace {

// Product of the extents, or nullopt beyond what is decoded. Rows without elements take memory too: where the product
// is 0 every extent is bounded, as it is in the recorder.
std::optional<uint64_t> Elements(const std::vector<int64_t>& shape) {
  // 2^24 rows of no elements would still need 2^24 row identities.
  constexpr int64_t kMaxEmptyExtent = int64_t{1} << 24;
  uint64_t n = 1;
  for (const int64_t extent : shape) {
    // Divides instead of multiplying, so that forged extents cannot overflow.
    if (extent < 0 || (extent > 0 && n > Capture::kMaxTensorElements / static_cast<uint64_t>(extent))) return {};
    n *= static_cast<uint64_t>(extent);
  }
  const auto beyond = [](int64_t extent) { return extent > kMaxEmptyExtent; };
  if (n == 0 && std::any_of(shape.begin(), shape.end(), beyond)) return {};
  return n;
}

std::string Where(const EventInfo& info) {
  std::string out = info.name;
  if (info.event.step >= 0) out += " of step " + std::to_string(info.event.step);
  if (info.event.rank > 0) out += " of rank " + std::to_string(info.event.rank);
  return out;
}

// values of shape {outer…, rows, inner…} to {rows, outer…, inner…}.
// Checks index rows first whatever the engine's layout is (heads first, or a batch axis before it).
void RowsFirst(std::vector<double>* values, const std::vector<int64_t>& shape, size_t axis) {
  size_t outer = 1, inner = 1;
  for (size_t i = 0; i < axis; ++i) outer *= static_cast<size_t>(shape[i]);
  for (size_t i = axis + 1; i < shape.size(); ++i) inner *= static_cast<size_t>(shape[i]);
  const size_t rows = static_cast<size_t>(shape[axis]);
  std::vector<double> out(values->size());
  for (size_t o = 0; o < outer; ++o) {
    for (size_t r = 0; r < rows; ++r) {
      const double* from = values->data() + (o * rows + r) * inner;
      std::copy(from, from + inner, out.data() + (r * outer + o) * inner);
    }
  }
  *values = std::move(out);
}

}  // namespace

Result<TensorPtr> Capture::Decode(EventId id) const {
  auto tensor = std::make_shared<Tensor>();
  tensor->info = Info(id);
  const Event& e = tensor->info->event;
  if (e.payload.sha256.empty()) {
    return Status::BadInput(Where(*tensor->info) +
                            " was recorded without its values: " + RecordHint(tensor->info->name));
  }
  std::vector<int64_t> shape = e.shape;
  const size_t row_axis = static_cast<size_t>(std::max(e.row_axis, 0));
  const bool has_rows = e.row_axis >= 0 && row_axis < shape.size();
  // A step may have no rows; a row of nothing is no operand, and what divides by its size need not ask.
  for (size_t a = 0; a < shape.size(); ++a) {
    if (shape[a] == 0 && !(has_rows && a == row_axis))
      return Status::BadInput(Where(*tensor->info) + " has no elements: axis " + std::to_string(a) + " has size 0");
  }
  tensor->sampled = !e.payload.rows.empty();
  // Sampled rows count along the row axis, or along the first one without token rows.
  if (tensor->sampled && row_axis < shape.size()) {
    shape[row_axis] = static_cast<int64_t>(e.payload.rows.size());
  }
  const std::optional<uint64_t> n = Elements(shape);
  if (!n) return Status::BadInput(Where(*tensor->info) + " is too large to be decoded");
  ASSAY_ASSIGN_OR_RETURN(tensor->bytes, trace_->payload(e.payload));
  // The bytes are what the file has, the shape is what it says: DecodeTo trusts that they agree.
  if ((*n * static_cast<uint64_t>(BitsOf(e.dtype)) + 7) / 8 != tensor->bytes.size() || BitsOf(e.dtype) == 0) {
    return Status::BadInput(Where(*tensor->info) + ": its payload " + e.payload.sha256 + " has " +
                            std::to_string(tensor->bytes.size()) + " bytes, its shape needs " +
                            std::to_string((*n * static_cast<uint64_t>(BitsOf(e.dtype)) + 7) / 8));
  }
  tensor->values.resize(*n);
  DecodeTo(tensor->bytes.data(), 0, static_cast<int64_t>(*n), e.dtype, tensor->values.data());
  if (has_rows) {
    const std::vector<RowId> all = RowIdsOf(e);
    if (row_axis > 0) RowsFirst(&tensor->values, shape, row_axis);
    std::rotate(shape.begin(), shape.begin() + e.row_axis, shape.begin() + e.row_axis + 1);
    for (int64_t r = 0; r < shape[0]; ++r) {
      const int64_t number = tensor->sampled ? e.payload.rows[static_cast<size_t>(r)] : r;
      const bool inside = number >= 0 && static_cast<uint64_t>(number) < all.size();
      tensor->row_numbers.push_back(number);
      tensor->rows.push_back(inside ? all[static_cast<size_t>(number)] : RowId{});
    }
  }
  tensor->shape = std::move(shape);
  return TensorPtr(std::move(tensor));
}

// The cost is that of the decoded values and rows.
Result<TensorPtr> Capture::Load(EventId id) const {
  if (const TensorPtr* kept = index_->tensors.Find(id)) return *kept;
  ASSAY_ASSIGN_OR_RETURN(TensorPtr tensor, Decode(id));
  index_->tensors.Put(id, tensor, 8 * tensor->values.size() + sizeof(Tensor) + sizeof(RowId) * tensor->rows.size());
  return tensor;
}

Result<TensorPtr> Capture::LoadOperand(const EventInfo& result, std::string_view name) const {
  const std::optional<EventId> id = Operand(result, name);
  if (!id)
    return Status::BadInput(std::string(name) + " was not recorded before " + Where(result) + ": " + RecordHint(name));
  return Load(*id);
}

Result<TensorPtr> Capture::LoadWeight(const EventInfo& result, std::string_view name) const {
  const std::optional<EventId> id = Weight(result, name);
  if (!id) {
    return Status::BadInput(std::string(name) +
                            " was not recorded: record it once, in phase load, with ASSAY_LEVEL=payload");
  }
  return Load(*id);
}

// Events in order of execution, so that a position that was written twice has its latest row at the end.
Result<RequestRows> Capture::RowsOf(std::string_view name, uint64_t request, EventId until, int32_t rank) const {
  RequestRows out;
  out.request = request;
  std::map<int64_t, std::pair<TensorPtr, int64_t>> latest;  // by position: tensor and row in it
  const int64_t until_step = trace_->event(until).step();
  const uint32_t until_file = trace_->event(until).file();
  const int64_t until_repeat = RepeatOf(trace_->event(until));
  for (const EventId id : EventsOf(name)) {
    const EventView view = trace_->event(id);
    if (view.rank() != rank || view.meta("audit") == "before") continue;
    // In another process the order within a step is unknown: its rows of the same step count.
    const bool earlier = view.file() == until_file ? id == until || Earlier(id, until) : view.step() <= until_step;
    const int64_t repeat = RepeatOf(view);
    const bool same_repeat = until_repeat >= 0 && repeat == until_repeat;
    if (!(earlier || same_repeat) || (until_repeat >= 0 && repeat >= 0 && !same_repeat)) continue;
    bool has_request = false;
    for (int32_t i = 0; i < view.n_segments() && !has_request; ++i) {
      const SegmentSummary s = view.segment(i);
      has_request = s.request == request && !s.padding && s.n_rows > 0;
    }
    if (!has_request) continue;
    ASSAY_ASSIGN_OR_RETURN(TensorPtr tensor, Load(id));
    const std::vector<int64_t> row_shape(tensor->shape.begin() + 1, tensor->shape.end());
    if (!out.sources.empty() && row_shape != out.row_shape) {
      return Status::BadInput(std::string(name) + " has rows of several shapes");
    }
    out.row_shape = row_shape;
    out.sources.push_back(id);
    if (UnitRoundoff(view.compute_dtype()) >= UnitRoundoff(out.compute_dtype)) out.compute_dtype = view.compute_dtype();
    for (size_t r = 0; r < tensor->rows.size(); ++r) {
      const RowId& row = tensor->rows[r];
      if (row.real() && row.request == request) latest[row.position] = {tensor, static_cast<int64_t>(r)};
    }
  }
  if (out.sources.empty()) {
    return Status::BadInput("no rows of the request were recorded under " + std::string(name) + ": " +
                            RecordHint(name));
  }
  for (const auto& [position, where] : latest) {
    const std::span<const double> row = where.first->row(where.second);
    out.positions.push_back(position);
    out.values.insert(out.values.end(), row.begin(), row.end());
  }
  return out;
}

// Shards may come in any order; every column of the whole must be in one of them.
Result<TensorPtr> Capture::Stitched(const EventInfo& part) const {
  if (part.event.shard.count <= 1) return Load(part.id);
  const int64_t full = part.event.shard.full_cols;
  std::map<int32_t, TensorPtr> parts;
  for (const EventId id : Find(part.name, {.step = part.event.step, .repeat = part.repeat})) {
    const EventView view = trace_->event(id);
    if (view.meta("audit") == "before" || view.shard().count != part.event.shard.count) continue;
    ASSAY_ASSIGN_OR_RETURN(parts[view.shard().index], Load(id));
  }
  if (static_cast<int64_t>(parts.size()) != part.event.shard.count) {
    return Status::BadInput(Where(part) + ": " + std::to_string(parts.size()) + " of " +
                            std::to_string(part.event.shard.count) + " shards were recorded: record every rank");
  }
  // Info, rows and row numbers are those of the first shard.
  auto whole = std::make_shared<Tensor>(*parts.begin()->second);
  const int64_t rows = whole->n_rows();
  const std::optional<uint64_t> n = Elements({rows, full});
  if (!n) return Status::BadInput(Where(part) + ": the whole is too large to be stitched");
  whole->values.assign(*n, 0);
  whole->shape = {rows, full};
  whole->bytes = {};
  std::vector<uint8_t> filled(static_cast<size_t>(full), 0);
  for (const auto& [index, piece] : parts) {
    const int64_t first = piece->info->event.shard.col_offset, cols = piece->row_size();
    if (piece->n_rows() != rows || first < 0 || cols > full || first > full - cols) {
      return Status::BadInput(Where(part) + ": shard " + std::to_string(index) + " does not fit into the whole");
    }
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(piece->row(r).begin(), cols, whole->values.begin() + r * full + first);
    }
    std::fill_n(filled.begin() + first, cols, uint8_t{1});
  }
  if (std::count(filled.begin(), filled.end(), 1) != full) {
    return Status::BadInput(Where(part) + ": its shards leave columns of the whole open");
  }
  return TensorPtr(std::move(whole));
}

}  // namespace assay
