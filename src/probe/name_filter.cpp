// Globs and regular expressions over site names.
#include <regex.h>

#include <cstddef>

#include "probe/settings.h"

namespace assay {
namespace {

// Matches one "[...]" at p[at] == '[' against c and moves *next behind it. An unclosed bracket is a literal '['.
bool BracketMatches(std::string_view p, size_t at, char c, size_t* next) {
  size_t i = at + 1;
  const bool negated = i < p.size() && (p[i] == '!' || p[i] == '^');
  if (negated) ++i;
  bool hit = false;
  // A ']' right behind the bracket, or behind its '!', is a member.
  for (bool first = true; i < p.size() && (first || p[i] != ']'); first = false) {
    char low = p[i++];
    char high = low;
    if (i + 1 < p.size() && p[i] == '-' && p[i + 1] != ']') {
      high = p[i + 1];
      i += 2;
    }
    if (low <= c && c <= high) hit = true;
  }
  if (i >= p.size()) {
    *next = at + 1;
    return c == '[';
  }
  *next = i + 1;
  return hit != negated;
}

// The usual two-pointer match: on a mismatch go back to the last '*' and let it take one character more. O(n * m).
bool GlobMatches(std::string_view p, std::string_view name) {
  size_t pi = 0, ni = 0;
  size_t star = std::string_view::npos, star_name = 0;
  while (ni < name.size()) {
    size_t next = pi + 1;
    if (pi < p.size() && p[pi] == '*') {
      star = pi++;
      star_name = ni;
      continue;
    }
    const bool hit =
        pi < p.size() && (p[pi] == '?' || (p[pi] == '[' ? BracketMatches(p, pi, name[ni], &next) : p[pi] == name[ni]));
    if (hit) {
      pi = next;
      ++ni;
    } else if (star != std::string_view::npos) {
      pi = star + 1;
      ni = ++star_name;
    } else {
      return false;
    }
  }
  while (pi < p.size() && p[pi] == '*') ++pi;
  return pi == p.size();
}

}  // namespace

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
