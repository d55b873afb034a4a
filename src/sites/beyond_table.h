// Names beyond the site table that engines record (docs/adding-a-case.md): what they are computed from and, where it is
// known, behind which canonical site they are executed.
//
// It gives no axes and no oracle: the recorder is told the axes with the call, the checks know their operations.
#pragma once

#include <string_view>

#include "sites/site_table.h"

namespace assay {

struct BeyondSite {
  std::string_view stem;    // under "layers.N." where the result is a layer's
  std::string_view inputs;  // comma-separated stems, of all paths; whether they were recorded is not said
  // Canonical site behind which it is executed; "": unknown, or before it is of no use to anybody.
  std::string_view behind;
  SiteOp op = SiteOp::kLinear;  // of use only where `behind` is
  // Rows sorted by expert, or counts of them: no row has an identity of its own, all of them are those of a step.
  bool by_expert = false;
};

// nullptr: not in the table. "moe.routed" is canonical and stands here for what else it may be computed from.
const BeyondSite* FindBeyond(std::string_view stem);

}  // namespace assay
