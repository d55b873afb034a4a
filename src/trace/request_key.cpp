#include "trace/request_key.h"

#include "base/hash.h"

namespace assay {

// The number of tokens enters too, so that (1, 2) with ordinal 3 and (1, 2, 3) with ordinal 0 part.
uint64_t RequestKey(std::span<const int64_t> prompt_token_ids, int64_t ordinal) {
  uint64_t h = 0x6173736179;  // "assay"
  for (int64_t id : prompt_token_ids) h = Mix64((h ^ static_cast<uint64_t>(id)) + kGolden64);
  h = Mix64((h ^ prompt_token_ids.size()) + kGolden64);
  h = Mix64((h ^ static_cast<uint64_t>(ordinal)) + kGolden64);
  return h != 0 ? h : 1;
}

}  // namespace assay
