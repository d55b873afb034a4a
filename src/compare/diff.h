// Two traces against each other: the first tensor whose inputs agree and whose value does not.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "finding/finding.h"
#include "trace/reader.h"

namespace assay {

// kSame: equal bits in all that was compared. kIncomparable: no row that both have was judged.
enum class Verdict : uint8_t { kSame, kNoise, kFault, kIncomparable };
std::string NameOf(Verdict verdict);

// What the verdict rests on, and what it does not. Counts are of sites (by name) and of rows at a site.
struct Coverage {
  uint64_t sites_a = 0, sites_b = 0, sites_common = 0, sites_compared = 0;
  uint64_t rows_compared = 0, rows_only_a = 0, rows_only_b = 0;
  uint64_t rows_set_aside = 0;              // depend on a near tie or lie behind a differing token
  std::vector<std::string> only_a, only_b;  // site names
  // Sentences for people, about what was left out and why.
  std::vector<std::string> notes;
  // Bytes of a trace that cannot be read, beyond what a killed host leaves behind: what is recorded there is not in
  // the comparison, so that `same` and `noise` hold for the rest alone.
  bool damaged = false;
};

// A choice that went the other way by a gap that rounding may close: rows that depend on it are set aside.
struct NearTie {
  std::string name;
  uint64_t request = 0;
  int64_t position = 0;
  double margin = 0;  // mean of both sides' gaps between the scores that changed places; -1: not recorded
  double bound = 0;   // what a right run may close
};

// Element by element, where both sides stored the tensor. A ulp is the gap between neighbours of the coarser dtype of
// both sides at the larger of the two values (of integers: 1).
struct PayloadDifference {
  static constexpr int kUlpBins = 32;
  uint64_t elements = 0;                       // compared; 0: no payload on both sides
  uint64_t nonfinite_differ = 0;               // elements that are NaN or infinite on one side only, or differently
  double max_abs = 0, rel_l2 = 0, cosine = 0;  // over elements that are finite on both sides
  double ulp_p50 = 0, ulp_p99 = 0, ulp_max = 0;
  // Elements by distance: equal, up to 1, up to 2, up to 4 ulp …; the last bin holds the rest.
  std::array<uint64_t, kUlpBins> ulp_histogram{};
  int64_t position = -1, head = -1, channel = -1;  // of the largest absolute difference
  double value_a = 0, value_b = 0;                 // there
};

// One line a site for the table. The worst row is the one whose difference is largest against its bound; rel_l2,
// rel_l2_in (the largest of its inputs) and bound are that row's, relative to the size that the row has or, by its
// inputs, should have. Of payloads the relative differences are over all elements and the larger of both norms.
struct SiteComparison {
  std::string name;
  uint64_t rows = 0, rows_bad = 0, rows_set_aside = 0;  // looked at; of them wrong; of them not judged
  double rel_l2 = 0, rel_l2_in = 0, bound = 0;
  bool by_rows = true;        // these are of one row, from its sketch; else of a segment's rows together, from theirs
  double max_abs = -1;        // from payloads; -1: not known
  double cosine = -2;         // from payloads, or from sketches; -2: not known
  PayloadDifference payload;  // elements 0: not stored on both sides
  std::string note;           // why the site was not compared or only in part
};

struct DiffOptions {
  std::string tolerance;    // "1e-5,layers.*.q:1e-3" replaces the derived bound; empty: derived
  std::string floor_trace;  // the run of A once more with inputs disturbed by one ulp; raises bounds to its noise
  int threads = 0;          // 0: all cores
};

// Owns all its content; nothing points into the traces.
struct DiffResult {
  Verdict verdict = Verdict::kIncomparable;  // kFault as soon as there is a finding
  std::vector<FirstBad> findings;            // in causal order; findings[0] is first_bad
  Coverage coverage;
  std::vector<NearTie> near_ties;
  std::vector<SiteComparison> sites;  // in causal order
  std::string summary;                // one sentence, the verdict first
};

// kUsage: the tolerance. kBadInput: the floor trace, or more rows than can be numbered. The traces must outlive the
// call only.
Result<DiffResult> Diff(const Trace& a, const Trace& b, const DiffOptions& options);

}  // namespace assay
