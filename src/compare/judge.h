// Goes through the common sites in causal order and judges every row: equal, within its bound, wrong from here on
// (root), wrong because an input was (consequence), or set aside because a discrete choice went the other way.
//
// The bound of a row: rounding of the operation on both sides + gain of the operation x measured difference of its
// inputs, times the spread of a 4-bucket sketch over all comparisons made. Sums (residual adds, reductions) are checked
// exactly on each side instead: the sketch of a sum is the sum of the sketches.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "compare/bounds.h"
#include "compare/diff.h"
#include "compare/joint_index.h"
#include "compare/site_cells.h"
#include "compare/site_graph.h"

namespace assay {

// Why a row is where a fault begins: beyond its bound; a sum that does not add up; most rows off a little; non-finite
// elements on one side; a choice beyond a near tie; copies on ranks that differ.
enum class RootReason : uint8_t { kBound, kSum, kMajority, kNonFinite, kChoice, kReplica };

// What was found at one site.
struct SiteOutcome {
  uint32_t site = 0;            // index into JointIndex::sites
  SiteComparison comparison;    // the line of the table
  std::vector<uint32_t> roots;  // row numbers, ascending
  RootReason reason = RootReason::kBound;
  double measured = 0, bound = 0, measured_in = 0;  // of the worst root, relative L2
  int side = -1;      // of the worst root: whose sum does not add up, whose copies differ; -1: A and B from each other
  std::string basis;  // where the bound comes from
  bool inputs_known = true;     // GraphNode::inputs_known
  bool any_difference = false;  // some row differs in a bit
  double difference = 0;        // relative difference that 90 % of the rows stay below
};

struct JudgeOptions {
  Tolerance tolerance;
  std::map<std::string, double> floor;  // measured noise of a site, relative L2; empty: none
  double false_alarm = 1e-4;            // chance that sketch spread alone gives a finding, over all comparisons made
};

struct Judgement {
  std::vector<SiteOutcome> sites;  // those compared, in causal order
  Coverage coverage;
  std::vector<NearTie> near_ties;
  // By row number: the first site (index) from which on the row is set aside; kNever: not at all.
  static constexpr uint32_t kNever = ~uint32_t{0};
  std::vector<uint32_t> aside_from;
  uint64_t near_ties_total = 0;  // near_ties holds the first 1000
  bool all_equal = true;         // no row of any site differs in a bit
  bool by_rows = true;           // every comparison had row grids
};

// index and graph must outlive the call only.
Judgement JudgeAll(const JointIndex& index, const SiteGraph& graph, const JudgeOptions& options);

}  // namespace assay
