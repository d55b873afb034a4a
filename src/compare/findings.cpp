#include "compare/findings.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <map>

#include "compare/row_causes.h"

namespace assay {
namespace {

constexpr size_t kExplained = 4;  // findings whose rows are read once more; the first ones matter
constexpr size_t kRowsExplained = 4096;
constexpr double kHeadShare = 0.05;  // a head differs when it differs at least this much of the worst head

// Three digits: what is measured and bounded has no more.
std::string Number(double x) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%.2e", x);
  return buffer;
}

constexpr const char* kSides[2] = {"A", "B"};

// The first line of a finding's evidence. side: SiteOutcome::side.
std::string Why(RootReason reason, int side) {
  switch (reason) {
    case RootReason::kBound:
      return "inputs agree, output does not";
    case RootReason::kSum:
      return std::string("the output is not the sum of its inputs in ") + kSides[side] + ", and is in " +
             kSides[1 - side];
    case RootReason::kMajority:
      return "inputs agree, most rows of the output differ by more than rounding explains";
    case RootReason::kNonFinite:
      return "inputs agree, non-finite elements of the output do not";
    case RootReason::kChoice:
      return "scores agree, the choice made from them does not, by more than a near tie";
    case RootReason::kReplica:
      return std::string("copies of one tensor differ between ranks of ") + kSides[side];
  }
  return "";
}

// One finding from one site's outcome.
class Maker {
 public:
  Maker(const JointIndex& index, const SiteGraph& graph, const SiteOutcome& outcome)
      : index_(index), graph_(graph), outcome_(outcome), site_(index.sites[outcome.site]) {}

  FirstBad Run(bool explain) {
    bad_.name = site_.name;
    bad_.layer = site_.parsed.layer;
    bad_.measured = outcome_.measured;
    bad_.bound = outcome_.bound;
    bad_.bound_basis = outcome_.basis;
    bad_.method = outcome_.reason == RootReason::kChoice ? "diff: digests" : "diff: sketches";
    SayWhatIsMeasured();
    // A comparison knows where, seldom what: the class is unknown until rows explain themselves.
    bad_.cls = outcome_.reason == RootReason::kNonFinite ? fault_class::kRange : fault_class::kUnknown;
    // Steps of a judgement, not of a probability: how far beyond the bound, and whether the inputs were seen.
    const double excess = outcome_.bound > 0 ? outcome_.measured / outcome_.bound : 1e9;
    bad_.confidence = !outcome_.inputs_known ? 0.5 : excess > 10 ? 0.99 : excess > 2 ? 0.9 : 0.7;
    PickRequest();
    bad_.evidence.push_back(outcome_.inputs_known
                                ? Why(outcome_.reason, outcome_.side)
                                : "the first site compared that differs; nothing before it was recorded");
    bad_.evidence.push_back(Number(outcome_.measured) + " measured, bound " + Number(outcome_.bound) +
                            ", inputs differ by " + Number(outcome_.measured_in));
    if (requests_ > 1) {
      bad_.evidence.push_back("in " + std::to_string(requests_) + " requests, " +
                              std::to_string(outcome_.roots.size()) + " rows in all");
    }
    AddPayload();
    if (explain) {
      FindRanks();
      // Heads and causes are told from the first rank's copy, which is right.
      if (outcome_.reason != RootReason::kReplica) {
        FindHeads();
        Explain();
      }
    }
    return std::move(bad_);
  }

 private:
  // Whose figure `measured` is and what it was made from: the verdict rests on statistics, also where payloads exist.
  void SayWhatIsMeasured() {
    if (outcome_.reason == RootReason::kChoice) {
      bad_.measured_of = "gap of the scores that changed places, mean of A and B";
      bad_.measured_from = outcome_.measured < 0 ? "-1 as no margin was recorded" : "computed from recorded margins";
      return;
    }
    const int side = outcome_.side;
    bad_.measured_of = outcome_.reason == RootReason::kSum
                           ? std::string("relative L2 of the output less its inputs in ") + kSides[side]
                       : outcome_.reason == RootReason::kReplica
                           ? std::string("relative L2 between ranks of ") + kSides[side]
                           : "relative L2 of B - A";
    bad_.measured_from =
        outcome_.comparison.by_rows ? "estimated from row sketches" : "estimated from segment sketches";
  }

  // What sketches can only estimate, element by element.
  void AddPayload() {
    const PayloadDifference& p = outcome_.comparison.payload;
    if (p.elements == 0) return;
    std::string where = "at";
    if (p.position >= 0) where += " position " + std::to_string(p.position) + ",";
    if (p.head >= 0) where += " head " + std::to_string(p.head) + ",";
    where += " channel " + std::to_string(p.channel);
    bad_.evidence.push_back("computed from payloads: largest difference " + Number(p.max_abs) + " " + where + " (" +
                            Number(p.value_a) + " in A, " + Number(p.value_b) + " in B), relative L2 " +
                            Number(p.rel_l2) + ", cosine " + Number(p.cosine) + ", ulp: half within " +
                            Number(p.ulp_p50) + ", 99 % within " + Number(p.ulp_p99) + ", largest " +
                            Number(p.ulp_max));
    if (p.nonfinite_differ > 0) {
      bad_.evidence.push_back("computed from payloads: " + std::to_string(p.nonfinite_differ) +
                              " elements are non-finite on one side only, or differently");
    }
  }

  // The request whose wrong rows come first in time, and its positions.
  void PickRequest() {
    struct PerRequest {
      std::vector<uint32_t> rows;
      int64_t step = -1;
    };
    std::map<uint32_t, PerRequest> by_request;
    for (uint32_t row : outcome_.roots) by_request[index_.interval_of(row).request].rows.push_back(row);
    requests_ = by_request.size();
    const PerRequest* best = nullptr;
    for (auto& [request, found] : by_request) {
      found.step = StepOf(request, PositionOf(found.rows.front()));
      if (best == nullptr || (found.step >= 0 && found.step < best->step)) {
        // The first request stays when no step is known; else the smallest step wins.
        best = &found;
        request_ = request;
      }
    }
    if (best == nullptr) return;
    bad_.step = best->step;
    bad_.request = index_.requests[request_].key;
    request_rows_ = best->rows;
    if (!site_.has_rows) return;
    for (uint32_t row : best->rows) {
      const int64_t position = PositionOf(row);
      if (!bad_.positions.empty() && bad_.positions.back().second == position - 1) {
        bad_.positions.back().second = position;
      } else {
        bad_.positions.emplace_back(position, position);
      }
    }
  }

  int32_t PositionOf(uint32_t row) const {
    const RowInterval& interval = index_.interval_of(row);
    return interval.first + static_cast<int32_t>(row - interval.base);
  }

  // Step in which side B (else A) recorded the row.
  int64_t StepOf(uint32_t request, int32_t position) const {
    for (int side : {kB, kA}) {
      const std::vector<Piece>& pieces = index_.pieces[side];
      for (size_t i = site_.begin[side]; i < site_.end[side]; ++i) {
        const Piece& p = pieces[i];
        if (p.request != request || position < p.position || position - int64_t{p.position} >= p.rows()) continue;
        return index_.trace[side]->event(p.event).step();
      }
    }
    return -1;
  }

  // Head cells are kept a segment: those that hold wrong rows are added up on both sides, and compared where both
  // have as many rows in the block.
  void FindHeads() {
    std::map<int32_t, std::map<int32_t, HeadCell>> heads[2];  // block of 64 positions -> head -> sum
    std::map<int32_t, int64_t> covered[2];
    for (int side : {kA, kB}) {
      std::map<std::pair<int32_t, int32_t>, bool> counted;  // rows of a replica count once
      for (size_t i = site_.begin[side]; i < site_.end[side]; ++i) {
        const Piece& piece = index_.pieces[side][i];
        if (piece.request != request_) continue;
        const int32_t block = piece.position >> 6;
        if (!HoldsWrongRow(piece)) continue;
        const EventView event = index_.trace[side]->event(piece.event);
        const Shard shard = event.shard();
        const auto segment = static_cast<int32_t>(piece.segment);
        const int32_t n = event.segment(segment).n_head_cells;
        // Number of the rank's first head among all; ranks are taken to hold equal counts.
        const int64_t before = shard.count > 1 ? int64_t{shard.index} * n : 0;
        if (before < 0 || before > std::numeric_limits<int32_t>::max() - n) continue;  // forged
        const auto first = static_cast<int32_t>(before);
        if (!counted.try_emplace({piece.position, first}, true).second) continue;
        if (first == 0) covered[side][block] += piece.rows();
        HeadCell cell;
        for (int32_t h = 0; h < n; ++h) {
          event.head_cell(segment, h, &cell);
          HeadCell& sum = heads[side][block][first + h];
          sum.sum_sq += cell.sum_sq;
          sum.nonfinite += cell.nonfinite;
          for (size_t k = 0; k < kHeadSketchSize; ++k) sum.sketch[k] += cell.sketch[k];
        }
      }
    }
    std::map<int32_t, double> differs;  // head -> squared relative difference, summed over blocks
    std::map<int32_t, bool> nonfinite;
    for (const auto& [block, of_a] : heads[kA]) {
      const auto of_b = heads[kB].find(block);
      if (of_b == heads[kB].end() || covered[kA][block] != covered[kB][block]) continue;
      for (const auto& [head, a] : of_a) {
        const auto b = of_b->second.find(head);
        if (b == of_b->second.end()) continue;
        double sum = 0;
        for (size_t k = 0; k < kHeadSketchSize; ++k) sum += std::pow(a.sketch[k] - b->second.sketch[k], 2);
        // Relative, so that a quiet head counts as much as a loud one.
        const double norm = std::max(a.sum_sq, b->second.sum_sq);
        differs[head] += norm > 0 ? sum / norm : 0;
        nonfinite[head] |= a.nonfinite != b->second.nonfinite;
      }
    }
    // Against the worst head: all heads carry some rounding, so differing at all says nothing.
    double worst = 0;
    for (const auto& [head, sum] : differs) worst = std::max(worst, sum);
    std::vector<int32_t> found;
    for (const auto& [head, sum] : differs) {
      if (nonfinite[head] || (sum > 0 && std::sqrt(sum) >= kHeadShare * std::sqrt(worst))) found.push_back(head);
    }
    if (found.empty()) return;
    if (found.size() == differs.size()) {
      bad_.evidence.push_back("all " + std::to_string(found.size()) + " heads differ");
    } else {
      bad_.heads = found;
      bad_.evidence.push_back(std::to_string(found.size()) + " of " + std::to_string(differs.size()) + " heads differ");
    }
  }

  bool HoldsWrongRow(const Piece& piece) const {
    // request_rows_ ascend in position.
    const auto it = std::lower_bound(request_rows_.begin(), request_rows_.end(), piece.position,
                                     [this](uint32_t row, int32_t p) { return PositionOf(row) < p; });
    return it != request_rows_.end() && PositionOf(*it) - int64_t{piece.position} < piece.rows();
  }

  // Where both sides have the same ranks, each rank's part by itself; else the copies that differ from the first.
  void FindRanks() {
    std::vector<int32_t> ranks[2];
    size_t begin[2], end[2];
    // Any rank holds only a part of the columns.
    bool cut = false;
    for (int side : {kA, kB}) {
      const std::vector<Piece>& pieces = index_.pieces[side];
      size_t i = site_.begin[side];
      while (i < site_.end[side] && pieces[i].request != request_) ++i;
      begin[side] = i;
      while (i < site_.end[side] && pieces[i].request == request_) ++i;
      end[side] = i;
      for (size_t j = begin[side]; j < end[side]; ++j) {
        const EventView event = index_.trace[side]->event(pieces[j].event);
        const int32_t rank = event.rank();
        cut |= event.shard().count > 1;
        if (std::find(ranks[side].begin(), ranks[side].end(), rank) == ranks[side].end()) ranks[side].push_back(rank);
      }
      std::sort(ranks[side].begin(), ranks[side].end());
    }
    const bool replica = outcome_.reason == RootReason::kReplica;
    // Copies of a part differ: a rank holds another rank's columns.
    if (replica && cut) bad_.cls = fault_class::kTpShard;
    std::vector<int32_t> found;
    const bool by_rows = site_.has_rows && FormatOf(index_, kA, site_).row_grid && FormatOf(index_, kB, site_).row_grid;
    if (ranks[kA] == ranks[kB] && ranks[kA].size() > 1) {
      for (int32_t rank : ranks[kA]) {
        SideRows rows[2];
        for (int side : {kA, kB}) ReadRows(index_, side, begin[side], end[side], by_rows, rank, &rows[side]);
        if (Differ(rows, by_rows)) found.push_back(rank);
      }
    } else if (replica) {
      for (int side : {kA, kB}) {
        SideRows rows;
        ReadRows(index_, side, begin[side], end[side], by_rows, -1, &rows);
        for (const RowValue& row : rows.rows) {
          if (row.deviating_rank >= 0 && (!by_rows || IsWrong(row.position))) found.push_back(row.deviating_rank);
        }
      }
      std::sort(found.begin(), found.end());
      found.erase(std::unique(found.begin(), found.end()), found.end());
    }
    if (found.empty()) return;
    bad_.evidence.push_back(std::to_string(found.size()) + " of " +
                            std::to_string(std::max(ranks[kA].size(), ranks[kB].size())) + " ranks differ");
    bad_.ranks = std::move(found);
  }

  // Whether one rank's wrong rows differ between the sides by more than the bound.
  bool Differ(const SideRows (&rows)[2], bool by_rows) const {
    double diff = 0, norm = 0;
    size_t j = 0;
    const std::vector<RowValue>&all_a = rows[kA].rows, &all_b = rows[kB].rows;
    for (size_t i = 0; i < all_a.size(); ++i) {
      const RowValue& a = all_a[i];
      while (j < all_b.size() && all_b[j].position < a.position) ++j;
      if (j == all_b.size() || all_b[j].position != a.position) continue;
      const RowValue& b = all_b[j];
      if (by_rows && !IsWrong(a.position)) continue;
      if (a.nonfinite != b.nonfinite) return true;
      const double* x = by_rows ? a.sketch : &rows[kA].sketches[i * kSketchSize];
      const double* y = by_rows ? b.sketch : &rows[kB].sketches[j * kSketchSize];
      for (int k = 0; k < (by_rows ? kRowSketchSize : kSketchSize); ++k) diff += std::pow(x[k] - y[k], 2);
      norm += std::max(a.sum_sq, b.sum_sq);
    }
    // The bound is that of the whole row; a rank's part is held against it for want of one of its own, 1e-6 at least.
    return norm > 0 && std::sqrt(diff / norm) > std::max(outcome_.bound, 1e-6);
  }

  // request_rows_ is sorted by position.
  bool IsWrong(int32_t position) const {
    const auto it = std::lower_bound(request_rows_.begin(), request_rows_.end(), position,
                                     [this](uint32_t row, int32_t p) { return PositionOf(row) < p; });
    return it != request_rows_.end() && PositionOf(*it) == position;
  }

  void Explain() {
    if (!site_.has_rows || outcome_.reason == RootReason::kChoice) return;
    std::vector<uint32_t> rows = outcome_.roots;
    if (rows.size() > kRowsExplained) rows.resize(kRowsExplained);
    RowCause cause =
        ExplainRows(index_, graph_, outcome_.site, rows, outcome_.reason == RootReason::kNonFinite, outcome_.bound);
    bad_.cls = cause.cls;
    bad_.constant = cause.constant;
    for (std::string& line : cause.evidence) bad_.evidence.push_back(std::move(line));
  }

  const JointIndex& index_;
  const SiteGraph& graph_;
  const SiteOutcome& outcome_;
  const JointSite& site_;
  FirstBad bad_;
  uint32_t request_ = 0;
  std::vector<uint32_t> request_rows_;
  size_t requests_ = 0;
};

}  // namespace

// In the order of the sites, which is causal: the first entry is where the fault begins.
std::vector<FirstBad> MakeFindings(const JointIndex& index, const SiteGraph& graph, const Judgement& judgement) {
  std::vector<FirstBad> out;
  for (const SiteOutcome& outcome : judgement.sites) {
    if (outcome.roots.empty()) continue;
    out.push_back(Maker(index, graph, outcome).Run(out.size() < kExplained));
  }
  return out;
}

}  // namespace assay
