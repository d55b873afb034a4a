// Text as the ByteLevel pre-tokenizer of GPT-2 sees it: UTF-8 with letter, number and space classes, split by
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace assay {

// One decoded code point. size_bytes 0: text is at its end; valid false: the first size_bytes bytes are a maximal
// ill-formed part (Unicode, table 3-8), code is U+FFFD.
struct DecodedChar {
  char32_t code = 0;
  int size_bytes = 0;
  bool valid = true;
};
DecodedChar DecodeUtf8(std::string_view text);
void AppendUtf8(char32_t code, std::string* out);

enum class CharClass : uint8_t { kLetter, kNumber, kSpace, kOther };
CharClass ClassOf(char32_t code);

// The pieces of text, in order; together they are the text. text must be valid UTF-8.
std::vector<std::string_view> SplitByteLevel(std::string_view text);

}  // namespace assay
