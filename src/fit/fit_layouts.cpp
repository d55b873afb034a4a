// Fits of layouts: the same memory read in another order.
#include <cmath>

#include "fit/fits.h"

namespace assay::fit {
namespace {

// No source: the pitch leads out of the memory that is known.
constexpr int64_t kUnknown = -1;

// Model whose element i is expected's element source(i); kUnknown where nothing is predicted.
template <class SourceOf>
void FitOrder(const Evidence& evidence, const SourceOf& source, double price, Explanation x,
              std::vector<Explanation>* found) {
  // Most orders are refused by a look at a few elements.
  const int64_t n = evidence.size();
  // 32 places spread evenly; three quarters must meet, as a right order may miss a tenth (hit_share) and the sample is
  // small.
  int64_t looked = 0, met = 0;
  for (int64_t j = 0; j < 32; ++j) {
    const int64_t i = (2 * j + 1) * n / 64, s = source(i);
    if (s == kUnknown) continue;
    ++looked;
    met += Evidence::Meets(evidence.actual(i), evidence.expected(s), evidence.options().slack * evidence.bound(s));
  }
  if (met < looked * 3 / 4) return;
  Model model;
  model.values.resize(static_cast<size_t>(n));
  model.bound.resize(static_cast<size_t>(n));
  model.known.assign(static_cast<size_t>(n), 1);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t s = source(i);
    model.known[static_cast<size_t>(i)] = s != kUnknown;
    model.values[static_cast<size_t>(i)] = s == kUnknown ? evidence.actual(i) : evidence.expected(s);
    model.bound[static_cast<size_t>(i)] = s == kUnknown ? 0 : evidence.bound(s);
  }
  model.price = price;
  if (evidence.Judge(model, &x)) found->push_back(x);
}

// Columns of each stretch of `width` elements.
void FitInterleaved(const Evidence& evidence, int64_t width, const char* where, std::vector<Explanation>* found) {
  if (width < 4 || width % 2 != 0) return;
  Explanation x{Kind::kInterleaved, Axis::kColumn};
  x.parameters = std::string("halves in place of interleaved pairs, ") + where;
  FitOrder(
      evidence,
      [=](int64_t i) {
        const int64_t c = i % width;
        return i - c + (c < width / 2 ? 2 * c : 2 * (c - width / 2) + 1);
      },
      1, x, found);
  x.parameters = std::string("interleaved pairs in place of halves, ") + where;
  FitOrder(
      evidence, [=](int64_t i) { return i - i % width + i % width / 2 + i % 2 * (width / 2); }, 1, x, found);
}

// Memory of [a, b] pieces of `inner` elements, `a · b · inner` a stretch, written in one order and read in the other.
void FitTransposed(const Evidence& evidence, int64_t a, int64_t b, int64_t inner, const char* what,
                   std::vector<Explanation>* found) {
  if (a < 2 || b < 2) return;
  const int64_t stretch = a * b * inner;
  // Written [a, b] and read [b, a], or the reverse: two different orders unless a = b.
  for (const auto& [p, q] : {std::pair{a, b}, std::pair{b, a}}) {
    Explanation x{Kind::kTransposed, Axis::kAll};
    x.parameters = std::string(what) + " swapped";
    const auto source = [stretch, inner, rows = p, columns = q](int64_t i) {
      const int64_t unit = i % stretch / inner;
      return i - i % stretch + (unit % rows * columns + unit / rows) * inner + i % inner;
    };
    FitOrder(evidence, source, 2, x, found);
    if (a == b) return;
  }
}

// Unit u of `width` elements read at u · pitch. A pitch of 0, the same unit each time, is a move.
void FitPitch(const Evidence& evidence, int64_t stretch, int64_t width, const char* what,
              std::vector<Explanation>* found) {
  const int64_t units = stretch / width;
  if (units < 2) return;
  // Pitches of real faults are widths of neighbouring tensors or padded rows; the limits bound the search, as each
  // pitch costs a look at 32 elements.
  for (int64_t pitch = 1; pitch <= 4 * width && pitch <= 8192; ++pitch) {
    if (pitch == width) continue;
    Explanation x{Kind::kOtherStride, Axis::kAll};
    x.constant = static_cast<double>(pitch);
    x.parameters =
        std::string(what) + " read at a stride of " + std::to_string(pitch) + " in place of " + std::to_string(width);
    const auto source = [=](int64_t i) {
      const int64_t s = i % stretch / width * pitch + i % width;
      return s < stretch ? i - i % stretch + s : kUnknown;
    };
    FitOrder(evidence, source, std::log2(4.0 * static_cast<double>(width)), x, found);
  }
}

}  // namespace

// Rows and columns are tried with all heads together; heads alone where there are several.
void FitLayouts(const Evidence& evidence, std::vector<Explanation>* found) {
  const Problem& p = evidence.problem();
  const int64_t width = evidence.width();
  FitInterleaved(evidence, p.cols, p.heads > 1 ? "in each head" : "in each row", found);
  if (p.heads > 1) FitInterleaved(evidence, width, "in each row", found);
  if (p.heads > 1) {
    FitTransposed(evidence, p.rows, p.heads, p.cols, "rows and heads", found);
    FitTransposed(evidence, p.heads, p.cols, 1, "heads and columns", found);
  }
  FitTransposed(evidence, p.rows, width, 1, "rows and columns", found);
  FitPitch(evidence, evidence.size(), width, "rows", found);
  if (p.heads > 1) FitPitch(evidence, width, p.cols, "heads", found);
}

}  // namespace assay::fit
