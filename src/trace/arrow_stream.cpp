#include "trace/arrow_stream.h"

#include <cerrno>
#include <exception>
#include <string>
#include <utility>

#include "trace/arrow_column.h"

namespace assay {
namespace {

// Layer of "layers.N.…", or -1.
// Site names are the sites layer's, which the trace layer may not include; this much of their grammar is in the
// format's table ("layer").
int32_t LayerOf(std::string_view site) {
  constexpr std::string_view kPrefix = "layers.";
  if (site.substr(0, kPrefix.size()) != kPrefix) return -1;
  int64_t layer = 0;
  size_t i = kPrefix.size();
  for (; i < site.size() && site[i] >= '0' && site[i] <= '9' && layer < 1000000; ++i)
    layer = 10 * layer + (site[i] - '0');
  return i > kPrefix.size() && i < site.size() && site[i] == '.' ? static_cast<int32_t>(layer) : -1;
}

// A list column; its items are never null.
ArrowColumn ListOf(const char* name, const char* item_format) {
  std::vector<ArrowColumn> item;
  item.emplace_back("item", item_format, false);
  return ArrowColumn(name, "+l", true, std::move(item));
}

// The table under construction. Columns are named members of one list; the enum gives their order.
class EventTable {
 public:
  EventTable() : root_("", "+s", false, Columns()) {}

  // segment: null for an event without segments.
  // Everything of the event is repeated in each of its segments' rows, so that a row can be queried by itself.
  void Append(uint64_t event_index, const TraceProcess& process, const Event& e, const Segment* segment,
              int32_t segment_index) {
    next_ = 0;
    const auto site = e.site < process.sites.size() ? process.sites[e.site] : SiteInfo{};
    Text(FileName(process.file));
    Text(process.info.host);
    Put(process.info.pid);
    Put(e.rank);
    Put(event_index);
    Put(e.sequence);
    Put(static_cast<int64_t>(e.time_ns));
    PutIf(e.step >= 0, e.step);
    Text(NameOf(e.phase));
    Text(site.name);
    TextIf(site.engine_name);
    TextIf(site.axes);
    const int32_t layer = LayerOf(site.name);
    PutIf(layer >= 0, layer);
    TextIf(NameOf(e.dtype), e.dtype != DType::kInvalid);
    TextIf(NameOf(e.compute_dtype), e.compute_dtype != DType::kInvalid);
    Flag((e.flags & kEventBeforeInplace) != 0);
    Flag((e.flags & kEventInGraph) != 0);
    Flag((e.flags & kEventAnomalyRing) != 0);
    List(e.shape);
    List(e.strides);
    Put(e.storage_offset);
    Put(e.base_address);
    Put(e.stream);
    PutIf(e.row_axis >= 0, e.row_axis);
    PutIf(e.head_axis >= 0, e.head_axis);
    Put(e.shard.index);
    Put(e.shard.count);
    Put(e.shard.col_offset);
    Put(e.shard.full_cols);
    TextIf(e.payload.sha256);
    PutIf(!e.payload.sha256.empty(), e.payload.size_bytes);
    List(e.payload.rows);
    Meta(e.meta);
    if (segment != nullptr) {
      AppendSegment(*segment, segment_index);
    } else {
      // Columns of the segment: not known is null, not 0.
      while (next_ < n_columns_) Next().Null();
    }
    root_.End();
  }

  ArrowColumn& root() { return root_; }

 private:
  static std::string_view FileName(std::string_view path) { return path.substr(path.rfind('/') + 1); }

  // Format letters: u text, l L 64-bit signed and unsigned, i I 32-bit, s 16-bit, g double, b Boolean, tsn: nanoseconds
  // since 1970. The order is that of Append and AppendSegment.
  std::vector<ArrowColumn> Columns() {
    std::vector<ArrowColumn> c;
    const auto add = [&c](const char* name, const char* format, bool nullable) {
      c.emplace_back(name, format, nullable);
    };
    add("file", "u", false), add("host", "u", false), add("pid", "l", false), add("rank", "i", false);
    add("event", "L", false), add("sequence", "L", false), add("time", "tsn:", false), add("step", "l", true);
    add("phase", "u", false), add("site", "u", false), add("engine_name", "u", true), add("axes", "u", true);
    add("layer", "i", true), add("dtype", "u", true), add("compute_dtype", "u", true);
    add("before_inplace", "b", false), add("in_graph", "b", false), add("anomaly_ring", "b", false);
    c.push_back(ListOf("shape", "l"));
    c.push_back(ListOf("strides", "l"));
    add("storage_offset", "l", false), add("base_address", "L", false), add("stream", "L", false);
    add("row_axis", "i", true), add("head_axis", "i", true);
    add("shard_index", "i", false), add("shard_count", "i", false);
    add("shard_col_offset", "l", false), add("shard_full_cols", "l", false);
    add("payload_sha256", "u", true), add("payload_bytes", "L", true);
    c.push_back(ListOf("payload_rows", "l"));
    std::vector<ArrowColumn> pair, item;
    pair.emplace_back("key", "u", false);
    pair.emplace_back("value", "u", false);
    item.emplace_back("item", "+s", false, std::move(pair));
    c.emplace_back("meta", "+l", true, std::move(item));

    add("segment", "i", true), add("request", "L", true), add("first_position", "l", true), add("n_rows", "l", true);
    add("first_row", "l", true), add("padding", "b", true);
    for (const char* name : {"count", "nan", "pos_inf", "neg_inf", "zero", "subnormal"}) add(name, "L", true);
    for (const char* name : {"min", "max", "abs_max"}) add(name, "g", true);
    add("abs_max_index", "L", true);
    for (const char* name : {"sum", "sum_sq", "l2", "mean"}) add(name, "g", true);
    add("digest", "L", true), add("digest_split", "b", true);
    std::vector<ArrowColumn> bucket;
    bucket.emplace_back("item", "g", true);
    c.emplace_back("sketch", "+w:64", true, std::move(bucket));
    c.push_back(ListOf("histogram_exponent", "s"));
    c.push_back(ListOf("histogram_count", "I"));
    c.push_back(ListOf("row_sum_sq", "g"));
    c.push_back(ListOf("row_digest", "L"));
    c.push_back(ListOf("row_nonfinite", "I"));
    c.push_back(ListOf("head_sum_sq", "g"));
    n_columns_ = c.size();
    return c;
  }

  void AppendSegment(const Segment& segment, int32_t index) {
    const Stats& s = segment.stats;
    Put(index);
    Put(segment.request);
    Put(segment.first_position);
    Put(segment.n_rows);
    Put(segment.first_row);
    Flag(segment.padding);
    for (uint64_t n : {s.count, s.nan, s.pos_inf, s.neg_inf, s.zero, s.subnormal}) Put(n);
    for (double x : {s.min, s.max, s.abs_max}) Put(x);
    Put(s.abs_max_index);
    Put(s.sum);
    Put(s.sum_sq);
    Put(__builtin_sqrt(s.sum_sq));
    // Over the finite elements, as the sums are.
    const uint64_t finite = s.count - s.nonfinite();
    PutIf(finite > 0, s.sum / static_cast<double>(finite));
    Put(s.digest);
    Flag(s.digest_split);
    ArrowColumn& sketch = Next();
    for (double x : s.sketch) sketch.child(0).Value(x);
    sketch.End();
    ListBy<int16_t>(s.histogram, [](const ExponentBin& bin) { return bin.exponent; });
    ListBy<uint32_t>(s.histogram, [](const ExponentBin& bin) { return bin.count; });
    ListBy<double>(segment.rows, [](const RowCell& cell) { return cell.sum_sq; });
    ListBy<uint64_t>(segment.rows, [](const RowCell& cell) { return cell.digest; });
    ListBy<uint32_t>(segment.rows, [](const RowCell& cell) { return cell.nonfinite; });
    ListBy<double>(segment.heads, [](const HeadCell& cell) { return cell.sum_sq; });
  }

  // Each appends to the next column.
  ArrowColumn& Next() { return root_.child(next_++); }
  template <class T>
  void Put(T value) {
    Next().Value(value);
  }
  template <class T>
  void PutIf(bool present, T value) {
    present ? Next().Value(value) : Next().Null();
  }
  void Flag(bool value) { Next().Bool(value); }
  void Text(std::string_view value) { Next().Text(value); }
  void TextIf(std::string_view value, bool present) { present ? Next().Text(value) : Next().Null(); }
  void TextIf(std::string_view value) { TextIf(value, !value.empty()); }
  void List(const std::vector<int64_t>& values) {
    ListBy<int64_t>(values, [](int64_t value) { return value; });
  }
  template <class T, class Items, class F>
  void ListBy(const Items& items, F value_of) {
    ArrowColumn& list = Next();
    for (const auto& item : items) list.child(0).Value(static_cast<T>(value_of(item)));
    list.End();
  }
  void Meta(const Metadata& meta) {
    ArrowColumn& list = Next();
    for (const auto& [key, value] : meta) {
      ArrowColumn& pair = list.child(0);
      pair.child(0).Text(key);
      pair.child(1).Text(value);
      pair.End();
    }
    list.End();
  }

  size_t n_columns_ = 0;
  ArrowColumn root_;
  size_t next_ = 0;
};

// private_data of an exported stream.
struct Stream {
  std::shared_ptr<const Trace> trace;
  ArrowExportOptions options;
  uint64_t next_event = 0;
  size_t next_segment = 0;
  std::string error;

  // Goes on at (next_event, next_segment): a batch may end inside an event, which is then decoded again for the next
  // one.
  void FillBatch(ArrowArray* out) {
    EventTable table;
    const auto full = [&] {
      return table.root().length() >= options.batch_rows || table.root().size_bytes() >= options.batch_bytes;
    };
    while (next_event < trace->event_count() && !full()) {
      const EventView view = trace->event(next_event);
      const Event event = view.Decode();
      const TraceProcess& process = trace->processes()[view.file()];
      if (event.segments.empty()) table.Append(next_event, process, event, nullptr, 0);
      for (; next_segment < event.segments.size() && !full(); ++next_segment) {
        table.Append(next_event, process, event, &event.segments[next_segment], static_cast<int32_t>(next_segment));
      }
      if (next_segment < event.segments.size()) break;
      next_segment = 0;
      ++next_event;
    }
    if (table.root().length() > 0) table.root().ExportArray(out);
  }
};

// Exceptions must not cross the C interface.
template <class F>
int Guarded(ArrowArrayStream* self, F&& body) {
  auto* stream = static_cast<Stream*>(self->private_data);
  try {
    body(stream);
    stream->error.clear();
    return 0;
  } catch (const std::exception&) {
    stream->error = "no memory";  // short enough to need none
    return ENOMEM;
  }
}

// The functions of the C stream interface. Nothing thrown leaves them.
int GetSchema(ArrowArrayStream* self, ArrowSchema* out) {
  *out = {};
  return Guarded(self, [&](Stream*) { EventTable().root().ExportSchema(out); });
}

// A released array (all zero) ends the stream.
int GetNext(ArrowArrayStream* self, ArrowArray* out) {
  *out = {};
  return Guarded(self, [&](Stream* stream) { stream->FillBatch(out); });
}

const char* GetLastError(ArrowArrayStream* self) {
  const auto* stream = static_cast<const Stream*>(self->private_data);
  return stream->error.empty() ? nullptr : stream->error.c_str();
}

void Release(ArrowArrayStream* self) {
  delete static_cast<Stream*>(self->private_data);
  self->private_data = nullptr;
  self->release = nullptr;
}

}  // namespace

void ExportEvents(std::shared_ptr<const Trace> trace, const ArrowExportOptions& options, ArrowArrayStream* out) {
  auto stream = std::make_unique<Stream>();
  stream->trace = std::move(trace);
  stream->options = options;
  if (stream->options.batch_rows < 1) stream->options.batch_rows = 1;
  *out = {};
  out->get_schema = GetSchema;
  out->get_next = GetNext;
  out->get_last_error = GetLastError;
  out->release = Release;
  out->private_data = stream.release();
}

}  // namespace assay
