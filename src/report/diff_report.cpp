#include "report/diff_report.h"

#include <algorithm>

#include "base/version.h"
#include "report/finding_report.h"
#include "report/text_table.h"

namespace assay {
namespace {

constexpr size_t kFindingsShown = 5;
constexpr size_t kNotesShown = 12;
constexpr size_t kNamesShown = 12;
constexpr size_t kSitesAround = 6;
// Below the table: whose figures its columns are, and what from.
constexpr const char* kLegend =
    "rel L2, inputs: B - A at the worst row against its bound, estimated from sketches. max abs: B - A, from "
    "payloads.\n"
    "cosine: of the site, computed from payloads where there is a max abs, else estimated from sketches.\n";

// 0 of nothing.
double ShareOf(uint64_t part, uint64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

void AppendFinding(const FirstBad& f, bool first, std::string* out) {
  *out += FindingHead(f, first);
  *out += "  class     " + f.cls + (f.constant.empty() ? "" : ", " + OneLine(f.constant)) + "\n";
  *out += MeasuredText(f) + "\n";
  *out += "  bound     " + OneLine(f.bound_basis) + "\n";
  *out += FindingTail(f);
}

// What rel_l2, rel_l2_in and, without payloads, the cosine are estimated from.
const char* SketchesOf(const SiteComparison& s) { return s.by_rows ? "row sketches" : "segment sketches"; }

Json PayloadJson(const PayloadDifference& p) {
  Json j;
  j["elements"] = p.elements;
  j["max_abs"] = JsonNumber(p.max_abs);
  j["rel_l2"] = JsonNumber(p.rel_l2);
  j["cosine"] = JsonNumber(p.cosine);
  j["ulp"] = {{"p50", JsonNumber(p.ulp_p50)}, {"p99", JsonNumber(p.ulp_p99)}, {"max", JsonNumber(p.ulp_max)}};
  // Trailing empty bins are left out.
  size_t bins = p.ulp_histogram.size();
  while (bins > 1 && p.ulp_histogram[bins - 1] == 0) --bins;
  j["ulp_histogram"] =
      std::vector<uint64_t>(p.ulp_histogram.begin(), p.ulp_histogram.begin() + static_cast<ptrdiff_t>(bins));
  j["nonfinite_differ"] = p.nonfinite_differ;
  j["where"] = {{"position", p.position}, {"head", p.head}, {"channel", p.channel}};
  j["a"] = JsonNumber(p.value_a);
  j["b"] = JsonNumber(p.value_b);
  return j;
}

}  // namespace

Json DiffJson(const DiffResult& r, const std::string& path_a, const std::string& path_b) {
  Json j;
  j["schema"] = "assay.diff/1";
  j["version"] = ASSAY_VERSION;
  j["a"] = path_a;
  j["b"] = path_b;
  j["verdict"] = NameOf(r.verdict);
  j["summary"] = r.summary;
  j["first_bad"] = r.findings.empty() ? Json(nullptr) : FindingJson(r.findings[0]);
  j["findings"] = Json::array();
  for (const FirstBad& f : r.findings) j["findings"].push_back(FindingJson(f));
  const Coverage& c = r.coverage;
  Json coverage;
  coverage["sites_a"] = c.sites_a;
  coverage["sites_b"] = c.sites_b;
  coverage["sites_common"] = c.sites_common;
  coverage["sites_compared"] = c.sites_compared;
  coverage["share"] = ShareOf(c.sites_compared, c.sites_common);
  coverage["rows_compared"] = c.rows_compared;
  coverage["rows_only_a"] = c.rows_only_a;
  coverage["rows_only_b"] = c.rows_only_b;
  coverage["rows_set_aside"] = c.rows_set_aside;
  coverage["only_a"] = StringsJson(c.only_a);
  coverage["only_b"] = StringsJson(c.only_b);
  coverage["notes"] = StringsJson(c.notes);
  j["coverage"] = std::move(coverage);
  j["near_ties"] = Json::array();
  for (const NearTie& t : r.near_ties) {
    Json tie;
    tie["name"] = t.name;
    tie["request"] = HexKey(t.request);
    tie["position"] = t.position;
    tie["margin"] = t.margin >= 0 ? JsonNumber(t.margin) : Json(nullptr);
    tie["bound"] = JsonNumber(t.bound);
    j["near_ties"].push_back(std::move(tie));
  }
  j["sites"] = Json::array();
  for (const SiteComparison& s : r.sites) {
    Json site;
    site["name"] = s.name;
    site["rows"] = s.rows;
    site["rows_bad"] = s.rows_bad;
    site["rows_set_aside"] = s.rows_set_aside;
    site["rel_l2"] = JsonNumber(s.rel_l2);
    site["rel_l2_in"] = JsonNumber(s.rel_l2_in);
    site["bound"] = JsonNumber(s.bound);
    site["measured_from"] = SketchesOf(s);
    site["cosine"] = s.cosine >= -1.5 ? JsonNumber(s.cosine) : Json(nullptr);
    site["cosine_from"] = s.cosine < -1.5 ? Json(nullptr) : Json(s.payload.elements > 0 ? "payloads" : SketchesOf(s));
    site["max_abs"] = s.max_abs >= 0 ? JsonNumber(s.max_abs) : Json(nullptr);
    site["payload"] = s.payload.elements > 0 ? PayloadJson(s.payload) : Json(nullptr);
    site["note"] = s.note;
    j["sites"].push_back(std::move(site));
  }
  return j;
}

std::string DiffText(const DiffResult& r, const std::string& path_a, const std::string& path_b, bool all_sites) {
  std::string out = "A " + path_a + " (trusted)\nB " + path_b + " (in question)\n\n" + OneLine(r.summary) + "\n\n";
  for (size_t i = 0; i < r.findings.size() && i < kFindingsShown; ++i) {
    AppendFinding(r.findings[i], i == 0, &out);
    out += "\n";
  }
  if (r.findings.size() > kFindingsShown) {
    out += "and " + std::to_string(r.findings.size() - kFindingsShown) + " more findings, see --json\n\n";
  }

  using Align = TextTable::Align;
  TextTable table({{"site", Align::kLeft},
                   {"rows", Align::kRight},
                   {"bad", Align::kRight},
                   {"aside", Align::kRight},
                   {"rel L2", Align::kRight},
                   {"bound", Align::kRight},
                   {"inputs", Align::kRight},
                   {"cosine", Align::kRight},
                   {"max abs", Align::kRight},
                   {"", Align::kLeft}});
  size_t first = r.sites.size();
  for (size_t i = 0; i < r.sites.size(); ++i) {
    if (!r.findings.empty() && r.sites[i].name == r.findings[0].name) first = i;
  }
  size_t left_out = 0;
  for (size_t i = 0; i < r.sites.size(); ++i) {
    const SiteComparison& s = r.sites[i];
    const bool near = first < r.sites.size() && i + kSitesAround >= first && i <= first + kSitesAround;
    if (!all_sites && !near) {
      ++left_out;
      continue;
    }
    table.Add({s.name, std::to_string(s.rows), std::to_string(s.rows_bad), std::to_string(s.rows_set_aside),
               ShortNumber(s.rel_l2), ShortNumber(s.bound), ShortNumber(s.rel_l2_in),
               s.cosine >= -1.5 ? ShortNumber(s.cosine) : "", s.max_abs >= 0 ? ShortNumber(s.max_abs) : "",
               i == first ? "<- first wrong" : s.note});
  }
  if (!table.empty()) out += table.Text() + kLegend + "\n";
  if (left_out > 0 && !table.empty()) out += std::to_string(left_out) + " more sites, see --all or --json\n";

  const Coverage& c = r.coverage;
  out += "coverage: " + std::to_string(c.sites_compared) + " of " + std::to_string(c.sites_common) +
         " common sites compared (A has " + std::to_string(c.sites_a) + ", B " + std::to_string(c.sites_b) +
         "); rows: " + std::to_string(c.rows_compared) + " compared, " + std::to_string(c.rows_only_a) +
         " only in A, " + std::to_string(c.rows_only_b) + " only in B, " + std::to_string(c.rows_set_aside) +
         " set aside\n";
  auto names = [&](const char* side, const std::vector<std::string>& list) {
    if (list.empty()) return;
    out += std::string("only in ") + side + ": ";
    for (size_t i = 0; i < list.size() && i < kNamesShown; ++i) {
      if (i > 0) out += ", ";
      out += OneLine(list[i]);
    }
    if (list.size() > kNamesShown) out += " and " + std::to_string(list.size() - kNamesShown) + " more";
    out += "\n";
  };
  names("A", c.only_a);
  names("B", c.only_b);
  if (!r.near_ties.empty()) {
    out += "near ties: " + std::to_string(r.near_ties.size()) + ", first " + OneLine(r.near_ties[0].name) +
           " at position " + std::to_string(r.near_ties[0].position) + " (margin " +
           ShortNumber(r.near_ties[0].margin) + ", bound " + ShortNumber(r.near_ties[0].bound) + ")\n";
  }
  for (size_t i = 0; i < c.notes.size() && i < kNotesShown; ++i) out += "note: " + OneLine(c.notes[i]) + "\n";
  if (c.notes.size() > kNotesShown) {
    out += "note: " + std::to_string(c.notes.size() - kNotesShown) + " more, see --json\n";
  }
  return out;
}

}  // namespace assay
