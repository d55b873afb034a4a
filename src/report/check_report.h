// `assay check` as JSON (schema assay.check/1, docs/json.md) and as text. Both print CheckResult; neither decides
// anything.
#pragma once

#include <string>

#include "check/check.h"
#include "io/json.h"

namespace assay {

Json CheckJson(const CheckResult& result, const std::string& path);
std::string CheckText(const CheckResult& result, const std::string& path);
// {"first_bad": {…}}: the common form of a finding, with "constant" null or {"value", "meaning"}.
Json CheckFindingJson(const FirstBad& finding);
// The ledger as the two lists "ruled_out" and "not_testable" of an object (and "confirmed").
void AddLedgerJson(const std::vector<LedgerEntry>& ledger, Json* out);
// A finding in lines of text; the first one is called the first wrong tensor.
std::string FindingText(const FirstBad& finding, bool first);
// Names, hypotheses and needs of all checks, as a table.
std::string CheckListText();

}  // namespace assay
