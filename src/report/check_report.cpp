#include "report/check_report.h"

#include <cmath>

#include "base/version.h"
#include "report/diff_report.h"
#include "report/text_table.h"

namespace assay {
namespace {

constexpr size_t kFindingsShown = 8;

std::string Joined(const std::vector<int32_t>& values) {
  std::string out;
  for (const int32_t v : values) {
    if (!out.empty()) out += ',';
    out += std::to_string(v);
  }
  return out;
}

Json Lines(const std::vector<std::string>& lines) {
  Json out = Json::array();
  for (const std::string& line : lines) out.push_back(line);
  return out;
}

Json CoverageJson(const CheckCoverage& c) {
  Json j;
  j["events"] = c.events;
  j["sites"] = c.sites;
  j["processes"] = c.processes;
  j["payloads"] = c.payloads;
  j["damages"] = c.damages;
  j["dropped"] = c.dropped;
  j["checks"] = c.checks_run;
  j["results_judged"] = c.results_judged;
  j["results_not_judged"] = c.results_not_judged;
  return j;
}

}  // namespace

std::string FindingText(const FirstBad& f, bool first) {
  std::string out;
  out += (first ? "first wrong tensor: " : "also: ") + f.name + "\n";
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
  out += "  class     " + f.cls;
  if (std::isfinite(f.constant_value)) out += ", " + ShortNumber(f.constant_value);
  if (!f.constant.empty()) out += std::string(std::isfinite(f.constant_value) ? ": " : ", ") + f.constant;
  out += "\n";
  if (!f.bound_basis.empty()) {
    out += "  measured  " + ShortNumber(f.measured) + ", bound " + ShortNumber(f.bound) + " (" + f.bound_basis + ")\n";
  }
  out += "  method    " + f.method + ", confidence " + ShortNumber(f.confidence) + "\n";
  for (const std::string& line : f.evidence) out += "  evidence  " + line + "\n";
  return out;
}

Json CheckFindingJson(const FirstBad& finding) {
  Json bad = FindingJson(finding);
  bad["constant"] = nullptr;
  if (std::isfinite(finding.constant_value)) {
    bad["constant"] = {{"value", JsonNumber(finding.constant_value)}, {"meaning", finding.constant}};
  }
  Json j;
  j["first_bad"] = std::move(bad);
  return j;
}

void AddLedgerJson(const std::vector<LedgerEntry>& ledger, Json* out) {
  for (const char* key : {"confirmed", "ruled_out", "not_testable"}) (*out)[key] = Json::array();
  for (const LedgerEntry& entry : ledger) {
    Json j;
    j["hypothesis"] = entry.hypothesis;
    j["evidence"] = Lines(entry.evidence);
    if (entry.state == CheckState::kNotTestable) j["capture"] = entry.capture;
    const char* key = entry.state == CheckState::kConfirmed  ? "confirmed"
                      : entry.state == CheckState::kRuledOut ? "ruled_out"
                                                             : "not_testable";
    (*out)[key].push_back(std::move(j));
  }
}

Json CheckJson(const CheckResult& r, const std::string& path) {
  Json j;
  j["schema"] = "assay.check/1";
  j["version"] = ASSAY_VERSION;
  j["trace"] = path;
  j["findings"] = Json::array();
  for (const FirstBad& f : r.findings) j["findings"].push_back(CheckFindingJson(f));
  j["consequences"] = Json::array();
  for (const FirstBad& f : r.consequences) j["consequences"].push_back(CheckFindingJson(f));
  AddLedgerJson(r.ledger, &j);
  j["coverage"] = CoverageJson(r.coverage);
  return j;
}

std::string CheckText(const CheckResult& r, const std::string& path) {
  const CheckCoverage& c = r.coverage;
  std::string out = path + ": " + std::to_string(c.events) + " events at " + std::to_string(c.sites) + " sites, " +
                    std::to_string(c.payloads) + " with values; " + std::to_string(c.results_judged) +
                    " results judged by " + std::to_string(c.checks_run) + " checks, " +
                    std::to_string(c.results_not_judged) + " could not be\n";
  if (c.damages + c.dropped > 0) {
    out += std::to_string(c.damages) + " damaged records, " + std::to_string(c.dropped) + " dropped events\n";
  }
  out += r.findings.empty() ? "nothing wrong was found\n" : "";
  for (size_t i = 0; i < r.findings.size() && i < kFindingsShown; ++i) out += FindingText(r.findings[i], i == 0);
  if (r.findings.size() > kFindingsShown)
    out += std::to_string(r.findings.size() - kFindingsShown) + " more findings\n";
  if (!r.consequences.empty()) out += std::to_string(r.consequences.size()) + " symptoms behind them\n";
  out += "\n";
  TextTable table({{"hypothesis", TextTable::Align::kLeft},
                   {"state", TextTable::Align::kLeft},
                   {"evidence", TextTable::Align::kLeft}});
  for (const LedgerEntry& e : r.ledger) {
    std::vector<std::string> lines = e.evidence;
    if (e.state == CheckState::kNotTestable && !e.capture.empty()) lines.push_back("to test it: " + e.capture);
    if (lines.empty()) lines.emplace_back();
    for (size_t i = 0; i < lines.size(); ++i) {
      table.Add({i == 0 ? e.hypothesis : "", i == 0 ? std::string(NameOf(e.state)) : "", lines[i]});
    }
  }
  return out + table.Text();
}

std::string CheckListText() {
  TextTable table({{"check", TextTable::Align::kLeft},
                   {"hypothesis", TextTable::Align::kLeft},
                   {"what holds", TextTable::Align::kLeft},
                   {"needs", TextTable::Align::kLeft}});
  for (const CheckDef& d : AllChecks()) {
    table.Add({std::string(d.name), std::string(d.hypothesis), std::string(d.what), std::string(d.needs)});
  }
  return table.Text();
}

}  // namespace assay
