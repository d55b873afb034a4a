// Rounding of doubles to numbers of fewer significant bits. It knows no largest number, and no format by name: whoever
// asks does.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

namespace assay {

// Exponent of the smallest double: no least spacing but that of the doubles themselves.
inline constexpr int kDoubleLeastExponent = -1074;

// Between numbers of so many significant bits (the hidden one included) at x, never below 2^least_exponent, which it is
// at 0. NaN where x is not finite.
inline double SpacingAt(double x, int significant_bits, int least_exponent = kDoubleLeastExponent) {
  if (!std::isfinite(x)) return std::numeric_limits<double>::quiet_NaN();
  if (x == 0) return std::ldexp(1, least_exponent);
  return std::ldexp(1, std::max(std::ilogb(x) - (significant_bits - 1), least_exponent));
}

// Nearest such number, ties to even. NaN, infinities and zeros stay.
inline double RoundToBits(double x, int significant_bits, int least_exponent = kDoubleLeastExponent) {
  if (!std::isfinite(x) || x == 0) return x;
  const double spacing = SpacingAt(x, significant_bits, least_exponent);
  // Both by powers of two, so exact; nearbyint rounds ties to even in the default mode.
  return std::nearbyint(x / spacing) * spacing;
}

}  // namespace assay
