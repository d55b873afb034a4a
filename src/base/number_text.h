// Numbers for messages and evidence: "1.4427", "-3", "inf". JSON has its own writer, tables their own width.
#pragma once

#include <concepts>
#include <cstdio>
#include <string>

namespace assay {

// digits: significant ones, 17 at most. Two values that differ in a rounding need 9 (float) or 17 (double).
inline std::string NumberText(double value, int digits = 6) {
  char text[40];
  std::snprintf(text, sizeof text, "%.*g", digits, value);
  return text;
}

template <std::integral T>
std::string NumberText(T value) {
  return std::to_string(value);
}

}  // namespace assay
