// `assay diff` as JSON (schema assay.diff/1, docs/json.md) and as text. Both print DiffResult; neither decides
// anything.
#pragma once

#include <string>

#include "compare/diff.h"
#include "io/json.h"

namespace assay {

Json DiffJson(const DiffResult& result, const std::string& path_a, const std::string& path_b);
// all_sites: every site compared; else those around the first wrong one.
std::string DiffText(const DiffResult& result, const std::string& path_a, const std::string& path_b, bool all_sites);

}  // namespace assay
