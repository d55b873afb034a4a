#include "oracle/norm.h"

#include <cmath>

namespace assay::oracle {
namespace {

// A weight or bias of a norm: absent, or one number a column.
Status CheckVector(const Array& vector, int64_t d, const char* what) {
  if (vector.values.empty() || vector.size() == d) return {};
  return Status::BadInput(std::string(what) + " of shape " + ShapeText(vector.shape) + " does not fit rows of " +
                          std::to_string(d));
}

// Vectors that a layer lacks are constant.
double At(const Array& vector, int64_t i, double otherwise) { return vector.values.empty() ? otherwise : vector[i]; }

}  // namespace

// Sums of squares do not cancel, so plain summation in double is exact enough for any width.
Result<std::vector<double>> MeanSquares(const Array& x, int64_t begin, int64_t end) {
  if (begin < 0 || begin >= end || end > x.cols()) {
    return Status::BadInput("no columns " + std::to_string(begin) + ":" + std::to_string(end) + " in shape " +
                            ShapeText(x.shape));
  }
  std::vector<double> out(static_cast<size_t>(x.rows()));
  for (int64_t r = 0; r < x.rows(); ++r) {
    double sum = 0;
    for (const double v : x.row(r).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin))) sum += v * v;
    out[static_cast<size_t>(r)] = sum / static_cast<double>(end - begin);
  }
  return out;
}

Result<Computed> RmsNorm(const Array& x, const Array& weight, double eps) {
  if (x.size() == 0) return RmsNormGiven(x, weight, eps, {});
  ASSAY_ASSIGN_OR_RETURN(const std::vector<double> mean_squares, MeanSquares(x, 0, x.cols()));
  return RmsNormGiven(x, weight, eps, mean_squares);
}

// k: the sum of d squares passes half its relative error through the root, d/2; six more for division, root and
// products.
Result<Computed> RmsNormGiven(const Array& x, const Array& weight, double eps, std::span<const double> mean_squares) {
  const int64_t d = x.cols();
  ASSAY_RETURN_IF_ERROR(CheckVector(weight, d, "a norm's weight"));
  if (x.size() > 0 && static_cast<int64_t>(mean_squares.size()) != x.rows()) {
    return Status::BadInput(std::to_string(mean_squares.size()) + " mean squares for rows of " + ShapeText(x.shape));
  }
  Computed c{Array::Filled(x.shape), Array::Filled(x.shape), {}, static_cast<double>(d) / 2 + 6, 0, 2};
  c.floors = Array::Filled(x.shape);
  for (int64_t r = 0; x.size() > 0 && r < x.rows(); ++r) {
    const double factor = 1 / std::sqrt(mean_squares[static_cast<size_t>(r)] + eps);
    for (int64_t i = 0; i < d; ++i) {
      const double y = x.row(r)[static_cast<size_t>(i)] * factor * At(weight, i, 1);
      c.value[r * d + i] = y;
      c.scale[r * d + i] = std::abs(y);
      c.floors[r * d + i] = 1 + std::abs(At(weight, i, 1));  // the normed value is stored, then multiplied
    }
  }
  return c;
}

// Two passes here, whatever the engine does; cancellation bounds what one pass would lose.
Result<Computed> LayerNorm(const Array& x, const Array& weight, const Array& bias, double eps) {
  const int64_t d = x.cols();
  ASSAY_RETURN_IF_ERROR(CheckVector(weight, d, "a norm's weight"));
  ASSAY_RETURN_IF_ERROR(CheckVector(bias, d, "a norm's bias"));
  const double n = static_cast<double>(d);
  Computed c{Array::Filled(x.shape), Array::Filled(x.shape), Array::Filled(x.shape), 8, n + 8, 2};
  c.floors = Array::Filled(x.shape);
  for (int64_t r = 0; x.size() > 0 && r < x.rows(); ++r) {
    const std::span<const double> row = x.row(r);
    double sum = 0, magnitude = 0, squares = 0;
    for (const double v : row) {
      sum += v;
      magnitude += std::abs(v);
      squares += v * v;
    }
    // The mean and the variance in two passes: no cancellation on this side.
    const double mean = sum / n;
    double variance = 0;
    for (const double v : row) variance += (v - mean) * (v - mean);
    variance /= n;
    const double factor = 1 / std::sqrt(variance + eps);
    // How much larger the one-pass variance's terms are than the variance: its relative rounding.
    const double cancellation = (squares / n + mean * mean) / (variance + eps);
    for (int64_t i = 0; i < d; ++i) {
      const double w = At(weight, i, 1), b = At(bias, i, 0), v = row[static_cast<size_t>(i)];
      const double y = (v - mean) * factor * w;
      c.value[r * d + i] = y + b;
      c.scale[r * d + i] = std::abs(y) + std::abs(b);
      c.floors[r * d + i] = 1 + std::abs(w);
      c.inner[r * d + i] = std::abs(factor * w) * (std::abs(v) + magnitude / n) + std::abs(y) * cancellation;
    }
  }
  return c;
}

}  // namespace assay::oracle
