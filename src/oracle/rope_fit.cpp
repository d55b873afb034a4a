#include "oracle/rope_fit.h"

#include <algorithm>
#include <cmath>
#include <complex>
#include <numbers>
#include <set>

#include "base/parallel_for.h"

namespace assay::oracle {
namespace {

using Complex = std::complex<double>;
constexpr int64_t kStepsAStart = 256;  // phases are computed anew so often: drift stays below 256 · 2^-52

// For one row: correlation of y with x turned by p is Re Σ_i z_i exp(-i p f_i), z_i = Σ_heads conj(x_i) y_i.
// Complex numbers, as turning a pair by an angle is one multiplication: all heads of a row share the position, so
// their correlations add up before any position is tried.
class Row {
 public:
  Row(const Array& x, const Array& y, const RopeFrequencies& f, const RopeLayout& layout, int64_t t) : f_(f) {
    const int64_t half = static_cast<int64_t>(f.inverse.size()), d = x.cols(), heads = x.rows() / x.shape[0];
    const int64_t step = layout.pairing == Pairing::kInterleaved ? 2 : 1;
    const int64_t other = layout.pairing == Pairing::kInterleaved ? 1 : half;
    z_.assign(static_cast<size_t>(half), Complex{});
    for (int64_t r = t * heads; r < (t + 1) * heads; ++r) {
      for (int64_t i = 0; i < half; ++i) {
        const int64_t at = r * d + (layout.from_end ? d - 2 * half : 0) + i * step;
        const Complex a(x[at], x[at + other]), b(y[at], y[at + other]);
        z_[static_cast<size_t>(i)] += std::conj(a) * b;
        x_sq_ += std::norm(a);
        y_sq_ += std::norm(b);
      }
    }
  }

  bool decidable() const { return x_sq_ > 0 && y_sq_ > 0 && std::isfinite(x_sq_) && std::isfinite(y_sq_); }
  double y_sq() const { return y_sq_; }

  // Re Σ z conj(e^(i angle)), written out.
  double Correlation(double p) const {
    double sum = 0;
    for (size_t i = 0; i < z_.size(); ++i) {
      const double angle = p * f_.inverse[i];
      sum += z_[i].real() * std::cos(angle) + z_[i].imag() * std::sin(angle);
    }
    return sum;
  }
  // Correlations at first, first + 1/2, ..., last.
  std::vector<double> Scan(int64_t first, int64_t last) const {
    std::vector<double> out(static_cast<size_t>(2 * (last - first) + 1));
    for (size_t i = 0; i < z_.size(); ++i) {
      const Complex turn = std::polar(1.0, -0.5 * f_.inverse[i]);
      for (size_t begin = 0; begin < out.size(); begin += kStepsAStart) {
        const double p = static_cast<double>(first) + 0.5 * static_cast<double>(begin);
        // A complex product a step in place of a sine and a cosine. Written out below, as operator* also mends NaN
        // results.
        Complex phase = z_[i] * std::polar(1.0, -p * f_.inverse[i]);
        for (size_t j = begin; j < std::min(out.size(), begin + kStepsAStart); ++j) {
          out[j] += phase.real();
          phase = {phase.real() * turn.real() - phase.imag() * turn.imag(),
                   phase.real() * turn.imag() + phase.imag() * turn.real()};
        }
      }
    }
    return out;
  }
  // 1 - c² / (|x|² |y|²) under the root; a negative correlation explains nothing (the factor would be negative: the
  // search then finds half a turn, or a sign flip is another explanation).
  double Residual(double correlation) const {
    if (correlation <= 0) return 1;
    return std::sqrt(std::max(0.0, 1 - correlation / x_sq_ * (correlation / y_sq_)));
  }
  // Least squares: the factor m that makes |y - m R x| smallest is <y, R x> / |x|².
  double Magnitude(double correlation) const { return correlation / x_sq_; }

 private:
  const RopeFrequencies& f_;
  std::vector<Complex> z_;
  double x_sq_ = 0, y_sq_ = 0;
};

// Largest correlation within half a position of p, by golden section.
double Refine(const Row& row, double p) {
  constexpr double kRatio = 0.6180339887498949;
  double low = p - 0.5, high = p + 0.5;
  while (high - low > 1e-7) {
    const double a = high - kRatio * (high - low), b = low + kRatio * (high - low);
    if (row.Correlation(a) < row.Correlation(b)) {
      low = a;
    } else {
      high = b;
    }
  }
  return (low + high) / 2;
}

// Largest correlation of the scan, then golden section. The scan's steps of 1/2 resolve the fastest pair, which turns
// by one radian a position.
RowRotation FitRow(const Row& row, int64_t first, int64_t last) {
  RowRotation fit;
  if (!row.decidable()) {
    fit.decidable = false;
    if (!std::isfinite(row.y_sq())) fit.residual = fit.runner_up = std::nan("");
    return fit;
  }
  const std::vector<double> scan = row.Scan(first, last);
  const int64_t best = std::max_element(scan.begin(), scan.end()) - scan.begin();
  fit.position = static_cast<double>(first) + 0.5 * static_cast<double>(best);
  // A whole position wins over a fractional one that is no better than rounding of positions explains.
  const double refined = Refine(row, fit.position);
  const double whole = std::round(refined);
  const double at_whole = row.Residual(row.Correlation(whole)), at_refined = row.Residual(row.Correlation(refined));
  const bool is_whole = at_whole <= std::max(1.5 * at_refined, 1e-6) || std::abs(whole - refined) < 1e-4;
  fit.position = is_whole ? whole : refined;
  const double correlation = row.Correlation(fit.position);
  fit.magnitude = row.Magnitude(correlation);
  fit.residual = row.Residual(correlation);
  // Positions within one of the best are the same peak; a second peak as high means that the row does not decide.
  for (size_t j = 0; j < scan.size(); ++j) {
    const double p = static_cast<double>(first) + 0.5 * static_cast<double>(j);
    if (std::abs(p - fit.position) > 1) fit.runner_up = std::min(fit.runner_up, row.Residual(scan[j]));
  }
  return fit;
}

}  // namespace

Result<RotationFit> FitRotation(const Array& x, const Array& y, const RopeFrequencies& f, const RopeLayout& layout,
                                int64_t first, int64_t last) {
  const int64_t half = static_cast<int64_t>(f.inverse.size());
  if (x.rank() < 2 || x.shape != y.shape || x.cols() < 2 * half || half == 0) {
    return Status::BadInput("no rotation leads from shape " + ShapeText(x.shape) + " to " + ShapeText(y.shape));
  }
  if (last < first || last - first > 1 << 22) return Status::BadInput("positions to search: at most 4194304");
  RotationFit fit;
  fit.layout = layout;
  fit.rows.resize(static_cast<size_t>(x.shape[0]));
  std::vector<double> weight(fit.rows.size());
  ParallelFor(x.shape[0], 0, [&](int64_t t) {
    const Row row(x, y, f, layout, t);
    fit.rows[static_cast<size_t>(t)] = FitRow(row, first, last);
    weight[static_cast<size_t>(t)] = row.y_sq();
  });
  double missed = 0, total = 0;
  for (size_t t = 0; t < fit.rows.size(); ++t) {
    if (!fit.rows[t].decidable) continue;
    missed += weight[t] * fit.rows[t].residual * fit.rows[t].residual;
    total += weight[t];
  }
  // Root of the shares: rows count by their energy, so a nearly empty row cannot spoil the fit.
  if (total > 0) fit.residual = std::sqrt(missed / total);
  return fit;
}

Result<std::vector<RotationFit>> FitPairings(const Array& x, const Array& y, const RopeFrequencies& f, bool from_end,
                                             int64_t first, int64_t last) {
  std::vector<RotationFit> fits;
  for (const Pairing pairing : {Pairing::kHalf, Pairing::kInterleaved}) {
    ASSAY_ASSIGN_OR_RETURN(RotationFit fit, FitRotation(x, y, f, {pairing, from_end}, first, last));
    fits.push_back(std::move(fit));
  }
  if (fits[1].residual < fits[0].residual) std::swap(fits[0], fits[1]);
  return fits;
}

namespace {

// Angle and weight of a pair in one row, heads summed up.
struct Phase {
  double position;
  Complex z;
};

// Largest Re sum z exp(-i w p) over w in (-pi, pi], on a grid that the longest wave of `phases` resolves. Phases by
// ascending position.
double CoarseFrequency(std::span<const Phase> phases) {
  const double step = 0.5 / phases.back().position;
  const auto n = static_cast<int64_t>(std::numbers::pi / step);
  double best = -1, found = 0;
  for (int64_t j = -n; j <= n; ++j) {
    const double w = static_cast<double>(j) * step;
    double sum = 0;
    for (const Phase& f : phases) sum += f.z.real() * std::cos(w * f.position) + f.z.imag() * std::sin(w * f.position);
    if (sum > best) best = sum, found = w;
  }
  return found;
}

// Weighted root mean square of the angles that w leaves; *slope: by how much w should be larger (least squares).
double AnglesLeft(std::span<const Phase> phases, double w, double* slope) {
  double weight = 0, square = 0, cross = 0, moment = 0;
  for (const Phase& f : phases) {
    const double left = std::arg(f.z * std::polar(1.0, -w * f.position)), m = std::abs(f.z);
    weight += m;
    square += m * left * left;
    cross += m * left * f.position;
    moment += m * f.position * f.position;
  }
  *slope = moment > 0 ? cross / moment : 0;
  return weight > 0 ? std::sqrt(square / weight) : 0;
}

// First from the rows of small positions, then with more and more of the others: what is known from positions up to p
// tells which turn one up to 2 p is in.
PairFrequency FitPair(std::span<const Phase> phases, size_t n_coarse, double given) {
  PairFrequency fit;
  fit.inverse = given;
  double slope = 0, energy = 0;
  for (const Phase& f : phases) energy += std::abs(f.z);
  if (!(energy > 0) || !std::isfinite(energy)) return fit;
  fit.decided = true;
  fit.declared = AnglesLeft(phases, given, &slope);
  fit.inverse = CoarseFrequency(phases.first(n_coarse));
  for (size_t n = n_coarse;;) {
    for (int round = 0; round < 3; ++round) {
      AnglesLeft(phases.first(n), fit.inverse, &slope);
      fit.inverse += slope;
    }
    if (n == phases.size()) break;
    const double reach = 2 * phases[n - 1].position;
    ++n;  // one more even where it lies farther out
    while (n < phases.size() && phases[n].position <= reach) ++n;
  }
  fit.residual = AnglesLeft(phases, fit.inverse, &slope);
  return fit;
}

}  // namespace

Result<FrequencyFit> FitFrequencies(const Array& x, const Array& y, std::span<const double> positions,
                                    std::span<const char> judged, const RopeFrequencies& given,
                                    const RopeLayout& layout) {
  constexpr double kFarthest = 4096;  // of the rows of the first search, whose cost grows with the position
  constexpr size_t kFewest = 4, kMostRows = 256, kMostCoarse = 48;
  const int64_t half = static_cast<int64_t>(given.inverse.size()), d = x.cols();
  if (x.rank() < 2 || x.shape != y.shape || d < 2 * half || half == 0 ||
      x.shape[0] != static_cast<int64_t>(positions.size())) {
    return Status::BadInput("no rotation leads from shape " + ShapeText(x.shape) + " to " + ShapeText(y.shape));
  }
  std::vector<int64_t> rows;
  std::set<double> different;
  for (int64_t t = 0; t < x.shape[0]; ++t) {
    const double p = positions[static_cast<size_t>(t)];
    if (!(p >= 1) || p != std::floor(p) || (!judged.empty() && judged[static_cast<size_t>(t)] == 0)) continue;
    rows.push_back(t);
    different.insert(p);
  }
  std::stable_sort(rows.begin(), rows.end(), [&](int64_t a, int64_t b) {
    return positions[static_cast<size_t>(a)] < positions[static_cast<size_t>(b)];
  });
  if (rows.size() > kMostRows) rows.resize(kMostRows);
  size_t n_coarse = 0;
  while (n_coarse < std::min(rows.size(), kMostCoarse) && positions[static_cast<size_t>(rows[n_coarse])] <= kFarthest)
    ++n_coarse;
  if (different.size() < kFewest || n_coarse < kFewest) {
    return Status::BadInput("too few positions to tell frequencies from");
  }
  const int64_t heads = x.rows() / x.shape[0];
  const int64_t step = layout.pairing == Pairing::kInterleaved ? 2 : 1;
  const int64_t other = layout.pairing == Pairing::kInterleaved ? 1 : half;
  FrequencyFit fit;
  fit.pairs.resize(static_cast<size_t>(half));
  std::vector<double> x_sq(fit.pairs.size()), y_sq(fit.pairs.size());
  ParallelFor(half, 0, [&](int64_t i) {
    const auto pair = static_cast<size_t>(i);
    std::vector<Phase> phases;
    for (const int64_t t : rows) {
      Complex z;
      for (int64_t r = t * heads; r < (t + 1) * heads; ++r) {
        const int64_t at = r * d + (layout.from_end ? d - 2 * half : 0) + i * step;
        const Complex a(x[at], x[at + other]), b(y[at], y[at + other]);
        z += std::conj(a) * b;
        x_sq[pair] += std::norm(a);
        y_sq[pair] += std::norm(b);
      }
      phases.push_back({positions[static_cast<size_t>(t)], z});
    }
    fit.pairs[pair] = FitPair(phases, n_coarse, given.inverse[pair]);
  });
  double before = 0, behind = 0;
  for (size_t i = 0; i < x_sq.size(); ++i) {
    before += x_sq[i];
    behind += y_sq[i];
  }
  if (before > 0) fit.magnitude = std::sqrt(behind / before);
  return fit;
}

}  // namespace assay::oracle
