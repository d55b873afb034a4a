// manifest.json: what the trace folder holds and the exact command to run each process again. Derived: it can be
// deleted and rebuilt from the trace files at any time, and no reader of assay needs it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace assay {

// Reads the summaries of all trace files in dir (not their events) and writes dir/manifest.json, schema
// "assay.manifest/1", by rename. Damaged files are listed with what is wrong. kEnvironment: cannot list or write.
Status RebuildManifest(const std::string& dir);

// The word as a POSIX shell reads it back: unchanged when it is harmless, in single quotes otherwise.
std::string ShellQuote(std::string_view word);
// The words joined by spaces, each quoted where it must be; empty for no words.
std::string ShellCommand(const std::vector<std::string>& argv);

}  // namespace assay
