#include "report/sites_report.h"

#include <algorithm>
#include <span>

#include "base/glob.h"
#include "base/version.h"
#include "report/text_table.h"
#include "sites/site_table.h"

namespace assay {
namespace {

// As traces have it, with N for the layer.
std::string FullName(const SiteDef& def) {
  return def.per_layer ? "layers.N." + std::string(def.name) : std::string(def.name);
}

// With the layer or without it.
bool Wanted(const SiteDef& def, const std::string& pattern) {
  return pattern.empty() || GlobMatches(pattern, FullName(def)) || GlobMatches(pattern, def.name);
}

// [[{"name": "attn.k", "context": true}, …], …]: alternatives, each a list of inputs.
Json InputsJson(std::string_view inputs) {
  Json out = Json::array();
  for (const auto& alternative : ParseSiteInputs(inputs)) {
    Json list = Json::array();
    for (const SiteInput& input : alternative) {
      Json item;
      item["name"] = std::string(input.name);
      item["context"] = input.context;
      list.push_back(std::move(item));
    }
    out.push_back(std::move(list));
  }
  return out;
}

}  // namespace

bool AnySite(const std::string& pattern) {
  const std::span<const SiteDef> sites = AllSites();
  return std::any_of(sites.begin(), sites.end(), [&](const SiteDef& def) { return Wanted(def, pattern); });
}

// Keys of docs/json.md, assay.sites/1.
Json SitesJson(const std::string& pattern) {
  Json j;
  j["schema"] = "assay.sites/1";
  j["version"] = ASSAY_VERSION;
  j["sites"] = Json::array();
  for (const SiteDef& def : AllSites()) {
    if (!Wanted(def, pattern)) continue;
    Json site;
    site["name"] = FullName(def);
    site["axes"] = std::string(def.axes);
    site["what"] = std::string(def.what);
    site["op"] = std::string(NameOf(def.op));
    site["per_layer"] = def.per_layer;
    site["paths"] = std::string(def.paths);
    site["inputs_materialised"] = InputsJson(def.inputs_materialised);
    site["inputs_absorbed"] = InputsJson(def.inputs_absorbed);
    site["shard_axis"] = std::string(def.shard_axis);
    site["default_preset"] = def.default_preset;
    j["sites"].push_back(std::move(site));
  }
  return j;
}

std::string SitesText(const std::string& pattern) {
  using Align = TextTable::Align;
  TextTable table({{"name", Align::kLeft},
                   {"axes", Align::kLeft},
                   {"op", Align::kLeft},
                   {"path", Align::kLeft},
                   {"shard", Align::kLeft},
                   {"preset", Align::kLeft},
                   {"computed from", Align::kLeft},
                   {"what", Align::kLeft}});
  for (const SiteDef& def : AllSites()) {
    if (!Wanted(def, pattern)) continue;
    std::string inputs(def.inputs_materialised);
    if (def.inputs_absorbed != def.inputs_materialised) inputs += " / " + std::string(def.inputs_absorbed);
    table.Add({FullName(def), std::string(def.axes), std::string(NameOf(def.op)), std::string(def.paths),
               std::string(def.shard_axis), def.default_preset ? "yes" : "opt-in", inputs, std::string(def.what)});
  }
  return table.Text();
}

}  // namespace assay
