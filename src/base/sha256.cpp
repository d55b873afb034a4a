#include "base/sha256.h"

#include <bit>
#include <cstring>

#include "base/hex.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace assay {
namespace internal {
namespace {

// First 32 bits of the fractional parts of the cube roots of the first 64 primes.
alignas(16) constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// The words of a message are big-endian, whatever the machine.
uint32_t LoadBigEndian(const unsigned char* p) {
  return uint32_t{p[0]} << 24 | uint32_t{p[1]} << 16 | uint32_t{p[2]} << 8 | uint32_t{p[3]};
}

#if defined(__x86_64__)
// Four rounds an iteration; the state is kept in the order ABEF, CDGH that the instructions want.
__attribute__((target("sha,sse4.1,ssse3"))) void BlocksSha(uint32_t state[8], const unsigned char* data,
                                                           size_t n_blocks) {
  // Reverses the four bytes of each 32-bit word: the message's words are big-endian.
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state));       // a b c d
  __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4));  // e f g h
  low = _mm_shuffle_epi32(low, 0xb1);
  high = _mm_shuffle_epi32(high, 0x1b);
  __m128i abef = _mm_alignr_epi8(low, high, 8);
  __m128i cdgh = _mm_blend_epi16(high, low, 0xf0);
  for (; n_blocks > 0; --n_blocks, data += 64) {
    // Step 4 of section 6.2.2 adds the chaining value from before the block to the working variables.
    const __m128i abef_before = abef;
    const __m128i cdgh_before = cdgh;
    // The last 16 words of the message schedule, four a register, as a ring: w[i & 3] holds words 4i to 4i + 3.
    __m128i w[4];
    for (int i = 0; i < 4; ++i) {
      w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data + 16 * i)), swap);
    }
    for (int i = 0; i < 16; ++i) {
      const __m128i now = w[i & 3];
      const __m128i sum = _mm_add_epi32(now, _mm_load_si128(reinterpret_cast<const __m128i*>(kRound + 4 * i)));
      // Two rounds each, from the low and then the high half of the sum. The result holds the new A, B, E, F, and the
      // old ones are the new C, D, G, H: so the two registers change their parts instead of being moved.
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
      if (i < 12) {  // words 4(i+4) .. 4(i+4)+3 of the message schedule
        const __m128i last = w[(i + 3) & 3];
        const __m128i shifted = _mm_alignr_epi8(last, w[(i + 2) & 3], 4);
        w[i & 3] = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(now, w[(i + 1) & 3]), shifted), last);
      }
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  low = _mm_shuffle_epi32(abef, 0x1b);   // f e b a -> a b e f
  high = _mm_shuffle_epi32(cdgh, 0xb1);  // -> g h c d order
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(low, high, 0xf0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(high, low, 8));
}

// CPUID leaf 7, EBX bit 29; Clang 14 does not know __builtin_cpu_supports("sha").
bool HasSha() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  return (b >> 29 & 1) != 0 && __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("ssse3");
}
#endif

}  // namespace

// FIPS 180-4, section 6.2.2, with its names: s0 and s1 are the sigmas (of the schedule, then of the rounds), v the
// working variables a to h.
void Sha256BlocksPortable(uint32_t state[8], const unsigned char* data, size_t n_blocks) {
  for (; n_blocks > 0; --n_blocks, data += 64) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i) w[i] = LoadBigEndian(data + 4 * i);
    for (int i = 16; i < 64; ++i) {
      const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
      const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    uint32_t v[8];
    std::memcpy(v, state, sizeof v);
    for (int i = 0; i < 64; ++i) {
      const uint32_t s1 = std::rotr(v[4], 6) ^ std::rotr(v[4], 11) ^ std::rotr(v[4], 25);
      const uint32_t choice = (v[4] & v[5]) ^ (~v[4] & v[6]);
      const uint32_t t1 = v[7] + s1 + choice + kRound[i] + w[i];
      const uint32_t s0 = std::rotr(v[0], 2) ^ std::rotr(v[0], 13) ^ std::rotr(v[0], 22);
      const uint32_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
      for (int k = 7; k > 0; --k) v[k] = v[k - 1];
      v[4] += t1;
      v[0] = t1 + s0 + majority;
    }
    for (int k = 0; k < 8; ++k) state[k] += v[k];
  }
}

void Sha256Blocks(uint32_t state[8], const unsigned char* data, size_t n_blocks) {
#if defined(__x86_64__)
  // Asked at the first call, as in crc32c.cpp: no static initialiser in a library that is loaded into hosts.
  static const bool has_sha = HasSha();
  if (has_sha) return BlocksSha(state, data, n_blocks);
#endif
  Sha256BlocksPortable(state, data, n_blocks);
}

}  // namespace internal

// First 32 bits of the fractional parts of the square roots of the first 8 primes.
void Sha256::Reset() {
  state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  block_used_ = 0;
  total_bytes_ = 0;
}

// A begun block is filled first, then whole blocks are hashed where they lie, without a copy; the rest waits in block_.
void Sha256::Update(const void* data, size_t size_bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  total_bytes_ += size_bytes;
  if (block_used_ > 0) {
    const size_t take = size_bytes < 64 - block_used_ ? size_bytes : 64 - block_used_;
    if (take > 0) std::memcpy(block_ + block_used_, p, take);
    block_used_ += take;
    p += take;
    size_bytes -= take;
    if (block_used_ < 64) return;
    internal::Sha256Blocks(state_.data(), block_, 1);
    block_used_ = 0;
  }
  const size_t whole = size_bytes / 64;
  if (whole > 0) internal::Sha256Blocks(state_.data(), p, whole);
  block_used_ = size_bytes % 64;
  if (block_used_ > 0) std::memcpy(block_, p + 64 * whole, block_used_);
}

// Padding: 0x80, zeros up to 56 modulo 64, and the length in bits as 8 big-endian bytes; 72 bytes at the most.
Sha256::Digest Sha256::Finish() {
  const uint64_t bits = total_bytes_ * 8;
  unsigned char tail[72] = {0x80};
  const size_t padding = (block_used_ < 56 ? 56 : 120) - block_used_;
  for (size_t i = 0; i < 8; ++i) tail[padding + i] = static_cast<unsigned char>(bits >> (56 - 8 * i));
  Update(tail, padding + 8);
  Digest digest;
  for (size_t i = 0; i < 32; ++i) digest[i] = static_cast<unsigned char>(state_[i / 4] >> (24 - 8 * (i % 4)));
  return digest;
}

Sha256::Digest Sha256::Of(const void* data, size_t size_bytes) {
  Sha256 hash;
  hash.Update(data, size_bytes);
  return hash.Finish();
}

std::string Sha256::HexOf(const void* data, size_t size_bytes) {
  const Digest digest = Of(data, size_bytes);
  return HexEncode(digest.data(), digest.size());
}

}  // namespace assay
