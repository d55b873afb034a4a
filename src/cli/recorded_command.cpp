#include "cli/recorded_command.h"

#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "cli/machine.h"
#include "cli/python_host.h"

namespace assay::cli {
namespace {

namespace fs = std::filesystem;

// Empty counts as unset, as in the settings.
bool Unset(const char* variable) {
  const char* value = std::getenv(variable);
  return value == nullptr || *value == '\0';
}

// The folder for all processes of this run: %i becomes the next free number now, so that they meet in one; the path
// becomes absolute, as the command may change its folder.
std::string OneFolder(std::string dir) {
  std::error_code error;
  dir = fs::absolute(dir, error).string();
  const size_t at = dir.find("%i");
  if (at == std::string::npos) return dir;
  for (int i = 0;; ++i) {
    std::string candidate = dir;
    candidate.replace(at, 2, std::to_string(i));
    if (!fs::exists(candidate, error)) return candidate;
  }
}

}  // namespace

Result<Settings> SettingsForCommand(const std::map<std::string, std::string>& knobs) {
  std::vector<std::string> assignments;
  if (Unset("ASSAY")) assignments.push_back("ASSAY=all");
  if (Unset("ASSAY_DIR")) assignments.push_back("ASSAY_DIR=assay-trace-%i");
  for (const auto& [name, value] : knobs) assignments.push_back(name + "=" + value);
  ASSAY_ASSIGN_OR_RETURN(Settings settings, ParseSettings(assignments, true));
  if (!settings.on()) return Status::Usage("recording is off (ASSAY=off or --profile off); run the command itself");
  settings.dir = OneFolder(settings.dir);
  // Not left to the command's recordings, which a host may open without looking at the code.
  if (const FolderFacts folder = CheckFolder(settings.dir); settings.sink != "stderr" && !folder.writable)
    return Status::Environment("no trace can be written to " + settings.dir + ": " + folder.detail);
  return settings;
}

// All settings are written out, so that the child does not depend on how its environment was put together.
Result<ChildResult> RunRecorded(const Settings& settings, const std::vector<std::string>& command, bool out_to_err) {
  std::vector<std::pair<std::string, std::string>> environment = FormatSettings(settings);
  for (auto& variable : PythonEnvironment()) environment.push_back(std::move(variable));
  return RunChild(command, environment, out_to_err);
}

}  // namespace assay::cli
