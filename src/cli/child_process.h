// Runs a command as a child, in the foreground, with a changed environment.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/status.h"

namespace assay::cli {

struct ChildResult {
  bool started = false;
  int start_errno = 0;  // why it could not be started
  int exit_code = 0;    // of the command, when it ended by itself
  int signal = 0;       // that ended it, or 0
  // Its traces carry it in their names.
  int64_t pid = 0;

  // As shells have it: the command's own, 128 + signal, 127 not found, 126 not executable.
  int shell_code() const;
};

// argv[0] is looked up in PATH. stdin, stdout and stderr are the caller's; out_to_err: stdout is the caller's stderr.
// While the command runs, SIGINT and SIGQUIT are left to it (the terminal sends them to both), SIGTERM and SIGHUP are
// passed on. Errors: kEnvironment when no process can be made; a command that cannot be executed is a result.
Result<ChildResult> RunChild(const std::vector<std::string>& argv,
                             const std::vector<std::pair<std::string, std::string>>& environment,
                             bool out_to_err = false);

}  // namespace assay::cli
