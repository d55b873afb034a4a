#include "report/diagnose_report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/version.h"
#include "report/diff_report.h"

namespace assay {
namespace {

std::string Joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += (text.empty() ? "" : "; ") + line;
  return text;
}

// The constant as a number with its meaning.
Json WithNumber(const FirstBad& finding) {
  Json j = FindingJson(finding);
  if (std::isnan(finding.constant_value)) {
    j["constant"] = nullptr;
  } else {
    Json constant;
    constant["value"] = finding.constant_value;
    constant["text"] = finding.constant;
    j["constant"] = std::move(constant);
  }
  return j;
}

Json Wrapped(const FirstBad& finding) {
  Json j;
  j["first_bad"] = WithNumber(finding);
  return j;
}

const char* Verdicted(const Diagnosis& d) {
  if (!d.findings.empty()) return "fault";
  return d.judged ? "no fault found" : "not testable";
}

std::string Line(const FirstBad& f) {
  std::string text = f.name + "  " + (f.cls.empty() ? "UNKNOWN" : f.cls);
  if (f.step >= 0) text += "  step " + std::to_string(f.step);
  if (!f.positions.empty()) {
    text += "  positions ";
    for (size_t i = 0; i < f.positions.size() && i < 4; ++i) {
      const auto& [first, last] = f.positions[i];
      if (i > 0) text += ", ";
      text += std::to_string(first);
      if (last > first) text.append("-").append(std::to_string(last));
    }
    if (f.positions.size() > 4) text += ", ...";
  }
  if (!f.constant.empty()) text += "  constant " + f.constant;
  return text;
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
  for (const FirstBad& f : d.findings) j["findings"].push_back(Wrapped(f));
  j["consequences"] = Json::array();
  for (const FirstBad& f : d.consequences) j["consequences"].push_back(f.name);
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
  out += "\nverdict    ";
  if (d.findings.empty()) {
    out += d.judged ? "no fault found in what was recorded\n" : "nothing could be judged: see what to capture above\n";
    return out;
  }
  out += Line(d.findings[0]) + "\n";
  for (const std::string& line : d.findings[0].evidence) out += "           " + line + "\n";
  for (size_t i = 1; i < d.findings.size(); ++i) out += "also       " + Line(d.findings[i]) + "\n";
  return out;
}

}  // namespace assay
