#include "report/text_table.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/terminal_controls.h"

namespace assay {
namespace {

// Columns on the screen: bytes that do not continue a UTF-8 sequence.
// Wide and combining characters are counted as one column: names are ASCII but for slips.
size_t WidthOf(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

}  // namespace

// Cells are made harmless here, once, whatever the caller put in.
void TextTable::Add(std::vector<std::string> cells) {
  for (std::string& cell : cells) cell = OneLine(cell);
  rows_.push_back(std::move(cells));
}

// Two spaces between columns; the last one is not padded.
std::string TextTable::Text(int indent) const {
  std::vector<size_t> widths;
  for (const auto& [title, align] : columns_) widths.push_back(WidthOf(title));
  for (const auto& row : rows_) {
    for (size_t c = 0; c < row.size() && c < widths.size(); ++c) widths[c] = std::max(widths[c], WidthOf(row[c]));
  }
  std::string out;
  auto line = [&](auto cell) {
    std::string text(static_cast<size_t>(indent), ' ');
    for (size_t c = 0; c < columns_.size(); ++c) {
      const std::string& value = cell(c);
      const std::string pad(widths[c] - std::min(widths[c], WidthOf(value)), ' ');
      if (c > 0) text += "  ";
      text += columns_[c].second == Align::kLeft ? value + pad : pad + value;
    }
    text.erase(text.find_last_not_of(' ') + 1);
    out += text + "\n";
  };
  static const std::string kEmpty;
  line([&](size_t c) -> const std::string& { return columns_[c].first; });
  for (const auto& row : rows_) {
    line([&](size_t c) -> const std::string& { return c < row.size() ? row[c] : kEmpty; });
  }
  return out;
}

// Bytes of 0x80 and above pass, as terminals take UTF-8, but for the controls in it.
std::string Printable(std::string_view text, bool newlines) {
  std::string out;
  const auto escape = [&](char c) {
    char code[8];
    std::snprintf(code, sizeof code, "\\x%02x", static_cast<unsigned char>(c));
    out += code;
  };
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const auto byte = static_cast<unsigned char>(c);
    unsigned code = 0;
    if (const size_t length = TerminalControl(text.substr(i), &code); length > 0) {
      for (const char part : text.substr(i, length)) escape(part);
      i += length - 1;
    } else if ((byte >= 0x20 && byte != 0x7f) || (newlines && c == '\n')) {
      out += c;
    } else if (c == '\n' || c == '\t') {
      out += c == '\n' ? "\\n" : "\\t";
    } else {
      escape(c);
    }
  }
  return out;
}

std::string OneLine(std::string_view text) {
  if (text.size() <= kMaxLineBytes) return Printable(text, false);
  size_t end = kMaxLineBytes;
  while (end > 0 && (text[end] & 0xc0) == 0x80) --end;  // not inside a UTF-8 sequence
  return Printable(text.substr(0, end), false) + "…";
}

// Four significant digits where they stay readable, three with an exponent elsewhere.
std::string ShortNumber(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Inf" : "-Inf";
  if (value == 0) return "0";
  char buffer[32];
  const double size = std::fabs(value);
  std::snprintf(buffer, sizeof buffer, size >= 1e-3 && size < 1e5 ? "%.4g" : "%.2e", value);
  return buffer;
}

std::string RangesText(const std::vector<std::pair<int64_t, int64_t>>& ranges, size_t max_ranges) {
  std::string out;
  for (size_t i = 0; i < ranges.size() && i < max_ranges; ++i) {
    if (i > 0) out += ",";
    out += std::to_string(ranges[i].first);
    if (ranges[i].second == ranges[i].first) continue;
    out += '-';
    out += std::to_string(ranges[i].second);
  }
  if (ranges.size() > max_ranges) out += "…(" + std::to_string(ranges.size() - max_ranges) + " more)";
  return out;
}

std::string HexKey(uint64_t key) {
  char buffer[20];
  std::snprintf(buffer, sizeof buffer, "%016llx", static_cast<unsigned long long>(key));
  return buffer;
}

}  // namespace assay
