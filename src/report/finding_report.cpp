#include "report/finding_report.h"

#include <cmath>

#include "base/number_text.h"
#include "report/text_table.h"

namespace assay {
namespace {

// "0,1,3".
std::string Joined(const std::vector<int32_t>& values) {
  std::string out;
  for (const int32_t v : values) {
    if (!out.empty()) out += ',';
    out += std::to_string(v);
  }
  return out;
}

// What could not be judged is not ruled out either.
std::string StateText(const LedgerEntry& e) {
  std::string text(NameOf(e.state));
  if (e.state == CheckState::kRuledOut && e.not_judged > 0)
    text += " in " + std::to_string(e.judged) + " of " + std::to_string(e.judged + e.not_judged);
  return text;
}

}  // namespace

Json StringsJson(const std::vector<std::string>& lines) {
  Json out = Json::array();
  for (const std::string& line : lines) out.push_back(line);
  return out;
}

Json FindingJson(const FirstBad& f) {
  Json j;
  j["name"] = f.name;
  j["layer"] = f.layer;
  j["step"] = f.step;
  j["request"] = HexKey(f.request);
  j["positions"] = Json::array();
  for (const auto& [first, last] : f.positions) {
    Json range = Json::array();
    range.push_back(first);
    range.push_back(last);
    j["positions"].push_back(std::move(range));
  }
  j["heads"] = f.heads;
  j["ranks"] = f.ranks;
  j["rank"] = f.ranks.empty() ? Json(nullptr) : Json(f.ranks[0]);
  j["class"] = f.cls;
  j["constant"] = f.constant;
  j["measured"] = JsonNumber(f.measured);
  j["bound"] = JsonNumber(f.bound);
  j["bound_basis"] = f.bound_basis;
  j["measured_of"] = f.measured_of;
  j["measured_from"] = f.measured_from;
  j["method"] = f.method;
  j["confidence"] = JsonNumber(f.confidence);
  j["evidence"] = StringsJson(f.evidence);
  return j;
}

Json FindingsJson(const std::vector<FirstBad>& findings) {
  Json out = Json::array();
  for (const FirstBad& finding : findings) {
    Json entry;
    Json& bad = entry["first_bad"] = FindingJson(finding);
    bad["constant"] = nullptr;
    if (!std::isnan(finding.constant_value)) {
      bad["constant"] = {{"value", JsonNumber(finding.constant_value)}, {"meaning", finding.constant}};
    }
    out.push_back(std::move(entry));
  }
  return out;
}

void AddCounts(const LedgerEntry& entry, Json* out) {
  (*out)["judged"] = entry.judged;
  (*out)["not_judged"] = entry.not_judged;
}

Json CoverageJson(const CheckCoverage& c, const std::string& checks_key) {
  Json j;
  j["events"] = c.events;
  j["sites"] = c.sites;
  j["processes"] = c.processes;
  j["payloads"] = c.payloads;
  j["damages"] = c.damages;
  j["dropped"] = c.dropped;
  j[checks_key] = c.checks_run;
  j["results_judged"] = c.results_judged;
  j["results_not_judged"] = c.results_not_judged;
  return j;
}

std::string FindingHead(const FirstBad& f, bool first, std::string_view kind) {
  std::string out = first ? "first wrong " + std::string(kind) + ": " : "also: ";
  out += OneLine(f.name) + "\n";
  std::string where;
  const auto add = [&](const char* name, const std::string& value) {
    if (value.empty()) return;
    if (!where.empty()) where += ", ";
    where.append(name).append(" ").append(value);
  };
  add("step", f.step >= 0 ? std::to_string(f.step) : "");
  add("request", f.request != 0 ? HexKey(f.request) : "");
  add("positions", RangesText(f.positions));
  add("heads", Joined(f.heads));
  add("ranks", Joined(f.ranks));
  if (!where.empty()) out += "  where     " + where + "\n";
  return out;
}

std::string MeasuredText(const FirstBad& f) {
  std::string out = "  measured  " + ShortNumber(f.measured);
  if (!f.measured_of.empty()) out += " " + OneLine(f.measured_of);
  out += ", bound " + ShortNumber(f.bound);
  if (!f.measured_from.empty()) out += "; " + OneLine(f.measured_from);
  return out;
}

std::string FindingTail(const FirstBad& f) {
  std::string out = "  method    " + f.method + ", confidence " + ShortNumber(f.confidence) + "\n";
  for (const std::string& line : f.evidence) out += "  evidence  " + OneLine(line) + "\n";
  return out;
}

std::string FindingText(const FirstBad& f, bool first, std::string_view kind) {
  std::string out = FindingHead(f, first, kind) + "  class     " + f.cls;
  if (!std::isnan(f.constant_value)) out += ", " + FactorText(f.constant_value);
  if (!f.constant.empty()) out += (!std::isnan(f.constant_value) ? ": " : ", ") + OneLine(f.constant);
  out += "\n";
  if (!f.bound_basis.empty()) {
    out += MeasuredText(f) + " (" + OneLine(f.bound_basis) + ")\n";
  }
  return out + FindingTail(f);
}

std::string LedgerText(const std::vector<LedgerEntry>& ledger) {
  using Align = TextTable::Align;
  TextTable table({{"hypothesis", Align::kLeft}, {"state", Align::kLeft}, {"evidence", Align::kLeft}});
  for (const LedgerEntry& e : ledger) {
    std::vector<std::string> lines = e.evidence;
    if (e.state == CheckState::kNotTestable && !e.capture.empty()) lines.push_back("to test it: " + e.capture);
    if (lines.empty()) lines.emplace_back();
    for (size_t i = 0; i < lines.size(); ++i) {
      table.Add({i == 0 ? e.hypothesis : "", i == 0 ? StateText(e) : "", lines[i]});
    }
  }
  return table.Text();
}

}  // namespace assay
