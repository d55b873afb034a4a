#include "probe/observe.h"

#include <algorithm>
#include <string>

#include "probe/segment_pool.h"
#include "probe/site_registry.h"
#include "probe/tensor_copy.h"

namespace assay {
namespace {

// Elements must lie within what an address can reach from data: strides and offsets that do not are a slip of the
// host's, and reading by them would end it. That the memory is the host's own cannot be checked. REQUIRES: a view with
// elements.
Status CheckReach(const TensorView& view) {
  constexpr int64_t kMaxBytes = int64_t{1} << 56;  // of the widest address space there is
  // The lowest and the highest element that any index reaches: negative strides extend downwards.
  int64_t low = view.offset_elems, high = view.offset_elems;
  bool overflow = false;
  for (size_t i = 0; i < view.shape.size(); ++i) {
    int64_t span = 0;
    overflow |= __builtin_mul_overflow(view.shape[i] - 1, view.strides[i], &span);
    int64_t* end = span < 0 ? &low : &high;
    overflow |= __builtin_add_overflow(*end, span, end);
  }
  const int64_t limit = kMaxBytes / std::max(1, BitsOf(view.dtype) / 8);
  if (!overflow && low >= -limit && high <= limit) return {};
  return Status::Usage("strides and offset lead beyond any memory; they count elements, not bytes");
}

// Row and head axis: the observation's own, else by the axes "T" and "H".
Status ResolveAxes(const Observation& o, const ProbeSite& site, Event* event) {
  const int rank = o.view.rank();
  int row_axis = -1, head_axis = -1;
  if (site.n_axes == rank) {
    row_axis = site.row_axis;
    head_axis = site.head_axis;
  } else if (site.axes_given && site.n_axes > 0) {
    return Status::Usage(site.name + ": axes \"" + site.axes + "\" do not fit a tensor of rank " +
                         std::to_string(rank));
  } else if (const AxesText own = ReadAxes(o.axes); own.count == rank && own.row_axis >= 0) {
    // The site was asked about before its first observation, so it has the table's axes; this tensor has others.
    row_axis = own.row_axis;
    head_axis = own.head_axis;
  }
  if (o.row_axis >= 0) row_axis = o.row_axis;
  if (o.head_axis >= 0) head_axis = o.head_axis;
  if (row_axis >= rank || head_axis >= rank) {
    return Status::Usage(site.name + ": row axis " + std::to_string(row_axis) + ", head axis " +
                         std::to_string(head_axis) + " of a tensor of rank " + std::to_string(rank));
  }
  event->row_axis = row_axis;
  event->head_axis = head_axis;
  return {};
}

// Leaves of token ids what tells equal from different: counts and digests.
void RemoveContent(Event* event) {
  for (Segment& segment : event->segments) {
    Stats kept;
    kept.count = segment.stats.count;
    kept.digest = segment.stats.digest;
    kept.digest_split = segment.stats.digest_split;
    segment.stats = kept;
    for (RowCell& row : segment.rows) {
      const uint64_t digest = row.digest;
      row = RowCell{};
      row.digest = digest;
    }
    for (HeadCell& head : segment.heads) head = HeadCell{};
  }
}

// Whole tensors at level payload; at level sample rows, or the whole of what has no rows (vectors, scalars). Token
// ids are few and always whole.
Status TakePayload(const Settings& settings, const Observation& o, std::span<const RowRun> runs,
                   PendingEvent* pending) {
  const bool whole = settings.level == Level::kPayload || pending->site->token_ids;
  if (!whole) {
    // Rows of axis 0 stand in for token rows; a vector is one row.
    int axis = pending->event.row_axis;
    RowRun all;
    std::span<const RowRun> rows_of = runs;
    if (axis < 0 && o.view.rank() >= 2) {
      axis = 0;
      all.n_rows = o.view.shape[0];
      rows_of = {&all, 1};
    }
    if (axis >= 0) {
      pending->payload_rows = SampleRows(rows_of, settings.sample_rows, settings.seed);
      if (pending->payload_rows.empty()) return {};
      ASSAY_RETURN_IF_ERROR(CopyRows(o.view, axis, pending->payload_rows, &pending->payload));
      pending->has_payload = true;
      return {};
    }
  }
  ASSAY_RETURN_IF_ERROR(CopyContiguous(o.view, &pending->payload));
  pending->has_payload = true;
  return {};
}

}  // namespace

bool StoresTokens(const Settings& settings) { return settings.tokens || settings.level == Level::kPayload; }

Status Observe(const Settings& settings, const Observation& o, PendingEvent* pending) {
  Event& event = pending->event;
  const ProbeSite& site = *pending->site;
  event.step = o.step;
  event.phase = o.phase;
  event.flags = o.flags;
  for (const auto& [key, value] : o.meta) event.meta.emplace_back(std::string(key), std::string(value));
  // Nothing of the tensor is looked at, its dtype included: names work for tensors that cannot be described.
  if (settings.level == Level::kNames) return {};

  if (BitsOf(o.view.dtype) == 0) {
    return Status::Usage(site.name + ": unknown dtype " + std::to_string(static_cast<int>(o.view.dtype)));
  }
  const Result<uint64_t> count = CountElements(o.view);
  if (!count.ok()) return Status::Usage(site.name + ": " + count.status().message());
  if (*count > 0) {
    if (const Status reach = CheckReach(o.view); !reach.ok()) return Status::Usage(site.name + ": " + reach.message());
  }
  // Rows cost time and memory even where they have no elements, and nothing else bounds their number then.
  constexpr int64_t kMaxEmptyExtent = int64_t{1} << 24;
  for (const int64_t extent : o.view.shape) {
    if (*count == 0 && extent > kMaxEmptyExtent) {
      return Status::Usage(site.name + ": an extent of " + std::to_string(extent) + " in a tensor without elements");
    }
  }
  event.dtype = o.view.dtype;
  event.compute_dtype = o.compute_dtype;
  event.shape.assign(o.view.shape.begin(), o.view.shape.end());
  event.strides.assign(o.view.strides.begin(), o.view.strides.end());
  event.storage_offset = o.view.offset_elems;
  event.base_address = o.base_address != 0 ? o.base_address : reinterpret_cast<uintptr_t>(o.view.data);
  event.stream = o.stream;
  event.shard = o.shard;
  ASSAY_RETURN_IF_ERROR(ResolveAxes(o, site, &event));
  if (event.row_axis < 0 && !o.runs.empty()) {
    if (!site.axes.empty() && site.n_axes != o.view.rank()) {
      return Status::Usage(site.name + ": rows are given, but the site's axes \"" + site.axes +
                           "\" are not those of a tensor of rank " + std::to_string(o.view.rank()) +
                           "; name this one's own (axes with a T, or row_axis)");
    }
    return Status::Usage(site.name +
                         ": rows are given for a tensor without a row axis; name the axis (row_axis, or T " +
                         "in axes), or leave the rows out");
  }
  if (settings.level == Level::kShapes) return {};

  RowRun all;
  std::span<const RowRun> runs = o.runs;
  if (event.row_axis >= 0 && runs.empty()) {
    all.n_rows = o.view.shape[static_cast<size_t>(event.row_axis)];
    runs = {&all, 1};
  }
  LogicalLayout layout;
  layout.row_axis = event.row_axis;
  if (event.row_axis >= 0) layout.runs = runs;
  // A shard is measured at its place in the whole, so that the ranks' digests and sketches add up to those of the
  // whole.
  layout.full_cols = o.shard.full_cols;
  layout.col_offset = o.shard.col_offset;
  // Without token rows axis 0 stands in for them, so heads there (weights, "H c dv") get no grid of their own.
  layout.head_axis = event.row_axis < 0 && event.head_axis == 0 ? -1 : event.head_axis;
  layout.segment_rows = settings.segment_rows;
  MeasureOptions options;
  options.threads = settings.threads;
  options.row_grid = settings.row_grid;
  options.head_grid = settings.head_grid;
  event.segments = TakeSegments();
  if (const Status measured = Measure(o.view, layout, options, &event.segments); !measured.ok()) {
    return Status(measured.code(), site.name + ": " + measured.message());
  }
  // Statistics of one id are the id itself, so they go the same way as the ids.
  const bool content_allowed = !site.token_ids || StoresTokens(settings);
  if (!content_allowed) {
    RemoveContent(&event);
    return {};
  }
  if (settings.level >= Level::kSample || site.token_ids) return TakePayload(settings, o, runs, pending);
  return {};
}

bool HasAnomaly(const PendingEvent& pending) {
  for (const Segment& segment : pending.event.segments) {
    // Rows that nobody asked for may hold anything.
    if (segment.padding) continue;
    const Stats& s = segment.stats;
    if (s.nan + s.pos_inf != 0 || (s.neg_inf != 0 && !pending.site->minus_inf_is_fine)) return true;
  }
  return false;
}

}  // namespace assay
