// Explanations by codes: decoded by another table, lost, or taken from another place in their word or block.
#include <cmath>
#include <map>

#include "check/weights_slab.h"
#include "finding/finding.h"
#include "quant/bits.h"
#include "quant/ggml_block.h"
#include "quant/misreading.h"

namespace assay {
namespace {

// The code that memory holds in place of an element's own, by dividing the scale out; NaN under scale 0.
std::vector<double> UsedCodes(const WeightSlab& s) {
  std::vector<double> out(s.actual.size());
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = s.scale[i] == 0 ? std::nan("") : s.actual[i] / s.scale[i] + s.zero[i];
  }
  return out;
}

// What dividing by the scale leaves of a rounding, in codes.
double Room(const WeightSlab& s, double code, double zero) {
  return 16 * s.roundoff * (std::fabs(code) + std::fabs(zero) + 1);
}

// Entries of the grid that all codes come from, in the order of their index; empty: none of those known.
std::vector<double> GridOf(const std::map<double, double>& table) {
  std::vector<double> iq4, e2m1, doubled;
  for (int i = 0; i < 16; ++i) {
    iq4.push_back(kIq4Grid[i]);
    e2m1.push_back(kE2m1Doubled[i] * 0.5);
    doubled.push_back(kE2m1Doubled[i]);
  }
  for (const std::vector<double>& grid : {iq4, e2m1, doubled}) {
    bool all = true;
    for (const auto& [code, value] : table) {
      bool found = false;
      for (const double entry : grid) found = found || entry == code;
      all = all && found;
    }
    if (all) return grid;
  }
  return {};
}

// How many entries a reader knew that cut the index to its low bits; 0: that is not it.
int64_t CutTo(const WeightSlab& s, const std::map<double, double>& table) {
  const std::vector<double> grid = GridOf(table);
  if (grid.empty()) return 0;
  for (const int64_t kept : {8, 4, 2, 1}) {
    bool fits = true;
    for (const auto& [code, value] : table) {
      size_t index = 0;
      while (grid[index] != code) ++index;
      const double cut = grid[index % static_cast<size_t>(kept)];
      fits = fits && std::fabs(value - cut) <= Room(s, cut, 0);
    }
    if (fits) return kept;
  }
  return 0;
}

}  // namespace

// Every code decodes to one value, wrong for some of them: a table with other entries, or an index cut short.
MaybeExplained FitTable(const WeightSlab& s) {
  if (!s.quantised) return std::nullopt;
  const std::vector<double> used = UsedCodes(s);
  std::map<double, double> table;
  for (size_t i = 0; i < used.size(); ++i) {
    if (std::isnan(used[i])) continue;
    const auto [at, fresh] = table.emplace(s.code[i], used[i]);
    const double room = Room(s, at->second, s.zero[i]) + 16 * s.roundoff * std::fabs(s.code[i]);
    if (!fresh && !(std::fabs(at->second - used[i]) <= room)) return std::nullopt;
  }
  std::vector<std::pair<double, double>> wrong;
  for (const auto& [code, value] : table) {
    if (!(std::fabs(code - value) <= 2 * Room(s, code, 0))) wrong.emplace_back(code, value);
  }
  // With two codes any two values make a table.
  if (wrong.empty() || table.size() < 3) return std::nullopt;
  std::vector<std::string> evidence = {NumberText(static_cast<int64_t>(wrong.size())) + " of " +
                                       NumberText(static_cast<int64_t>(table.size())) +
                                       " codes decode to another value, each always to the same one"};
  for (size_t i = 0; i < wrong.size() && i < 4; ++i) {
    evidence.push_back("code " + NumberText(wrong[i].first) + " decodes as " + NumberText(wrong[i].second));
  }
  if (const int64_t kept = CutTo(s, table); kept > 0) {
    evidence.push_back("the index into the grid was cut to " + NumberText(kept) + " entries");
    return Explained(fault_class::kQLayout, {}, std::move(evidence));
  }
  const bool one = wrong.size() == 1 || (wrong.size() == 2 && wrong[0].first == -wrong[1].first);
  if (one && table.size() > 4) {
    return Explained(fault_class::kKernel,
                     Constant{wrong.back().second, "value used for code " + NumberText(wrong.back().first)},
                     std::move(evidence));
  }
  return Explained(fault_class::kQLayout, {}, std::move(evidence), 0.8);
}

// Columns that are all right or all 0, by their place within a period: one nibble of each byte, or half a word, was
// dropped.
MaybeExplained FitLostColumns(const WeightSlab& s) {
  const size_t n = static_cast<size_t>(s.cols);
  std::vector<uint8_t> right(n, 1), zero(n, 1), told(n, 0);  // by column; told: something there is not 0
  for (int64_t i = 0; i < s.size(); ++i) {
    const size_t at = static_cast<size_t>(i), c = static_cast<size_t>(i % s.cols);
    if (!(std::fabs(s.actual[at] - s.expect[at]) <= s.Allowed(i))) right[c] = 0;
    if (s.actual[at] != 0) zero[c] = 0;
    if (s.expect[at] != 0) told[c] = 1;
  }
  for (const int64_t period : kRunLengths) {
    if (s.cols % period != 0) continue;
    int64_t kept = 0, lost = 0;
    bool fits = true;
    for (int64_t p = 0; p < period && fits; ++p) {
      bool all_right = true, all_zero = true, any = false;
      for (size_t c = static_cast<size_t>(p); c < n; c += static_cast<size_t>(period)) {
        if (told[c] == 0) continue;
        any = true;
        all_right = all_right && right[c] != 0;
        all_zero = all_zero && zero[c] != 0;
      }
      if (!any) continue;
      fits = all_right || all_zero;
      kept += all_right ? 1 : 0;
      lost += all_right ? 0 : 1;
    }
    if (fits && lost > 0 && kept > 0) {
      const double share = static_cast<double>(kept) / static_cast<double>(kept + lost);
      return Explained(s.quantised ? fault_class::kQLayout : fault_class::kLoad,
                       Constant{share, "share of the columns that is kept"},
                       {"of every " + NumberText(period) + " columns " + NumberText(kept) + " are right and " +
                        NumberText(lost) + " are 0"});
    }
  }
  return std::nullopt;
}

// The same permutation within every period, along columns or rows.
MaybeExplained FitCodeOrder(const WeightSlab& s) {
  if (!s.quantised) return std::nullopt;
  const std::vector<double> used = UsedCodes(s);
  // Residue p of the period holds the codes of residue q everywhere.
  const auto holds = [&](bool by_rows, int64_t period, int64_t p, int64_t q) {
    const int64_t jump = (q - p) * (by_rows ? s.cols : 1);
    for (int64_t i = 0; i < s.size(); ++i) {
      if ((by_rows ? i / s.cols : i % s.cols) % period != p) continue;
      const size_t at = static_cast<size_t>(i), other = static_cast<size_t>(i + jump);
      if (!std::isnan(used[at]) && !(std::fabs(used[at] - s.code[other]) <= Room(s, s.code[other], s.zero[at])))
        return false;
    }
    return true;
  };
  for (const bool by_rows : {false, true}) {
    for (const int64_t period : kRunLengths) {
      if ((by_rows ? s.rows : s.cols) % period != 0) continue;
      std::vector<int64_t> from;
      bool moved = false;
      for (int64_t p = 0; p < period; ++p) {
        int64_t q = 0;
        while (q < period && !holds(by_rows, period, p, q)) ++q;
        if (q == period) break;
        from.push_back(q);
        moved = moved || q != p;
      }
      if (static_cast<int64_t>(from.size()) < period || !moved) continue;
      return Explained(fault_class::kQLayout, {}, {RunOrderText(by_rows, from)});
    }
  }
  return std::nullopt;
}

}  // namespace assay
