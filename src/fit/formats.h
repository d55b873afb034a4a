// Small float formats as sets of values: rounding to them, and which of them holds all of an array. A value that fits
// fewer bits than its tensor declares has been rounded on the way.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace assay::fit {

struct Format {
  std::string_view name;
  int significant_bits;  // the hidden one included
  int least_exponent;    // of the last bit of the smallest subnormal: spacing is never below 2^least_exponent
  double largest;
};
// f32, f16, bf16, f8_e4m3fn, f8_e5m2, f4_e2m1; finest first.
std::span<const Format> Formats();

// Nearest value, ties to even; beyond the largest: the largest with the sign. NaN and infinities stay.
double RoundTo(double x, const Format& format);
// Spacing of the format's values at x; NaN where x is not finite.
double SpacingAt(double x, const Format& format);

struct Coarsest {
  const Format* format;
  int64_t distinct;  // distinct finite values that are not 0
  // Bits by which this surprises, for values of `significant_bits` bits: distinct times the bits that are always zero.
  double bits;
};
// The coarsest format that holds every finite value, if it is coarser than significant_bits; none when fewer than 8
// distinct values or nothing coarser. Powers of two times a format (a scale) do not count.
std::optional<Coarsest> CoarsestFormat(std::span<const double> values, int significant_bits);

}  // namespace assay::fit
