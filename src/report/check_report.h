// `assay check` as JSON (schema assay.check/1, docs/json.md) and as text. Both print CheckResult; neither decides
// anything.
#pragma once

#include <string>

#include "check/check.h"
#include "io/json.h"

namespace assay {

// path: of the trace, as the user named it.
Json CheckJson(const CheckResult& result, const std::string& path);
// Several lines, not yet escaped: names in it come from the trace (Printable).
std::string CheckText(const CheckResult& result, const std::string& path);
// Names, hypotheses, what holds and needs of all checks: schema assay.checks/1, and a table.
Json CheckListJson();
std::string CheckListText();

}  // namespace assay
