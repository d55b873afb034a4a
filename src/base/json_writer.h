// Writes JSON text without a library, for the parts that may depend on libc alone (the manifest). Strings are escaped;
// bytes that are not valid UTF-8 become U+FFFD; non-finite numbers become the strings "NaN", "Infinity", "-Infinity".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace assay {

// Calls nest as the text does: BeginObject, Key, a value, ..., EndObject. Commas and two-space indentation are added.
class JsonWriter {
 public:
  void BeginObject() { Open('{'); }
  void EndObject() { Shut('}'); }
  void BeginArray() { Open('['); }
  void EndArray() { Shut(']'); }
  // Only inside an object, and a value must follow: the writer does not check that the text comes out well formed.
  void Key(std::string_view key);
  void String(std::string_view value);
  void Int(int64_t value);
  void UInt(uint64_t value);
  // 17 significant digits: reading the text back gives the same double.
  void Double(double value);
  void Bool(bool value);

  // Whole once depth is back at 0; it then ends in a newline.
  const std::string& text() const { return text_; }

 private:
  void Open(char bracket);
  void Shut(char bracket);
  void Separate();
  void NewLine();

  std::string text_;
  int depth_ = 0;
  bool first_ = true;  // nothing written yet in the innermost bracket
  bool after_key_ = false;
};

// The string in quotes, escaped.
std::string JsonQuote(std::string_view value);
// Appends \uXXXX; code is one of the basic plane.
void AppendJsonEscape(unsigned code, std::string* out);

}  // namespace assay
