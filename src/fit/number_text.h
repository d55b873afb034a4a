// A number for messages: six significant digits.
#pragma once

#include <cstdio>
#include <string>

namespace assay::fit {

inline std::string NumberText(double value) {
  char text[40];
  std::snprintf(text, sizeof text, "%.6g", value);
  return text;
}

}  // namespace assay::fit
