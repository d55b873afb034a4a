#include "report/diagnose_report.h"

#include <algorithm>
#include <cstdio>

#include "base/version.h"
#include "report/check_report.h"

namespace assay {
namespace {

constexpr size_t kFindingsShown = 6;

std::string Joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += (text.empty() ? "" : "; ") + line;
  return text;
}

const char* Verdicted(const Diagnosis& d) {
  if (!d.findings.empty()) return "fault";
  return d.judged ? "no fault found" : "not testable";
}

}  // namespace

Json DiagnoseJson(const Diagnosis& d, const std::string& trace, const std::string& other) {
  Json j;
  j["schema"] = "assay.diagnose/1";
  j["version"] = ASSAY_VERSION;
  j["trace"] = trace;
  j["compared_with"] = d.compared ? Json(other) : Json(nullptr);
  j["verdict"] = Verdicted(d);
  j["comparison"] = d.compared ? Json(NameOf(d.comparison)) : Json(nullptr);
  j["findings"] = Json::array();
  for (const FirstBad& f : d.findings) j["findings"].push_back(CheckFindingJson(f));
  j["consequences"] = Json::array();
  for (const FirstBad& f : d.consequences) j["consequences"].push_back(CheckFindingJson(f));
  j["confirmed"] = Json::array();
  j["ruled_out"] = Json::array();
  j["not_testable"] = Json::array();
  for (const LedgerEntry& e : d.ledger) {
    Json entry;
    entry["hypothesis"] = e.hypothesis;
    if (e.state == CheckState::kNotTestable) {
      entry["capture"] = e.capture;
      entry["why"] = Joined(e.evidence);
      j["not_testable"].push_back(std::move(entry));
    } else {
      entry["evidence"] = Joined(e.evidence);
      j[e.state == CheckState::kConfirmed ? "confirmed" : "ruled_out"].push_back(std::move(entry));
    }
  }
  Json coverage;
  coverage["events"] = d.coverage.events;
  coverage["sites"] = d.coverage.sites;
  coverage["processes"] = d.coverage.processes;
  coverage["payloads"] = d.coverage.payloads;
  coverage["checks_run"] = d.coverage.checks_run;
  coverage["results_judged"] = d.coverage.results_judged;
  coverage["results_not_judged"] = d.coverage.results_not_judged;
  j["coverage"] = std::move(coverage);
  return j;
}

std::string DiagnoseText(const Diagnosis& d, const std::string& trace, const std::string& other) {
  std::string out = "trace      " + trace + "\n";
  if (d.compared) out += "against    " + other + ": " + NameOf(d.comparison) + ", " + d.comparison_summary + "\n";
  out += "\n";
  for (const LedgerEntry& e : d.ledger) {
    char head[80];
    std::snprintf(head, sizeof head, "%-26s %-13s ", e.hypothesis.c_str(), std::string(NameOf(e.state)).c_str());
    out += head;
    for (size_t i = 0; i < std::max<size_t>(e.evidence.size(), 1); ++i) {
      if (i > 0) out += std::string(41, ' ');
      out += (e.evidence.empty() ? "" : e.evidence[i]) + "\n";
    }
    if (e.state == CheckState::kNotTestable && !e.capture.empty())
      out += std::string(41, ' ') + "to test it: " + e.capture + "\n";
  }
  out += "\n";
  if (d.findings.empty()) {
    out += d.judged ? "verdict: no fault found in what was recorded\n"
                    : "verdict: nothing could be judged, see above what to capture\n";
    return out;
  }
  for (size_t i = 0; i < d.findings.size() && i < kFindingsShown; ++i) out += FindingText(d.findings[i], i == 0);
  if (d.findings.size() > kFindingsShown)
    out += "and " + std::to_string(d.findings.size() - kFindingsShown) + " more findings, see --json\n";
  if (!d.consequences.empty()) out += std::to_string(d.consequences.size()) + " symptoms follow from these\n";
  return out;
}

}  // namespace assay
