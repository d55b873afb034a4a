// JSON with the two faults of the library mended: non-finite numbers are written as the strings "NaN", "Infinity",
// "-Infinity", and duplicate keys in input are an error. Depth is limited. Nothing throws.
#pragma once

#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "base/status.h"

namespace assay {

using Json = nlohmann::ordered_json;

// what: the file's name for messages. kBadInput with the byte offset (base_offset added) of the first fault.
Result<Json> ParseJson(std::string_view text, std::string_view what, uint64_t base_offset = 0);
// indent < 0: one line.
std::string WriteJson(const Json& json, int indent = 2);
// A double for JSON: itself, or one of the three strings.
Json JsonNumber(double value);

}  // namespace assay
