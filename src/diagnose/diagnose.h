// One verdict on one recording, or on two: the checks of src/check, and for two recordings their comparison as well.
//
// With one trace the checks decide alone. With two, the comparison says where the runs part, and the checks on the
// second one say what it is: a finding of both ways at one tensor takes place, class and constant from the check. A
// fault that both runs share is seen by the checks alone. It prints nothing and reads no files but the traces.
#pragma once

#include <string>
#include <vector>

#include "check/check.h"
#include "compare/diff.h"

namespace assay {

struct Diagnosis {
  std::vector<FirstBad> findings;      // in order of execution; findings[0] is the verdict, none: nothing wrong
  std::vector<FirstBad> consequences;  // symptoms behind an earlier finding
  std::vector<LedgerEntry> ledger;     // hypotheses: confirmed, ruled out, not testable
  CheckCoverage coverage;
  bool compared = false;  // two traces
  Verdict comparison = Verdict::kSame;
  std::string comparison_summary;
  bool judged = false;  // something could be judged: without it "nothing wrong" says nothing
};

// Errors of the checks or the comparison are passed on; a trace in which nothing can be judged is no error (judged).
// The traces must outlive the call only.
Result<Diagnosis> Diagnose(const Trace& trace);
// a is trusted, b is in question.
Result<Diagnosis> Diagnose(const Trace& a, const Trace& b);

}  // namespace assay
