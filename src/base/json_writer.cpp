#include "base/json_writer.h"

#include <cstdio>

#include "base/terminal_controls.h"

namespace assay {
namespace {

// Length of the valid UTF-8 sequence at the start of s (no overlong forms, no surrogates, at most U+10FFFF), 0 if none.
// The bounds on the second byte are those of table 3-7 of the Unicode standard.
size_t Utf8Length(std::string_view s) {
  const auto at = [&](size_t i) { return static_cast<unsigned char>(s[i]); };
  const unsigned char lead = at(0);
  if (lead < 0x80) return 1;
  const size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || s.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((at(i) & 0xc0) != 0x80) return 0;
  }
  const unsigned char second = at(1);
  if ((lead == 0xe0 && second < 0xa0) || (lead == 0xed && second > 0x9f) || (lead == 0xf0 && second < 0x90) ||
      (lead == 0xf4 && second > 0x8f)) {
    return 0;
  }
  return length;
}

// Escapes what JSON demands (quote, backslash, control bytes below 0x20) and what terminals obey; a byte that starts no
// valid sequence becomes U+FFFD by itself, so the text behind it is found again.
void AppendQuoted(std::string_view value, std::string* out) {
  out->push_back('"');
  while (!value.empty()) {
    const char c = value[0];
    unsigned code = 0;
    if (const size_t length = TerminalControl(value, &code); length > 0) {
      AppendJsonEscape(code, out);
      value.remove_prefix(length);
      continue;
    }
    if (c == '"' || c == '\\') {
      out->push_back('\\');
      out->push_back(c);
    } else if (c == '\n') {
      out->append("\\n");
    } else if (c == '\t') {
      out->append("\\t");
    } else if (static_cast<unsigned char>(c) < 0x20) {
      AppendJsonEscape(static_cast<unsigned char>(c), out);
    } else if (const size_t length = Utf8Length(value); length > 0) {
      out->append(value.substr(0, length));
      value.remove_prefix(length);
      continue;
    } else {
      out->append("\xef\xbf\xbd");
    }
    value.remove_prefix(1);
  }
  out->push_back('"');
}

}  // namespace

void AppendJsonEscape(unsigned code, std::string* out) {
  char buffer[8];
  std::snprintf(buffer, sizeof buffer, "\\u%04x", code & 0xffff);
  out->append(buffer);
}

std::string JsonQuote(std::string_view value) {
  std::string out;
  AppendQuoted(value, &out);
  return out;
}

void JsonWriter::NewLine() {
  text_.push_back('\n');
  text_.append(static_cast<size_t>(2 * depth_), ' ');
}

// What stands before a key or a value: nothing right behind a key (the colon is written) and at the top level, else a
// comma unless it is the first of its bracket, and a new line.
void JsonWriter::Separate() {
  if (after_key_) {
    after_key_ = false;
    return;
  }
  if (depth_ == 0) return;
  if (!first_) text_.push_back(',');
  first_ = false;
  NewLine();
}

void JsonWriter::Open(char bracket) {
  Separate();
  text_.push_back(bracket);
  ++depth_;
  first_ = true;
}

// An empty bracket stays on one line: "[]". What encloses it is no longer empty, hence first_ = false.
void JsonWriter::Shut(char bracket) {
  --depth_;
  if (!first_) NewLine();
  first_ = false;
  text_.push_back(bracket);
  if (depth_ == 0) text_.push_back('\n');
}

void JsonWriter::Key(std::string_view key) {
  Separate();
  AppendQuoted(key, &text_);
  text_.append(": ");
  after_key_ = true;
}

void JsonWriter::String(std::string_view value) {
  Separate();
  AppendQuoted(value, &text_);
}

void JsonWriter::Int(int64_t value) {
  Separate();
  text_.append(std::to_string(value));
}

void JsonWriter::UInt(uint64_t value) {
  Separate();
  text_.append(std::to_string(value));
}

void JsonWriter::Double(double value) {
  Separate();
  // NaN alone differs from itself, and only a finite value minus itself is 0.
  if (value != value) {
    text_.append("\"NaN\"");
  } else if (value - value != 0) {
    text_.append(value > 0 ? "\"Infinity\"" : "\"-Infinity\"");
  } else {
    char buffer[40];
    std::snprintf(buffer, sizeof buffer, "%.17g", value);
    text_.append(buffer);
  }
}

void JsonWriter::Bool(bool value) {
  Separate();
  text_.append(value ? "true" : "false");
}

}  // namespace assay
