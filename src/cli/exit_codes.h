// Exit codes of every command. Like diff(1): 0 and 1 answer the question, the rest say why there is no answer.
// Part of the interface (docs/cli.md): never renumbered.
#pragma once

#include "base/status.h"
#include "trace/reader.h"

namespace assay::cli {

inline constexpr int kExitOk = 0;           // same, noise, or fine
inline constexpr int kExitDifference = 1;   // a difference or fault was found
inline constexpr int kExitUsage = 2;        // the command line does not fit together
inline constexpr int kExitBadInput = 3;     // a file or trace is damaged, hostile or cannot be compared
inline constexpr int kExitEnvironment = 4;  // the machine refused: disk full, no permission, missing library
inline constexpr int kExitInternal = 5;     // a fault of assay itself; please report

// Codes of Status are the exit codes (base/status.h).
inline int ExitCodeOf(const Status& status) { return static_cast<int>(status.code()); }

// Prints "assay COMMAND: message" on stderr, control characters escaped, and gives the exit code.
int Fail(const char* command, const Status& status);
// Prints a line for each damaged record or payload that matters (torn tails do not); false: there is none.
bool SayDamages(const char* command, const Trace& trace);

}  // namespace assay::cli
