#include "fit/formats.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <unordered_set>

#include "base/rounding.h"

namespace assay::fit {
namespace {

// bf16's least exponent is -126 - 7, f32's -126 - 23; largest values as in tensor/dtype.h.
constexpr std::array<Format, 6> kFormats{{{"f32", 24, -149, 0x1.fffffep127},
                                          {"f16", 11, -24, 65504},
                                          {"bf16", 8, -133, 0x1.fep127},
                                          {"f8_e4m3fn", 4, -9, 448},
                                          {"f8_e5m2", 3, -16, 57344},
                                          {"f4_e2m1", 2, -1, 6}}};

}  // namespace

std::span<const Format> Formats() { return kFormats; }

double SpacingAt(double x, const Format& format) {
  return assay::SpacingAt(x, format.significant_bits, format.least_exponent);
}

double RoundTo(double x, const Format& format) {
  if (!std::isfinite(x) || x == 0) return x;
  const double rounded = RoundToBits(x, format.significant_bits, format.least_exponent);
  return std::abs(rounded) > format.largest ? std::copysign(format.largest, x) : rounded;
}

std::optional<Coarsest> CoarsestFormat(std::span<const double> values, int significant_bits) {
  std::unordered_set<double> distinct;
  for (const double v : values) {
    // 4096 distinct values are surprise enough; the cap bounds the memory.
    if (std::isfinite(v) && v != 0 && distinct.size() < 4096) distinct.insert(v);
  }
  if (distinct.size() < 8) return std::nullopt;
  for (auto format = kFormats.rbegin(); format != kFormats.rend(); ++format) {
    // From the coarsest up: the first that holds all is the answer.
    if (format->significant_bits >= significant_bits) break;
    const bool all = std::all_of(values.begin(), values.end(),
                                 [&](double v) { return !std::isfinite(v) || RoundTo(v, *format) == v; });
    if (!all) continue;
    const int64_t n = static_cast<int64_t>(distinct.size());
    return Coarsest{&*format, n, static_cast<double>(n) * (significant_bits - format->significant_bits)};
  }
  return std::nullopt;
}

}  // namespace assay::fit
