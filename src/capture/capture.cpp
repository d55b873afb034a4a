#include "capture/capture.h"

#include <algorithm>
#include <charconv>
#include <list>
#include <map>

#include "capture/index.h"

namespace assay {
namespace {

// "layers.3.", or "" outside the layers.
std::string PrefixOf(const SiteName& site) {
  return site.layer < 0 ? std::string() : "layers." + std::to_string(site.layer) + ".";
}

}  // namespace

int64_t EventInfo::n_rows() const {
  if (event.row_axis < 0 || static_cast<size_t>(event.row_axis) >= event.shape.size()) return 0;
  return event.shape[static_cast<size_t>(event.row_axis)];
}

int64_t Tensor::dim(int i) const {
  const int64_t at = static_cast<int64_t>(shape.size()) + i;
  return at < 0 || at >= static_cast<int64_t>(shape.size()) ? 1 : shape[static_cast<size_t>(at)];
}

// 1 for rows that are scalars.
int64_t RequestRows::row_size() const {
  int64_t n = 1;
  for (const int64_t extent : row_shape) n *= extent;
  return n;
}

std::span<const double> RequestRows::at(int64_t position) const {
  const auto found = std::lower_bound(positions.begin(), positions.end(), position);
  if (found == positions.end() || *found != position) return {};
  const size_t size = static_cast<size_t>(row_size());
  return std::span<const double>(values).subspan(static_cast<size_t>(found - positions.begin()) * size, size);
}

// A row that two segments name is the later one's.
std::vector<RowId> RowIdsOf(const Event& event) {
  if (event.row_axis < 0 || static_cast<size_t>(event.row_axis) >= event.shape.size()) return {};
  const int64_t n = event.shape[static_cast<size_t>(event.row_axis)];
  if (n <= 0 || static_cast<uint64_t>(n) > Capture::kMaxTensorElements) return {};
  std::vector<RowId> rows(static_cast<size_t>(n));
  for (const Segment& s : event.segments) {
    // Hostile segments may lie outside of the tensor.
    // The bound r < n - s.first_row cannot overflow, as first_row is not negative.
    for (int64_t r = 0; r < s.n_rows && s.first_row >= 0 && r < n - s.first_row; ++r) {
      rows[static_cast<size_t>(s.first_row + r)] = {s.request, s.first_position + r, s.padding, true};
    }
  }
  return rows;
}

// Site names are parsed once; events are sorted only where files were read in another order than they ran.
Capture::Index::Index(const Trace& trace) {
  const std::vector<std::string>& names = trace.site_names();
  sites.reserve(names.size());
  for (uint32_t i = 0; i < names.size(); ++i) {
    site_of.emplace(names[i], i);
    sites.push_back(ParseSiteName(names[i]));
    // A partial result is another thing than its sum: whoever asks for a stem does not get it by surprise.
    by_stem[sites.back().partial ? sites.back().stem + ".partial" : sites.back().stem].push_back(i);
  }
  events.resize(names.size());
  by_step.resize(names.size());
  const uint64_t n = trace.event_count();
  if (trace.processes().size() > 1) {  // see Earlier
    order.resize(n);
    std::map<std::pair<uint32_t, int64_t>, uint32_t> seen;
    for (uint64_t i = 0; i < n; ++i) {
      const EventView view = trace.event(i);
      order[i] = {view.step(), seen[{view.file(), view.step()}]++};
    }
  }
  for (uint64_t i = 0; i < n; ++i) {
    const EventView view = trace.event(i);
    payloads += view.has_payload() ? 1 : 0;
    // Spares most look-ups in a set: traces of one rank are the rule.
    if (ranks.empty() || *ranks.rbegin() != view.rank()) ranks.insert(view.rank());
    events[view.global_site()].push_back(i);
  }
  const auto earlier = [&](EventId a, EventId b) { return Earlier(trace, a, b); };
  for (auto& list : events) {
    if (!std::is_sorted(list.begin(), list.end(), earlier)) std::sort(list.begin(), list.end(), earlier);
  }
}

bool Capture::Index::Earlier(const Trace& trace, EventId a, EventId b) const {
  if (!order.empty()) {
    // Clocks of hosts and sequences of processes do not compare; the step does, and within it each process runs the
    // same program.
    if (order[a] != order[b]) return order[a] < order[b];
    return a < b;
  }
  const uint64_t x = trace.event(a).sequence(), y = trace.event(b).sequence();
  return x != y ? x < y : a < b;
}

// Most checks ask step by step; without this, each question would walk all events of the site.
std::span<const EventId> Capture::Index::OfStep(const Trace& trace, uint32_t site, int64_t step) const {
  std::vector<EventId>& list = by_step[site];
  const auto less = [&](EventId a, EventId b) { return trace.event(a).step() < trace.event(b).step(); };
  if (list.size() != events[site].size()) {
    list = events[site];
    std::stable_sort(list.begin(), list.end(), less);
  }
  const auto first =
      std::partition_point(list.begin(), list.end(), [&](EventId id) { return trace.event(id).step() < step; });
  const auto last = std::partition_point(first, list.end(), [&](EventId id) { return trace.event(id).step() <= step; });
  return {first, last};
}

Result<std::unique_ptr<Capture>> Capture::Open(const std::string& path) {
  ASSAY_ASSIGN_OR_RETURN(std::unique_ptr<Trace> trace, Trace::Open(path));
  auto capture = std::make_unique<Capture>(*trace);
  capture->owned_ = std::move(trace);
  return capture;
}

Capture::Capture(const Trace& trace) : trace_(&trace), index_(std::make_unique<Index>(trace)) {
  has_payloads_ = index_->payloads > 0;
  for (const TraceProcess& p : trace.processes()) {
    world_size_ = std::max(world_size_, p.info.world_size);
    for (const RequestInfo& r : p.requests) {
      const auto [at, fresh] = index_->requests.emplace(r.key, &r);
      // Only one rank may have been told to keep tokens.
      if (!fresh && at->second->tokens.empty()) at->second = &r;
    }
  }
}

Capture::~Capture() = default;

uint64_t Capture::event_count() const { return trace_->event_count(); }
uint64_t Capture::payload_count() const { return index_->payloads; }

int32_t Capture::n_ranks() const { return static_cast<int32_t>(index_->ranks.size()); }

bool Capture::Earlier(EventId a, EventId b) const { return index_->Earlier(*trace_, a, b); }

bool Capture::HasSite(std::string_view name) const { return !EventsOf(name).empty(); }

std::vector<std::string> Capture::Names() const {
  std::vector<std::string> out;
  for (uint32_t i = 0; i < index_->events.size(); ++i) {
    if (!index_->events[i].empty()) out.push_back(trace_->site_names()[i]);
  }
  return out;
}

std::vector<std::string> Capture::NamesOfStem(std::string_view stem) const {
  std::vector<std::string> out;
  const auto found = index_->by_stem.find(std::string(stem));
  if (found == index_->by_stem.end()) return out;
  for (const uint32_t site : found->second) {
    if (!index_->events[site].empty()) out.push_back(trace_->site_names()[site]);
  }
  return out;
}

std::span<const EventId> Capture::EventsOf(std::string_view name) const {
  const auto found = index_->site_of.find(name);
  if (found == index_->site_of.end()) return {};
  return index_->events[found->second];
}

const SiteName& Capture::SiteOf(EventId id) const { return index_->sites[trace_->event(id).global_site()]; }

std::vector<EventId> Capture::Find(std::string_view name, const EventFilter& filter) const {
  std::vector<EventId> out;
  const auto site = index_->site_of.find(name);
  if (site == index_->site_of.end()) return out;
  const std::span<const EventId> all =
      filter.step ? index_->OfStep(*trace_, site->second, *filter.step) : index_->events[site->second];
  for (const EventId id : all) {
    const EventView view = trace_->event(id);
    if (filter.rank && view.rank() != *filter.rank) continue;
    if (filter.phase && view.phase() != *filter.phase) continue;
    if (filter.audit && view.meta("audit") != *filter.audit) continue;
    if (filter.repeat && RepeatOf(view) != *filter.repeat) continue;
    if (filter.before != kNoEvent && !Earlier(id, filter.before)) continue;
    out.push_back(id);
  }
  return out;
}

// Row and head cells are dropped: no check on one trace reads them, and they are most of an event's memory.
std::shared_ptr<const EventInfo> Capture::Info(EventId id) const {
  if (auto* kept = index_->infos.Find(id)) return *kept;
  auto info = std::make_shared<EventInfo>();
  const EventView view = trace_->event(id);
  info->id = id;
  info->file = view.file();
  info->name = trace_->site_names()[view.global_site()];
  info->site = index_->sites[view.global_site()];
  info->prefix = PrefixOf(info->site);
  // Axes belong to the process's own entry of the site: another process may record it in another layout.
  const auto& sites = trace_->processes()[info->file].sites;
  if (view.site() < sites.size()) info->axes = sites[view.site()].axes;
  info->event = view.Decode();
  for (Segment& s : info->event.segments) {
    s.rows = {};
    s.heads = {};
  }
  info->audit = view.meta("audit");
  info->repeat = RepeatOf(view);
  index_->infos.Put(id, info, 1);
  return info;
}

// Events of one repeat belong together whatever their order; otherwise the last before the result wins.
std::optional<EventId> Capture::Operand(const EventInfo& result, std::string_view name) const {
  const auto site = index_->site_of.find(name);
  if (site == index_->site_of.end()) return std::nullopt;
  // `other`: the operand may be recorded by one rank alone when all ranks hold the same.
  std::optional<EventId> own, other;
  for (const EventId id : index_->OfStep(*trace_, site->second, result.event.step)) {
    const EventView view = trace_->event(id);
    if (id == result.id || view.meta("audit") == "before") continue;
    const int64_t repeat = RepeatOf(view);
    const bool same_repeat = result.repeat >= 0 && repeat == result.repeat;
    if (repeat >= 0 && result.repeat >= 0 && !same_repeat) continue;
    // Between processes of one step there is no order that could be trusted: all events of the step count as earlier.
    if (view.file() == result.file && !same_repeat && !Earlier(id, result.id)) continue;
    if (view.rank() == result.event.rank) {
      own = id;
    } else if (view.shard().count <= 1) {
      other = id;
    }
  }
  return own ? own : other;
}

// Of weights recorded before the result the last; one that was only recorded later is better than none, since weights
// do not change by themselves.
std::optional<EventId> Capture::Weight(const EventInfo& result, std::string_view name) const {
  std::optional<EventId> own, other;
  bool own_is_earlier = false;
  for (const EventId id : EventsOf(name)) {
    const EventView view = trace_->event(id);
    if (view.meta("audit") == "before") continue;
    const bool earlier = view.phase() == Phase::kLoad || view.step() < 0 || Earlier(id, result.id);
    if (view.rank() == result.event.rank) {
      if (earlier || !own_is_earlier) own = id;
      own_is_earlier = own_is_earlier || earlier;
    } else if (view.shard().count <= 1) {
      other = id;
    }
  }
  return own ? own : other;
}

const RequestInfo* Capture::Request(uint64_t key) const {
  const auto found = index_->requests.find(key);
  return found == index_->requests.end() ? nullptr : found->second;
}

std::vector<uint64_t> Capture::RequestKeys() const {
  std::vector<uint64_t> keys;
  for (const auto& [key, info] : index_->requests) keys.push_back(key);
  return keys;
}

std::string Capture::RecordHint(std::string_view name) {
  return "record " + std::string(name) + " with ASSAY_LEVEL=payload";
}

int64_t RepeatOf(const EventView& view) {
  const std::string_view text = view.meta("repeat");
  int64_t repeat = -1;
  if (!text.empty()) std::from_chars(text.data(), text.data() + text.size(), repeat);
  return repeat;
}

}  // namespace assay
