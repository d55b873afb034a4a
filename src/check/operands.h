// What a recorded result is computed from, by name: `inputs` of the event, `scale_of`, the site table, and the
// contract's names beyond it.
#pragma once

#include <string>
#include <vector>

#include "capture/capture.h"

namespace assay::check {

// Full names, canonical order, those of all paths; whether they were recorded is not looked at.
std::vector<std::string> OperandNames(const EventInfo& result);
// Those that were recorded for the result (Capture::Operand).
std::vector<EventId> RecordedOperands(const Capture& capture, const EventInfo& result);

}  // namespace assay::check
