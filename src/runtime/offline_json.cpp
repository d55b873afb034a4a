#include "runtime/offline_json.h"

#include <cmath>
#include <string_view>
#include <unordered_map>

#include "base/json_writer.h"

namespace assay {
namespace {

// One overload a type, so that the functions below read like the tables of docs/fields.md.
class Writer {
 public:
  void Field(std::string_view key, std::string_view value) { json_.Key(key), json_.String(value); }
  void Field(std::string_view key, const std::string& value) { Field(key, std::string_view(value)); }
  void Field(std::string_view key, const char* value) { Field(key, std::string_view(value)); }
  void Field(std::string_view key, bool value) { json_.Key(key), json_.Bool(value); }
  void Field(std::string_view key, double value) { json_.Key(key), json_.Double(value); }
  void Field(std::string_view key, int64_t value) { json_.Key(key), json_.Int(value); }
  void Field(std::string_view key, int32_t value) { Field(key, int64_t{value}); }
  void Field(std::string_view key, uint64_t value) { json_.Key(key), json_.UInt(value); }
  void Field(std::string_view key, uint32_t value) { Field(key, uint64_t{value}); }
  void Field(std::string_view key, const std::vector<int64_t>& values) {
    json_.Key(key), json_.BeginArray();
    for (int64_t v : values) json_.Int(v);
    json_.EndArray();
  }
  void Field(std::string_view key, const std::vector<std::string>& values) {
    json_.Key(key), json_.BeginArray();
    for (const std::string& v : values) json_.String(v);
    json_.EndArray();
  }
  void Field(std::string_view key, const Metadata& meta) {  // a later value of a key wins
    json_.Key(key), json_.BeginObject();
    std::unordered_map<std::string_view, size_t> last;
    for (size_t i = 0; i < meta.size(); ++i) last[meta[i].first] = i;
    for (size_t i = 0; i < meta.size(); ++i) {
      if (last[meta[i].first] == i) Field(meta[i].first, meta[i].second);
    }
    json_.EndObject();
  }
  void BeginList(std::string_view key) { json_.Key(key), json_.BeginArray(); }
  JsonWriter& json() { return json_; }

 private:
  JsonWriter json_;
};

// A process with all sites: their ids are their places in the list.
void WriteProcess(const TraceProcess& p, Writer* w) {
  JsonWriter& json = w->json();
  json.BeginObject();
  w->Field("file", p.file);
  w->Field("host", p.info.host);
  w->Field("pid", p.info.pid);
  w->Field("rank", p.info.rank);
  w->Field("world_size", p.info.world_size);
  w->Field("start_time_ns", p.info.start_time_ns);
  w->Field("command", p.info.command);
  w->Field("cwd", p.info.cwd);
  w->Field("meta", p.info.meta);
  w->Field("closed", p.closed);
  w->Field("dropped", p.drops.total());
  w->BeginList("sites");
  for (const SiteInfo& s : p.sites) {
    json.BeginObject();
    w->Field("name", s.name);
    w->Field("engine_name", s.engine_name);
    w->Field("axes", s.axes);
    json.EndObject();
  }
  json.EndArray();
  w->BeginList("requests");
  for (const RequestInfo& r : p.requests) {
    json.BeginObject();
    w->Field("key", r.key);
    w->Field("prompt_tokens", r.prompt_tokens);
    w->Field("ordinal", r.ordinal);
    w->Field("engine_id", r.engine_id);
    w->Field("tokens", r.tokens);
    json.EndObject();
  }
  json.EndArray();
  w->BeginList("coverage");
  for (const CoverageNote& n : p.coverage) {
    json.BeginObject();
    w->Field("site", n.site);
    w->Field("reason", n.reason);
    w->Field("count", n.count);
    w->Field("detail", n.detail);
    json.EndObject();
  }
  json.EndArray();
  json.EndObject();
}

// Square roots here, as norms are what people read; the Arrow table has the sums.
void WriteSegment(const Segment& s, Writer* w) {
  JsonWriter& json = w->json();
  json.BeginObject();
  w->Field("request", s.request);
  w->Field("first_position", s.first_position);
  w->Field("n_rows", s.n_rows);
  w->Field("first_row", s.first_row);
  w->Field("padding", s.padding);
  w->Field("count", s.stats.count);
  w->Field("nan", s.stats.nan);
  w->Field("pos_inf", s.stats.pos_inf);
  w->Field("neg_inf", s.stats.neg_inf);
  w->Field("zero", s.stats.zero);
  w->Field("subnormal", s.stats.subnormal);
  w->Field("min", s.stats.min);
  w->Field("max", s.stats.max);
  w->Field("abs_max", s.stats.abs_max);
  w->Field("abs_max_index", s.stats.abs_max_index);
  w->Field("sum", s.stats.sum);
  w->Field("sum_sq", s.stats.sum_sq);
  w->Field("digest", s.stats.digest);
  w->Field("digest_split", s.stats.digest_split);
  w->BeginList("row_l2");
  for (const RowCell& row : s.rows) json.Double(std::sqrt(row.sum_sq));
  json.EndArray();
  w->BeginList("head_l2");
  for (const HeadCell& head : s.heads) json.Double(std::sqrt(head.sum_sq));
  json.EndArray();
  json.EndObject();
}

}  // namespace

std::string DescribeTrace(const Trace& trace) {
  Writer w;
  JsonWriter& json = w.json();
  json.BeginObject();
  w.Field("path", trace.path());
  w.Field("events", trace.event_count());
  w.BeginList("processes");
  for (const TraceProcess& process : trace.processes()) WriteProcess(process, &w);
  json.EndArray();
  w.BeginList("damages");
  for (const Damage& d : trace.damages()) {
    json.BeginObject();
    w.Field("file", d.file);
    w.Field("offset", d.offset);
    w.Field("size_bytes", d.size_bytes);
    w.Field("what", d.what);
    w.Field("benign", d.benign);
    json.EndObject();
  }
  json.EndArray();
  json.EndObject();
  return json.text();
}

std::string DescribeEvent(const Trace& trace, const EventView& view) {
  const Event e = view.Decode();
  const TraceProcess& process = trace.processes()[view.file()];
  const SiteInfo& site = process.sites[e.site];  // the reader gives every site of an event an entry
  Writer w;
  JsonWriter& json = w.json();
  json.BeginObject();
  w.Field("file", process.file);
  w.Field("sequence", e.sequence);
  w.Field("time_ns", e.time_ns);
  w.Field("site", trace.site_names()[view.global_site()]);
  w.Field("engine_name", site.engine_name);
  w.Field("axes", site.axes);
  w.Field("rank", e.rank);
  w.Field("step", e.step);
  w.Field("phase", NameOf(e.phase));
  w.Field("dtype", e.dtype == DType::kInvalid ? std::string_view() : NameOf(e.dtype));
  w.Field("compute_dtype", e.compute_dtype == DType::kInvalid ? std::string_view() : NameOf(e.compute_dtype));
  w.Field("before_inplace", (e.flags & kEventBeforeInplace) != 0);
  w.Field("in_graph", (e.flags & kEventInGraph) != 0);
  w.Field("anomaly_ring", (e.flags & kEventAnomalyRing) != 0);
  w.Field("shape", e.shape);
  w.Field("strides", e.strides);
  w.Field("storage_offset", e.storage_offset);
  w.Field("base_address", e.base_address);
  w.Field("stream", e.stream);
  w.Field("row_axis", e.row_axis);
  w.Field("head_axis", e.head_axis);
  w.Field("shard_index", e.shard.index);
  w.Field("shard_count", e.shard.count);
  w.Field("shard_col_offset", e.shard.col_offset);
  w.Field("shard_full_cols", e.shard.full_cols);
  w.Field("meta", e.meta);
  w.Field("payload_sha256", e.payload.sha256);
  w.Field("payload_bytes", e.payload.size_bytes);
  w.Field("payload_rows", e.payload.rows);
  w.BeginList("segments");
  for (const Segment& segment : e.segments) WriteSegment(segment, &w);
  json.EndArray();
  json.EndObject();
  return json.text();
}

}  // namespace assay
