// Columns of text, aligned with spaces. For terminals and logs; programs read the JSON.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace assay {

// Widths follow from the cells, so rows are kept until Text is asked for.
class TextTable {
 public:
  enum class Align { kLeft, kRight };
  explicit TextTable(std::vector<std::pair<std::string, Align>> columns) : columns_(std::move(columns)) {}

  // One row; cells that are missing stay empty.
  void Add(std::vector<std::string> cells);
  bool empty() const { return rows_.empty(); }
  // Header, then one line a row; no trailing spaces. indent: spaces before each line.
  std::string Text(int indent = 0) const;

 private:
  std::vector<std::pair<std::string, Align>> columns_;
  std::vector<std::vector<std::string>> rows_;
};

// Control characters (C0, DEL, those of base/terminal_controls.h) as \n, \t or \x1b: names come from hosts and files
// and may hold anything, and terminals obey it. newlines: those stay, for text of several lines.
std::string Printable(std::string_view text, bool newlines);
// The same on one line, cut behind kMaxLineBytes: longer names are a slip of the host's.
inline constexpr size_t kMaxLineBytes = 1000;
std::string OneLine(std::string_view text);

// Numbers as the tables show them: "1.23e-05", "0", "NaN".
std::string ShortNumber(double value);
// "3", "0-11,14", at most max_ranges ranges and then "…(N more)".
std::string RangesText(const std::vector<std::pair<int64_t, int64_t>>& ranges, size_t max_ranges = 8);
// 16 hexadecimal digits.
std::string HexKey(uint64_t key);

}  // namespace assay
