// Embedding rows of ranks that share a vocabulary.
#pragma once

#include "check/op_common.h"

namespace assay::check {

// embed.partial of every rank against its part of embed_tokens.weight and the tokens of the prompts.
void JudgeEmbedParts(const Capture& capture, CheckReport* report);

}  // namespace assay::check
