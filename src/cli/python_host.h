// What a Python program that `assay run` starts needs in order to attach itself, without anything installed into its
// environment: the folder with our sitecustomize.py in front of PYTHONPATH, and ASSAY_LIBRARY. Nothing when the Python
// part of assay is not beside this program. Children of the program inherit both.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace assay::cli {

// Variables to set, with their new values.
std::vector<std::pair<std::string, std::string>> PythonEnvironment();

}  // namespace assay::cli
