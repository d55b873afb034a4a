#include "base/parallel_for.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace assay {

// The affinity mask and not the number of cores: containers and taskset restrict the former. A machine of more than
// 1024 processors fails the call (the set is too small for it) and is asked by the standard library instead.
int UsableCores() {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// Joining orders everything that body wrote before the return, so the counter itself may be relaxed.
void ParallelFor(int64_t n, int threads, const std::function<void(int64_t)>& body) {
  if (threads <= 0) threads = UsableCores();
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr failure;  // of the first that failed, who alone writes it
  const auto work = [&] {
    try {
      for (int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < n;
           i = next.fetch_add(1, std::memory_order_relaxed)) {
        body(i);
      }
    } catch (...) {
      if (!failed.exchange(true)) failure = std::current_exception();
      next.store(n, std::memory_order_relaxed);
    }
  };
  // The caller works too, so one thread less is started; never more threads than there are calls to make.
  const int64_t helpers = std::min<int64_t>(threads, n) - 1;
  std::vector<std::thread> pool;
  try {
    for (int64_t i = 0; i < helpers; ++i) pool.emplace_back(work);
  } catch (const std::exception&) {
    // No thread to be had (limit reached, no memory): the ones that run finish the work.
  }
  work();
  for (std::thread& thread : pool) thread.join();
  if (failure != nullptr) std::rethrow_exception(failure);
}

}  // namespace assay
