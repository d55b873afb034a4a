#include "report/check_report.h"

#include "base/version.h"
#include "report/finding_report.h"
#include "report/text_table.h"

namespace assay {
namespace {

constexpr size_t kFindingsShown = 8;

// Evidence as a list of sentences, one a check.
void AddLedger(const std::vector<LedgerEntry>& ledger, Json* out) {
  for (const char* key : {"confirmed", "ruled_out", "not_testable"}) (*out)[key] = Json::array();
  for (const LedgerEntry& entry : ledger) {
    Json j;
    j["hypothesis"] = entry.hypothesis;
    j["evidence"] = StringsJson(entry.evidence);
    AddCounts(entry, &j);
    if (entry.state == CheckState::kNotTestable) j["capture"] = entry.capture;
    const char* key = entry.state == CheckState::kConfirmed  ? "confirmed"
                      : entry.state == CheckState::kRuledOut ? "ruled_out"
                                                             : "not_testable";
    (*out)[key].push_back(std::move(j));
  }
}

}  // namespace

Json CheckJson(const CheckResult& r, const std::string& path) {
  Json j;
  j["schema"] = "assay.check/1";
  j["version"] = ASSAY_VERSION;
  j["trace"] = path;
  j["findings"] = FindingsJson(r.findings);
  j["consequences"] = FindingsJson(r.consequences);
  AddLedger(r.ledger, &j);
  j["coverage"] = CoverageJson(r.coverage, "checks");
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
  return out + "\n" + LedgerText(r.ledger);
}

Json CheckListJson() {
  Json j;
  j["schema"] = "assay.checks/1";
  j["version"] = ASSAY_VERSION;
  j["checks"] = Json::array();
  for (const CheckDef& d : AllChecks()) {
    Json check;
    check["name"] = d.name;
    check["hypothesis"] = d.hypothesis;
    check["what"] = d.what;
    check["needs"] = d.needs;
    j["checks"].push_back(std::move(check));
  }
  return j;
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
