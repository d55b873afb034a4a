// The kinds of fits, one function a family; each appends what counts. Only Explain calls them.
#pragma once

#include <vector>

#include "fit/evidence.h"

namespace assay::fit {

// `found` is appended to, never cleared or sorted; kinds that a problem has no axis for add nothing. Thread-safe, as
// Evidence is not changed.
void FitCandidates(const Evidence& evidence, std::vector<Explanation>* found);
// Constants: of all, of some groups, one a group; sums with named arrays; offsets.
void FitScales(const Evidence& evidence, std::vector<Explanation>* found);
void FitSums(const Evidence& evidence, std::vector<Explanation>* found);
// The same values in other places.
void FitMoves(const Evidence& evidence, std::vector<Explanation>* found);
void FitLayouts(const Evidence& evidence, std::vector<Explanation>* found);
// Properties of the values: zeros, constants, coarse formats, a largest magnitude.
void FitValues(const Evidence& evidence, std::vector<Explanation>* found);

// "0, 2-5, 9", at most `most` runs.
std::string ListText(const std::vector<int64_t>& indices, size_t most = 8);

}  // namespace assay::fit
