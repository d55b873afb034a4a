// The time of day. Intervals are not measured with it: it may be set back.
#pragma once

#include <time.h>

#include <cstdint>

namespace assay {

// Nanoseconds since 1970 (CLOCK_REALTIME).
inline uint64_t WallClockNs() {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace assay
