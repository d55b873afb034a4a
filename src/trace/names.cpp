#include <array>

#include "trace/event.h"

namespace assay {
namespace {

// By number of Phase.
constexpr std::array<std::string_view, 8> kPhaseNames = {"unknown", "prefill", "decode",  "mixed",
                                                         "warmup",  "dummy",   "capture", "load"};

}  // namespace

std::string_view NameOf(Phase phase) {
  const auto i = static_cast<size_t>(phase);
  return i < kPhaseNames.size() ? kPhaseNames[i] : kPhaseNames[0];  // a newer writer's phase
}

Phase ParsePhase(std::string_view name) {
  for (size_t i = 0; i < kPhaseNames.size(); ++i) {
    if (kPhaseNames[i] == name) return static_cast<Phase>(i);
  }
  return Phase::kUnknown;
}

}  // namespace assay
