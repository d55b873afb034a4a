#include "fit/least_squares.h"

#include <algorithm>
#include <cmath>

namespace assay::fit {

void SolveSymmetric(std::span<double> a, std::span<double> b) {
  const size_t n = b.size();
  std::vector<double> diagonal(n);
  for (size_t i = 0; i < n; ++i) diagonal[i] = a[i * n + i];
  std::vector<char> known(n, 1);
  for (size_t i = 0; i < n; ++i) {
    const double pivot = a[i * n + i];
    if (!(pivot > 1e-10 * diagonal[i]) || diagonal[i] == 0) {
      known[i] = 0;
      continue;
    }
    for (size_t r = 0; r < n; ++r) {
      if (r == i || a[r * n + i] == 0) continue;
      const double by = a[r * n + i] / pivot;
      for (size_t c = i; c < n; ++c) a[r * n + c] -= by * a[i * n + c];
      b[r] -= by * b[i];
    }
  }
  for (size_t i = 0; i < n; ++i) b[i] = known[i] ? b[i] / a[i * n + i] : std::nan("");
}

std::vector<double> SolveLeastSquares(std::span<const double> y, std::span<const std::span<const double>> terms) {
  const size_t n = terms.size();
  std::vector<double> a(n * n, 0), b(n, 0);
  for (size_t i = 0; i < n; ++i) {
    for (size_t c = 0; c < y.size(); ++c) b[i] += terms[i][c] * y[c];
    for (size_t j = 0; j < n; ++j)
      for (size_t c = 0; c < y.size(); ++c) a[i * n + j] += terms[i][c] * terms[j][c];
  }
  SolveSymmetric(a, b);
  if (!std::all_of(b.begin(), b.end(), [](double x) { return std::isfinite(x); })) return {};
  return b;
}

}  // namespace assay::fit
