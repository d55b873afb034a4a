// Byte-level BPE from a Hugging Face tokenizer.json (ByteLevel pre-tokenizer and decoder, no normalizer).
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
  // kBadInput names the feature that is not read natively (then pass --tokens).
  static Result<std::unique_ptr<Tokenizer>> Load(const std::string& path);
  ~Tokenizer();
  // Added tokens in the text are matched first; the post-processor's bos/eos tokens are added as the file says.
  Result<std::vector<int64_t>> Encode(std::string_view text) const;
  std::string Decode(const std::vector<int64_t>& ids, bool skip_special) const;
  int64_t vocab_size() const;

 private:
  Tokenizer();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace assay
