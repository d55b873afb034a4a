// Where the bound of a row is above the row itself, or near it, every replacement of the tensor is within it. What the
// same operation shows in the other layers says more then: the ratio of a row's difference to what its bound is made of
// (rounding + gain x difference of the inputs), which the layers of a right run have alike. Nothing is judged here.
// The floors are measured in each comparison; the factors over them below are not derived either: they are set by how
// sketches scatter and held by right pairs of runs, which must give no finding (tests/e2e, docs/limits.md).
#pragma once

#include <cstdint>
#include <vector>

#include "compare/joint_index.h"
#include "compare/site_graph.h"

namespace assay {

// Bounds above this part of a row are wide: they are held against the floor. Above 1 they say nothing at all.
constexpr double kWideBound = 0.5;
// A row is wrong beyond this many times the largest ratio of a row elsewhere (what one sketch of 4 buckets may read
// above another, and a little), and a site beyond this many times the largest median.
constexpr double kRowsOverFloor = 4, kMedianOverFloor = 5;
// Smaller differences are within any wide bound: noise of a few units in bf16's last place must not matter.
constexpr double kVisibleRow = 0.25, kVisibleMedian = 0.1;
// Inputs that differ by more than this part of themselves are no small disturbance, and their bound is wide by right.
constexpr double kAlikeInputs = 0.1;
// Attention sharper than that (AttentionCondition) may turn over with rounding, in one layer and not in the next.
constexpr double kSharp = 6;

// What one row shows of its bound.
struct RowRatio {
  float ratio = 0;  // of its difference to `limit`
  float limit = 0;  // the bound without the spread of sketches
  uint32_t row = 0;
  bool wide = false;  // its bound is wide, and a floor may replace it
};

// Of one site, in rows whose inputs agree and that are within their bounds. [0]: prefill rows, [1]: decoded ones.
struct SiteRatios {
  uint64_t rows = 0, blind = 0;       // judged at all; with a bound of 1 or more that no floor may replace
  uint64_t vacuous = 0;               // with a bound of 1 or more
  double worst = 0;                   // largest ratio
  double worst_visible = 0;           // … of rows with wide bounds and differences above kVisibleRow
  double median[2] = {0, 0};          // of the ratios; 0: too few rows
  double median_visible[2] = {0, 0};  // the same where most bounds are wide and the median difference is visible
};

// What the other layers show at a site of the same name and the same gains.
struct MeasuredFloor {
  bool known = false;
  double row = 0;             // largest ratio of a row
  double median[2] = {0, 0};  // largest median; 0: none
};

// Whether a site may be held against other layers at all: not sums, which are checked exactly, nor choices, nor what
// lies behind choices that were not recorded.
bool MayHaveFloor(const GraphNode& node);

// One a site of the index; ratios likewise.
std::vector<MeasuredFloor> MeasureFloors(const JointIndex& index, const SiteGraph& graph,
                                         const std::vector<SiteRatios>& ratios);

// Some row, or most rows, are beyond what the floor allows.
bool Exceeds(const SiteRatios& ratios, const MeasuredFloor& floor);

}  // namespace assay
