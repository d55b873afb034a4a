// Runs a command with recording switched on: what `assay run` and `assay diagnose -- COMMAND` share.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/status.h"
#include "cli/child_process.h"
#include "probe/settings.h"

namespace assay::cli {

// Settings from the environment, overruled by `knobs` (variable -> value). Left out by both: profile all, and the
// folder assay-trace-%i. %i is replaced by the next free number, the path is absolute. kUsage: an unknown value, or
// recording switched off; kEnvironment: the folder cannot be written.
Result<Settings> SettingsForCommand(const std::map<std::string, std::string>& knobs);
// The command, which sees the settings in its environment.
Result<ChildResult> RunRecorded(const Settings& settings, const std::vector<std::string>& command);

}  // namespace assay::cli
