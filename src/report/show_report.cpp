#include "report/show_report.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>
#include <tuple>
#include <unordered_map>

#include "base/glob.h"
#include "base/version.h"
#include "report/text_table.h"
#include "stats/sketch_math.h"

namespace assay {
namespace {

// An empty list takes everything.
template <class T>
bool Listed(const std::vector<T>& list, T value) {
  return list.empty() || std::find(list.begin(), list.end(), value) != list.end();
}

// One glob that matches is enough.
bool SiteListed(const std::vector<std::string>& globs, const std::string& name) {
  return globs.empty() ||
         std::any_of(globs.begin(), globs.end(), [&](const std::string& glob) { return GlobMatches(glob, name); });
}

// "1234abcd:0-11": the first half of the request's key, then positions.
std::string RowsOf(const Segment& segment) {
  if (segment.n_rows == 0) return {};
  std::string out = segment.padding ? "padding" : segment.request == 0 ? "-" : HexKey(segment.request).substr(0, 8);
  out += ':';
  out += std::to_string(segment.first_position);
  if (segment.n_rows > 1) {
    out += '-';
    out += std::to_string(segment.first_position + segment.n_rows - 1);
  }
  return out;
}

// "[3,4,8]".
std::string ListText(const std::vector<int64_t>& values) {
  std::string out = "[";
  for (size_t i = 0; i < values.size(); ++i) {
    if (i > 0) out += ',';
    out += std::to_string(values[i]);
  }
  return out + "]";
}

// A later value of a key wins, as in the trace. Linear: a hostile trace may have a million keys, and an ordered object
// looks for each among all.
Json MetaJson(const Metadata& meta) {
  Json out = Json::object();
  auto& members = out.get_ref<Json::object_t&>();
  std::unordered_map<std::string_view, size_t> places;
  for (const auto& [key, value] : meta) {
    const auto [place, is_new] = places.try_emplace(key, members.size());
    if (is_new) {
      members.push_back({key, value});
    } else {
      (members.begin() + static_cast<ptrdiff_t>(place->second))->second = value;
    }
  }
  return out;
}

// Keys of docs/json.md, "damages".
Json DamageJson(const Damage& damage) {
  Json d;
  d["file"] = damage.file;
  d["offset"] = damage.offset;
  d["size_bytes"] = damage.size_bytes;
  d["what"] = damage.what;
  d["benign"] = damage.benign;
  return d;
}

// Keys of docs/json.md, assay.show/1. 64-bit words that are no counts are hexadecimal text: JSON numbers of other
// readers end at 2^53.
Json EventJson(const ShownEvent& shown) {
  const Event& e = shown.event;
  const Stats& s = shown.stats;
  Json j;
  j["site"] = shown.site;
  j["engine_name"] = shown.engine_name;
  j["axes"] = shown.axes;
  j["sequence"] = e.sequence;
  j["time_ns"] = e.time_ns;
  j["rank"] = e.rank;
  j["step"] = e.step;
  j["phase"] = std::string(NameOf(e.phase));
  j["dtype"] = std::string(NameOf(e.dtype));
  j["compute_dtype"] = e.compute_dtype == DType::kInvalid ? Json(nullptr) : Json(std::string(NameOf(e.compute_dtype)));
  j["shape"] = e.shape;
  j["strides"] = e.strides;
  j["storage_offset"] = e.storage_offset;
  j["base_address"] = HexKey(e.base_address);
  j["stream"] = HexKey(e.stream);
  j["flags"] = e.flags;
  j["row_axis"] = e.row_axis;
  j["head_axis"] = e.head_axis;
  Json shard;
  shard["index"] = e.shard.index;
  shard["count"] = e.shard.count;
  shard["col_offset"] = e.shard.col_offset;
  shard["full_cols"] = e.shard.full_cols;
  j["shard"] = std::move(shard);
  j["meta"] = MetaJson(e.meta);
  j["segments"] = Json::array();
  for (const Segment& segment : e.segments) {
    Json part;
    part["request"] = HexKey(segment.request);
    part["first_position"] = segment.first_position;
    part["rows"] = segment.n_rows;
    part["padding"] = segment.padding;
    j["segments"].push_back(std::move(part));
  }
  Json stats;
  stats["count"] = s.count;
  stats["nan"] = s.nan;
  stats["pos_inf"] = s.pos_inf;
  stats["neg_inf"] = s.neg_inf;
  stats["zero"] = s.zero;
  stats["subnormal"] = s.subnormal;
  stats["min"] = JsonNumber(s.min);
  stats["max"] = JsonNumber(s.max);
  stats["abs_max"] = JsonNumber(s.abs_max);
  stats["sum"] = JsonNumber(s.sum);
  stats["sum_sq"] = JsonNumber(s.sum_sq);
  stats["digest"] = HexKey(s.digest);
  stats["digest_split"] = s.digest_split;
  j["stats"] = s.count > 0 ? std::move(stats) : Json(nullptr);
  Json payload(nullptr);
  if (!e.payload.sha256.empty()) {
    payload = Json::object();
    payload["sha256"] = e.payload.sha256;
    payload["size_bytes"] = e.payload.size_bytes;
    payload["rows"] = e.payload.rows;
  }
  j["payload"] = std::move(payload);
  return j;
}

// The columns, which AddRow fills in this order.
TextTable StepTable(bool wide) {
  using Align = TextTable::Align;
  std::vector<std::pair<std::string, Align>> columns = {
      {"site", Align::kLeft}, {"rank", Align::kRight}, {"dtype", Align::kLeft}, {"shape", Align::kLeft},
      {"rows", Align::kLeft}, {"min", Align::kRight},  {"max", Align::kRight},  {"mean", Align::kRight},
      {"L2", Align::kRight},  {"zero", Align::kRight}, {"NaN", Align::kRight},  {"Inf", Align::kRight}};
  if (wide) {
    for (const char* name : {"strides", "address", "digest", "engine name"}) columns.push_back({name, Align::kLeft});
  }
  return TextTable(std::move(columns));
}

// A shard says which of how many it is.
std::string ShapeText(const Event& e) {
  std::string out = ListText(e.shape);
  if (e.shard.count > 1) out += " " + std::to_string(e.shard.index + 1) + "/" + std::to_string(e.shard.count);
  return out;
}

// Three runs of rows, then how many more: a batch can have hundreds.
void AddRow(const ShownEvent& shown, bool wide, TextTable* table) {
  const Event& e = shown.event;
  const Stats& s = shown.stats;
  std::string rows;
  for (size_t i = 0; i < shown.rows.size() && i < 3; ++i) {
    if (i > 0) rows += ' ';
    rows += shown.rows[i];
  }
  if (shown.rows.size() > 3) rows += " +" + std::to_string(shown.rows.size() - 3);
  const bool any = s.count > 0;
  const double finite = static_cast<double>(s.count - s.nonfinite());
  std::vector<std::string> cells = {shown.site,
                                    std::to_string(e.rank),
                                    std::string(NameOf(e.dtype)),
                                    ShapeText(e),
                                    rows,
                                    any ? ShortNumber(s.min) : "",
                                    any ? ShortNumber(s.max) : "",
                                    any && finite > 0 ? ShortNumber(s.sum / finite) : "",
                                    any ? ShortNumber(std::sqrt(s.sum_sq)) : "",
                                    any ? std::to_string(s.zero) : "",
                                    any ? std::to_string(s.nan) : "",
                                    any ? std::to_string(s.pos_inf + s.neg_inf) : ""};
  if (wide) {
    cells.push_back(ListText(e.strides) + (e.storage_offset != 0 ? "+" + std::to_string(e.storage_offset) : ""));
    cells.push_back(HexKey(e.base_address));
    cells.push_back(HexKey(s.digest) + (s.digest_split ? " split" : ""));
    cells.push_back(shown.engine_name);
  }
  table->Add(std::move(cells));
}

}  // namespace

std::string DropsText(const DropCounts& drops) {
  std::string reasons;
  for (const auto& [reason, count] : drops.by_reason()) {
    if (count != 0)
      reasons.append(reasons.empty() ? " (" : ", ").append(reason).append(" ").append(std::to_string(count));
  }
  return std::to_string(drops.total()) + " dropped" + (reasons.empty() ? "" : reasons + ")");
}

Json DropsJson(const DropCounts& drops) {
  Json out = Json::object();
  for (const auto& [reason, count] : drops.by_reason()) out[reason] = count;
  return out;
}

// Filters look at what can be read in place; only events that are shown are decoded.
ShowModel MakeShowModel(const Trace& trace, const ShowOptions& options) {
  ShowModel model;
  model.path = trace.path();
  model.total = trace.event_count();
  // Globs are matched once a name, not once an event.
  std::vector<uint8_t> wanted_site;
  for (const std::string& name : trace.site_names()) wanted_site.push_back(SiteListed(options.sites, name));
  // (step, event): recording order inside a step.
  std::vector<std::pair<int64_t, uint64_t>> order;
  for (uint64_t i = 0; i < model.total; ++i) {
    const EventView event = trace.event(i);
    if (!wanted_site[event.global_site()] || !Listed(options.ranks, int64_t{event.rank()}) ||
        !Listed(options.steps, event.step())) {
      continue;
    }
    if (!options.requests.empty()) {
      bool any = false;
      for (int32_t s = 0; s < event.n_segments() && !any; ++s) any = Listed(options.requests, event.segment(s).request);
      if (!any) continue;
    }
    // Steps that a host does not count are -1 and come first.
    order.emplace_back(event.step(), i);
  }
  std::sort(order.begin(), order.end());
  model.matching = order.size();
  if (options.limit > 0 && order.size() > options.limit) order.resize(options.limit);
  for (const auto& [step, i] : order) {
    const EventView view = trace.event(i);
    ShownEvent shown;
    shown.event = view.Decode();
    shown.site = trace.site_names()[view.global_site()];
    const TraceProcess& process = trace.processes()[view.file()];
    if (view.site() < process.sites.size()) {
      shown.engine_name = process.sites[view.site()].engine_name;
      shown.axes = process.sites[view.site()].axes;
    }
    // Statistics are those of the rows asked for, merged; what was merged is dropped, as a trace may have millions of
    // cells.
    std::vector<Segment> kept;
    for (Segment& segment : shown.event.segments) {
      if (!Listed(options.requests, segment.request)) continue;
      MergeStats(segment.stats, &shown.stats);
      if (std::string rows = RowsOf(segment); !rows.empty()) shown.rows.push_back(std::move(rows));
      segment.rows.clear();
      segment.heads.clear();
      segment.stats = Stats();
      kept.push_back(std::move(segment));
    }
    shown.event.segments = std::move(kept);
    if (!shown.event.payload.sha256.empty()) (void)trace.payload(shown.event.payload);  // kept as damage when it fails
    model.events.push_back(std::move(shown));
  }
  model.payload_damages = trace.payload_damages();
  return model;
}

// Steps in order, events of a step in order of recording.
Json ShowJson(const Trace& trace, const ShowModel& model) {
  Json j;
  j["schema"] = "assay.show/1";
  j["version"] = ASSAY_VERSION;
  j["trace"] = model.path;
  j["events_total"] = model.total;
  j["events_matching"] = model.matching;
  j["processes"] = Json::array();
  j["requests"] = Json::array();
  j["coverage"] = Json::array();
  uint64_t dropped = 0;
  for (const TraceProcess& process : trace.processes()) {
    Json p;
    p["file"] = process.file;
    p["host"] = process.info.host;
    p["pid"] = process.info.pid;
    p["rank"] = process.info.rank;
    p["world_size"] = process.info.world_size;
    p["start_time_ns"] = process.info.start_time_ns;
    p["command"] = process.info.command;
    p["cwd"] = process.info.cwd;
    p["meta"] = MetaJson(process.info.meta);
    p["dropped"] = process.drops.total();
    p["drops"] = DropsJson(process.drops);
    p["closed"] = process.closed;
    j["processes"].push_back(std::move(p));
    dropped += process.drops.total();
    for (const RequestInfo& request : process.requests) {
      Json r;
      r["key"] = HexKey(request.key);
      r["prompt_tokens"] = request.prompt_tokens;
      r["ordinal"] = request.ordinal;
      r["engine_id"] = request.engine_id;
      j["requests"].push_back(std::move(r));
    }
    for (const CoverageNote& note : process.coverage) {
      Json c;
      c["site"] = note.site;
      c["reason"] = note.reason;
      c["count"] = note.count;
      c["detail"] = note.detail;
      j["coverage"].push_back(std::move(c));
    }
  }
  j["dropped"] = dropped;
  j["damages"] = Json::array();
  for (const auto* damages : {&trace.damages(), &model.payload_damages}) {
    for (const Damage& damage : *damages) j["damages"].push_back(DamageJson(damage));
  }
  j["steps"] = Json::array();
  for (const ShownEvent& shown : model.events) {
    Json& steps = j["steps"];
    if (steps.empty() || steps.back()["step"] != shown.event.step) {
      Json step;
      step["step"] = shown.event.step;
      step["events"] = Json::array();
      steps.push_back(std::move(step));
    }
    steps.back()["events"].push_back(EventJson(shown));
  }
  return j;
}

// What was recorded, and behind it what was not.
std::string ShowText(const Trace& trace, const ShowModel& model, bool wide) {
  std::string out = model.path + ": " + std::to_string(model.total) + " events of " +
                    std::to_string(trace.processes().size()) + " process(es), " + std::to_string(model.matching) +
                    " shown\n";
  for (size_t i = 0; i < model.events.size();) {
    const int64_t step = model.events[i].event.step;
    out += "\nstep " + (step < 0 ? std::string("unknown") : std::to_string(step)) + " (" +
           std::string(NameOf(model.events[i].event.phase)) + ")\n";
    TextTable table = StepTable(wide);
    for (; i < model.events.size() && model.events[i].event.step == step; ++i) AddRow(model.events[i], wide, &table);
    out += table.Text(2);
  }
  if (model.matching > model.events.size()) {
    out += "\n" + std::to_string(model.matching - model.events.size()) + " more events, raise --limit\n";
  }
  std::string losses;
  for (const TraceProcess& process : trace.processes()) {
    for (const CoverageNote& note : process.coverage) {
      // Nothing is lost where a probe was placed and fired; a limit that it is under is worth a line.
      if ((note.reason == "attached" && note.detail.empty()) || note.reason == "fired") continue;
      losses += "  " + OneLine(note.site) + ": " + note.reason +
                (note.count > 0 ? " (" + std::to_string(note.count) + ")" : "") +
                (note.detail.empty() ? "" : ", " + OneLine(note.detail)) + "\n";
    }
    if (process.drops.total() > 0) losses += "  " + process.file + ": " + DropsText(process.drops) + "\n";
    if (!process.closed) losses += "  " + process.file + ": not closed by its writer\n";
  }
  for (const Damage& damage : trace.damages()) {
    losses += "  " + damage.file + " at byte " + std::to_string(damage.offset) + ": " + damage.what + ", " +
              std::to_string(damage.size_bytes) + " bytes skipped" + (damage.benign ? " (normal)" : "") + "\n";
  }
  for (const Damage& damage : model.payload_damages) losses += "  " + damage.file + ": " + damage.what + "\n";
  if (!losses.empty()) out += "\nnot recorded, lost or damaged\n" + losses;
  return out;
}

}  // namespace assay
