// Byte-level BPE from a Hugging Face tokenizer.json: ByteLevel pre-tokenizer (with its regular expression) and decoder,
// no normalizer, added tokens, TemplateProcessing. Ids equal those of the `tokenizers` package. Everything else that a
// tokenizer.json can ask for is refused by the feature's name; models with such a file are fed token ids instead.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace assay {

class Tokenizer {
 public:
  // path: tokenizer.json, or the folder that holds it. kBadInput names the file and the feature that is not read
  // natively (then pass --tokens), or the damaged entry.
  static Result<std::unique_ptr<Tokenizer>> Load(const std::string& path);
  // The same from bytes; what names them in messages.
  static Result<std::unique_ptr<Tokenizer>> Parse(std::string_view json, std::string_view what);
  ~Tokenizer();

  // Added tokens in the text are matched first (the longest at the leftmost place); the post-processor's tokens are
  // added as the file says. kUsage with the byte offset when text is not UTF-8.
  Result<std::vector<int64_t>> Encode(std::string_view text) const;
  // Bytes of the tokens, invalid UTF-8 replaced by U+FFFD a maximal ill-formed part, as `tokenizers` does; an id that
  // the vocabulary lacks becomes U+FFFD too.
  std::string Decode(const std::vector<int64_t>& ids, bool skip_special) const;
  // Largest id + 1.
  int64_t vocab_size() const;

 private:
  Tokenizer();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace assay
