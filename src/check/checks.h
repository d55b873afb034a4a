// The checks by name, for the registry: check/<name>.cpp defines each.
#pragma once

#include <memory>

#include "check/check.h"

namespace assay::check {

// Statistics alone, in one shared pass.
std::unique_ptr<ScanCheck> MakeNonfinite();

}  // namespace assay::check
