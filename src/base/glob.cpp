#include "base/glob.h"

#include <cstddef>

namespace assay {
namespace {

// One "[...]" at p[at] == '[' against c; moves *next behind it. Where it is not closed, the bracket itself.
bool SetMatches(std::string_view p, size_t at, char c, size_t* next) {
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

}  // namespace

// The usual two-pointer match: on a mismatch go back to the last '*' and let it take one character more. O(n * m).
bool GlobMatches(std::string_view pattern, std::string_view text) {
  size_t p = 0, t = 0;
  size_t star = std::string_view::npos, mark = 0;
  while (t < text.size()) {
    size_t next = p + 1;
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      mark = t;
      continue;
    }
    const bool hit =
        p < pattern.size() &&
        (pattern[p] == '?' || (pattern[p] == '[' ? SetMatches(pattern, p, text[t], &next) : pattern[p] == text[t]));
    if (hit) {
      p = next;
      ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++mark;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

}  // namespace assay
