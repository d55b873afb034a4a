// What several commands print alike: findings, and the ledger of hypotheses. diff, check, diagnose and weights put
// their own documents and tables around it. Nothing is decided here.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "check/check.h"
#include "finding/finding.h"
#include "io/json.h"

namespace assay {

// ---- JSON (docs/json.md) ----

Json StringsJson(const std::vector<std::string>& lines);
// The fields of a finding; "constant" is a sentence, as in assay.diff/1.
Json FindingJson(const FirstBad& finding);
// [{"first_bad": {…}}]: the fields of a finding, "constant" null or {"value", "meaning"}.
Json FindingsJson(const std::vector<FirstBad>& findings);
// "judged", "not_judged": results that the hypothesis was held against, and those that could not be.
void AddCounts(const LedgerEntry& entry, Json* out);
// What the trace holds and how much of it was judged. checks_key: the document's name for the number of checks.
Json CoverageJson(const CheckCoverage& coverage, const std::string& checks_key);

// ---- text ----

// "first wrong tensor: NAME" or "also: NAME", and below it where in it, as far as that is known.
std::string FindingHead(const FirstBad& finding, bool first, std::string_view kind = "tensor");
// "  measured  0.78 relative L2 of B - A, bound 2.8e-05; estimated from row sketches", without the end of the line.
std::string MeasuredText(const FirstBad& finding);
// Method, confidence and evidence, a line each.
std::string FindingTail(const FirstBad& finding);
// A whole finding: head, class and constant, measured and bound, tail.
std::string FindingText(const FirstBad& finding, bool first, std::string_view kind = "tensor");
// A table of hypotheses: "ruled out in 12 of 794" where results could not be judged; what is not testable says what to
// record.
std::string LedgerText(const std::vector<LedgerEntry>& ledger);

}  // namespace assay
