// A request's identity across engines: a hash of its prompt's token ids and its ordinal among equal prompts.
#pragma once

#include <cstdint>
#include <span>

namespace assay {

// Never 0 (0 means "no request"). The hash is part of the format (docs/trace-format.md).
uint64_t RequestKey(std::span<const int64_t> prompt_token_ids, int64_t ordinal);

}  // namespace assay
