// Characters beyond ASCII that change how a terminal shows what stands around them: C1 controls (U+009B is ESC [ in
// one) and the bidirectional embeddings, overrides and isolates, by which a name reads in another order than it is.
// Names come from hosts and files and may hold any. C0 controls and DEL are the caller's: each form escapes them its
// own way.
#pragma once

#include <cstddef>
#include <string_view>

namespace assay {

// Bytes of such a character at the start of UTF-8 text, 0 when there is none; *code is its code point.
inline size_t TerminalControl(std::string_view text, unsigned* code) {
  const auto at = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U; };
  if (at(0) == 0xc2 && at(1) >= 0x80 && at(1) <= 0x9f) {
    *code = at(1);
    return 2;
  }
  const bool embeds = at(1) == 0x80 && at(2) >= 0xaa && at(2) <= 0xae,  // U+202A to U+202E
      isolates = at(1) == 0x81 && at(2) >= 0xa6 && at(2) <= 0xa9;       // U+2066 to U+2069
  if (at(0) != 0xe2 || !(embeds || isolates)) return 0;
  *code = 0x2000U | (at(1) & 0x3f) << 6 | (at(2) & 0x3f);
  return 3;
}

}  // namespace assay
