// Runs the assay program as a user does and returns what came out.
#pragma once

#include <string>
#include <vector>

namespace assay::testing {

struct Output {
  int exit_code = -1;  // 128 + signal when a signal ended it
  std::string out, err;
};

// arguments without the program's name. environment: "NAME=value", added to a copy of this process's environment from
// which ASSAY* is removed. working_dir: empty for the current one. No shell, no standard input; two minutes at most.
Output RunAssay(const std::vector<std::string>& arguments, const std::vector<std::string>& environment = {},
                const std::string& working_dir = {});

// Compares with tests/cli/golden/NAME; ASSAY_UPDATE_GOLDEN=1 writes the file instead. Returns the golden text.
std::string Golden(const std::string& name, const std::string& actual);

}  // namespace assay::testing
