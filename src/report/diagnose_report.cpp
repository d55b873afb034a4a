#include "report/diagnose_report.h"

#include "base/version.h"
#include "report/finding_report.h"
#include "report/text_table.h"

namespace assay {
namespace {

constexpr size_t kFindingsShown = 6;

// Sentences in one string, as this schema has them.
std::string Joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += (text.empty() ? "" : "; ") + line;
  return text;
}

// "3 of 40 events have values": what is said of the others rests on their statistics.
// Empty where all have them.
std::string ValuesText(const CheckCoverage& c) {
  if (c.payloads >= c.events) return "";
  return std::to_string(c.payloads) + " of " + std::to_string(c.events) + " events have values";
}

// "no fault found" only where something was judged at all.
const char* Verdicted(const Diagnosis& d) {
  if (!d.findings.empty()) return "fault";
  return d.judged ? "no fault found" : "not testable";
}

}  // namespace

// Keys of docs/json.md, assay.diagnose/1.
Json DiagnoseJson(const Diagnosis& d, const std::string& trace, const std::string& other) {
  Json j;
  j["schema"] = "assay.diagnose/1";
  j["version"] = ASSAY_VERSION;
  j["trace"] = trace;
  j["compared_with"] = d.compared ? Json(other) : Json(nullptr);
  j["verdict"] = Verdicted(d);
  j["comparison"] = d.compared ? Json(NameOf(d.comparison)) : Json(nullptr);
  j["findings"] = FindingsJson(d.findings);
  j["consequences"] = FindingsJson(d.consequences);
  j["confirmed"] = Json::array();
  j["ruled_out"] = Json::array();
  j["not_testable"] = Json::array();
  for (const LedgerEntry& e : d.ledger) {
    Json entry;
    entry["hypothesis"] = e.hypothesis;
    AddCounts(e, &entry);
    if (e.state == CheckState::kNotTestable) {
      entry["capture"] = e.capture;
      entry["why"] = Joined(e.evidence);
      j["not_testable"].push_back(std::move(entry));
    } else {
      entry["evidence"] = Joined(e.evidence);
      j[e.state == CheckState::kConfirmed ? "confirmed" : "ruled_out"].push_back(std::move(entry));
    }
  }
  j["coverage"] = CoverageJson(d.coverage, "checks_run");
  return j;
}

// The ladder first, the verdict last, where a terminal leaves it in sight.
std::string DiagnoseText(const Diagnosis& d, const std::string& trace, const std::string& other) {
  std::string out = "trace      " + trace + "\n";
  // The summary says the verdict of the comparison first.
  if (d.compared) out += "against    " + other + ": " + OneLine(d.comparison_summary) + "\n";
  out += "\n" + LedgerText(d.ledger) + "\n";
  if (d.findings.empty()) {
    out += d.judged ? "verdict: no fault found in what was recorded" : "verdict: nothing could be judged";
    if (const std::string values = ValuesText(d.coverage); !values.empty()) out += "; " + values;
    return out + (d.judged ? "\n" : "; see above what to capture\n");
  }
  for (size_t i = 0; i < d.findings.size() && i < kFindingsShown; ++i) out += FindingText(d.findings[i], i == 0);
  if (d.findings.size() > kFindingsShown)
    out += "and " + std::to_string(d.findings.size() - kFindingsShown) + " more findings, see --json\n";
  if (!d.consequences.empty()) out += std::to_string(d.consequences.size()) + " symptoms follow from these\n";
  out += "verdict: fault, first wrong tensor " + OneLine(d.findings[0].name);
  if (const std::string values = ValuesText(d.coverage); !values.empty()) out += "; " + values;
  return out + "\n";
}

}  // namespace assay
