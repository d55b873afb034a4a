// All checks, one line each, in the order in which the ledger prints those of one hypothesis.
#include <array>

#include "check/checks.h"

namespace assay {
namespace {

namespace h = hypothesis;

constexpr std::array kChecks = {
    CheckDef{"nonfinite", h::kRange, "every value of a real row is finite", "any statistics", nullptr,
             check::MakeNonfinite},
};

}  // namespace

std::span<const CheckDef> AllChecks() { return kChecks; }

}  // namespace assay
