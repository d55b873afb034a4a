// SHA-256 (FIPS 180-4): names payloads by their content. Streaming; uses the SHA instructions where the machine has
// them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace assay {

class Sha256 {
 public:
  using Digest = std::array<unsigned char, 32>;

  Sha256() { Reset(); }
  void Reset();
  void Update(const void* data, size_t size_bytes);
  // Ends the message; call Reset() before the next.
  Digest Finish();

  static Digest Of(const void* data, size_t size_bytes);
  static std::string HexOf(const void* data, size_t size_bytes);  // 64 lower-case digits

 private:
  // The chaining value, a to h of FIPS 180-4, section 6.2.
  std::array<uint32_t, 8> state_;
  // A begun block of the message, block_used_ bytes of it.
  unsigned char block_[64];
  size_t block_used_;
  // Of the whole message so far; its length in bits ends the padding, so a message is below 2^61 bytes.
  uint64_t total_bytes_;
};

namespace internal {
// One compression over n 64-byte blocks, without the machine's SHA instructions; for tests.
void Sha256BlocksPortable(uint32_t state[8], const unsigned char* data, size_t n_blocks);
// The one that Sha256 uses on this machine.
void Sha256Blocks(uint32_t state[8], const unsigned char* data, size_t n_blocks);
}  // namespace internal

}  // namespace assay
