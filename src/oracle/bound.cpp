#include "oracle/bound.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace assay::oracle {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Of the doubles that oracles are computed in.
constexpr double kOwnRoundoff = 0x1p-53;

// As bound.h says: what is no float counts as f32.
double FloatRoundoff(DType dtype) { return IsFloat(dtype) ? UnitRoundoff(dtype) : UnitRoundoff(DType::kF32); }

// Half the smallest subnormal; with f32's range 2^-119: engines flush subnormals, and where an exponential leaves the
// range (silu at -89 is 0 for 89 · 2^-128) the result is 0.
double FloorOf(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return 0;
    case DType::kF16:
      return 0x1p-25;
    case DType::kF8E4M3FN:
      return 0x1p-10;
    case DType::kF8E5M2:
      return 0x1p-17;
    case DType::kF8E4M3FNUZ:
      return 0x1p-11;
    case DType::kF8E5M2FNUZ:
      return 0x1p-18;
    case DType::kF4E2M1:
      return 0.25;
    default:
      return 0x1p-119;
  }
}

// The walk never passes the worst case: for few roundings 8 sqrt(k) is the larger one.
double Growth(double k, double u, bool walk) {
  const double worst = Gamma(k, u);
  return walk ? std::min(worst, Gamma(8 * std::sqrt(k), u)) : worst;
}

}  // namespace

Precision PrecisionOf(DType accum, DType store) {
  Precision p;
  p.accum = FloatRoundoff(accum);
  p.store = FloatRoundoff(store);
  p.floor = IsFloat(store) ? FloorOf(store) : FloorOf(DType::kF32);
  return p;
}

// Higham, section 3.1: the product of k factors 1 + d, |d| <= u, is 1 + theta with |theta| <= gamma(k).
double Gamma(double k, double u) {
  const double ku = k * u;
  return ku < 1 ? ku / (1 - ku) : kInfinity;
}

double BoundAt(const Computed& c, int64_t i, const Precision& p) {
  // 2^-53 beside the engine's own: the oracle rounds too.
  const auto grown = [&](double k, double magnitude) {
    if (magnitude == 0) return 0.0;  // also where gamma is infinite
    return (Growth(k, p.accum, p.walk) + Gamma(k, kOwnRoundoff) + p.operand) * magnitude;
  };
  double bound = grown(c.k, c.scale[i]) + p.floor * (c.floors.values.empty() ? 1 : c.floors[i]);
  if (c.scale[i] != 0) bound += c.stores * p.store * c.scale[i];
  if (!c.inner.values.empty()) bound += grown(c.k_inner, c.inner[i]);
  return bound;
}

Array Bound(const Computed& computed, const Precision& precision) {
  Array bound = Array::Filled(computed.value.shape);
  for (int64_t i = 0; i < bound.size(); ++i) bound[i] = BoundAt(computed, i, precision);
  return bound;
}

// Every element takes part, the non-finite ones as well; only the sums of the relative norm leave those out.
Result<Agreement> Compare(const Array& actual, const Computed& computed, const Precision& precision) {
  if (actual.size() != computed.value.size()) {
    return Status::BadInput("shape " + ShapeText(actual.shape) + " is not that of the oracle, " +
                            ShapeText(computed.value.shape));
  }
  Agreement a;
  a.count = actual.size();
  double error_sq = 0, value_sq = 0;
  for (int64_t i = 0; i < a.count; ++i) {
    const double got = actual[i], want = computed.value[i];
    double ratio = 0;
    if (!std::isfinite(got) || !std::isfinite(want)) {
      if (got == want || (std::isnan(got) && std::isnan(want))) continue;
      ratio = kInfinity;
      ++a.wrong_nonfinite;
    } else {
      const double error = std::abs(got - want);
      error_sq += error * error;
      value_sq += want * want;
      if (error == 0) continue;
      const double bound = BoundAt(computed, i, precision);
      // A NaN bound comes from an operand that is not finite and was not used: no bound can be stated, so none holds.
      ratio = bound > 0 ? error / bound : kInfinity;
    }
    // Not ratio > 1: the comparison must fail for a NaN too.
    if (!(ratio <= 1)) {
      ++a.over;
      if (a.first_over < 0) a.first_over = i;
    }
    if (a.worst_at < 0 || ratio > a.worst) {
      a.worst = ratio;
      a.worst_at = i;
    }
  }
  if (error_sq > 0) a.relative_l2 = value_sq > 0 ? std::sqrt(error_sq / value_sq) : kInfinity;
  return a;
}

}  // namespace assay::oracle
