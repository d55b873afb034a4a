// Patterns over site names, as ASSAY_INCLUDE and ASSAY_EXCLUDE give them; name_filter.cpp matches them.
#include <regex.h>

#include <algorithm>
#include <charconv>

#include "probe/settings_reader.h"

namespace assay::settings_reader {
namespace {

// What the C library's matcher can be made to do with a hostile pattern is bounded here: no back references
// (exponential time) and a bounded product of repetition counts (memory). The library expands x{n,m} into m copies of
// x, x{n,} into n + 1 and x+ into 2, and copies nest, as in (x+)+ or x++: the product over the whole pattern bounds
// them, nested or not. A plus sign in a bracket counts too, which refuses a little more than it must.
Status CheckRegex(const Cursor& cursor, size_t start, const std::string& pattern) {
  constexpr size_t kMaxLength = 512;
  constexpr uint64_t kMaxRepetition = 1000;
  if (pattern.size() > kMaxLength) return cursor.Expected("a regular expression of at most 512 characters", start);
  uint64_t product = 1;
  for (size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] == '\\' && i + 1 < pattern.size()) {
      ++i;
      if (pattern[i] >= '1' && pattern[i] <= '9') {
        return cursor.Expected("a regular expression without back references", start + i);
      }
    } else if (pattern[i] == '{' || pattern[i] == '+') {
      uint64_t count = pattern[i] == '+' ? 2 : 1;
      for (size_t j = i + 1; pattern[i] == '{' && j < pattern.size() && pattern[j] != '}'; ++j) {
        uint64_t value = 0;
        const auto [stop, error] = std::from_chars(pattern.data() + j, pattern.data() + pattern.size(), value);
        if (error == std::errc::result_out_of_range) value = kMaxRepetition + 1;
        if (stop == pattern.data() + j) continue;
        const bool open_ended = std::string_view(stop, pattern.data() + pattern.size()).starts_with(",}");
        count = std::max(count, value + (open_ended ? 1 : 0));
        j = static_cast<size_t>(stop - pattern.data()) - 1;
      }
      product = count > kMaxRepetition ? kMaxRepetition + 1 : product * count;
      if (product > kMaxRepetition) {
        return cursor.Expected("repetition counts (+ is 2) whose product is at most 1000", start + i);
      }
    }
  }
  // Compiled once for its verdict and thrown away; matching compiles again, as a regex_t cannot be copied.
  regex_t regex;
  const int error = regcomp(&regex, pattern.c_str(), REG_EXTENDED | REG_NOSUB);
  if (error != 0) {
    char why[128];
    regerror(error, &regex, why, sizeof(why));
    return cursor.Expected(std::string("a POSIX extended regular expression (") + why + ")", start);
  }
  regfree(&regex);
  return {};
}

}  // namespace

// A comma ends a pattern but not inside a regular expression; a slash in one is written "\/".
Result<NameFilter> ReadPatterns(std::string_view variable, std::string_view text) {
  NameFilter filter;
  Cursor cursor{variable, text};
  do {
    const size_t start = cursor.at;
    if (cursor.take('/')) {
      while (!cursor.done() && cursor.peek() != '/') cursor.at += cursor.peek() == '\\' ? 2 : 1;
      if (cursor.at > text.size()) cursor.at = text.size();
      const std::string pattern(text.substr(start + 1, cursor.at - start - 1));
      if (!cursor.take('/')) return cursor.Expected("a closing '/' of the regular expression");
      if (pattern.empty()) return cursor.Expected("a regular expression between the slashes", start);
      ASSAY_RETURN_IF_ERROR(CheckRegex(cursor, start + 1, pattern));
      if (!cursor.done() && cursor.peek() != ',') return cursor.Expected("',' behind the regular expression");
    } else {
      // A comma inside [...] belongs to the glob.
      bool bracket = false;
      while (!cursor.done() && (bracket || cursor.peek() != ',')) {
        if (cursor.peek() == '[') bracket = text.find(']', cursor.at) != std::string_view::npos;
        if (cursor.peek() == ']') bracket = false;
        ++cursor.at;
      }
      if (cursor.at == start) return cursor.Expected("a glob such as layers.*.attn.q, or /regex/", start);
    }
    filter.patterns.emplace_back(text.substr(start, cursor.at - start));
  } while (cursor.take(','));
  return filter;
}

}  // namespace assay::settings_reader
