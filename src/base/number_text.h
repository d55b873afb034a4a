// Numbers for messages and evidence: "1.4427", "-3", "inf". JSON has its own writer, tables their own width.
#pragma once

#include <cmath>
#include <concepts>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace assay {

// digits: significant ones, 17 at most. Two values that differ in a rounding need 9 (float) or 17 (double).
inline std::string NumberText(double value, int digits = 6) {
  char text[40];
  std::snprintf(text, sizeof text, "%.*g", digits, value);
  return text;
}

// A factor or other constant that a finding names. One near 1 says nothing but its distance to it, so within a tenth of
// 1 there are more digits, until rounding takes less than 1e-4 of that distance: 1025/1024 is "1.000977", not "1.001".
// least, most: significant digits; such a number reads "1" only where it is within half a unit of the last of `most`.
inline std::string FactorText(double value, int least = 4, int most = 7) {
  const double distance = std::fabs(std::fabs(value) - 1);
  std::string text = NumberText(value, least);
  if (!(distance < 0.1)) return text;  // NaN as well
  for (int digits = least + 1; digits <= most; ++digits) {
    if (std::fabs(std::strtod(text.c_str(), nullptr) - value) <= 1e-4 * distance) break;
    text = NumberText(value, digits);
  }
  return text;
}

template <std::integral T>
std::string NumberText(T value) {
  return std::to_string(value);
}

}  // namespace assay
