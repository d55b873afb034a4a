#include "check/absorbed_heads.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <optional>

#include "finding/finding.h"

namespace assay {
namespace {

// How memory is read: element (head, row, column) of the cut lies at head * h + row * r + column * c.
struct Strides {
  int64_t h, r, c;
  bool operator==(const Strides&) const = default;
};

struct Extents {
  int64_t n, d, c;  // heads here, rows of one, latent columns
};

Extents ExtentsOf(const KvHeads& heads, const AbsorbedHeads& a) {
  return {a.shape[0], a.key() ? heads.dn : heads.dv, heads.c};
}

Strides RowsFirst(const Extents& e) { return {e.d * e.c, e.c, 1}; }
Strides LatentFirst(const Extents& e) { return {e.d * e.c, 1, e.d}; }

// The readings that are right. Both inner orders are in use: W_UK_T [H, c, dn] or [H, dn, c] by the batched product
// that reads it; square ones are told apart by "H c dn" and "H dv c".
std::vector<Strides> RightReadings(const Extents& e, const AbsorbedHeads& a) {
  if (e.d != e.c) return {a.shape[1] == e.c ? LatentFirst(e) : RowsFirst(e)};
  if (a.axes.ends_with(" c")) return {RowsFirst(e)};
  if (a.axes.find(" c ") != std::string::npos) return {LatentFirst(e)};
  return {LatentFirst(e), RowsFirst(e)};
}

// What memory should hold: head h of it is head first + (h + shift) mod n of kv_b_proj, its key or value rows, times
// factor.
struct Cut {
  bool key;
  int64_t first, shift = 0;
  double factor = 1;
};

bool Fits(const KvHeads& heads, const AbsorbedHeads& a, const Strides& s, const Cut& cut) {
  const Extents e = ExtentsOf(heads, a);
  for (int64_t h = 0; h < e.n; ++h) {
    const int64_t from = cut.first + (h + cut.shift) % e.n;
    if (from >= heads.count) return false;
    for (int64_t r = 0; r < e.d; ++r) {
      for (int64_t k = 0; k < e.c; ++k) {
        const size_t at = heads.At(cut.key, from, r, k);
        const double want = cut.factor * heads.values[at];
        const double have = a.values[static_cast<size_t>(h * s.h + r * s.r + k * s.c)];
        // A zero point may be subtracted behind the scale: each term is rounded.
        const double terms = heads.quantised() ? std::fabs(cut.factor * heads.zero[at] * heads.scale[at]) : 0;
        if (have == want || (std::isnan(have) && std::isnan(want))) continue;
        if (!(std::fabs(have - want) <= 4 * a.roundoff * (std::fabs(want) + terms) + 0x1p-149)) return false;
      }
    }
  }
  return true;
}

// Rows of kv_b_proj by their first column, so that each row of memory is sought among few.
class RowFinder {
 public:
  RowFinder(const KvHeads& heads, double roundoff) : heads_(heads), roundoff_(roundoff) {
    for (int64_t i = 0; i < heads.count * heads.own(); ++i) by_first_.emplace(RowAt(i)[0], i);
  }

  // The row that equals these c numbers, `likely` before others; -1: none.
  int64_t Find(const double* row, int64_t likely) const {
    if (Equal(row, likely)) return likely;
    const double room = 8 * roundoff_ * std::fabs(row[0]) + 0x1p-140;
    for (auto it = by_first_.lower_bound(row[0] - room); it != by_first_.end() && it->first <= row[0] + room; ++it)
      if (Equal(row, it->second)) return it->second;
    return -1;
  }

 private:
  const double* RowAt(int64_t i) const { return heads_.values.data() + i * heads_.c; }
  bool Equal(const double* row, int64_t i) const {
    for (int64_t k = 0; k < heads_.c; ++k)
      if (!NearlyEqual(row[k], RowAt(i)[k], roundoff_)) return false;
    return true;
  }

  const KvHeads& heads_;
  double roundoff_;
  std::multimap<double, int64_t> by_first_;
};

// Every row of memory is some row of kv_b_proj, at places that no simpler words name.
MaybeExplained FitRows(const KvHeads& heads, const AbsorbedHeads& a, const WeightSlab& slab) {
  const Extents e = ExtentsOf(heads, a);
  const RowFinder finder(heads, a.roundoff);
  bool same_place = true;  // within the head
  int64_t moved = 0, first = -1, first_from = -1;
  for (int64_t i = 0; i < slab.rows; ++i) {
    const int64_t right = (a.first_head + i / e.d) * heads.own() + (a.key() ? 0 : heads.dn) + i % e.d;
    const int64_t from = finder.Find(slab.actual.data() + i * slab.cols, right);
    if (from < 0) return std::nullopt;
    same_place = same_place && from % heads.own() == right % heads.own();
    if (from == right) continue;
    if (first < 0) first = i, first_from = from;
    ++moved;
  }
  if (moved == 0) return std::nullopt;
  std::vector<std::string> evidence = {
      same_place ? "heads hold those of other heads" : "it holds rows of kv_b_proj other than its own",
      NumberText(moved) + " of " + NumberText(slab.rows) + " rows moved; row " + NumberText(first) + " is row " +
          NumberText(first_from) + " of kv_b_proj"};
  return Explained(same_place ? fault_class::kTpShard : fault_class::kLoad, {}, std::move(evidence));
}

// The codes alone, where values belong.
bool IsCodes(const KvHeads& heads, const AbsorbedHeads& a, const WeightSlab& slab) {
  if (!heads.quantised()) return false;
  for (size_t i = 0; i < slab.actual.size(); ++i)
    if (!NearlyEqual(slab.actual[i], slab.code[i] - slab.zero[i], a.roundoff)) return false;
  return true;
}

// Memory as all orders of the three axes but the right ones.
std::optional<Strides> OtherOrder(const KvHeads& heads, const AbsorbedHeads& a, const Cut& cut) {
  const Extents e = ExtentsOf(heads, a);
  const std::vector<Strides> right = RightReadings(e, a);
  const std::array<Strides, 6> orders = {LatentFirst(e),
                                         RowsFirst(e),
                                         Strides{e.c, e.n * e.c, 1},
                                         Strides{1, e.n * e.c, e.n},
                                         Strides{e.d, 1, e.n * e.d},
                                         Strides{1, e.n, e.n * e.d}};
  for (const Strides& s : orders) {
    if (std::find(right.begin(), right.end(), s) == right.end() && Fits(heads, a, s, cut)) return s;
  }
  return std::nullopt;
}

}  // namespace

std::string WhyIncomparable(const KvHeads& heads, const AbsorbedHeads& a) {
  if (a.shape.size() != 3) return "heads and two inner axes are expected";
  const Extents e = ExtentsOf(heads, a);
  const bool rows_first = a.shape[1] == e.d && a.shape[2] == e.c, latent_first = a.shape[1] == e.c && a.shape[2] == e.d;
  if (!rows_first && !latent_first) return "the inner axes are not those of kv_b_proj";
  if (a.first_head < 0 || e.n <= 0 || e.n > heads.count - a.first_head) return "kv_b_proj lacks some of its heads";
  return {};
}

bool IsCutOf(const KvHeads& heads, const AbsorbedHeads& a) {
  const std::vector<Strides> right = RightReadings(ExtentsOf(heads, a), a);
  return std::any_of(right.begin(), right.end(), [&](const Strides& s) {
    return Fits(heads, a, s, {a.key(), a.first_head});
  });
}

WeightSlab SlabOf(const KvHeads& heads, const AbsorbedHeads& a) {
  const Extents e = ExtentsOf(heads, a);
  const Strides s = RightReadings(e, a).front();
  WeightSlab slab;
  slab.name = a.name;
  slab.rows = e.n * e.d, slab.cols = e.c;
  slab.quantised = heads.quantised();
  slab.roundoff = a.roundoff;
  slab.head_dim = e.d;
  std::map<int32_t, int32_t> groups;  // renumbered, as a cut has some of them
  for (int64_t i = 0; i < slab.rows; ++i) {
    for (int64_t k = 0; k < e.c; ++k) {
      const size_t at = heads.At(a.key(), a.first_head + i / e.d, i % e.d, k);
      slab.actual.push_back(a.values[static_cast<size_t>(i / e.d * s.h + i % e.d * s.r + k * s.c)]);
      slab.expect.push_back(heads.values[at]);
      slab.code.push_back(slab.quantised ? heads.code[at] : heads.values[at]);
      slab.zero.push_back(slab.quantised ? heads.zero[at] : 0);
      slab.scale.push_back(slab.quantised ? heads.scale[at] : 1);
      const int32_t group = slab.quantised ? heads.group[at] : 0;
      slab.group.push_back(groups.emplace(group, static_cast<int32_t>(groups.size())).first->second);
    }
  }
  slab.n_groups = static_cast<int32_t>(groups.size());
  return slab;
}

// The simplest first: heads moved, another rank's heads, the other half, another order of the axes; then what FitWeight
// knows of any weight.
MaybeExplained ExplainAbsorbed(const KvHeads& heads, const AbsorbedHeads& a) {
  const Extents e = ExtentsOf(heads, a);
  const Strides own = RightReadings(e, a).front();
  for (int64_t shift = 1; shift < e.n; ++shift) {
    if (Fits(heads, a, own, {a.key(), a.first_head, shift})) {
      return Explained(fault_class::kTpShard, Constant{static_cast<double>(shift), "heads that it is shifted by"},
                       {"each head holds that of another head"});
    }
  }
  for (int64_t first = 0; first + e.n <= heads.count; ++first) {
    if (first != a.first_head && Fits(heads, a, own, {a.key(), first})) {
      return Explained(
          fault_class::kTpShard, {},
          {"it holds heads " + NumberText(first) + " to " + NumberText(first + e.n - 1) + ", those of another rank"});
    }
  }
  if (heads.dn == heads.dv && Fits(heads, a, own, {!a.key(), a.first_head}))
    return Explained(fault_class::kLoad, {},
                     {"it holds the other half of kv_b_proj: key and value rows are exchanged"});
  if (const auto order = OtherOrder(heads, a, {a.key(), a.first_head})) {
    const bool inner = *order == RowsFirst(e) || *order == LatentFirst(e);
    return Explained(fault_class::kLoad, {},
                     {inner ? "each head is transposed" : "its memory holds the axes in another order"});
  }
  const WeightSlab slab = SlabOf(heads, a);
  if (MaybeExplained rows = FitRows(heads, a, slab)) return rows;
  if (MaybeExplained fit = FitWeight(slab)) {
    if (IsCodes(heads, a, slab)) fit->evidence.emplace_back("it holds the codes without their scales");
    return fit;
  }
  return std::nullopt;
}

WeightExplanation UnexplainedAbsorbed(const WeightSlab& slab) {
  double ab = 0, aa = 0, bb = 0;
  int64_t right = 0;
  for (int64_t i = 0; i < slab.size(); ++i) {
    const auto at = static_cast<size_t>(i);
    ab += slab.expect[at] * slab.actual[at], aa += slab.actual[at] * slab.actual[at];
    bb += slab.expect[at] * slab.expect[at];
    right += std::fabs(slab.actual[at] - slab.expect[at]) <= slab.Allowed(i) ? 1 : 0;
  }
  return Explained(fault_class::kLoad, {},
                   {"no explanation fits; cosine with kv_b_proj " + NumberText(ab / std::sqrt(aa * bb)) + ", " +
                    NumberText(right) + " of " + NumberText(slab.size()) + " elements right"},
                   0.7);
}

}  // namespace assay
