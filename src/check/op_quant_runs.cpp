// Codes in another order within short runs, whatever the order: told from the result by a matched filter.
//
// With y the result and x the other operand, both about their mean, the codes of residue q of each run stand at residue
// p where Σ y (Σ x v_pq) is largest for its size, v_pq the value that they would have there: all pairs (p, q) follow
// from Σ y x of each line, so that the search costs one small product, not one a pair. The order found so is then tried
// like any cause.
#include <algorithm>
#include <cmath>

#include "check/op_quant_explain.h"
#include "finding/finding.h"
#include "quant/misreading.h"

namespace assay::op {
namespace {

using oracle::Array;

constexpr int64_t kMostOthers = 256;
constexpr double kMostWork = 0x1p28;  // products of one length of runs

class MatchedFilter {
 public:
  explicit MatchedFilter(const QuantTrial& t) : t_(t), p_(t.parts()) {
    const auto n_rows = static_cast<int64_t>(t.subject().judged().size());
    const Array& have = t.subject().actual();
    const int64_t width = n_rows > 0 ? have.size() / n_rows : 0;
    const bool activation = t.product().activation;
    const int64_t lines = activation ? n_rows : width, others = activation ? width : n_rows;
    if (width == 0 || p_.cols == 0 || t.product().other.cols() != p_.cols || t.product().other.rows() != others ||
        t.product().first + lines > p_.rows)
      return;
    Choose(lines, others);
    for (size_t i = 0; i < p_.code.size(); ++i)
      middle_ += double{p_.code[i]} - (p_.zero.empty() ? 0 : double{p_.zero[i]});
    middle_ /= static_cast<double>(p_.code.size());
    Correlate(have, width, activation);
  }

  // Numbers of the result that were looked at; 0: shapes that do not belong together.
  int64_t equations() const { return lines_ * static_cast<int64_t>(others_.size()); }

  // Place p of each run holds the codes of place from[p]; empty: runs of this length cannot be told.
  // zeros_too: zero points move with their codes.
  std::vector<int64_t> Order(int64_t length, bool by_rows, bool zeros_too) const {
    const int64_t first = t_.product().first;
    if (lines_ == 0 || (by_rows ? first % length != 0 || lines_ < length : p_.cols % length != 0)) return {};
    const auto n = static_cast<size_t>(length);
    std::vector<double> cross(n * n, 0), square(n * n, 0);
    // Long runs cost more a line, and are told by fewer.
    int64_t lines = std::min(lines_, static_cast<int64_t>(kMostWork / static_cast<double>(p_.cols * length)));
    if (by_rows) lines = std::min(std::max(lines, length), lines_) / length * length;
    std::vector<double> v(n);  // what each place would hold, but for the scale and zero points that stay
    const int64_t step = by_rows ? p_.cols : 1;
    for (int64_t line = 0; line < lines; line += by_rows ? length : 1) {
      for (int64_t k = 0; k < p_.cols; k += by_rows ? 1 : length) {
        const int64_t begin = (first + line) * p_.cols + k;
        for (int64_t q = 0; q < length; ++q) {
          const int64_t from = begin + q * step;
          v[static_cast<size_t>(q)] =
              double{p_.code[static_cast<size_t>(from)]} - (zeros_too ? t_.ZeroAt(from) : 0) - middle_;
        }
        for (int64_t p = 0; p < length; ++p) {
          const int64_t at = begin + p * step, col = by_rows ? k : k + p;
          const double scale = p_.ScaleOf(at), zero = zeros_too ? 0 : t_.ZeroAt(at);
          const double a = filter_[static_cast<size_t>(at - first * p_.cols)] * scale;
          const double b = energy_[static_cast<size_t>(col)] * scale * scale;
          double* cross_row = cross.data() + static_cast<size_t>(p) * n;
          double* square_row = square.data() + static_cast<size_t>(p) * n;
          for (size_t q = 0; q < n; ++q) {
            const double u = v[q] - zero;
            cross_row[q] += a * u;
            square_row[q] += b * u * u;
          }
        }
      }
    }
    return Assign(cross, square, n);
  }

 private:
  // Rows of requests alone; as many lines as the work allows.
  void Choose(int64_t lines, int64_t others) {
    const bool activation = t_.product().activation;
    for (int64_t i = 0; i < others; ++i) {
      if (activation || t_.subject().judged()[static_cast<size_t>(i)]) others_.push_back(i);
    }
    if (static_cast<int64_t>(others_.size()) > kMostOthers) {
      std::vector<int64_t> some;
      for (int64_t i = 0; i < kMostOthers; ++i)
        some.push_back(others_[static_cast<size_t>(i) * others_.size() / static_cast<size_t>(kMostOthers)]);
      others_ = std::move(some);
    }
    const double of_line = static_cast<double>(p_.cols) * static_cast<double>(std::max<size_t>(others_.size(), 1));
    lines_ = others_.empty() ? 0 : std::min(lines, std::max<int64_t>(static_cast<int64_t>(kMostWork / of_line), 16));
  }

  // filter_: Σ y x of each line and column, about the means over the others and less what codes of the middle value
  // give; energy_: Σ x².
  void Correlate(const Array& have, int64_t width, bool activation) {
    const Array& x = t_.product().other;
    const auto cols = static_cast<size_t>(p_.cols);
    std::vector<double> mean(cols, 0);
    for (const int64_t o : others_)
      for (size_t k = 0; k < cols; ++k) mean[k] += x[o * p_.cols + static_cast<int64_t>(k)];
    for (double& m : mean) m /= static_cast<double>(others_.size());
    energy_.assign(cols, 0);
    for (const int64_t o : others_) {
      for (size_t k = 0; k < cols; ++k) {
        const double d = x[o * p_.cols + static_cast<int64_t>(k)] - mean[k];
        energy_[k] += d * d;
      }
    }
    filter_.assign(static_cast<size_t>(lines_) * cols, 0);
    std::vector<double> flat(cols);  // the line if each code were the middle one
    for (int64_t line = 0; line < lines_; ++line) {
      if (activation && !t_.subject().judged()[static_cast<size_t>(line)]) continue;
      double middle = 0;
      const auto y = [&](int64_t o) { return have[activation ? line * width + o : o * width + line]; };
      for (const int64_t o : others_) middle += y(o);
      middle /= static_cast<double>(others_.size());
      if (!std::isfinite(middle)) continue;
      const int64_t at = (t_.product().first + line) * p_.cols;
      for (size_t k = 0; k < cols; ++k) flat[k] = middle_ * p_.ScaleOf(at + static_cast<int64_t>(k));
      double* filter = filter_.data() + static_cast<size_t>(line) * cols;
      for (const int64_t o : others_) {
        const double* x_row = &x.values[static_cast<size_t>(o) * cols];
        double d = y(o) - middle;
        for (size_t k = 0; k < cols; ++k) d -= (x_row[k] - mean[k]) * flat[k];
        for (size_t k = 0; k < cols; ++k) filter[k] += d * (x_row[k] - mean[k]);
      }
    }
  }

  // The best pairs first, each place and each source once. n ≤ 256.
  static std::vector<int64_t> Assign(const std::vector<double>& cross, const std::vector<double>& square, size_t n) {
    std::vector<std::pair<double, size_t>> pairs;
    for (size_t i = 0; i < n * n; ++i) {
      const double score = square[i] > 0 ? -cross[i] / std::sqrt(square[i]) : 0;
      pairs.emplace_back(std::isfinite(score) ? score : 0, i);  // huge scales: no order of what is no number
    }
    std::sort(pairs.begin(), pairs.end());
    std::vector<int64_t> from(n, -1);
    std::vector<char> taken(n, 0);
    for (const auto& [score, i] : pairs) {
      if (from[i / n] >= 0 || taken[i % n]) continue;
      from[i / n] = static_cast<int64_t>(i % n);
      taken[i % n] = 1;
    }
    return from;
  }

  const QuantTrial& t_;
  const DequantParts& p_;
  int64_t lines_ = 0;
  std::vector<int64_t> others_;
  std::vector<double> filter_, energy_;
  double middle_ = 0;  // of all codes less their zero points: what any order gives alike, and is taken off y and v
};

// Where the element at (r, c) is taken from when runs are moved as `from` says; what does not fill a run stays.
int64_t Source(const DequantParts& p, int64_t r, int64_t c, bool by_rows, const std::vector<int64_t>& from) {
  const auto length = static_cast<int64_t>(from.size());
  const int64_t extent = by_rows ? p.rows : p.cols, step = by_rows ? p.cols : 1;
  const int64_t i = by_rows ? r : c, place = i % length, at = r * p.cols + c;
  return i - place + length > extent ? at : at + (from[static_cast<size_t>(place)] - place) * step;
}

}  // namespace

std::optional<Explanation> TryRuns(const QuantTrial& t) {
  const MatchedFilter filter(t);
  const DequantParts& p = t.parts();
  for (const bool by_rows : {false, true}) {
    for (const bool zeros_too : {false, true}) {
      if (zeros_too && (p.zero.empty() || !by_rows)) continue;
      for (const int64_t length : kRunLengths) {
        // An order of n is one of n!: every number that fits to rounding is worth two bits at least, and 40 are asked.
        const auto n = static_cast<double>(length);
        if (2 * static_cast<double>(filter.equations()) < n * std::log2(n) + 40) break;
        const std::vector<int64_t> from = filter.Order(length, by_rows, zeros_too);
        if (from.empty() || std::is_sorted(from.begin(), from.end())) continue;
        const auto moved = [&](int64_t r, int64_t c) {
          const int64_t at = r * p.cols + c, source = Source(p, r, c, by_rows, from);
          return t.ValueOf(double{p.code[static_cast<size_t>(source)]}, t.ZeroAt(zeros_too ? source : at),
                           p.ScaleOf(at));
        };
        std::string text = "fits " + t.product().name + " if " + RunOrderText(by_rows, from);
        if (zeros_too) text += ", zero points with them";
        if (auto why = t.Try(moved, {fault_class::kQLayout, text})) return why;
      }
    }
  }
  return std::nullopt;
}

}  // namespace assay::op
