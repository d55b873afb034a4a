#include "report/weights_report.h"

#include <cmath>
#include <cstdio>
#include <map>

#include "base/version.h"
#include "report/finding_report.h"
#include "report/text_table.h"

namespace assay {
namespace {

// Over the finite elements, as sum_sq is.
double Rms(const WeightStats& s) {
  const uint64_t finite = s.count - s.nan - s.inf;
  return finite == 0 ? 0 : std::sqrt(s.sum_sq / static_cast<double>(finite));
}

Json StatsJson(const WeightStats& s) {
  Json j;
  j["count"] = s.count;
  j["nan"] = s.nan;
  j["inf"] = s.inf;
  j["zero"] = s.zero;
  j["min"] = JsonNumber(s.min);
  j["max"] = JsonNumber(s.max);
  j["rms"] = JsonNumber(Rms(s));
  j["digest"] = HexKey(s.digest);
  return j;
}

// null for formats without scales.
Json ScalesJson(const ScaleStats& s) {
  if (s.count == 0) return nullptr;
  Json j;
  j["count"] = s.count;
  j["zero"] = s.zero;
  j["negative"] = s.negative;
  j["nonfinite"] = s.nonfinite;
  j["not_power_of_two"] = s.not_power_of_two;
  j["min"] = JsonNumber(s.min);
  j["max"] = JsonNumber(s.max);
  j["median"] = JsonNumber(s.median);
  return j;
}

std::string Mebibytes(uint64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f MiB", static_cast<double>(bytes) / 1048576.0);
  return text;
}

// One line for each format, with what it takes on disk.
void AppendFormats(const WeightsResult& result, std::string* out) {
  struct Sum {
    uint64_t weights = 0, elements = 0, bytes = 0;
  };
  std::map<std::string, Sum> formats;
  for (const WeightAudit& audit : result.weights) {
    Sum& sum = formats[audit.weight->format()];
    ++sum.weights;
    sum.elements += audit.stats.count;
    sum.bytes += audit.weight->stored_bytes();
  }
  TextTable table({{"format", TextTable::Align::kLeft},
                   {"weights", TextTable::Align::kRight},
                   {"elements", TextTable::Align::kRight},
                   {"stored", TextTable::Align::kRight}});
  for (const auto& [format, sum] : formats) {
    table.Add({format, std::to_string(sum.weights), std::to_string(sum.elements), Mebibytes(sum.bytes)});
  }
  *out += table.Text();
}

}  // namespace

// Keys of docs/json.md, assay.weights/1.
Json WeightsJson(const WeightsResult& result, const std::string& checkpoint, const std::string& trace) {
  Json j;
  j["schema"] = "assay.weights/1";
  j["version"] = ASSAY_VERSION;
  j["checkpoint"] = checkpoint;
  j["trace"] = trace.empty() ? Json(nullptr) : Json(trace);
  j["findings"] = FindingsJson(result.findings);
  j["weights"] = Json::array();
  for (const WeightAudit& audit : result.weights) {
    Json weight;
    weight["name"] = audit.weight->name();
    weight["canonical"] = audit.canonical;
    weight["format"] = audit.weight->format();
    weight["shape"] = audit.weight->shape();
    weight["stored_bytes"] = audit.weight->stored_bytes();
    weight["stats"] = StatsJson(audit.stats);
    weight["scales"] = ScalesJson(audit.scales);
    j["weights"].push_back(std::move(weight));
  }
  j["memory"] = Json::array();
  for (const MemoryCheck& check : result.memory) {
    Json entry;
    entry["name"] = check.name;
    entry["rank"] = check.rank;
    entry["checkpoint"] = check.checkpoint.empty() ? Json(nullptr) : Json(check.checkpoint);
    entry["elements"] = check.elements;
    entry["different"] = check.different;
    entry["note"] = check.note;
    j["memory"].push_back(std::move(entry));
  }
  j["notes"] = Json::array();
  for (const std::string& note : result.notes) j["notes"].push_back(note);
  j["stored_bytes"] = result.stored_bytes;
  j["elements"] = result.elements;
  j["seconds"] = JsonNumber(result.seconds);
  return j;
}

std::string WeightsText(const WeightsResult& result, bool all) {
  std::string out;
  for (size_t i = 0; i < result.findings.size(); ++i) out += FindingText(result.findings[i], i == 0, "weight");
  if (!result.findings.empty()) out += "\n";
  AppendFormats(result, &out);
  if (all) {
    TextTable table({{"weight", TextTable::Align::kLeft},
                     {"format", TextTable::Align::kLeft},
                     {"rms", TextTable::Align::kRight},
                     {"min", TextTable::Align::kRight},
                     {"max", TextTable::Align::kRight},
                     {"zero", TextTable::Align::kRight},
                     {"not finite", TextTable::Align::kRight}});
    for (const WeightAudit& audit : result.weights) {
      const WeightStats& s = audit.stats;
      table.Add({audit.weight->name(), audit.weight->format(), ShortNumber(Rms(s)), ShortNumber(s.min),
                 ShortNumber(s.max), std::to_string(s.zero), std::to_string(s.nan + s.inf)});
    }
    out += "\n" + table.Text();
  }
  if (result.with_trace) {
    uint64_t compared = 0, skipped = 0, different = 0;
    for (const MemoryCheck& check : result.memory) {
      (check.checkpoint.empty() ? skipped : compared) += 1;
      different += check.different > 0 ? 1 : 0;
    }
    out += "\nin memory: " + std::to_string(compared) + " tensors compared, " + std::to_string(different) +
           " different, " + std::to_string(skipped) + " not compared\n";
    for (const MemoryCheck& check : result.memory) {
      if (!check.note.empty())
        out += "  not compared: " + OneLine(check.name) + ", rank " + std::to_string(check.rank) + ": " +
               OneLine(check.note) + "\n";
    }
  }
  for (const std::string& note : result.notes) out += "note: " + OneLine(note) + "\n";
  if (result.findings.empty()) out += "nothing wrong found\n";
  return out;
}

}  // namespace assay
