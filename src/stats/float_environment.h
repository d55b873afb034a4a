// Default floating-point environment for the life of the object: round to nearest, no flush to zero, no exceptions.
// A host may run with denormals flushed (torch.set_flush_denormal) or with traps; neither may change a statistic, and
// measuring may not raise a flag that the host would see.
#pragma once

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif
#if defined(__aarch64__)
#include <cstdint>
#endif

namespace assay {

class FloatEnvironment {
 public:
#if defined(__x86_64__) || defined(_M_X64)
  FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }  // the value at reset
  ~FloatEnvironment() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
  FloatEnvironment() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~FloatEnvironment() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }
#else
  FloatEnvironment() = default;
#endif
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
#if defined(__x86_64__) || defined(_M_X64)
  unsigned int saved_;
#elif defined(__aarch64__)
  uint64_t saved_;
#endif
};

}  // namespace assay
