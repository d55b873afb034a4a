// The prompts and tokens of another run, read from its trace, so that a run can follow them instead of its own choices:
// a comparison then goes on behind the place where two runs would have chosen differently.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "model/engine.h"
#include "trace/reader.h"

namespace assay {

// Fills prompts[i].forced with the tokens that the trace's run chose after the same prompt (matched by request key,
// equal prompts by their order). No prompts given: takes those of the trace. The trace must hold token ids
// (ASSAY_TOKENS=on); kBadInput says what it lacks, kUsage names a prompt that the trace does not have.
Status FollowTrace(const Trace& trace, std::vector<PromptInput>* prompts);

}  // namespace assay
