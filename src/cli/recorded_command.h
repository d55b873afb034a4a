// Runs a command with recording switched on: what `assay run` and `assay diagnose -- COMMAND` share.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/status.h"
#include "cli/child_process.h"
#include "probe/settings.h"

namespace assay::cli {

// What is said of a command that left no trace.
inline constexpr const char* kNothingRecorded =
    "nothing was recorded: the command opened no recording. A program with torch is recorded when a profile knows its "
    "model, or by probes (--probes 'module:*'); others use the C interface (assay_open) or the Python package "
    "(assay.trace)";

// Settings from the environment, overruled by `knobs` (variable -> value). Left out by both: profile all, and the
// folder assay-trace-%i. %i is replaced by the next free number, the path is absolute. kUsage: an unknown value, or
// recording switched off; kEnvironment: the folder cannot be written.
Result<Settings> SettingsForCommand(const std::map<std::string, std::string>& knobs);
// The command, which sees the settings in its environment. out_to_err: its stdout goes to stderr, where the caller
// prints data of its own on stdout.
Result<ChildResult> RunRecorded(const Settings& settings, const std::vector<std::string>& command, bool out_to_err);

}  // namespace assay::cli
