// A weight in memory beside what the checkpoint says it is, element by element, for the search for an explanation.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/number_text.h"
#include "quant/weight.h"

namespace assay {

// [rows, cols], row-major. expect = (code - zero) * scale; plain numbers have scale 1 and one group.
struct WeightSlab {
  std::string name;  // canonical, of the part: "layers.0.attn.k_proj.weight"
  int64_t rows = 0, cols = 0;
  // One entry an element each, [rows * cols], though zero and scale repeat within a group: the fits index by element.
  std::vector<double> actual, expect, code, zero, scale;
  std::vector<int32_t> group;  // elements that share a scale; numbers below n_groups
  int32_t n_groups = 1;
  // The grid of scales when groups are rectangles in row-major order: n_groups = grid_rows * grid_cols; otherwise 0.
  int64_t grid_rows = 0, grid_cols = 0;
  int64_t block_rows = 0, block_cols = 0;  // of such a rectangle; 0: not known, or it begins within one
  bool quantised = false;
  double roundoff = 0;  // u of the type that the weight in memory was rounded to
  // Head groups in which expect's rows were reordered from half to interleaved pairs (metadata rope_permuted); 0: none.
  int64_t rope_permuted = 0;
  int64_t head_dim = 0;     // of the configuration, 0: not known
  double global_scale = 0;  // of an NVFP4 weight, 0: none
  bool global_divides = false;
  const Weight* weight = nullptr;

  int64_t size() const { return rows * cols; }
  // Largest distance from expect that rounding explains: products may be rounded in another order, and a zero point may
  // be subtracted after the scale.
  double Allowed(int64_t i) const;
  // The same for a prediction that is `factor` times expect.
  bool Predicts(int64_t i, double factor) const;
};

// Engines that rotate neighbouring elements (2i, 2i + 1) reorder the rows of q and k at load, where the half-split form
// pairs i with i + d/2 (Su et al., RoFormer, section 3.4.2): the row of the half-split order that row i then holds, of
// so many rows in `heads` groups of d.
inline int64_t SideBySide(int64_t i, int64_t rows, int64_t heads) {
  const int64_t d = rows / heads, within = i % d;
  return i - within + within % 2 * (d / 2) + within / 2;
}

// A fitted number and what it is; NaN: none.
struct Constant {
  double value = std::numeric_limits<double>::quiet_NaN();
  std::string meaning;
};

// One fitted explanation.
struct WeightExplanation {
  std::string cls;
  Constant constant;
  std::vector<std::string> evidence;
  double confidence = 0.95;
};
using MaybeExplained = std::optional<WeightExplanation>;

// The smallest explanation of the difference; always a class (LOAD or KERNEL when nothing fits).
WeightExplanation ExplainWeight(const WeightSlab& slab);
// The same, nothing where nothing fits.
MaybeExplained FitWeight(const WeightSlab& slab);

// Elements beyond what is allowed, NaN included.
int64_t CountDifferent(const WeightSlab& slab);

// ---- Families of explanations, one file each -------------------------------------------------------------------
MaybeExplained FitOneRatio(const WeightSlab& slab);     // all elements times one constant
MaybeExplained FitScales(const WeightSlab& slab);       // one factor a group
MaybeExplained FitZero(const WeightSlab& slab);         // a constant number of scales a group
MaybeExplained FitOtherCells(const WeightSlab& slab);   // elements under the scale of another cell
MaybeExplained FitOrder(const WeightSlab& slab);        // rows or columns moved, transposition
MaybeExplained FitLostColumns(const WeightSlab& slab);  // every other column 0
MaybeExplained FitTable(const WeightSlab& slab);        // codes decoded by another table
MaybeExplained FitCodeOrder(const WeightSlab& slab);    // codes exchanged within short runs

// ---- Helpers ---------------------------------------------------------------------------------------------------
WeightExplanation Explained(std::string_view cls, Constant constant, std::vector<std::string> evidence,
                            double confidence = 0.95);
// Equal up to a few roundings.
bool NearlyEqual(double a, double b, double roundoff);

}  // namespace assay
