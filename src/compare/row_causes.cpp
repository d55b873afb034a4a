#include "compare/row_causes.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <set>
#include <unordered_map>

#include "base/number_text.h"
#include "compare/row_values.h"

namespace assay {
namespace {

// A fit holds when it leaves less than this part of what it explains, or than rounding explains, but never more than
// the second number.
constexpr double kFitResidual = 1e-3;
constexpr double kLargestResidual = 0.05;
constexpr uint32_t kNoSite = ~uint32_t{0};
constexpr const char* kSideName[2] = {"A", "B"};

// A row that is to be explained, with both sides' values.
struct WrongRow {
  uint32_t row;
  uint32_t request;
  int32_t position;
  RowValue value[2];
  bool present[2] = {false, false};
};

// One number in a format of this file.
std::string Printf(const char* format, double x) {
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, format, x);
  return buffer;
}

// Of two row sketches: an unbiased estimate of the rows' inner product.
double Dot(const double* a, const double* b) {
  double sum = 0;
  for (int i = 0; i < kRowSketchSize; ++i) sum += a[i] * b[i];
  return sum;
}

// Tests from the most certain (equal bits) to fits; the first that holds is the answer.
class Explainer {
 public:
  Explainer(const JointIndex& index, const SiteGraph& graph, uint32_t site, double noise)
      : index_(index),
        graph_(graph),
        site_(site),
        op_(graph.nodes[site].op),
        residual_(std::clamp(noise, kFitResidual, kLargestResidual)) {}

  // Equal bits before fits, and fits of one constant before those of a constant and an input: what is more certain
  // answers first.
  RowCause Run(const std::vector<uint32_t>& rows, bool nonfinite) {
    Load(rows);
    if (nonfinite) ExplainNonFinite();
    if (rows_.empty()) return std::move(cause_);
    if (cause_.cls == fault_class::kUnknown) ExplainZeroRows();
    if (cause_.cls == fault_class::kUnknown && !RowsAreFewIntegers()) ExplainRepeatedRows();
    if (cause_.cls == fault_class::kUnknown) ExplainMissingReduction();
    if (cause_.cls == fault_class::kUnknown) ExplainScale();
    if (cause_.cls == fault_class::kUnknown) ExplainSum();
    if (cause_.cls == fault_class::kUnknown) ExplainAddedInput();
    return std::move(cause_);
  }

 private:
  bool Is(std::string_view stem) const { return index_.sites[site_].parsed.stem == stem; }
  // Sites whose rows live in the cache: equal rows there mean a wrong slot.
  bool IsCache() const {
    const std::string& stem = index_.sites[site_].parsed.stem;
    return stem == "attn.kv_write" || stem == "attn.k" || stem == "attn.v" || stem == "attn.k_pe" ||
           stem == "attn.kv_c_normed" || stem == "attn.k_nope" || stem == "attn.k_read" || stem == "attn.v_read" ||
           stem == "attn.kv_read";
  }

  // Calls f(request, rows) for each request of the site on a side, from the row grids.
  template <class F>
  void ForEachRequest(uint32_t site, int side, int32_t rank, F f) const {
    const JointSite& s = index_.sites[site];
    SideRows rows;
    for (size_t begin = s.begin[side]; begin < s.end[side];) {
      size_t end = begin;
      const uint32_t request = index_.pieces[side][begin].request;
      while (end < s.end[side] && index_.pieces[side][end].request == request) ++end;
      ReadRows(index_, side, begin, end, true, rank, &rows);
      f(request, rows);
      begin = end;
    }
  }

  // That recorded the site on a side, ascending.
  std::set<int32_t> RanksOf(uint32_t site, int side) const {
    const JointSite& s = index_.sites[site];
    std::set<int32_t> ranks;
    for (size_t i = s.begin[side]; i < s.end[side]; ++i)
      ranks.insert(index_.trace[side]->event(index_.pieces[side][i].event).rank());
    return ranks;
  }

  // Both sides' values of the wrong rows; rows that a side lacks are left out.
  void Load(const std::vector<uint32_t>& rows) {
    std::unordered_map<uint64_t, size_t> at;
    std::vector<WrongRow> all;
    for (uint32_t row : rows) {
      const RowInterval& interval = index_.interval_of(row);
      WrongRow wrong{};
      wrong.row = row;
      wrong.request = interval.request;
      wrong.position = interval.first + static_cast<int32_t>(row - interval.base);
      at.emplace(Key(wrong.request, wrong.position), all.size());
      all.push_back(wrong);
    }
    for (int side : {kA, kB}) {
      ForEachRequest(site_, side, -1, [&](uint32_t request, const SideRows& values) {
        for (const RowValue& value : values.rows) {
          const auto it = at.find(Key(request, value.position));
          if (it == at.end()) continue;
          all[it->second].value[side] = value;
          all[it->second].present[side] = true;
        }
      });
    }
    for (const WrongRow& wrong : all) {
      if (wrong.present[kA] && wrong.present[kB]) rows_.push_back(wrong);
    }
  }

  // Request and position in one word; negative positions wrap without meeting others.
  static uint64_t Key(uint32_t request, int32_t position) {
    return (uint64_t{request} << 32) | static_cast<uint32_t>(position);
  }

  void ExplainNonFinite() {
    cause_.cls = fault_class::kRange;
    if (rows_.empty()) return;  // no row grids: nothing to count
    uint64_t total[2] = {0, 0};
    for (const WrongRow& wrong : rows_) {
      for (int side : {kA, kB}) total[side] += wrong.value[side].nonfinite;
    }
    cause_.evidence.push_back("non-finite elements in these rows: " + std::to_string(total[kA]) + " in A, " +
                              std::to_string(total[kB]) + " in B");
  }

  void ExplainZeroRows() {
    for (int side : {kA, kB}) {
      size_t zero = 0;
      for (const WrongRow& wrong : rows_) {
        zero += wrong.value[side].sum_sq == 0 && wrong.value[1 - side].sum_sq > 0;
      }
      // Nine rows of ten: a result that is zero in a few rows is no unwritten buffer.
      if (zero * 10 < rows_.size() * 9) continue;
      cause_.cls = fault_class::kUnwritten;
      cause_.evidence.push_back(std::to_string(zero) + " of " + std::to_string(rows_.size()) +
                                " rows are all zero in " + kSideName[side]);
      return;
    }
  }

  // Positions, slots, ids: such rows equal others by chance, and holding another's value says nothing.
  bool RowsAreFewIntegers() const {
    constexpr uint64_t kFew = 8;
    const JointSite& site = index_.sites[site_];
    for (int side : {kA, kB}) {
      if (site.begin[side] == site.end[side]) continue;
      const Piece& piece = index_.pieces[side][site.begin[side]];
      const EventView event = index_.trace[side]->event(piece.event);
      const SegmentSummary segment = event.segment(static_cast<int32_t>(piece.segment));
      if (IsFloat(event.dtype()) || segment.count > kFew * std::max<uint64_t>(piece.rows(), 1)) return false;
    }
    return true;
  }

  // Where a wrong row's bits were found again; step -2: nowhere.
  struct Seen {
    uint32_t site, request;
    int32_t position;
    int64_t step;
  };

  // Rows that hold, bit for bit, another row of the same site (any layer) of their own side, or another row of the
  // other side.
  void ExplainRepeatedRows() {
    for (int side : {kB, kA}) {
      std::unordered_map<uint64_t, std::vector<size_t>> wanted;  // digest of a wrong row -> which rows
      for (size_t i = 0; i < rows_.size(); ++i) {
        const RowValue& value = rows_[i].value[side];
        if (value.digest_whole && value.sum_sq > 0) wanted[value.digest].push_back(i);
      }
      if (wanted.empty()) continue;
      for (int from : {side, 1 - side}) {
        std::vector<Seen> seen(rows_.size(), Seen{0, 0, 0, -2});
        size_t found = 0;
        for (uint32_t other = 0; other < index_.sites.size() && found < rows_.size(); ++other) {
          if (!SameDefinition(other)) continue;
          ForEachRequest(other, from, -1, [&](uint32_t request, const SideRows& values) {
            for (const RowValue& value : values.rows) {
              const auto it = wanted.find(value.digest);
              if (it == wanted.end() || !value.digest_whole) continue;
              for (size_t i : it->second) {
                const bool itself =
                    other == site_ && request == rows_[i].request && value.position == rows_[i].position;
                if (itself || seen[i].step != -2) continue;
                const Piece& piece = index_.pieces[from][value.piece];
                seen[i] = {other, request, value.position, index_.trace[from]->event(piece.event).step()};
                ++found;
              }
            }
          });
        }
        if (from == side) DropCommonRepeats(side, &seen, &found);
        if (from == side && ExplainUnrotated(side, seen)) return;
        if (found * 2 < rows_.size() || found == 0) continue;
        DescribeRepeats(side, from, seen, found);
        return;
      }
    }
  }

  // Rows that are equal on the other side as well (equal tokens) say nothing.
  void DropCommonRepeats(int side, std::vector<Seen>* seen, size_t* found) const {
    const int other_side = 1 - side;
    for (uint32_t other = 0; other < index_.sites.size(); ++other) {
      std::unordered_map<uint64_t, std::vector<size_t>> wanted;
      for (size_t i = 0; i < seen->size(); ++i) {
        const Seen& s = (*seen)[i];
        if (s.step != -2 && s.site == other) wanted[Key(s.request, s.position)].push_back(i);
      }
      if (wanted.empty()) continue;
      ForEachRequest(other, other_side, -1, [&](uint32_t request, const SideRows& values) {
        for (const RowValue& value : values.rows) {
          const auto it = wanted.find(Key(request, value.position));
          if (it == wanted.end()) continue;
          for (size_t i : it->second) {
            if (value.digest != rows_[i].value[other_side].digest) continue;
            (*seen)[i].step = -2;
            --*found;
          }
        }
      });
    }
  }

  // Another layer's site of the same definition: a buffer or cache slot may be mixed up between layers, with equal
  // shapes.
  bool SameDefinition(uint32_t other) const {
    const SiteName &a = index_.sites[site_].parsed, &b = index_.sites[other].parsed;
    return other == site_ || (a.def != nullptr && a.def == b.def && a.chunk == b.chunk && a.partial == b.partial);
  }

  // What is rotated here, by name: a diff's graph has only what both sides recorded.
  uint32_t RotatedFrom() const {
    const std::string& name = index_.sites[site_].name;
    const std::string& stem = index_.sites[site_].parsed.stem;
    if (!name.ends_with(stem)) return kNoSite;
    const std::string input = name.substr(0, name.size() - stem.size()) + (Is("attn.k_pe")   ? "attn.kv_a"
                                                                           : Is("attn.k")    ? "attn.k_proj"
                                                                           : Is("attn.q_pe") ? "attn.q_proj"
                                                                                             : stem + "_proj");
    for (uint32_t s = 0; s < index_.sites.size(); ++s) {
      if (index_.sites[s].name == input) return s;
    }
    return kNoSite;
  }

  // Equal rows at positions whose operands are equal too: a rotation by position makes them differ, as it does on the
  // other side. Two such rows tell; most tokens come once.
  bool ExplainUnrotated(int side, const std::vector<Seen>& seen) {
    if (op_ != SiteOp::kRope) return false;
    const uint32_t input = RotatedFrom();
    if (input == kNoSite) return false;
    std::unordered_map<uint64_t, uint64_t> digest_at;
    ForEachRequest(input, side, -1, [&](uint32_t request, const SideRows& values) {
      for (const RowValue& value : values.rows) digest_at[Key(request, value.position)] = value.digest;
    });
    size_t equal = 0, others = 0;
    std::string example;
    for (size_t i = 0; i < rows_.size(); ++i) {
      if (seen[i].step == -2) continue;
      ++others;
      if (seen[i].site != site_) continue;
      const auto own = digest_at.find(Key(rows_[i].request, rows_[i].position));
      const auto other = digest_at.find(Key(seen[i].request, seen[i].position));
      if (own == digest_at.end() || other == digest_at.end() || own->second != other->second) continue;
      --others;
      if (equal++ == 0) {
        example = "position " + std::to_string(rows_[i].position) + " equals position " +
                  std::to_string(seen[i].position) + (seen[i].request == rows_[i].request ? "" : " of another request");
      }
    }
    if (equal < 2 || others > equal) return false;
    cause_.cls = fault_class::kRopePos;
    cause_.evidence.push_back(std::to_string(equal) + " of " + std::to_string(rows_.size()) + " rows of " +
                              kSideName[side] + " equal rows at other positions, as their operands in " +
                              index_.sites[input].name + " do: turned by one position, or not at all; " + example);
    cause_.evidence.push_back("`assay diagnose` tells which, from recordings with ASSAY_LEVEL=payload");
    return true;
  }

  // Rows of other requests, or in a cache: identity. Earlier rows of the same site elsewhere: an output that was not
  // written.
  void DescribeRepeats(int side, int from, const std::vector<Seen>& seen, size_t found) {
    size_t same_request = 0, same_site = 0;
    int64_t shift = 0;
    bool one_shift = true, first = true;
    std::string example;
    for (size_t i = 0; i < rows_.size(); ++i) {
      if (seen[i].step == -2) continue;
      same_request += seen[i].request == rows_[i].request;
      same_site += seen[i].site == site_;
      const int64_t s = int64_t{seen[i].position} - rows_[i].position;
      if (first) {
        shift = s;
        example = "position " + std::to_string(rows_[i].position) + " repeats " +
                  (seen[i].site == site_ ? std::string() : index_.sites[seen[i].site].name + ", ") + "position " +
                  std::to_string(seen[i].position) +
                  (seen[i].request == rows_[i].request ? "" : " of another request") +
                  (seen[i].step >= 0 ? ", step " + std::to_string(seen[i].step) : std::string());
      }
      one_shift &= s == shift;
      first = false;
    }
    cause_.cls = IsCache() || same_request < found ? fault_class::kKvIdent : fault_class::kUnwritten;
    if (!IsCache() && same_site == found && same_request < found) cause_.cls = fault_class::kUnwritten;
    cause_.evidence.push_back(std::to_string(found) + " of " + std::to_string(rows_.size()) + " rows of " +
                              kSideName[side] + " hold other rows" +
                              (from == side ? "" : std::string(" of ") + kSideName[from]) + " bit for bit: " + example);
    if (one_shift && shift != 0 && found > 1 && same_request == found) {
      cause_.constant = "rows shifted by " + std::to_string(shift);
    }
  }

  // The value before its reduction, taken for the sum.
  void ExplainMissingReduction() {
    const std::string name = index_.sites[site_].name + ".partial";
    for (uint32_t s = 0; s < index_.sites.size(); ++s) {
      if (index_.sites[s].name != name) continue;
      for (int side : {kB, kA}) {
        std::unordered_map<uint64_t, const RowValue*> wanted;
        for (const WrongRow& wrong : rows_) {
          wanted.emplace(Key(wrong.request, wrong.position), &wrong.value[side]);
        }
        for (const int32_t rank : RanksOf(s, side)) {
          size_t equal = 0;
          ForEachRequest(s, side, rank, [&](uint32_t request, const SideRows& values) {
            for (const RowValue& value : values.rows) {
              const auto it = wanted.find(Key(request, value.position));
              if (it == wanted.end()) continue;
              double gap = 0;
              for (int k = 0; k < kRowSketchSize; ++k) {
                gap = std::max(gap, std::fabs(value.sketch[k] - it->second->sketch[k]));
              }
              equal += gap <= 1e-5 * std::sqrt(value.sum_sq);
            }
          });
          if (equal * 2 < rows_.size()) continue;
          cause_.cls = fault_class::kReduce;
          cause_.evidence.push_back(std::to_string(equal) + " of " + std::to_string(rows_.size()) + " rows of " +
                                    kSideName[side] + " equal the partial result of rank " + std::to_string(rank) +
                                    ": the reduction is missing");
          return;
        }
      }
    }
  }

  // B = c A.
  void ExplainScale() {
    double ab = 0, aa = 0, bb = 0;
    for (const WrongRow& wrong : rows_) {
      const double *a = wrong.value[kA].sketch, *b = wrong.value[kB].sketch;
      ab += Dot(a, b);
      aa += Dot(a, a);
      bb += Dot(b, b);
    }
    if (!(aa > 0) || !(bb > 0)) return;
    // Least squares over all wrong rows together, in the sketches' space: 4 buckets a row.
    const double c = ab / aa;
    const double rest = std::sqrt(std::max(0.0, bb - c * ab) / bb);
    // A factor that is nearer to 1 than its own residual is no factor.
    if (!(std::fabs(c - 1) > 4 * rest) || rest > residual_) return;
    const std::string& stem = index_.sites[site_].parsed.stem;
    const bool lse = stem.ends_with("lse");
    const bool cache = Is("attn.kv_write");
    cause_.cls = lse ? fault_class::kLse : cache ? fault_class::kKvScale : fault_class::kScale;
    cause_.constant = "B = " + FactorText(c, 5) + " A";
    constexpr double kLog2e = 1.4426950408889634;
    if (std::fabs(c - kLog2e) < 1e-3) cause_.constant += " (log2 e: logarithm of base 2 on side B)";
    if (std::fabs(c - 1 / kLog2e) < 1e-3) cause_.constant += " (ln 2: logarithm of base 2 on side A)";
    cause_.evidence.push_back("one factor explains all rows but " + Printf("%.1e", rest) + " of their norm");
  }

  // One side's sum is not what its own inputs add up to, by c times one of them. Within one side rounding alone is in
  // the way, so this holds between precisions too, where the two sides' inputs differ by far more.
  void ExplainSum() {
    if (op_ != SiteOp::kAdd || !graph_.nodes[site_].direct) return;
    const std::vector<GraphEdge>& edges = graph_.nodes[site_].edges;
    for (int side : {kB, kA}) {
      std::vector<std::vector<RowValue>> inputs(edges.size(), std::vector<RowValue>(rows_.size()));
      std::vector<size_t> parts(rows_.size(), 0);
      for (size_t e = 0; e < edges.size(); ++e) ReadInput(edges[e].site, side, &inputs[e], &parts);
      double gap_sq = 0, value_sq = 0;
      std::vector<double> with(edges.size(), 0), own(edges.size(), 0);
      for (size_t i = 0; i < rows_.size(); ++i) {
        if (parts[i] != edges.size()) continue;
        double gap[kRowSketchSize];
        for (int k = 0; k < kRowSketchSize; ++k) {
          gap[k] = rows_[i].value[side].sketch[k];
          for (const std::vector<RowValue>& input : inputs) gap[k] -= input[i].sketch[k];
        }
        gap_sq += Dot(gap, gap);
        value_sq += Dot(rows_[i].value[side].sketch, rows_[i].value[side].sketch);
        for (size_t e = 0; e < edges.size(); ++e) {
          with[e] += Dot(gap, inputs[e][i].sketch);
          own[e] += Dot(inputs[e][i].sketch, inputs[e][i].sketch);
        }
      }
      if (!(gap_sq > kFitResidual * kFitResidual * value_sq)) continue;  // this side adds up
      // The gap is the smaller, the more the rounding of the large sum weighs in it: the residual that rounding
      // explains grows alike, up to the largest that still counts as a fit.
      const double allowed = std::min(residual_ * std::sqrt(value_sq / gap_sq), kLargestResidual);
      for (size_t e = 0; e < edges.size(); ++e) {
        if (!(own[e] > 0)) continue;
        const double c = with[e] / own[e];
        const double rest = std::sqrt(std::max(0.0, gap_sq - c * with[e]) / gap_sq);
        if (rest > allowed) continue;
        const std::string& input = index_.sites[edges[e].site].name;
        cause_.cls = fault_class::kReduce;
        cause_.constant = std::string(side == kB ? "B = A + " : "A = B + ") + Printf("%.3f", c) + " x " + input;
        cause_.evidence.push_back(std::string("in ") + kSideName[side] + " its own inputs add up to it but for " +
                                  Printf("%.3f", c) + " x " + input + ", and " + Printf("%.1e", rest) + " of that");
        return;
      }
    }
  }

  // The rows of an input that belong to the wrong rows; parts counts the inputs that each row has.
  void ReadInput(uint32_t site, int side, std::vector<RowValue>* values, std::vector<size_t>* parts) const {
    std::unordered_map<uint64_t, size_t> at;
    for (size_t i = 0; i < rows_.size(); ++i) at.emplace(Key(rows_[i].request, rows_[i].position), i);
    ForEachRequest(site, side, -1, [&](uint32_t request, const SideRows& read) {
      for (const RowValue& value : read.rows) {
        const auto it = at.find(Key(request, value.position));
        if (it == at.end()) continue;
        (*values)[it->second] = value;
        ++(*parts)[it->second];
      }
    });
  }

  // B = A + c * input, at operations that add.
  void ExplainAddedInput() {
    if (op_ != SiteOp::kAdd && op_ != SiteOp::kReduce && op_ != SiteOp::kCombine) return;
    std::unordered_map<uint64_t, size_t> at;
    for (size_t i = 0; i < rows_.size(); ++i) at.emplace(Key(rows_[i].request, rows_[i].position), i);
    for (const GraphEdge& edge : graph_.nodes[site_].edges) {
      double ds = 0, ss = 0, dd = 0;
      ForEachRequest(edge.site, kA, -1, [&](uint32_t request, const SideRows& values) {
        for (const RowValue& value : values.rows) {
          const auto it = at.find(Key(request, value.position));
          if (it == at.end()) continue;
          const WrongRow& wrong = rows_[it->second];
          double delta[kRowSketchSize];
          for (int k = 0; k < kRowSketchSize; ++k) delta[k] = wrong.value[kB].sketch[k] - wrong.value[kA].sketch[k];
          ds += Dot(delta, value.sketch);
          ss += Dot(value.sketch, value.sketch);
          dd += Dot(delta, delta);
        }
      });
      if (!(ss > 0) || !(dd > 0)) continue;
      const double c = ds / ss;
      const double rest = std::sqrt(std::max(0.0, dd - c * ds) / dd);
      if (rest > residual_) continue;
      cause_.cls = fault_class::kReduce;
      cause_.constant = "B = A + " + Printf("%.3f", c) + " x " + index_.sites[edge.site].name;
      cause_.evidence.push_back("the difference is that input but for " + Printf("%.1e", rest) + " of its norm");
      return;
    }
  }

  const JointIndex& index_;
  const SiteGraph& graph_;
  const uint32_t site_;
  const SiteOp op_;
  const double residual_;
  std::vector<WrongRow> rows_;
  RowCause cause_;
};

}  // namespace

RowCause ExplainRows(const JointIndex& index, const SiteGraph& graph, uint32_t site, const std::vector<uint32_t>& rows,
                     bool nonfinite, double noise) {
  return Explainer(index, graph, site, noise).Run(rows, nonfinite);
}

}  // namespace assay
