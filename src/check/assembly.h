// From what the checks saw to findings and ledger: one finding a tensor, in order of execution, consequences apart.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "check/check.h"

namespace assay {

class Assembly {
 public:
  // checks[i] wrote reports[i].
  Assembly(const Capture& capture, const std::vector<const CheckDef*>& checks, const std::vector<CheckReport>& reports)
      : capture_(capture), checks_(checks), reports_(reports) {}
  CheckResult Result();

 private:
  // Everything said of one call: its results share a name up to ".lse".
  struct Call {
    std::string key;
    EventId first = kNoEvent;
    bool local = false;
    std::vector<std::pair<size_t, const Suspicion*>> said;  // check, what
  };

  std::vector<Call> Calls() const;
  FirstBad Merged(const Call& call) const;
  // "; 782 not judged, because …", empty where all were.
  static std::string NotJudged(const CheckReport& report);
  // How many weights the trace has, and what judges their values.
  std::string WeightsRecorded() const;
  LedgerEntry Entry(std::string_view hypothesis) const;
  std::string Line(size_t check, CheckState* state) const;

  const Capture& capture_;
  const std::vector<const CheckDef*>& checks_;
  const std::vector<CheckReport>& reports_;
  struct Standing {
    const Suspicion* suspicion;
    bool root;
    std::string name;            // of the finding it went into
    std::string explained = {};  // the check whose cause explains this result, when this one only saw that it is wrong
  };
  std::vector<std::vector<Standing>> standing_;  // by check
  std::string root_name_;                        // of first_bad
};

}  // namespace assay
