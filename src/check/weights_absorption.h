// attn.W_UK_T and attn.W_UV in memory against kv_b_proj of the checkpoint; absorbed_heads.h compares.
#pragma once

#include <string_view>
#include <vector>

#include "check/weights_pieces.h"

namespace assay {

bool IsAbsorbed(std::string_view name);
// Either order of the two inner axes is right where they differ; where they are equal, the axes recorded with the site
// decide. Writes elements, note and the checkpoint's name to *check.
void CheckAbsorption(const WeightSource& source, const WeightIndex& index, const MemoryTensor& tensor, double roundoff,
                     MemoryCheck* check, std::vector<WeightFinding>* found);

}  // namespace assay
