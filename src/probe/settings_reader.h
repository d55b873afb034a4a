// What the files of the settings parser share: the cursor that every error message comes from, and the readers of the
// two small languages in it, patterns over names and selectors of a Python host. Text in, values or kUsage out.
#pragma once

#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"
#include "probe/settings.h"

namespace assay::settings_reader {

// Where a value is being read. Columns count from 1 in the value of the variable.
struct Cursor {
  std::string_view variable;
  std::string_view text;
  size_t at = 0;

  bool done() const { return at >= text.size(); }
  char peek() const { return done() ? '\0' : text[at]; }
  // Goes behind c when it comes next.
  bool take(char c) {
    if (peek() != c || done()) return false;
    ++at;
    return true;
  }
  // "ASSAY_LAYERS, column 3: expected a number, found "x" (in "0,x")"
  // The one form of every message; where counts from 0. Quotes at most 24 characters of what was found and 120 of the
  // whole value.
  Status Expected(std::string_view what, size_t where) const {
    std::string m(variable);
    m += ", column " + std::to_string(where + 1) + ": expected ";
    m += what;
    if (where >= text.size()) {
      m += ", found the end";
    } else {
      m += ", found \"" + std::string(text.substr(where, 24)) + "\"";
    }
    if (where != 0) m += " (in \"" + std::string(text.substr(0, 120)) + "\")";
    return Status::Usage(std::move(m));
  }
  Status Expected(std::string_view what) const { return Expected(what, at); }

  // A decimal number below 2^64 without sign or spaces; goes behind it.
  Result<uint64_t> Number(std::string_view what) {
    uint64_t value = 0;
    const char* begin = text.data() + at;
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(begin, end, value);
    if (stop == begin || error != std::errc()) return Expected(what);
    at += static_cast<size_t>(stop - begin);
    return value;
  }
};

// Globs and /regular expressions/, separated by commas. An expression that could cost the host much time or memory is
// refused here, so that whoever matches it later need not ask.
Result<NameFilter> ReadPatterns(std::string_view variable, std::string_view text);
// ASSAY_PROBES and ASSAY_ATTACH: checked for their grammar alone and kept as text; whether the names exist only Python
// can tell.
Status ReadProbes(std::string_view variable, std::string_view text, Settings* s);
Status ReadAttach(std::string_view variable, std::string_view text, Settings* s);

}  // namespace assay::settings_reader
