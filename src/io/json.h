// JSON with the faults of the library mended: non-finite numbers are written as the strings "NaN", "Infinity",
// "-Infinity" (the library writes null), duplicate keys in input are an error (it keeps one of them), nesting is
// limited, and nothing throws. Reading keeps the order of keys; building an object is linear in its size.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/status.h"

namespace assay {

// Ordered: reports come out in the order in which they were built.
using Json = nlohmann::ordered_json;

// Bounds recursion over a parsed document; configs and headers nest to 5 or so.
constexpr int kMaxJsonDepth = 64;

// what: the file's name for messages. kBadInput with the byte offset (base_offset added) of the first fault: a syntax
// error, invalid UTF-8, a number beyond double, a duplicate key, or more than kMaxJsonDepth nested containers.
Result<Json> ParseJson(std::string_view text, std::string_view what, uint64_t base_offset = 0);
// indent < 0: one line. Bytes that are not UTF-8 become U+FFFD.
std::string WriteJson(const Json& json, int indent = 2);
// A double for JSON: itself, or one of the three strings.
Json JsonNumber(double value);
// The member of an object, or nullptr when json is no object or has no such key. Linear in the number of keys.
const Json* FindKey(const Json& json, std::string_view key);

}  // namespace assay
