// One file a command: cmd_<name>.cpp defines Add<Name>Command, which declares the options on a subcommand and sets a
// callback that leaves the exit code in *exit_code. Data goes to stdout, talk to stderr.
#pragma once

#include <CLI/CLI.hpp>

namespace assay::cli {

void AddDemoCommand(CLI::App& app, int* exit_code);
void AddReferenceCommand(CLI::App& app, int* exit_code);
void AddRunCommand(CLI::App& app, int* exit_code);
void AddShowCommand(CLI::App& app, int* exit_code);
void AddSitesCommand(CLI::App& app, int* exit_code);
void AddDiffCommand(CLI::App& app, int* exit_code);
void AddDoctorCommand(CLI::App& app, int* exit_code);

}  // namespace assay::cli
