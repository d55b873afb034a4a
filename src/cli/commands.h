// One file a command: cmd_<name>.cpp defines Add<Name>Command, which declares the options on a subcommand and sets a
// callback that leaves the exit code in *exit_code. Data goes to stdout, talk to stderr.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace assay::cli {

// A whole number from 0 on. The parser's own check of that name spells out the largest double in its message.
inline CLI::Validator NonNegative() {
  return CLI::Validator(
      [](const std::string& text) {
        return text.rfind('-', 0) == 0 ? "expected 0 or above, found " + text : std::string();
      },
      "NONNEGATIVE");
}

// "" when nothing but `option` and what `with` names was given to the command; else a sentence naming what would have
// no effect. For options that print a list and stop.
std::string WithoutEffect(const CLI::App& command, const std::string& option, const std::vector<std::string>& with);

void AddArmCommand(CLI::App& app, int* exit_code);
void AddDisarmCommand(CLI::App& app, int* exit_code);
void AddCheckCommand(CLI::App& app, int* exit_code);
void AddDemoCommand(CLI::App& app, int* exit_code);
void AddReferenceCommand(CLI::App& app, int* exit_code);
void AddRunCommand(CLI::App& app, int* exit_code);
void AddShowCommand(CLI::App& app, int* exit_code);
void AddSitesCommand(CLI::App& app, int* exit_code);
void AddDiagnoseCommand(CLI::App& app, int* exit_code);
void AddDiffCommand(CLI::App& app, int* exit_code);
void AddWeightsCommand(CLI::App& app, int* exit_code);
void AddDoctorCommand(CLI::App& app, int* exit_code);

}  // namespace assay::cli
