#include "cli/side_by_side.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace assay::cli {
namespace {

// Bytes of the well-formed UTF-8 character at the start of text; 0 when there is none. Over-long forms of two bytes
// and bytes above F4 are refused; finer faults cannot hurt a terminal.
size_t CharacterBytes(std::string_view text) {
  const auto lead = static_cast<uint8_t>(text[0]);
  const size_t bytes = lead < 0x80 ? 1 : lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
  if (bytes > text.size()) return 0;
  for (size_t i = 1; i < bytes; ++i) {
    if ((static_cast<uint8_t>(text[i]) & 0xC0) != 0x80) return 0;
  }
  return bytes;
}

// One entry a printable character; C1 controls (C2 80 .. C2 9F) are controls too.
std::vector<std::string> Characters(std::string_view text) {
  std::vector<std::string> characters;
  while (!text.empty()) {
    const size_t bytes = CharacterBytes(text);
    const auto lead = static_cast<uint8_t>(text[0]);
    const bool c1 = bytes == 2 && lead == 0xC2 && static_cast<uint8_t>(text[1]) < 0xA0;
    if (bytes == 0) {
      characters.emplace_back("?");
    } else if (lead < 0x20 || lead == 0x7F || c1) {
      characters.emplace_back(" ");
    } else {
      characters.emplace_back(text.substr(0, bytes));
    }
    text.remove_prefix(std::max<size_t>(bytes, 1));
  }
  return characters;
}

// characters: columns on the screen, where bytes are more.
struct Line {
  std::string text;
  int characters = 0;
};

// Breaks at the last space that fits, or inside a word longer than the line.
// width: at least 1.
std::vector<Line> Wrap(std::string_view text, int width) {
  const std::vector<std::string> characters = Characters(text);
  const auto size = static_cast<int>(characters.size());
  std::vector<Line> lines;
  int begin = 0;
  while (begin < size) {
    if (characters[begin] == " ") {
      ++begin;
      continue;
    }
    int end = std::min(begin + width, size);
    if (end < size && characters[end] != " ") {
      int space = end;
      while (space > begin && characters[space - 1] != " ") --space;
      if (space > begin) end = space;
    }
    const int next = end;
    while (characters[end - 1] == " ") --end;  // stops: the line begins with something else
    Line line;
    for (int i = begin; i < end; ++i) line.text += characters[i];
    line.characters = end - begin;
    lines.push_back(std::move(line));
    begin = next;
  }
  return lines;
}

void AppendRow(const Line& left, const Line& right, int width, std::string* out) {
  *out += "  " + left.text;
  if (!right.text.empty()) *out += std::string(static_cast<size_t>(width - left.characters) + 3, ' ') + right.text;
  *out += "\n";
}

}  // namespace

std::string SideBySide(std::string_view left_heading, std::string_view right_heading, std::string_view left,
                       std::string_view right, int width) {
  std::vector<Line> a = Wrap(left_heading, width), b = Wrap(right_heading, width);
  const std::string rule(static_cast<size_t>(width), '-');
  a.push_back({rule, width});
  b.push_back({rule, width});
  for (Line& line : Wrap(left, width)) a.push_back(std::move(line));
  for (Line& line : Wrap(right, width)) b.push_back(std::move(line));
  std::string out;
  for (size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
    AppendRow(i < a.size() ? a[i] : Line{}, i < b.size() ? b[i] : Line{}, width, &out);
  }
  return out;
}

}  // namespace assay::cli
