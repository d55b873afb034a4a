#include "cli/positions.h"

#include <fmt/format.h>

namespace assay::cli {

// The last token is generated and not fed, so it needs no position.
Status CheckPositions(const ModelConfig& config, size_t prompt_tokens, int64_t max_tokens, std::string_view advice) {
  const int64_t limit = config.max_position_embeddings;
  const auto length = static_cast<int64_t>(prompt_tokens);
  if (limit == 0 || (length <= limit && max_tokens - 1 <= limit - length)) return {};
  return Status::Usage(fmt::format(
      "a prompt of {} tokens and --max-tokens {} go beyond the {} positions of the model (max_position_embeddings): {}",
      length, max_tokens, limit, advice));
}

}  // namespace assay::cli
