// Integer mixing shared by request keys, file names and tests. Part of the trace format where docs/trace-format.md says
// so; the hashes of sketch and digest are the statistics layer's own.
#pragma once

#include <cstdint>

namespace assay {

// Bijective finaliser with full avalanche (the output function of SplitMix64). Mix64(0) == 0.
constexpr uint64_t Mix64(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebu;
  x ^= x >> 31;
  return x;
}

// Golden-ratio increment of SplitMix64: what turns a counter into a sequence of unrelated Mix64 inputs.
inline constexpr uint64_t kGolden64 = 0x9e3779b97f4a7c15u;

// Seeded sequence for tests and for choosing rows; not for secrets.
class SplitMix64 {
 public:
  explicit SplitMix64(uint64_t seed) : state_(seed) {}
  uint64_t Next() { return Mix64(state_ += kGolden64); }
  // Uniform in [0, 1), 53 bits.
  double NextDouble() { return static_cast<double>(Next() >> 11) * 0x1p-53; }

 private:
  uint64_t state_;
};

}  // namespace assay
