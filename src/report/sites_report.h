// `assay sites`: the table of canonical names, as JSON (schema assay.sites/1) and as text.
#pragma once

#include <string>

#include "io/json.h"

namespace assay {

// pattern: glob over the names; empty: all.
Json SitesJson(const std::string& pattern);
// Whether a pattern lets any site through.
bool AnySite(const std::string& pattern);
std::string SitesText(const std::string& pattern);

}  // namespace assay
