// assay weights as text and as JSON (assay.weights/1, docs/json.md).
#pragma once

#include <string>

#include "check/weights_audit.h"
#include "io/json.h"

namespace assay {

// trace: path as named, empty without one.
Json WeightsJson(const WeightsResult& result, const std::string& checkpoint, const std::string& trace);
// all: a line for every weight, not only a summary by format.
std::string WeightsText(const WeightsResult& result, bool all);

}  // namespace assay
