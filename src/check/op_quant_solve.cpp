// One number for each group of a scale, solved from the result by least squares, and told in the fewest words that fit.
//
// For a line (a row of the quantised operand) the result is Σ_g f_g P_g: P_g is what the elements under scale g
// contribute, f_g = 1 where the scale is right. Zero points likewise: the result less the right one is Σ_g d_g S_g with
// S_g what ones under scale g contribute. Groups that several lines share (blocks of rows) have more equations. Where
// there are fewer equations than groups nothing is solved.
#include <algorithm>
#include <cmath>
#include <map>

#include "base/number_text.h"
#include "check/op_quant_explain.h"
#include "fit/constants.h"
#include "fit/least_squares.h"
#include "quant/misreading.h"

namespace assay::op {
namespace {

using oracle::Array;
using Cells = std::vector<double>;

constexpr int64_t kMostGroups = 256;  // of a line
constexpr double kMostWork = 0x1p31;  // products
constexpr double kNear = 2e-3;        // relative, of a solved number that is told as another one
constexpr double kNearRoundings = 8;  // the same, in roundings of the result

// Numbers of all cells; NaN where the result says nothing. Empty: too few equations.
class Solver {
 public:
  // lines: rows of the quantised operand that meet the result; others: rows of the operand that it is multiplied with.
  explicit Solver(const QuantTrial& t) : t_(t), p_(t.parts()), have_(t.subject().actual()) {
    n_rows_ = static_cast<int64_t>(t.subject().judged().size());
    width_ = n_rows_ > 0 ? have_.size() / n_rows_ : 0;
    lines_ = t.product().activation ? n_rows_ : width_;
    others_ = t.product().activation ? width_ : n_rows_;
    if (t.product().is_value) {
      equations_ = p_.cols / std::max<int64_t>(t.grid_cols(), 1) * std::max<int64_t>(p_.block_rows, 1);
      return;
    }
    int64_t judged = 0;
    for (char j : t.subject().judged()) judged += j;
    equations_ = (t.product().activation ? width_ : judged) * std::max<int64_t>(p_.block_rows, 1);
  }

  // Equations of one set of unknowns, over their number.
  // At 1 any result could be fitted; explanations with many free numbers ask for 2.
  double Surplus() const {
    return static_cast<double>(equations_) / static_cast<double>(t_.product().is_value ? 1 : t_.grid_cols());
  }
  // Shapes that belong together, more equations than unknowns, and work of a second or so at most.
  bool usable() const {
    if (t_.product().is_value) return have_.size() == p_.rows * p_.cols && equations_ > 1;
    return n_rows_ > 0 && t_.product().other.cols() == p_.cols && t_.product().other.rows() == others_ &&
           t_.product().first + lines_ <= p_.rows && t_.grid_cols() <= kMostGroups && equations_ > t_.grid_cols() &&
           Work() <= kMostWork;
  }

  // Products of all equations and of the systems, one a line at most; in floating point, which cannot overflow.
  double Work() const {
    const auto groups = static_cast<double>(t_.grid_cols()), others = static_cast<double>(others_);
    const double equation = static_cast<double>(p_.cols) + groups * groups;
    return static_cast<double>(lines_) * (others * equation + groups * groups * groups);
  }

  // zeros: shifts of the codes; otherwise factors of the scales.
  // Lines under the same scales (a block's rows) share one system.
  Cells Run(bool zeros) const {
    if (t_.product().is_value) return RunOnValue(zeros);
    const int64_t groups = t_.grid_cols(), block = std::max<int64_t>(p_.block_rows, 1);
    Cells out(t_.scales().size(), std::nan(""));
    const auto n = static_cast<size_t>(groups);
    for (int64_t begin = 0; begin < lines_;) {
      const int64_t m = (t_.product().first + begin) / block;
      int64_t end = begin;
      while (end < lines_ && (t_.product().first + end) / block == m) ++end;
      std::vector<double> normal(n * n, 0), target(n, 0), part(n), mine(static_cast<size_t>(p_.cols));
      for (int64_t line = begin; line < end; ++line) {
        const int64_t at = (t_.product().first + line) * p_.cols;
        for (int64_t c = 0; c < p_.cols; ++c)
          mine[static_cast<size_t>(c)] = zeros ? p_.ScaleOf(at + c) * p_.global : t_.declared()[at + c];
        for (int64_t other = 0; other < others_; ++other)
          AddEquation(line, other, zeros, mine, &part, &normal, &target);
      }
      fit::SolveSymmetric(normal, target);
      std::copy(target.begin(), target.end(), out.begin() + m * groups);
      begin = end;
    }
    return out;
  }

 private:
  // Each cell by itself.
  Cells RunOnValue(bool zeros) const {
    Cells cross(t_.scales().size(), 0), square = cross;
    for (int64_t r = 0; r < p_.rows; ++r) {
      for (int64_t c = 0; c < p_.cols; ++c) {
        const int64_t i = r * p_.cols + c;
        if (!std::isfinite(have_[i])) continue;
        const double mine = zeros ? p_.ScaleOf(i) * p_.global : t_.declared()[i];
        const auto cell = static_cast<size_t>(t_.CellOf(r, c));
        cross[cell] += mine * (have_[i] - (zeros ? t_.right().value[i] : 0));
        square[cell] += mine * mine;
      }
    }
    for (size_t i = 0; i < cross.size(); ++i) cross[i] = square[i] > 0 ? cross[i] / square[i] : std::nan("");
    return cross;
  }

  // In four sums, which need not wait for each other.
  static double Dot(const double* a, const double* b, int64_t n) {
    double sum[4] = {};
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
      for (int64_t j = 0; j < 4; ++j) sum[j] += a[i + j] * b[i + j];
    for (; i < n; ++i) sum[0] += a[i] * b[i];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }

  // One element of the result: adds its products to the normal equations. mine: what the line's elements are multiplied
  // with, their values or (zeros) their scales. zeros: the equation is of the difference from the right result.
  void AddEquation(int64_t line, int64_t other, bool zeros, const std::vector<double>& mine, std::vector<double>* part,
                   std::vector<double>* normal, std::vector<double>* target) const {
    const bool activation = t_.product().activation;
    const int64_t row = activation ? line : other, col = activation ? other : line, i = row * width_ + col;
    if (!t_.subject().judged()[static_cast<size_t>(row)] || !std::isfinite(have_[i])) return;
    const auto n = part->size();
    const double* x = &t_.product().other.values[static_cast<size_t>(other * p_.cols)];
    if (p_.block_cols > 0) {
      for (size_t g = 0; g < n; ++g) {
        const int64_t from = static_cast<int64_t>(g) * p_.block_cols;
        (*part)[g] = Dot(x + from, mine.data() + from, std::min(p_.block_cols, p_.cols - from));
      }
    } else {  // columns in groups by a list have rows of their own
      std::fill(part->begin(), part->end(), 0.0);
      const int64_t at = (t_.product().first + line) * p_.cols;
      for (int64_t c = 0; c < p_.cols; ++c) {
        const int64_t g = p_.group[static_cast<size_t>(at + c)] % t_.grid_cols();
        (*part)[static_cast<size_t>(g)] += x[c] * mine[static_cast<size_t>(c)];
      }
    }
    const double bias = t_.product().bias.size() == width_ ? t_.product().bias[col] : 0;
    const double y = have_[i] - (zeros ? t_.right().value[i] : bias);
    for (size_t a = 0; a < n; ++a) {
      (*target)[a] += (*part)[a] * y;
      for (size_t b = 0; b < n; ++b) (*normal)[a * n + b] += (*part)[a] * (*part)[b];
    }
  }

  const QuantTrial& t_;
  const DequantParts& p_;
  const Array& have_;
  int64_t n_rows_ = 0, width_ = 0, lines_ = 0, others_ = 0, equations_ = 0;
};

bool Near(double a, double b, double room) { return std::abs(a - b) <= room * std::max(std::abs(a), std::abs(b)); }

// What a solved number may be off by: 2e-3, more where the result is stored coarsely.
double RoomOf(const QuantTrial& t) { return std::max(kNear, kNearRoundings * t.subject().precision().store); }

// "3 of 8 scales (rows 4 to 5 of the grid)".
std::string Which(const QuantTrial& t, const std::vector<size_t>& cells, const char* what) {
  const auto cols = static_cast<size_t>(t.grid_cols());
  size_t row_from = SIZE_MAX, row_to = 0, col_from = SIZE_MAX, col_to = 0;
  for (size_t i : cells) {
    row_from = std::min(row_from, i / cols), row_to = std::max(row_to, i / cols);
    col_from = std::min(col_from, i % cols), col_to = std::max(col_to, i % cols);
  }
  std::string text = std::to_string(cells.size()) + " of " + std::to_string(t.scales().size()) + " " + what;
  if (!cells.empty() && (row_to - row_from + 1) * (col_to - col_from + 1) == cells.size())
    text += " (rows " + std::to_string(row_from) + " to " + std::to_string(row_to) + ", groups " +
            std::to_string(col_from) + " to " + std::to_string(col_to) + ")";
  return text;
}

// For each cell the nearest of `among`, when all of them lie near one.
// Its own place first, so that scales that are right stay where they are.
std::optional<std::vector<size_t>> Permutation(const Cells& used, const Cells& among, double room) {
  std::vector<size_t> sorted(among.size()), from(used.size());
  for (size_t i = 0; i < sorted.size(); ++i) sorted[i] = i;
  std::sort(sorted.begin(), sorted.end(), [&](size_t a, size_t b) { return among[a] < among[b]; });
  for (size_t i = 0; i < used.size(); ++i) {
    if (Near(used[i], among[i], room)) {
      from[i] = i;
      continue;
    }
    auto at = std::lower_bound(sorted.begin(), sorted.end(), used[i], [&](size_t a, double x) { return among[a] < x; });
    size_t best = at == sorted.end() ? sorted.back() : *at;
    if (at != sorted.begin() && std::abs(among[*(at - 1)] - used[i]) < std::abs(among[best] - used[i]))
      best = *(at - 1);
    if (!Near(used[i], among[best], room)) return std::nullopt;
    from[i] = best;
  }
  return from;
}

// The solved scales are those of the grid read by another rule; what lies outside of it keeps its solved number. Powers
// of two are near each other's neighbours often: as many moved ones are asked as no accident brings together.
std::optional<Explanation> Readings(const QuantTrial& t, const Cells& used, double room, double surplus) {
  constexpr size_t kLeastMoved = 20;
  if (surplus < 2) return std::nullopt;
  for (const GridReading& reading : OtherGridReadings(t.grid_rows(), t.grid_cols())) {
    Cells cells = used;
    size_t moved = 0;
    bool fits = true;
    for (size_t i = 0; i < cells.size() && fits; ++i) {
      if (reading.from[i] < 0) continue;
      cells[i] = t.scales()[static_cast<size_t>(reading.from[i])];
      moved += cells[i] != t.scales()[i] ? 1 : 0;
      fits = Near(used[i], cells[i], room);
    }
    if (!fits || moved < kLeastMoved) continue;
    if (auto why =
            t.TryScales(cells, {fault_class::kQLayout, "fits " + t.product().name + " with scales " + reading.how}))
      return why;
  }
  return std::nullopt;
}

// From the fewest words to the most: one constant on some, other places, one scale for all, a factor for each.
std::optional<Explanation> Scales(const QuantTrial& t, const Solver& solver) {
  const double room = RoomOf(t);
  const std::string fits = "fits " + t.product().name + " with ";
  const Cells factors = solver.Run(false);
  std::vector<size_t> off;
  Cells used = t.scales();
  double least = HUGE_VAL, most = -HUGE_VAL;
  for (size_t i = 0; i < factors.size(); ++i) {
    if (!std::isfinite(factors[i]) || Near(factors[i], 1, room)) continue;
    off.push_back(i);
    used[i] *= factors[i];
    least = std::min(least, factors[i]);
    most = std::max(most, factors[i]);
  }
  if (off.empty()) return std::nullopt;
  // One constant on some of them: by its name where it has one.
  if (Near(least, most, std::max(2 * room, 1e-2))) {
    std::vector<double> sorted;
    for (size_t i : off) sorted.push_back(factors[i]);
    std::nth_element(sorted.begin(), sorted.begin() + static_cast<int64_t>(sorted.size() / 2), sorted.end());
    // The median: a solved factor far off (few equations) does not bend it.
    const double middle = sorted[sorted.size() / 2];
    std::vector<double> constants{middle};
    const std::vector<fit::NamedNumber> known = fit::KnownConstants({});
    if (const auto named = fit::NameConstant(middle, 0, known)) constants.push_back(named->value);
    for (double c : constants) {
      Cells one = t.scales();
      for (size_t i : off) one[i] *= c;
      if (auto why =
              t.TryScales(one, {fault_class::kQScale,
                                fits + FactorText(c, 6) + " times " + Which(t, off, "scales") + ", the others right", c,
                                "scale used / expected"}))
        return why;
    }
  }
  if (auto why = Readings(t, used, room, solver.Surplus())) return why;
  if (const auto from = Permutation(used, t.scales(), room)) {
    Cells moved(used.size());
    for (size_t i = 0; i < moved.size(); ++i) moved[i] = t.scales()[(*from)[i]];
    std::string text = fits + "scales in other places: ";
    for (size_t k = 0; k < std::min<size_t>(off.size(), 4); ++k)
      text += (k > 0 ? ", " : "") + std::to_string(off[k]) + " holds that of " + std::to_string((*from)[off[k]]);
    if (auto why = t.TryScales(moved, {fault_class::kQLayout, text})) return why;
  }
  const double first = used.front();
  if (std::all_of(used.begin(), used.end(), [&](double x) { return Near(x, first, room); })) {
    if (auto why = t.TryScales(Cells(used.size(), first),
                               {fault_class::kQScale, fits + "one scale for all, " + NumberText(first)}))
      return why;
  }
  if (solver.Surplus() < 2) return std::nullopt;
  return t.TryScales(
      used, {fault_class::kQScale, fits + Which(t, off, "scales") + " off, each by a factor of " + "its own, from " +
                                       FactorText(least, 6) + " to " + FactorText(most, 6)});
}

std::optional<Explanation> Zeros(const QuantTrial& t, const Solver& solver) {
  const double room = RoomOf(t);
  const std::string fits = "fits " + t.product().name + " with ";
  const Cells shift = solver.Run(true);
  const Cells declared = t.zeros().empty() ? Cells(shift.size(), 0) : t.zeros();
  Cells used = declared, whole = declared;
  std::map<int64_t, int64_t> counts;
  std::vector<size_t> off;
  bool integers = true;
  for (size_t i = 0; i < shift.size(); ++i) {
    // A fiftieth of a code: below it is the noise of the solution.
    if (!std::isfinite(shift[i]) || std::abs(shift[i]) < 0.02) continue;
    const double nearest = std::nearbyint(shift[i]);
    integers = integers && std::abs(shift[i] - nearest) < 0.1 && nearest != 0;
    used[i] -= shift[i];
    whole[i] -= nearest;
    ++counts[std::llround(shift[i])];
    off.push_back(i);
  }
  if (off.empty()) return std::nullopt;
  const char* meaning = "error of the codes, in scales of their group";
  if (integers) {
    const auto most = std::max_element(counts.begin(), counts.end(),
                                       [](const auto& a, const auto& b) { return a.second < b.second; });
    const std::string text =
        counts.size() == 1
            ? fits + "the codes of " + Which(t, off, "groups") + " off by " + std::to_string(most->first)
            : fits + "zero points of " + Which(t, off, "groups") + " off, most often by " + std::to_string(most->first);
    // Shifts of many kinds are evidence only where there were more equations than numbers.
    if (counts.size() == 1 || solver.Surplus() >= 1.5) {
      if (const auto from = counts.size() == 1 ? std::nullopt : Permutation(whole, declared, room)) {
        if (auto why = t.TryZeros(whole, {fault_class::kQLayout, fits + "zero points in other places"})) return why;
      }
      if (auto why = t.TryZeros(whole, {fault_class::kQZero, text, static_cast<double>(most->first), meaning}))
        return why;
    }
  }
  if (solver.Surplus() < 2) return std::nullopt;
  return t.TryZeros(used, {fault_class::kQZero, fits + "zero points of " + Which(t, off, "groups") + " off"});
}

}  // namespace

// Zero points before scales: a shift fitted by factors would need one for each group.
std::optional<Explanation> TrySolved(const QuantTrial& trial) {
  const Solver solver(trial);
  if (!solver.usable()) return std::nullopt;
  if (trial.parts().integers) {
    if (auto why = Zeros(trial, solver)) return why;
  }
  return Scales(trial, solver);
}

}  // namespace assay::op
