#include "compare/judge.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "compare/measured_floor.h"
#include "compare/other_tokens.h"
#include "compare/row_inputs.h"
#include "compare/site_noise.h"

namespace assay {
namespace {

// Row sketches are stored as float32: differences below this part of the norm are not resolved.
constexpr double kStored = 0x1p-23;
constexpr size_t kMaxNearTies = 1000;
constexpr size_t kMajorityRows = 8;  // fewer rows than this are judged one by one only

// What a row of a site comes to. measured: relative L2 difference, or a gap of scores (kChoice); bound: of the same.
struct RowVerdict {
  bool wrong = false;
  RootReason reason = RootReason::kBound;
  double measured = 0, bound = 0;
  int side = -1;  // as SiteOutcome::side
};

// One pass over the sites in causal order: a site's inputs are judged before it. Cells of a site are freed behind its
// last reader, so memory follows the widest stretch of the graph and not its length.
class Judge {
 public:
  // floors: one a site, or null: bounds hold as they are.
  Judge(const JointIndex& index, const SiteGraph& graph, const JudgeOptions& options,
        const std::vector<MeasuredFloor>* floors)
      : index_(index),
        graph_(graph),
        options_(options),
        floors_(floors),
        site_ratios_(index.sites.size()),
        reader_(index),
        judged_(index.sites.size()),
        inputs_(index, graph, judged_),
        aside_from_(index.n_rows, Judgement::kNever),
        longest_request_(LongestRequest(index)) {}

  // Rows behind other tokens are set aside from the first site on.
  Judgement Run() {
    CountComparisons();
    const std::vector<uint8_t> behind = RowsBehindOtherTokens(index_);
    for (size_t row = 0; row < behind.size(); ++row) {
      if (behind[row] != 0) aside_from_[row] = 0;
    }
    for (uint32_t s = 0; s < index_.sites.size(); ++s) {
      if (!graph_.nodes[s].comparable) continue;
      CompareSite(s);
      if (outcome_.comparison.rows > 0) {
        JudgeSite(s);
        FinishSite(s);
      }
      for (uint32_t other = first_live_; other <= s; ++other) {
        if (graph_.nodes[other].last_use <= s) std::vector<Cell>().swap(judged_[other].cells);
      }
      while (first_live_ <= s && judged_[first_live_].cells.empty()) ++first_live_;
    }
    result_.aside_from = std::move(aside_from_);
    static constexpr const char* kNames[2] = {"A", "B"};
    for (int side : {kA, kB}) {
      auto note = [&](uint64_t count, const char* what) {
        if (count == 0) return;
        result_.coverage.notes.push_back(std::string(kNames[side]) + ": " + std::to_string(count) + what);
      };
      note(reader_.repeated(side), " rows recorded more than once by one rank; the last recording is compared");
      note(reader_.incomplete(side), " rows left out because a rank's part is missing");
    }
    return std::move(result_);
  }

  // One a site; of no use before Run.
  const std::vector<SiteRatios>& ratios() const { return site_ratios_; }

 private:
  // --- values -------------------------------------------------------------------------------------------------

  // The chance of a false alarm is shared out over all rows compared, so that it holds for the whole diff.
  void CountComparisons() {
    uint64_t pieces = 0;
    for (const Piece& p : index_.pieces[kA]) pieces += p.rows();
    false_alarm_ = options_.false_alarm / static_cast<double>(std::max<uint64_t>(pieces, 1));
    spread4_ = SpreadAbove(kRowSketchSize, false_alarm_);
    spread64_ = SpreadAbove(kSketchSize, false_alarm_);
  }

  // Reads both sides' rows; nothing is decided yet.
  void CompareSite(uint32_t s) {
    SiteCells read = reader_.Read(s, &result_.coverage);
    outcome_ = SiteOutcome();
    outcome_.site = s;
    outcome_.comparison.name = index_.sites[s].name;
    outcome_.comparison.rows = read.rows;
    outcome_.any_difference = read.any_difference;
    by_rows_ = outcome_.comparison.by_rows = read.by_rows;
    result_.by_rows &= by_rows_ || !index_.sites[s].has_rows;
    dot_ = read.dot;
    norm_a_ = read.norm_sq[kA];
    norm_b_ = read.norm_sq[kB];
    for (int side : {kA, kB}) roundoff_[side] = read.roundoff[side];
    JudgedSite& judged = judged_[s];
    judged.cells = std::move(read.cells);
    judged.cols = read.cols;
    judged.roundoff = std::max(roundoff_[kA], roundoff_[kB]);
  }

  // --- verdicts -----------------------------------------------------------------------------------------------

  // ||sketch(out) - sum of sketches(inputs)|| / size, on each side: what a sum did beside adding. False: not all there.
  // (Sketches are linear: that of a sum is the sum of the sketches, whatever the values are.)
  bool SumResidual(const GraphNode& node, uint32_t row, const Cell& out, double residual[2], double* size) const {
    if (!node.direct || !out.grid) return false;
    double rest[2][kRowSketchSize];
    for (int k = 0; k < kRowSketchSize; ++k) {
      rest[kA][k] = out.sketch_a[k];
      rest[kB][k] = double{out.sketch_a[k]} + out.delta[k];
    }
    *size = out.norm;
    for (const GraphEdge& edge : node.edges) {
      const std::vector<Cell>& cells = judged_[edge.site].cells;
      if (cells.empty() || !cells[row].grid) return false;
      const Cell& cell = cells[row];
      for (int k = 0; k < kRowSketchSize; ++k) {
        rest[kA][k] -= cell.sketch_a[k];
        rest[kB][k] -= double{cell.sketch_a[k]} + cell.delta[k];
      }
      *size += cell.norm;
    }
    for (int side : {kA, kB}) {
      double sum = 0;
      for (double x : rest[side]) sum += x * x;
      residual[side] = std::sqrt(sum);
    }
    return true;
  }

  // Every row of the site, request by request in ascending position: attention needs what came before.
  void JudgeSite(uint32_t s) {
    const GraphNode& node = graph_.nodes[s];
    JudgedSite& judged = judged_[s];
    outcome_.inputs_known = node.inputs_known || node.op == SiteOp::kEmbed || node.op == SiteOp::kSource;
    const bool choice = node.op == SiteOp::kSelect || node.op == SiteOp::kArgmax;
    const bool companion = index_.sites[s].name.ends_with(".margin");
    const double tolerance = options_.tolerance.of(index_.sites[s].name);
    NoteNoise(s);
    const double spread = by_rows_ ? spread4_ : spread64_;
    const double typical_gain = TypicalGain(node, judged_, s);
    const bool log_scale = index_.sites[s].parsed.stem.ends_with("lse");
    ratios_.clear();
    const MeasuredFloor floor = floors_ != nullptr ? (*floors_)[s] : MeasuredFloor();
    const bool may_have_floor = MayHaveFloor(node);

    plain_sum_ = -1;
    inputs_.BeginSite(s);
    uint32_t request = ~uint32_t{0};
    for (const RowInterval& interval : index_.intervals) {
      if (interval.request != request) inputs_.BeginRequest();
      request = interval.request;
      for (uint32_t k = 0; k < interval.count; ++k) {
        const uint32_t row = interval.base + k;
        inputs_.Pass(row, int64_t{interval.first} + k);
        Cell& cell = judged.cells[row];
        if (cell.state == CellState::kAbsent) continue;
        if (aside_from_[row] <= s) {
          cell.state = CellState::kAside;
          ++outcome_.comparison.rows_set_aside;
          continue;
        }
        AddToCosine(cell);
        const InputState in = inputs_.Of(row, cell);
        if (companion) continue;
        // Nothing to hold against each other, unless the bits are the same.
        if (in.aside && (cell.diff > 0 || cell.nonfinite_differs)) {
          cell.state = CellState::kAside;
          ++outcome_.comparison.rows_set_aside;
          continue;
        }
        if (choice) {
          JudgeChoice(s, row, in, &cell);
          continue;
        }
        // A logarithm has a natural unit: near 0 its error is that of the scores, not of its own size.
        const double unit = log_scale ? std::sqrt(static_cast<double>(judged.cols)) : 0;
        // What differences are relative to: a row that comes out unusually small is judged by the size that its inputs
        // give rows.
        const double size = std::max<double>({cell.norm, typical_gain * in.norm, unit});
        // Behind a wrong input the question is only whether the row differs at all.
        const double growth = in.bad ? in.typical
                              : node.op == SiteOp::kAdd || node.op == SiteOp::kReduce
                                  ? (size > 0 ? in.absolute / size : 0)
                                  : in.relative;
        // Without the sketch's spread: what JudgeMajority holds the median of all rows against.
        const double limit = in.condition * (noise_ + growth);
        worst_condition_ = std::max(worst_condition_, in.condition);
        double bound = tolerance >= 0 ? tolerance : spread * limit + kStored;
        const bool wide = tolerance < 0 && bound > kWideBound && may_have_floor && in.condition_known &&
                          in.condition <= kSharp && in.measured <= kAlikeInputs && !in.bad;
        if (tolerance < 0 && bound >= 1 && !in.bad) ++(wide ? site_ratios_[s].vacuous : site_ratios_[s].blind);
        if (wide && floor.known) {
          const double lowered = std::max(kVisibleRow, kRowsOverFloor * floor.row * limit);
          lowered_ |= lowered < bound;
          bound = std::min(bound, lowered);
        }
        const double relative = size > 0 ? cell.diff / size : 0;
        RowVerdict verdict{relative > bound, RootReason::kBound, relative, bound};
        if (cell.nonfinite_differs) {
          verdict.wrong = true;
          verdict.reason = RootReason::kNonFinite;
        } else if (verdict.wrong && cell.replicas_of >= 0) {
          verdict.reason = RootReason::kReplica;
          verdict.side = cell.replicas_of;
        } else if (tolerance < 0 && (node.op == SiteOp::kAdd || node.op == SiteOp::kReduce)) {
          const RowVerdict of_sum = JudgeSum(node, row, judged.cells, verdict);
          // A sum that adds up passes on what is wrong with its inputs.
          if (of_sum.wrong || !verdict.wrong || !in.bad) verdict = of_sum;
        }
        Keep(row, verdict, in, &cell);
        if (!verdict.wrong && !in.bad && tolerance < 0 && limit > 0) {
          ratios_.push_back({static_cast<float>((relative - kStored) / limit), static_cast<float>(limit), row, wide});
        }
      }
    }
    JudgeMajority(s);
    if (log_scale) {
      JudgeOutputBeside(s);
    } else if (node.op == SiteOp::kAttention || node.op == SiteOp::kMerge) {
      KeepOutput(s);
    }
  }

  // Of the whole site: sums over all rows, rows set aside left out.
  void AddToCosine(const Cell& cell) {
    if (!cell.grid) return;
    for (int k = 0; k < kRowSketchSize; ++k) {
      const double a = cell.sketch_a[k], b = a + cell.delta[k];
      dot_ += a * b;
      norm_a_ += a * a;
      norm_b_ += b * b;
    }
  }

  // Whether the site is a plain sum: on one side at least, the parts add up in half of the rows or more. Where a norm
  // or a scale is inside, a row in which a part is small may add up by chance.
  bool IsPlainSum(const GraphNode& node, const std::vector<Cell>& cells, double bound) {
    if (plain_sum_ >= 0) return plain_sum_ != 0;
    uint32_t adds_up = 0, all = 0;
    for (uint32_t row = 0; row < cells.size(); ++row) {
      double residual[2], size = 0;
      if (cells[row].state == CellState::kAbsent || !SumResidual(node, row, cells[row], residual, &size)) continue;
      if (!(size > 0)) continue;
      ++all;
      adds_up += std::min(residual[kA], residual[kB]) <= bound * size ? 1 : 0;
    }
    plain_sum_ = 2 * adds_up >= all ? 1 : 0;
    return plain_sum_ != 0;
  }

  // A residual add is exact but for its own rounding, so it is judged without the growth of its inputs' difference: a
  // part that was left out or added twice shows where the general bound, which allows for different inputs, would hide
  // it. verdict: by the general bound, which is returned where the site is no plain sum.
  RowVerdict JudgeSum(const GraphNode& node, uint32_t row, const std::vector<Cell>& cells, const RowVerdict& verdict) {
    double residual[2], size = 0;
    if (!SumResidual(node, row, cells[row], residual, &size) || !(size > 0)) return verdict;
    const double bound = spread4_ * std::hypot(noise_, kStored);
    const double low = std::min(residual[kA], residual[kB]) / size;
    const double high = std::max(residual[kA], residual[kB]) / size;
    if (low > bound) return verdict;  // neither side is a plain sum: a norm or a scale inside
    if (high > bound && !IsPlainSum(node, cells, bound)) return verdict;
    if (high > bound) return {true, RootReason::kSum, high, bound, residual[kB] > residual[kA] ? kB : kA};
    RowVerdict right = verdict;
    right.wrong = false;
    return right;
  }

  // Notes the row's outcome: the worst ratio of difference to bound is the one that the table shows.
  void Keep(uint32_t row, const RowVerdict& v, const InputState& in, Cell* cell) {
    SiteComparison& line = outcome_.comparison;
    const double ratio = v.bound > 0 ? v.measured / v.bound : (v.measured > 0 ? 1e30 : 0);
    if (ratio >= worst_ratio_) {
      worst_ratio_ = ratio;
      line.rel_l2 = v.measured;
      line.rel_l2_in = in.measured;
      line.bound = v.bound;
    }
    if (!v.wrong) return;
    ++line.rows_bad;
    // A sum that does not add up is wrong whatever its inputs are.
    if (in.bad && v.reason != RootReason::kSum) {
      cell->state = CellState::kConsequence;
      return;
    }
    cell->state = CellState::kRoot;
    AddRoot(row, v, in.measured);
  }

  // Non-finite elements are the stronger word, whatever the ratio.
  void AddRoot(uint32_t row, const RowVerdict& v, double measured_in) {
    const double ratio = v.bound > 0 ? v.measured / v.bound : 1e30;
    if (outcome_.roots.empty() || ratio > root_ratio_) {
      root_ratio_ = ratio;
      outcome_.measured = v.measured;
      outcome_.bound = v.bound;
      outcome_.measured_in = measured_in;
      outcome_.side = v.side;
      if (outcome_.reason != RootReason::kNonFinite) outcome_.reason = v.reason;
    }
    if (v.reason == RootReason::kNonFinite) outcome_.reason = v.reason;
    outcome_.roots.push_back(row);
  }

  // Scores that differ by rounding may choose differently where two of them nearly tie. Only a gap that rounding cannot
  // have closed is a fault; the rest is set aside, and all that depends on the choice with it.
  void JudgeChoice(uint32_t s, uint32_t row, const InputState& in, Cell* cell) {
    Keep(row, {false, RootReason::kChoice, cell->relative(), 0}, in, cell);
    if (cell->diff == 0 && !cell->nonfinite_differs) return;
    SiteComparison& line = outcome_.comparison;
    if (in.bad) {
      cell->state = CellState::kConsequence;
      ++line.rows_bad;
      return;
    }
    // Each side's choice leads the other's by that side's margin, so the difference of the two scores has moved by the
    // sum of both margins. A choice of groups is one of sums of two scores.
    const int terms = graph_.nodes[s].op == SiteOp::kSelect ? 2 : 1;
    const double bound = PairChange(spread4_ * (in.absolute + noise_ * in.norm), in.cols, terms, false_alarm_) / 2;
    double margin = -1;  // mean of both sides'; -1: not recorded, or the scores were not
    if (const int64_t m = graph_.nodes[s].margin_site;
        m >= 0 && graph_.nodes[s].direct && !judged_[static_cast<size_t>(m)].cells.empty()) {
      const Cell& companion = judged_[static_cast<size_t>(m)].cells[row];
      if (companion.state != CellState::kAbsent) margin = double{companion.norm} - double{companion.diff} / 2;
    }
    // Without a margin any difference of the scores may have decided, and scores that were not recorded any.
    if (margin < 0 ? in.absolute > 0 || !graph_.nodes[s].direct : margin <= bound) {
      cell->state = CellState::kAside;
      ++line.rows_set_aside;
      if (graph_.nodes[s].op == SiteOp::kSelect) aside_from_[row] = std::min(aside_from_[row], s + 1);
      if (result_.near_ties.size() < kMaxNearTies) {
        const RowInterval& interval = index_.interval_of(row);
        result_.near_ties.push_back({index_.sites[s].name, index_.requests[interval.request].key,
                                     int64_t{interval.first} + (row - interval.base), margin, bound});
      }
      ++result_.near_ties_total;
      return;
    }
    cell->state = CellState::kRoot;
    ++line.rows_bad;
    AddRoot(row, {true, RootReason::kChoice, margin, bound}, in.measured);
  }

  // A difference that each row alone could owe to the sketch's spread, but that most rows have, is none.
  void JudgeMajority(uint32_t s) {
    std::vector<Cell>& cells = judged_[s].cells;
    SiteRatios& figures = site_ratios_[s];
    figures.rows = ratios_.size();
    for (const RowRatio& r : ratios_) {
      figures.worst = std::max<double>(figures.worst, r.ratio);
      if (r.wide && r.ratio * r.limit > kVisibleRow) {
        figures.worst_visible = std::max<double>(figures.worst_visible, r.ratio);
      }
    }
    for (int decode : {0, 1}) {
      std::vector<float> ratios, differences;
      size_t wide = 0;
      for (const RowRatio& r : ratios_) {
        if (cells[r.row].decode != (decode == 1)) continue;
        ratios.push_back(r.ratio);
        differences.push_back(r.ratio * r.limit);
        wide += r.wide;
      }
      if (ratios.size() < kMajorityRows) continue;
      // n rows together have 4 n buckets. Of nearly normal ratios the median is 2 / pi as efficient as the mean, which
      // leaves 2.5 n; 2 n is on the safe side.
      double factor = SpreadAbove(static_cast<int>(std::min<size_t>(ratios.size() * 2, 512)),
                                  options_.false_alarm / static_cast<double>(index_.sites.size()));
      const double median = Median(&ratios);
      figures.median[decode] = median;
      if (wide * 2 > ratios.size() && Median(&differences) > kVisibleMedian) {
        figures.median_visible[decode] = median;
        const double floor = floors_ != nullptr ? (*floors_)[s].median[decode] : 0;
        if (floor > 0 && kMedianOverFloor * floor < factor) {
          factor = kMedianOverFloor * floor;
          lowered_ = true;
        }
      }
      if (median <= factor) continue;
      for (const RowRatio& r : ratios_) {
        Cell& cell = cells[r.row];
        if (cell.decode != (decode == 1) || !(r.ratio > std::min(factor, 1.0))) continue;
        cell.state = CellState::kRoot;
        ++outcome_.comparison.rows_bad;
        AddRoot(r.row, {true, RootReason::kMajority, cell.relative(), cell.relative() / r.ratio * factor},
                outcome_.comparison.rel_l2_in);
      }
      std::sort(outcome_.roots.begin(), outcome_.roots.end());
    }
  }

  // Rows of an attention's output that are within their bounds, for the log-sum-exp of the same call.
  void KeepOutput(uint32_t s) {
    output_.site = s;
    output_.rows.clear();
    for (const RowRatio& r : ratios_) output_.rows[r.row] = {r.ratio, judged_[s].cells[r.row].relative()};
  }

  // A kernel that writes a wrong log-sum-exp has wrong scores, or writes a wrong one of right scores. In the first case
  // its output is off as well, though one with coarse inputs may stay within its bound. That call is known to be wrong:
  // no allowance for the number of sites and rows is due, and the median row alone decides.
  void JudgeOutputBeside(uint32_t s) {
    const std::string& name = index_.sites[s].name;
    const auto found = std::find_if(result_.sites.rbegin(), result_.sites.rend(),
                                    [&](const SiteOutcome& o) { return o.site == output_.site; });
    if (outcome_.roots.empty() || found == result_.sites.rend() || !found->roots.empty() ||
        index_.sites[output_.site].name != name.substr(0, name.size() - 3) + "out")
      return;
    std::vector<float> ratios;
    for (uint32_t row : outcome_.roots) {
      if (const auto it = output_.rows.find(row); it != output_.rows.end()) ratios.push_back(it->second.ratio);
    }
    if (ratios.size() < kMajorityRows || Median(&ratios) <= 1) return;
    std::swap(outcome_, *found);
    root_ratio_ = -1;
    std::vector<Cell>& cells = judged_[output_.site].cells;
    for (uint32_t row : found->roots) {
      const auto it = output_.rows.find(row);
      if (it == output_.rows.end() || !(it->second.ratio > 1)) continue;
      if (!cells.empty()) cells[row].state = CellState::kRoot;
      ++outcome_.comparison.rows_bad;
      AddRoot(row, {true, RootReason::kMajority, it->second.relative, it->second.relative / it->second.ratio},
              outcome_.comparison.rel_l2_in);
    }
    if (!cells.empty()) judged_[output_.site].noise = NoiseOfRight(cells);
    std::swap(outcome_, *found);
  }

  // Rounding of the operation itself, and how the table explains it.
  void NoteNoise(uint32_t s) {
    SiteNoise noise = NoiseOf(graph_.nodes[s], judged_, roundoff_, longest_request_);
    // Nothing observed before: rounding of everything that came before is in the value.
    if (!outcome_.inputs_known) noise.relative *= 8;
    noise_ = noise.relative;
    outcome_.basis = noise.Basis();
    if (const auto it = options_.floor.find(index_.sites[s].name); it != options_.floor.end()) {
      noise_ = std::max(noise_, 4 * it->second);
      outcome_.basis += ", raised to 4 x measured floor " + Format("%.1e", it->second);
    }
  }

  // What the table says of bounds that the other layers lowered.
  std::string LoweredBy(uint32_t s) const {
    return Format("%g x ", kRowsOverFloor) + Format("%.1e a row, ", (*floors_)[s].row) +
           Format("%g x ", kMedianOverFloor) +
           Format("%.1e in most", std::max((*floors_)[s].median[0], (*floors_)[s].median[1]));
  }

  // Figures that later sites ask for, and the line of the table.
  void FinishSite(uint32_t s) {
    JudgedSite& judged = judged_[s];
    std::vector<float> all;
    for (const Cell& cell : judged.cells) {
      if (cell.state != CellState::kAbsent && cell.state != CellState::kAside)
        all.push_back(static_cast<float>(std::min(cell.relative(), 1e30)));
    }
    judged.noise = NoiseOfRight(judged.cells);
    outcome_.difference = Quantile90(&all);
    const GraphNode& node = graph_.nodes[s];
    const double tolerance = options_.tolerance.of(index_.sites[s].name);
    if (tolerance >= 0) {
      outcome_.basis = "given tolerance " + Format("%g", tolerance);
    } else {
      outcome_.basis += ", input difference " +
                        Format("%.1e", outcome_.roots.empty() ? outcome_.comparison.rel_l2_in : outcome_.measured_in);
      if (!node.edges.empty()) outcome_.basis += " x gain " + Format("%.0f", node.edges[0].gain);
      if (worst_condition_ > 1) outcome_.basis += ", x condition up to " + Format("%.1f", worst_condition_);
      outcome_.basis += ", x sketch spread " + Format("%.2f", by_rows_ ? spread4_ : spread64_);
      if (lowered_) outcome_.basis += ", lowered to what other layers show of it, " + LoweredBy(s);
    }
    if (norm_a_ > 0 && norm_b_ > 0) outcome_.comparison.cosine = dot_ / std::sqrt(norm_a_ * norm_b_);
    result_.all_equal &= !outcome_.any_difference;
    Coverage& coverage = result_.coverage;
    ++coverage.sites_compared;
    coverage.rows_compared += outcome_.comparison.rows;
    coverage.rows_set_aside += outcome_.comparison.rows_set_aside;
    worst_ratio_ = -1;
    root_ratio_ = -1;
    worst_condition_ = 1;
    lowered_ = false;
    result_.sites.push_back(std::move(outcome_));
  }

  const JointIndex& index_;
  const SiteGraph& graph_;
  const JudgeOptions& options_;
  const std::vector<MeasuredFloor>* floors_;
  std::vector<SiteRatios> site_ratios_;
  CellReader reader_;
  Judgement result_;
  std::vector<JudgedSite> judged_;
  RowInputs inputs_;
  std::vector<uint32_t> aside_from_;  // as in Judgement
  int64_t longest_request_;           // rows
  uint32_t first_live_ = 0;
  double false_alarm_ = 1;  // of one comparison
  double spread4_ = 1, spread64_ = 1;

  // Of the site at hand.
  SiteOutcome outcome_;
  double roundoff_[2] = {0, 0};
  bool by_rows_ = true;
  double noise_ = 0;
  double dot_ = 0, norm_a_ = 0, norm_b_ = 0;
  double worst_ratio_ = -1, root_ratio_ = -1;
  double worst_condition_ = 1;
  int plain_sum_ = -1;            // IsPlainSum(); -1: not asked yet
  std::vector<RowRatio> ratios_;  // of rows within their bounds
  bool lowered_ = false;          // a bound by the measured floor

  // The attention output judged last: rows within their bounds, with what ratios_ holds of them and their relative
  // difference.
  struct OutputRow {
    float ratio = 0;
    double relative = 0;
  };
  struct {
    uint32_t site = ~uint32_t{0};
    std::map<uint32_t, OutputRow> rows;
  } output_;
};

// Most of whose rows have a bound above themselves, and no other layer to be held against.
void NoteNotJudged(const std::vector<SiteRatios>& ratios, const std::vector<MeasuredFloor>& floors, Judgement* out) {
  constexpr size_t kNamed = 8;
  std::string names;
  size_t count = 0;
  for (SiteOutcome& outcome : out->sites) {
    const SiteRatios& r = ratios[outcome.site];
    const uint64_t open = r.blind + (floors[outcome.site].known ? 0 : r.vacuous);
    if (open * 2 <= outcome.comparison.rows - outcome.comparison.rows_set_aside) continue;
    outcome.comparison.note = "not judged: bound above the signal";
    if (++count <= kNamed) names += (count > 1 ? ", " : "") + outcome.comparison.name;
  }
  if (count == 0) return;
  out->coverage.notes.push_back(std::to_string(count) + " sites not judged, their bounds are above the signal: " +
                                names + (count > kNamed ? ", …" : ""));
}

}  // namespace

// Other layers are known when all have been gone through; a second pass is needed only where one stands out.
Judgement JudgeAll(const JointIndex& index, const SiteGraph& graph, const JudgeOptions& options) {
  Judge first(index, graph, options, nullptr);
  Judgement result = first.Run();
  const std::vector<MeasuredFloor> floors = MeasureFloors(index, graph, first.ratios());
  for (size_t s = 0; s < floors.size(); ++s) {
    if (!Exceeds(first.ratios()[s], floors[s])) continue;
    Judge second(index, graph, options, &floors);
    result = second.Run();
    NoteNotJudged(second.ratios(), floors, &result);
    return result;
  }
  NoteNotJudged(first.ratios(), floors, &result);
  return result;
}

}  // namespace assay
