#include "compare/diff.h"

#include <algorithm>
#include <map>

#include "compare/findings.h"
#include "compare/joint_index.h"
#include "compare/judge.h"
#include "compare/payload_diff.h"
#include "compare/site_graph.h"

namespace assay {
namespace {

constexpr size_t kMaxNames = 10000;  // of sites that one side lacks
constexpr uint64_t kMaxDamages = 8;  // a side, named in the notes

// Noise of each site between a run and the same run with its inputs disturbed by one unit in the last place.
// Judged like any comparison, without tolerances; only the figures are used, not the verdict.
Result<std::map<std::string, double>> MeasureFloor(const Trace& a, const DiffOptions& options) {
  std::map<std::string, double> floor;
  if (options.floor_trace.empty()) return floor;
  ASSAY_ASSIGN_OR_RETURN(std::unique_ptr<Trace> disturbed, Trace::Open(options.floor_trace));
  ASSAY_ASSIGN_OR_RETURN(JointIndex index, JointIndex::Build(a, *disturbed, options.threads));
  std::vector<std::string> notes;
  const SiteGraph graph = SiteGraph::Build(index, ComparableSites(index, &notes));
  const Judgement judgement = JudgeAll(index, graph, JudgeOptions());
  for (const SiteOutcome& site : judgement.sites) floor[site.comparison.name] = site.difference;
  if (floor.empty()) {
    return Status::BadInput(options.floor_trace + ": has no site and row in common with " + a.path() +
                            "; record the floor with the same prompts");
  }
  return floor;
}

// Sites by name, whether their events could be used or not.
void CountSites(const JointIndex& index, Coverage* coverage) {
  for (const JointSite& site : index.sites) {
    coverage->sites_a += site.recorded[kA];
    coverage->sites_b += site.recorded[kB];
    coverage->sites_common += site.recorded[kA] && site.recorded[kB];
    if (!site.recorded[kB] && coverage->only_a.size() < kMaxNames) coverage->only_a.push_back(site.name);
    if (!site.recorded[kA] && coverage->only_b.size() < kMaxNames) coverage->only_b.push_back(site.name);
  }
}

// attn.chunk.J.* of two runs is one quantity only where both cut the keys alike; a J whose keys differ everywhere is no
// common site.
void LeaveOutOtherChunks(const JointIndex& index, const Judgement& judgement, Coverage* coverage) {
  std::vector<uint8_t> compared(index.sites.size(), 0);
  for (const SiteOutcome& site : judgement.sites) compared[site.site] = 1;
  uint64_t other = 0;
  for (size_t i = 0; i < index.sites.size(); ++i) {
    const JointSite& site = index.sites[i];
    other += site.parsed.chunk >= 0 && site.recorded[kA] && site.recorded[kB] && !compared[i];
  }
  if (other == 0) return;
  coverage->sites_common -= other;
  coverage->notes.push_back(std::to_string(other) +
                            " sites attn.chunk.J.* cover other keys in A than in B; not counted as common");
}

// Meta of the processes that says which model ran; both sides of a comparison should agree.
void NoteOtherModels(const Trace& a, const Trace& b, Coverage* coverage) {
  const auto facts = [](const Trace& trace) {
    std::map<std::string, std::string> out;
    for (const TraceProcess& process : trace.processes()) {
      for (const auto& [key, value] : process.info.meta) {
        if (key.rfind("model.", 0) == 0) out.emplace(key, value);
      }
    }
    return out;
  };
  const auto of_a = facts(a), of_b = facts(b);
  std::string differing;
  for (const auto& [key, value] : of_a) {
    const auto other = of_b.find(key);
    if (other == of_b.end() || other->second == value) continue;
    differing += (differing.empty() ? "" : ", ") + key + " " + value + " in A, " + other->second + " in B";
  }
  if (!differing.empty()) coverage->notes.push_back("A and B ran different models: " + differing);
}

// What the traces themselves say they lack.
void NoteLosses(const Trace& trace, const char* side, Coverage* coverage) {
  uint64_t dropped = 0, open = 0, damaged = 0;
  for (const TraceProcess& process : trace.processes()) {
    dropped += process.drops.total();
    open += !process.closed;
  }
  for (const Damage& damage : trace.damages()) damaged += !damage.benign;
  auto note = [&](uint64_t count, const char* what) {
    if (count > 0) coverage->notes.push_back(std::string(side) + ": " + std::to_string(count) + " " + what);
  };
  note(dropped, "observations were dropped while recording");
  note(open, "files were not closed; their last events may be missing");
  note(damaged, "damaged places were skipped; what was recorded there is not compared");
  coverage->damaged |= damaged > 0;
  uint64_t named = 0;
  for (const Damage& damage : trace.damages()) {
    if (damage.benign || ++named > kMaxDamages) continue;
    coverage->notes.push_back(std::string(side) + ": " + damage.file + " at byte " + std::to_string(damage.offset) +
                              ": " + damage.what + ", " + std::to_string(damage.size_bytes) + " bytes skipped");
  }
  if (named > kMaxDamages) {
    coverage->notes.push_back(std::string(side) + ": " + std::to_string(named - kMaxDamages) +
                              " more; `assay show` lists them all");
  }
}

// Rounded down: 100 % means all.
std::string Percent(uint64_t part, uint64_t whole) {
  return std::to_string(whole == 0 ? 0 : part * 100 / whole) + " %";
}

// One line for people, the verdict's word first; coverage in numbers, as "same" of two sites says little.
std::string Summarise(const DiffResult& result) {
  const Coverage& c = result.coverage;
  const std::string covered = std::to_string(c.sites_compared) + " of " + std::to_string(c.sites_common) +
                              " common sites (" + Percent(c.sites_compared, c.sites_common) + "), " +
                              std::to_string(c.rows_compared) + " rows";
  switch (result.verdict) {
    case Verdict::kSame:
      return "same: bit-identical in " + covered;
    case Verdict::kNoise:
      return "noise: every difference is within its bound; " + covered;
    case Verdict::kFault:
      return "fault: first wrong tensor " + result.findings[0].name + "; " + covered;
    case Verdict::kIncomparable:
      break;
  }
  return "incomparable: no token row in common (" + std::to_string(c.sites_a) + " sites in A, " +
         std::to_string(c.sites_b) + " in B, " + std::to_string(c.sites_common) +
         " common); were the same prompts run, with statistics on?";
}

}  // namespace

std::string NameOf(Verdict verdict) {
  switch (verdict) {
    case Verdict::kSame:
      return "same";
    case Verdict::kNoise:
      return "noise";
    case Verdict::kFault:
      return "fault";
    case Verdict::kIncomparable:
      break;
  }
  return "incomparable";
}

// Tolerances are parsed before anything is read: a slip in them must not cost a minute.
Result<DiffResult> Diff(const Trace& a, const Trace& b, const DiffOptions& options) {
  JudgeOptions judge;
  ASSAY_ASSIGN_OR_RETURN(judge.tolerance, Tolerance::Parse(options.tolerance));
  ASSAY_ASSIGN_OR_RETURN(judge.floor, MeasureFloor(a, options));
  ASSAY_ASSIGN_OR_RETURN(const JointIndex index, JointIndex::Build(a, b, options.threads));
  std::vector<std::string> notes = index.notes, names;
  for (const JointSite& site : index.sites) names.push_back(site.name);
  if (!names.empty()) ASSAY_RETURN_IF_ERROR(judge.tolerance.CheckPatterns(names));
  const SiteGraph graph = SiteGraph::Build(index, ComparableSites(index, &notes));
  Judgement judgement = JudgeAll(index, graph, judge);

  ComparePayloads(index, &judgement, &notes);

  DiffResult result;
  result.findings = MakeFindings(index, graph, judgement);
  result.coverage = std::move(judgement.coverage);
  CountSites(index, &result.coverage);
  NoteOtherModels(a, b, &result.coverage);
  for (const Trace* trace : {&a, &b}) result.coverage.damaged |= !trace->payload_damages().empty();
  NoteLosses(a, "A", &result.coverage);
  NoteLosses(b, "B", &result.coverage);
  result.coverage.notes.insert(result.coverage.notes.end(), notes.begin(), notes.end());
  result.near_ties = std::move(judgement.near_ties);
  if (judgement.near_ties_total > result.near_ties.size()) {
    result.coverage.notes.push_back(std::to_string(judgement.near_ties_total) + " near ties, the first " +
                                    std::to_string(result.near_ties.size()) + " listed");
  }
  LeaveOutOtherChunks(index, judgement, &result.coverage);
  // Weights alone say nothing about runs that recorded token rows.
  uint64_t judged_rows = 0, judged_tokens = 0;
  for (const SiteOutcome& site : judgement.sites) {
    // Rows set aside were looked at and not judged: a verdict that rests on none of them is none.
    const uint64_t judged = site.comparison.rows - site.comparison.rows_set_aside;
    judged_rows += judged;
    if (index.sites[site.site].has_rows) judged_tokens += judged;
  }
  const bool has_tokens =
      std::any_of(index.sites.begin(), index.sites.end(), [](const JointSite& site) { return site.has_rows; });
  for (SiteOutcome& site : judgement.sites) result.sites.push_back(std::move(site.comparison));
  if (!result.findings.empty()) {
    result.verdict = Verdict::kFault;
  } else if (judged_rows == 0 || (has_tokens && judged_tokens == 0)) {
    result.verdict = Verdict::kIncomparable;
  } else {
    result.verdict = judgement.all_equal ? Verdict::kSame : Verdict::kNoise;
  }
  result.summary = Summarise(result);
  return result;
}

}  // namespace assay
