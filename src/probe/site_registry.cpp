#include "probe/site_registry.h"

#include <algorithm>
#include <new>

#include "sites/site_table.h"

namespace assay {
namespace {

// Names offered for a pattern that matched nothing.
constexpr size_t kMaxCandidates = 3;

// Everything that a name decides, once. The engine's own name may be filtered by as well as the canonical one.
void Classify(const Settings& settings, ProbeSite* site) {
  const SiteName parsed = ParseSiteName(site->name);
  site->axes_given = !site->axes.empty();
  if (!site->axes_given && parsed.def != nullptr) site->axes = parsed.def->axes;
  const AxesText axes = ReadAxes(site->axes);
  site->n_axes = axes.count;
  site->row_axis = axes.row_axis;
  site->head_axis = axes.head_axis;
  site->token_ids = parsed.stem == "next_token" || parsed.stem == "input_ids";
  site->minus_inf_is_fine = parsed.stem.ends_with("lse");
  const auto hit = [&](const NameFilter& filter) {
    return filter.matches(site->name) || (!site->engine_name.empty() && filter.matches(site->engine_name));
  };
  site->wanted = (settings.include.patterns.empty() || hit(settings.include)) && !hit(settings.exclude) &&
                 (parsed.layer < 0 || settings.layers.contains(parsed.layer));
}

}  // namespace

AxesText ReadAxes(std::string_view axes) {
  AxesText out;
  size_t at = 0;
  while (at < axes.size()) {
    if (axes[at] == ' ') {
      ++at;
      continue;
    }
    const size_t end = std::min(axes.find(' ', at), axes.size());
    const std::string_view name = axes.substr(at, end - at);
    if (name == "T" && out.row_axis < 0) out.row_axis = out.count;
    if (name == "H" && out.head_axis < 0) out.head_axis = out.count;
    ++out.count;
    at = end;
  }
  return out;
}

// A shared lock is enough for all but the first sight of a name. The first caller's engine name and axes stay.
ProbeSite* SiteRegistry::Find(std::string_view name, std::string_view engine_name, std::string_view axes) {
  {
    std::shared_lock lock(mutex_);
    if (const auto it = by_name_.find(name); it != by_name_.end()) return it->second;
  }
  std::unique_lock lock(mutex_);
  if (const auto it = by_name_.find(name); it != by_name_.end()) return it->second;
  ProbeSite& site = sites_.emplace_back();
  try {
    site.number = static_cast<uint32_t>(sites_.size() - 1);
    site.name = name;
    site.engine_name = engine_name;
    site.axes = axes;
    Classify(settings_, &site);
    by_name_.emplace(site.name, &site);
    if (const auto asked = asked_.find(name); asked != asked_.end()) asked_.erase(asked);
  } catch (...) {
    sites_.pop_back();
    throw;
  }
  return &site;
}

bool SiteRegistry::Wants(std::string_view name) {
  {
    std::shared_lock lock(mutex_);
    if (const auto it = by_name_.find(name); it != by_name_.end()) return it->second->wanted;
    if (const auto it = asked_.find(name); it != asked_.end()) return it->second;
  }
  ProbeSite site;
  site.name = name;
  Classify(settings_, &site);
  std::unique_lock lock(mutex_);
  // Another thread may have described the site meanwhile; as a name without a site it would count as never fired.
  if (const auto it = by_name_.find(name); it != by_name_.end()) return it->second->wanted;
  asked_.emplace(name, site.wanted);
  return site.wanted;
}

ProbeSite* SiteRegistry::At(uint32_t number) const {
  std::shared_lock lock(mutex_);
  return number < sites_.size() ? const_cast<ProbeSite*>(&sites_[number]) : nullptr;
}

void SiteRegistry::CountDrop(ProbeSite* site, const std::string& reason) {
  if (site->dropped.fetch_add(1, std::memory_order_relaxed) != 0) return;
  std::unique_lock lock(mutex_);
  try {
    drop_reasons_.emplace(site, reason);
  } catch (const std::bad_alloc&) {  // the count stands; only its reason is lost
  }
}

// Patterns are held against every name that was ever asked about, sites that other filters left out among them.
std::vector<CoverageNote> SiteRegistry::Coverage(int* not_found) const {
  std::shared_lock lock(mutex_);
  std::vector<CoverageNote> notes;
  *not_found = 0;
  std::vector<std::string_view> names;
  for (const ProbeSite& site : sites_) names.push_back(site.name);
  for (const auto& [name, wanted] : asked_) names.push_back(name);
  for (const NameFilter* filter : {&settings_.include, &settings_.exclude}) {
    for (const std::string& pattern : filter->patterns) {
      bool met = false;
      for (const std::string_view name : names) met = met || PatternMatches(pattern, name);
      for (const ProbeSite& site : sites_) met = met || PatternMatches(pattern, site.engine_name);
      if (met) continue;
      if (filter == &settings_.include) ++*not_found;
      std::string detail;
      std::vector<std::string_view> rest = names;
      for (size_t i = 0; i < kMaxCandidates; ++i) {
        // The pattern itself is what was typed, so names are held against it as text.
        const std::string_view nearest = NearestName(pattern, rest);
        if (nearest.empty()) break;
        detail += (i == 0 ? "nearest: " : ", ") + std::string(nearest);
        std::erase(rest, nearest);
      }
      notes.push_back({pattern, "not found", 0, std::move(detail)});
    }
  }
  for (const ProbeSite& site : sites_) {
    const uint64_t recorded = site.recorded.load(), skipped = site.skipped.load(), dropped = site.dropped.load();
    if (skipped != 0) notes.push_back({site.name, "skipped", skipped, "left out by the settings"});
    if (dropped != 0) {
      const auto reason = drop_reasons_.find(&site);
      notes.push_back({site.name, "dropped", dropped, reason == drop_reasons_.end() ? "" : reason->second});
    }
    // Announced and never observed: the engine's path did not pass there.
    if (recorded + skipped + dropped == 0) {
      notes.push_back(
          {site.name, site.wanted ? "never fired" : "skipped", 0, site.wanted ? "" : "left out by the settings"});
    }
  }
  for (const auto& [name, wanted] : asked_) {
    notes.push_back({name, wanted ? "never fired" : "skipped", 0, wanted ? "" : "left out by the settings"});
  }
  return notes;
}

void SiteRegistry::ResetInChild() {
  new (&mutex_) std::shared_mutex();  // held by the forking thread under its parent's identity
  for (ProbeSite& site : sites_) {
    site.recorded.store(0, std::memory_order_relaxed);
    site.skipped.store(0, std::memory_order_relaxed);
    site.dropped.store(0, std::memory_order_relaxed);
  }
  drop_reasons_.clear();
}

}  // namespace assay
