#include "model/text_split.h"

#include <algorithm>
#include <iterator>

namespace assay {
namespace {

// Inclusive; ranges of a table ascend.
struct CodePointRange {
  char32_t first, last;
};

#include "model/unicode_classes.inc"

template <size_t N>
// The last range that begins at or before the code point decides.
bool Contains(const CodePointRange (&ranges)[N], char32_t code) {
  const auto* after = std::upper_bound(std::begin(ranges), std::end(ranges), code,
                                       [](char32_t c, const CodePointRange& r) { return c < r.first; });
  return after != std::begin(ranges) && code <= std::prev(after)->last;
}

// White_Space of Unicode, which \s means.
bool IsSpace(char32_t c) {
  return (c >= 0x9 && c <= 0xD) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
         c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

// Length of a contraction at the start of text: 's 't 're 've 'm 'll 'd.
size_t Contraction(std::string_view text) {
  for (const std::string_view c : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}) {
    if (text.substr(0, c.size()) == c) return c.size();
  }
  return 0;
}

// Length of the run of one class at the start of text.
size_t Run(std::string_view text, CharClass kind) {
  size_t at = 0;
  while (at < text.size()) {
    const DecodedChar c = DecodeUtf8(text.substr(at));
    if (ClassOf(c.code) != kind) break;
    at += static_cast<size_t>(c.size_bytes);
  }
  return at;
}

// Length of the piece at the start of a text that is not empty.
// The alternatives of the regular expression in its order; the first that matches wins, as in Python's `re`.
size_t Piece(std::string_view text) {
  if (const size_t length = Contraction(text); length > 0) return length;
  const size_t space = text[0] == ' ' ? 1 : 0;
  if (space < text.size()) {
    const CharClass kind = ClassOf(DecodeUtf8(text.substr(space)).code);
    if (kind != CharClass::kSpace) return space + Run(text.substr(space), kind);
  }
  // White space. \s+(?!\S): all of it at the end of the text; before a word all but the last, which the word may take.
  // A single one before a word is left to the last alternative, \s+.
  const size_t run = Run(text, CharClass::kSpace);
  if (run == text.size()) return run;
  size_t last = run - 1;
  // Back to the first byte of the run's last character, which may have several.
  while (last > 0 && (static_cast<unsigned char>(text[last]) & 0xC0) == 0x80) --last;
  return last > 0 ? last : run;
}

}  // namespace

// A fault ends at the first byte that cannot go on, which begins the next character.
DecodedChar DecodeUtf8(std::string_view text) {
  constexpr char32_t kReplacement = 0xFFFD;
  if (text.empty()) return {0, 0, true};
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {lead, 1, true};
  int length = 0;
  char32_t code = 0;
  // The second byte's range excludes overlong forms, surrogates and values above U+10FFFF.
  unsigned char low = 0x80, high = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
    code = lead & 0x1Fu;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    code = lead & 0x0Fu;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    code = lead & 0x07u;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  } else {
    return {kReplacement, 1, false};
  }
  for (int i = 1; i < length; ++i) {
    const size_t at = static_cast<size_t>(i);
    if (at >= text.size() || byte(at) < low || byte(at) > high) return {kReplacement, i, false};
    code = (code << 6) | (byte(at) & 0x3Fu);
    low = 0x80;
    high = 0xBF;
  }
  return {code, length, true};
}

// REQUIRES: a code point up to U+10FFFF.
void AppendUtf8(char32_t code, std::string* out) {
  const auto put = [&](char32_t bits) { out->push_back(static_cast<char>(bits)); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0 | (code >> 6));
    put(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    put(0xE0 | (code >> 12));
    put(0x80 | ((code >> 6) & 0x3F));
    put(0x80 | (code & 0x3F));
  } else {
    put(0xF0 | (code >> 18));
    put(0x80 | ((code >> 12) & 0x3F));
    put(0x80 | ((code >> 6) & 0x3F));
    put(0x80 | (code & 0x3F));
  }
}

CharClass ClassOf(char32_t code) {
  if (IsSpace(code)) return CharClass::kSpace;
  if (Contains(kLetters, code)) return CharClass::kLetter;
  return Contains(kNumbers, code) ? CharClass::kNumber : CharClass::kOther;
}

std::vector<std::string_view> SplitByteLevel(std::string_view text) {
  std::vector<std::string_view> pieces;
  while (!text.empty()) {
    const size_t length = Piece(text);
    pieces.push_back(text.substr(0, length));
    text.remove_prefix(length);
  }
  return pieces;
}

}  // namespace assay
