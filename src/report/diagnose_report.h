// `assay diagnose` as JSON (schema assay.diagnose/1, docs/json.md) and as text: findings, then the ladder of
// hypotheses. Both print a Diagnosis; neither decides anything.
#pragma once

#include <string>

#include "diagnose/diagnose.h"
#include "io/json.h"

namespace assay {

// trace: the one that is judged; other: the trusted one, used only where two were compared.
Json DiagnoseJson(const Diagnosis& diagnosis, const std::string& trace, const std::string& other);
std::string DiagnoseText(const Diagnosis& diagnosis, const std::string& trace, const std::string& other);

}  // namespace assay
