// The limit that a model's config sets to positions, for the commands that generate.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/status.h"
#include "model/config.h"

namespace assay::cli {

// A model knows positions up to its config's limit (max_position_embeddings): what it says beyond is noise, and a slip
// in
// --max-tokens would run for days. prompt_tokens and max_tokens of one request; advice: what the user can do, for the
// message. kUsage beyond the limit; a config without one takes everything.
Status CheckPositions(const ModelConfig& config, size_t prompt_tokens, int64_t max_tokens, std::string_view advice);

}  // namespace assay::cli
