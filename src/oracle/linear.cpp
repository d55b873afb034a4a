#include "oracle/linear.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/hash.h"
#include "base/parallel_for.h"
#include "oracle/gemm.h"

namespace assay::oracle {
namespace {

// Rows that share one read of a panel.
constexpr int64_t kRowsAJob = 32;

// x [.., K], w [N, K], bias [N] or empty; everything behind relies on it.
Status CheckShapes(const Array& x, const Array& w, const Array& bias) {
  if (w.rank() != 2 || x.rank() == 0 || x.cols() != w.cols()) {
    return Status::BadInput("an input of shape " + ShapeText(x.shape) + " does not fit a weight of shape " +
                            ShapeText(w.shape));
  }
  if (!bias.values.empty() && bias.size() != w.shape[0]) {
    return Status::BadInput("a bias of shape " + ShapeText(bias.shape) + " does not fit a weight of shape " +
                            ShapeText(w.shape));
  }
  return {};
}

}  // namespace

Result<Computed> Linear(const Array& x, const Array& w, const Array& bias) {
  ASSAY_RETURN_IF_ERROR(CheckShapes(x, w, bias));
  const int64_t m = x.rows(), k = x.cols(), n = w.shape[0];
  std::vector<int64_t> shape = x.shape;
  shape.back() = n;
  Computed c{Array::Filled(shape), Array::Filled(shape), {}, static_cast<double>(k + 1), 0, 1};
  const PackedMatrix packed = PackedMatrix::FromColumns(w.values.data(), k, n, k);
  // Jobs are blocks of rows and of panels, so that one long row is spread too.
  const int64_t row_jobs = (m + kRowsAJob - 1) / kRowsAJob;
  const int64_t panels_a_job = std::max<int64_t>(8, packed.panels() / 16 + 1);
  const int64_t panel_jobs = (packed.panels() + panels_a_job - 1) / panels_a_job;
  // Small products stay on this thread: starting others costs more.
  ParallelFor(row_jobs * panel_jobs, m * n * k < 1 << 16 ? 1 : 0, [&](int64_t job) {
    const int64_t first = job / panel_jobs * kRowsAJob, panel = job % panel_jobs * panels_a_job;
    Multiply(x.values.data() + first * k, k, std::min(kRowsAJob, m - first), packed, 0, k, panel,
             std::min(panel + panels_a_job, packed.panels()),
             c.value.values.data() + first * n + panel * PackedMatrix::kWidth,
             c.scale.values.data() + first * n + panel * PackedMatrix::kWidth, n);
  });
  for (int64_t r = 0; !bias.values.empty() && r < m; ++r) {
    for (int64_t j = 0; j < n; ++j) {
      c.value[r * n + j] += bias[j];
      c.scale[r * n + j] += std::abs(bias[j]);
    }
  }
  return c;
}

// Cuts the operands instead of the result, so the cost is that of the chosen rows and columns.
Result<Computed> LinearAt(const Array& x, const Array& w, const Array& bias, std::span<const int64_t> rows,
                          std::span<const int64_t> columns) {
  ASSAY_RETURN_IF_ERROR(CheckShapes(x, w, bias));
  ASSAY_ASSIGN_OR_RETURN(Array flat, Reshape(x, {x.rows(), x.cols()}));
  if (!rows.empty()) {
    ASSAY_ASSIGN_OR_RETURN(flat, TakeRows(flat, rows));
  }
  if (columns.empty()) return Linear(flat, w, bias);
  ASSAY_ASSIGN_OR_RETURN(const Array chosen, TakeRows(w, columns));
  Array chosen_bias;
  if (!bias.values.empty()) {
    ASSAY_ASSIGN_OR_RETURN(const Array column, Reshape(bias, {bias.size()}));
    ASSAY_ASSIGN_OR_RETURN(chosen_bias, TakeRows(column, columns));
  }
  return Linear(flat, chosen, chosen_bias);
}

// k: the product of a term, and a sum for each of them.
Result<Computed> LinearCombination(std::span<const Term> terms) {
  if (terms.empty()) return Status::BadInput("a sum of no arrays");
  const Array& first = *terms[0].array;
  Computed c{Array::Filled(first.shape), Array::Filled(first.shape), {}, static_cast<double>(terms.size() + 1), 0, 1};
  // An engine may store after each term.
  c.stores = std::max<double>(1, static_cast<double>(terms.size()) - 1);
  for (const Term& term : terms) {
    if (term.array->size() != first.size()) {
      return Status::BadInput("shapes " + ShapeText(first.shape) + " and " + ShapeText(term.array->shape) +
                              " do not add up");
    }
    for (int64_t i = 0; i < first.size(); ++i) {
      const double v = term.factor * (*term.array)[i];
      c.value[i] += v;
      c.scale[i] += std::abs(v);
    }
  }
  return c;
}

// The fold of w costs N K a probe, once for all rows; a row then costs N + K.
Result<std::vector<RowCheck>> CheckLinear(const Array& x, const Array& w, const Array& bias, const Array& y,
                                          const Precision& precision, uint64_t seed, int probes) {
  ASSAY_RETURN_IF_ERROR(CheckShapes(x, w, bias));
  const int64_t m = x.rows(), k = x.cols(), n = w.shape[0];
  if (y.size() != m * n || y.cols() != n || probes < 1) {
    return Status::BadInput("a result of shape " + ShapeText(y.shape) + " is not that of " + ShapeText(x.shape) +
                            " times " + ShapeText(w.shape));
  }
  // Column p of `signs` [N, probes] is a probe; one more column of ones meets the magnitudes, for the bound.
  SplitMix64 random(seed);
  Array signs = Array::Filled({n, probes});
  for (double& s : signs.values) s = (random.Next() >> 63) != 0 ? 1.0 : -1.0;
  Array folded = Array::Filled({probes + 1, k});  // wᵀ r, and |w|ᵀ 1
  std::vector<double> folded_bias(static_cast<size_t>(probes) + 1);
  for (int64_t j = 0; j < n; ++j) {
    const std::span<const double> row = w.row(j);
    for (int64_t p = 0; p <= probes; ++p) {
      double* out = folded.values.data() + p * k;
      const double sign = p < probes ? signs[j * probes + p] : 0;
      for (int64_t i = 0; i < k; ++i) {
        out[i] += p < probes ? sign * row[static_cast<size_t>(i)] : std::abs(row[static_cast<size_t>(i)]);
      }
      if (!bias.values.empty()) folded_bias[static_cast<size_t>(p)] += p < probes ? sign * bias[j] : std::abs(bias[j]);
    }
  }
  Computed all;  // one element: the sum of the row's scales, whose bound is the sum of the bounds
  all.value = all.scale = Array::Filled({1});
  all.k = static_cast<double>(k + 1);
  std::vector<RowCheck> checks(static_cast<size_t>(m));
  for (int64_t r = 0; r < m; ++r) {
    RowCheck& check = checks[static_cast<size_t>(r)];
    double squares = 0, scale = folded_bias[static_cast<size_t>(probes)];
    for (int64_t i = 0; i < k; ++i) scale += std::abs(x[r * k + i]) * folded[probes * k + i];
    for (int64_t p = 0; p < probes; ++p) {
      double error = -folded_bias[static_cast<size_t>(p)];
      for (int64_t j = 0; j < n; ++j) error += y[r * n + j] * signs[j * probes + p];
      for (int64_t i = 0; i < k; ++i) error -= x[r * k + i] * folded[p * k + i];
      squares += error * error;
      // Not std::max: a NaN must stay.
      if (!(std::abs(error) <= check.largest)) check.largest = std::abs(error);
      // The row is lost; further probes would be NaN too.
      if (std::isnan(error)) break;
    }
    check.error = std::sqrt(squares / probes);
    all.scale[0] = scale;
    Precision p = precision;
    p.floor *= static_cast<double>(n);
    // The probe's own sums are longer than an element's: over K behind the fold over N.
    check.bound = BoundAt(all, 0, p) + Gamma(static_cast<double>(k + n + 1), 0x1p-53) * scale;
  }
  return checks;
}

}  // namespace assay::oracle
