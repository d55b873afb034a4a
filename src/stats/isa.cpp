// Which instruction sets this build and this machine have.
#include <cstdlib>
#include <cstring>
#include <string>

#include "stats/measure.h"

namespace assay {
namespace {

// Once a process: the environment is the host's, and a change of it in mid-run must not mix instruction sets.
Isa Resolve() {
  const char* wanted = std::getenv("ASSAY_ISA");
  for (Isa isa : {Isa::kAvx512, Isa::kAvx2, Isa::kPortable}) {
    if (wanted != nullptr && std::strcmp(wanted, NameOf(isa)) == 0 && IsaUsable(isa)) return isa;
  }
  // Unset, unknown or not usable here: the best there is. CheckIsaName says so to those who can be told.
  for (Isa isa : {Isa::kAvx512, Isa::kAvx2}) {
    if (IsaUsable(isa)) return isa;
  }
  return Isa::kPortable;
}

}  // namespace

bool IsaUsable(Isa isa) {
  switch (isa) {
    case Isa::kAuto:
    case Isa::kPortable:
      return true;
    case Isa::kAvx2:
#if defined(ASSAY_HAVE_AVX2)
      // The built-ins ask the system too, whether it saves the wide registers.
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
      return false;
#endif
    case Isa::kAvx512:
#if defined(ASSAY_HAVE_AVX512)
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
      return false;
#endif
  }
  return false;
}

Isa ActiveIsa() {
  static const Isa isa = Resolve();
  return isa;
}

const char* NameOf(Isa isa) {
  switch (isa) {
    case Isa::kAuto:
      return "auto";
    case Isa::kPortable:
      return "portable";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

Status CheckIsaName(std::string_view text) {
  if (text.empty()) return {};
  std::string usable;
  for (Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (!IsaUsable(isa)) continue;
    if (text == NameOf(isa)) return {};
    usable += (usable.empty() ? "" : ", ") + std::string(NameOf(isa));
  }
  return Status::Usage("ASSAY_ISA=" + std::string(text.substr(0, 80)) +
                       " is no instruction set of this build and machine; usable here: " + usable);
}

}  // namespace assay
