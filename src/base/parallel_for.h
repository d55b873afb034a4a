// The smallest thing that spreads work over cores: threads are started for the call and joined before it returns.
#pragma once

#include <cstdint>
#include <functional>

namespace assay {

// Cores this process may run on (its affinity mask), at least 1.
int UsableCores();

// Calls body(i) once for every i in [0, n), from up to `threads` threads (0: UsableCores()), the caller's among them;
// indexes are handed out in ascending order one at a time, so give each call at least some microseconds of work. body
// must be thread-safe. When a thread cannot be started, the others do its work. What body throws (memory that cannot be
// had) ends the handing out and is thrown on here, once every thread has ended; of several exceptions one.
void ParallelFor(int64_t n, int threads, const std::function<void(int64_t)>& body);

}  // namespace assay
