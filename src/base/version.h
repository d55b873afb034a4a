// The version of the whole project: CMake, the CLI, the library and the Python package read it here.
#pragma once

#define ASSAY_VERSION "0.1.0"
