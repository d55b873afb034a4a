// Globs and regular expressions over site names.
#include <regex.h>

#include "base/glob.h"
#include "probe/settings.h"

namespace assay {

// /regex/ goes to the C library, which is bounded by what the settings parser let through (settings_patterns.cpp).
bool PatternMatches(std::string_view pattern, std::string_view name) {
  if (pattern.size() >= 2 && pattern.front() == '/' && pattern.back() == '/') {
    regex_t regex;
    if (regcomp(&regex, std::string(pattern.substr(1, pattern.size() - 2)).c_str(), REG_EXTENDED | REG_NOSUB) != 0) {
      return false;
    }
    const bool hit = regexec(&regex, std::string(name).c_str(), 0, nullptr, 0) == 0;
    regfree(&regex);
    return hit;
  }
  return GlobMatches(pattern, name);
}

bool NameFilter::matches(std::string_view name) const {
  for (const std::string& pattern : patterns) {
    if (PatternMatches(pattern, name)) return true;
  }
  return false;
}

// Few ranges, so one by one; no range at all is no restriction.
bool IntervalSet::contains(int64_t v) const {
  if (ranges.empty()) return true;
  for (const auto& [low, high] : ranges) {
    if (low <= v && v <= high) return true;
  }
  return false;
}

}  // namespace assay
