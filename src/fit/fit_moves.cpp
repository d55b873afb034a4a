// Fits of moves: rows, heads or columns of actual that are other rows, heads or columns of expected, or rows of another
// array.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>

#include "fit/fits.h"

namespace assay::fit {
namespace {

constexpr int kProbes = 8;  // elements looked at before a pair of units is compared whole
constexpr int kProbesThatMeet = 6;
constexpr int64_t kMostPairs = int64_t{1} << 24;
constexpr size_t kMostMatches = 8;  // kept for one unit, when sources repeat

// Units (rows, heads, columns) of two arrays, by functions that give the place of element k of unit u.
struct Units {
  int64_t count;         // of actual
  int64_t source_count;  // of the source
  int64_t length;
  int64_t (*at)(const Problem&, int64_t unit, int64_t k);
};

// Flat index of element k of a unit in [rows, heads, cols]: a row's elements lie together, a head's in every row.
int64_t RowAt(const Problem& p, int64_t row, int64_t k) { return row * p.heads * p.cols + k; }
int64_t HeadAt(const Problem& p, int64_t head, int64_t k) {
  return (k / p.cols * p.heads + head) * p.cols + k % p.cols;
}
// Columns within a head: the same place in every head.
int64_t ColumnAt(const Problem& p, int64_t column, int64_t k) { return k * p.cols + column; }

// Where units may have been taken from: expected itself, or a named array.
struct Source {
  std::span<const double> values;
  std::span<const double> bound;  // empty: the problem's, at the same place
};

// Compares units of actual with units of the source, element by element, within the bounds.
class Matcher {
 public:
  Matcher(const Evidence& evidence, const Units& units, const Source& source)
      : evidence_(evidence), units_(units), source_(source) {}

  int64_t At(int64_t unit, int64_t k) const { return units_.at(evidence_.problem(), unit, k); }
  // The source's bound moves with its value. A source beyond the array (rows of a longer one) takes that of unit 0.
  double BoundOf(int64_t source, int64_t k) const {
    const int64_t i = At(source, k);
    if (!source_.bound.empty()) return source_.bound[static_cast<size_t>(i)];
    return i < evidence_.size() ? evidence_.bound(i) : evidence_.bound(At(0, k));
  }

  // At least hit_share of the elements meet. The probes refuse nearly all pairs after 8 of `length` comparisons, which
  // is what makes a search over all pairs affordable.
  bool Equal(int64_t unit, int64_t source) const {
    const auto meets = [&](int64_t k) {
      return Evidence::Meets(evidence_.actual(At(unit, k)), source_.values[static_cast<size_t>(At(source, k))],
                             evidence_.options().slack * BoundOf(source, k));
    };
    const int64_t n = units_.length;
    if (n >= 2 * kProbes) {
      int met = 0;
      for (int64_t j = 0; j < kProbes; ++j) met += meets((2 * j + 1) * n / (2 * kProbes));
      if (met < kProbesThatMeet) return false;
    }
    int64_t left = static_cast<int64_t>((1 - evidence_.options().hit_share) * static_cast<double>(n));
    for (int64_t k = 0; k < n; ++k) {
      if (!meets(k) && left-- == 0) return false;
    }
    return true;
  }

  // Units that are right have not moved, and need no source.
  bool Wrong(int64_t unit) const {
    for (int64_t k = 0; k < units_.length; ++k) {
      if (evidence_.wrong(At(unit, k))) return true;
    }
    return false;
  }

 private:
  const Evidence& evidence_;
  const Units& units_;
  const Source& source_;
};

// The one number that describes all sources, if there is one: a distance (modulo the count) or a fixed source.
struct Pattern {
  std::string text;
  double bits;
};
// bits: the price of the rule in the model's description, so a shift by one is far cheaper than a source for each unit.
Pattern PatternOf(const std::vector<int64_t>& units, const std::vector<int64_t>& source, int64_t source_count,
                  const char* word) {
  const double each = std::log2(static_cast<double>(std::max<int64_t>(source_count, 2)));
  std::map<int64_t, int64_t> shifts;
  bool fixed = true;
  for (const int64_t u : units) {
    const int64_t s = source[static_cast<size_t>(u)];
    ++shifts[((s - u) % source_count + source_count) % source_count];
    fixed &= s == source[static_cast<size_t>(units[0])];
  }
  const std::string unit(word);
  if (fixed && units.size() > 1) {
    return {
        unit + " " + ListText(units) + " hold " + unit + " " + std::to_string(source[static_cast<size_t>(units[0])]),
        2 * each};
  }
  if (shifts.size() == 1) {
    int64_t shift = shifts.begin()->first;
    // Modulo the count 7 of 8 is -1.
    if (2 * shift > source_count) shift -= source_count;
    return {unit + " " + ListText(units) + ": source " + (shift < 0 ? "-" : "+") + std::to_string(std::abs(shift)),
            each + 2};
  }
  std::string text;
  for (size_t j = 0; j < std::min<size_t>(units.size(), 6); ++j) {
    text +=
        (j ? ", " : "") + std::to_string(units[j]) + " from " + std::to_string(source[static_cast<size_t>(units[j])]);
  }
  if (units.size() > 6) text += ", ...";
  // A rule with few distinct shifts (a swap, blocks exchanged) is cheaper than a source for each.
  const double by_shift = static_cast<double>(shifts.size()) * each +
                          static_cast<double>(units.size()) * std::log2(static_cast<double>(shifts.size()));
  return {unit + " " + text, std::min(each * static_cast<double>(units.size()), by_shift)};
}

// The search for one kind of unit. `same`: source is expected itself, and a unit is no source of its own. Quadratic in
// the number of units, within kMostPairs.
void FitUnits(const Evidence& evidence, const Units& units, const Source& source, bool same, const char* word,
              Explanation x, std::vector<Explanation>* found) {
  if (units.count < 1 || units.source_count < 1 || units.length < 1 || (same && units.count < 2)) return;
  const Matcher matcher(evidence, units, source);
  std::vector<int64_t> wrong;
  for (int64_t u = 0; u < units.count; ++u) {
    if (matcher.Wrong(u)) wrong.push_back(u);
  }
  if (wrong.empty() || static_cast<int64_t>(wrong.size()) > kMostPairs / units.source_count) return;
  std::vector<std::vector<int64_t>> matches(static_cast<size_t>(units.count));
  std::map<int64_t, int64_t> votes;
  for (const int64_t u : wrong) {
    std::vector<int64_t>& own = matches[static_cast<size_t>(u)];
    for (int64_t s = 0; s < units.source_count && own.size() < kMostMatches; ++s) {
      if (same && s == u) continue;
      if (matcher.Equal(u, s)) own.push_back(s);
    }
    // Repeated rows (padding, equal tokens) match several sources; the shift that explains most units then decides.
    for (const int64_t s : own) ++votes[s - u];
  }
  Model model = evidence.Unchanged();
  model.bound.resize(model.values.size());
  for (int64_t i = 0; i < evidence.size(); ++i) model.bound[static_cast<size_t>(i)] = evidence.bound(i);
  x.members.assign(static_cast<size_t>(units.count), -1);
  std::vector<int64_t> moved;
  for (const int64_t u : wrong) {
    const std::vector<int64_t>& own = matches[static_cast<size_t>(u)];
    if (own.empty()) continue;
    // Where sources repeat, the distance that most units share.
    const int64_t s =
        *std::max_element(own.begin(), own.end(), [&](int64_t p, int64_t q) { return votes[p - u] < votes[q - u]; });
    x.members[static_cast<size_t>(u)] = s;
    moved.push_back(u);
    for (int64_t k = 0; k < units.length; ++k) {
      const size_t i = static_cast<size_t>(matcher.At(u, k));
      model.values[i] = source.values[static_cast<size_t>(matcher.At(s, k))];
      model.bound[i] = matcher.BoundOf(s, k);
    }
  }
  if (moved.empty()) return;
  const Pattern pattern = PatternOf(moved, x.members, units.source_count, word);
  x.parameters = pattern.text;
  model.price = pattern.bits;
  if (moved.size() < wrong.size() || wrong.size() < static_cast<size_t>(units.count)) {
    model.price += Evidence::ChoiceBits(moved, units.count);
  }
  if (evidence.Judge(model, &x)) found->push_back(x);
}

}  // namespace

void FitMoves(const Evidence& evidence, std::vector<Explanation>* found) {
  const Problem& p = evidence.problem();
  const Source expected{p.expected, {}};
  FitUnits(evidence, {p.rows, p.rows, p.heads * p.cols, RowAt}, expected, true, "row", {Kind::kRowsMoved, Axis::kRow},
           found);
  FitUnits(evidence, {p.heads, p.heads, p.rows * p.cols, HeadAt}, expected, true, "head",
           {Kind::kHeadsMoved, Axis::kHead}, found);
  FitUnits(evidence, {p.cols, p.cols, p.rows * p.heads, ColumnAt}, expected, true, "column",
           {Kind::kColumnsMoved, Axis::kColumn}, found);
  for (const NamedArray& array : p.arrays) {
    if (!array.as_rows) continue;
    Explanation x{Kind::kRowsOf, Axis::kRow};
    x.array = array.name;
    const int64_t rows = static_cast<int64_t>(array.values.size()) / evidence.width();
    FitUnits(evidence, {p.rows, rows, p.heads * p.cols, RowAt}, {array.values, array.bound}, false, "row", x, found);
  }
}

}  // namespace assay::fit
