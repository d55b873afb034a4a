// The hashes behind the sketch and the digest, and the sketch's fixed table. docs/numerics.md states them in words;
// tests/stats/golden.py is an independent second implementation. Nothing here may change once format version 1 is
// frozen.
//
// A group is eight logical elements: G = i >> 3, lane j = i & 7. Only the low 32 bits of G enter the 32-bit hashes; the
// upper 32 bits are folded into the salt, so a kernel sees 32-bit numbers alone.
#pragma once

#include <cstdint>

// The files of one instruction set are compiled with its flags. An inline function that such a file emits out of line
// could be the copy that the linker keeps for everybody, so what they call is always inlined, and plain arrays stand
// where std::array would.
#define ASSAY_KERNEL_INLINE [[gnu::always_inline]] inline
#define ASSAY_INLINE [[gnu::always_inline]] static inline  // in one file alone

namespace assay {

inline constexpr int kLanes = 8;          // elements of a group
inline constexpr int kBlockGroups = 256;  // groups of a block, and slots of the table
inline constexpr int kDigestWords = 16;   // 32-bit words of the widest group (eight f64)

// The bijective finaliser of splitmix64.
ASSAY_KERNEL_INLINE constexpr uint64_t Mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// The full 32-bit mix: a bijection, every input bit reaches every output bit.
// Multipliers of C. Wellons' search for mixers of low bias ("lowbias32").
ASSAY_KERNEL_INLINE constexpr uint32_t Mix32(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// What a request's key becomes: `block` salts the slot rotation, `group` the group hash.
struct Salt {
  uint32_t block = 0;
  uint32_t group = 0;
};

// group_high: upper 32 bits of the group number.
ASSAY_KERNEL_INLINE constexpr Salt SaltOf(uint64_t request, uint32_t group_high) {
  const uint64_t z = Mix64(request + (uint64_t{group_high} + 1) * 0x9e3779b97f4a7c15u);
  return {static_cast<uint32_t>(z), static_cast<uint32_t>(z >> 32)};
}

// r of a block: slot = (group & 255) ^ r. group is the low 32 bits of any group of the block.
ASSAY_KERNEL_INLINE constexpr uint32_t SlotRotation(uint32_t group, Salt salt) {
  return Mix32((group >> 8) ^ salt.block) & 0xff;
}

// g of a group: its top bit is the group's sign (1: minus), all of it keys the digest. Two multiplications.
ASSAY_KERNEL_INLINE constexpr uint32_t GroupHash(uint32_t group, uint32_t salt_group) {
  uint32_t h = (group ^ salt_group) * 0x9e3779b1u;
  return (h ^ (h >> 15)) * 0x85ebca77u;
}

// K of word n of a group.
struct DigestKeys {
  uint32_t word[kDigestWords] = {};
};

// The digest multiplies pairs of keyed words, a form of NH (Black et al., UMAC, section 4): two tensors that differ
// collide with a chance of about 2^-32 over the salts.
inline constexpr DigestKeys kDigestKeys = [] {
  DigestKeys keys;
  for (uint32_t n = 0; n < kDigestWords; ++n) {
    keys.word[n] = static_cast<uint32_t>(Mix64((n + 1) * 0x9e3779b97f4a7c15u) >> 32);
  }
  return keys;
}();

// Bucket (0..63) and sign of slot s, lane j. Any aligned 1, 2, 4 or 8 neighbouring slots hold every residue modulo
// 8, 16, 32 and 64 of the bucket exactly once: a fold to 64 buckets is a permuted add without collisions, and so are
// the folds to 16 (head cells) and 4 (row cells).
struct SketchTable {
  uint8_t bucket[kBlockGroups][kLanes] = {};
  uint8_t minus[kBlockGroups] = {};  // bit j set: sign of lane j is minus
};

// Draws are taken in order from Mix64(kSketchSeed + n * 0x9e3779b97f4a7c15), n = 1, 2, ...; see docs/numerics.md.
inline constexpr uint64_t kSketchSeed = 0x6173736179303031u;  // "assay001" in ASCII

constexpr SketchTable MakeSketchTable() {
  SketchTable table;
  uint64_t n = 0;
  auto draw = [&n] { return Mix64(kSketchSeed + ++n * 0x9e3779b97f4a7c15u); };
  // Bits 3, 4, 5 of the bucket: which slot of a pair, quad, octet takes which half of a residue class.
  for (int octet = 0; octet < kBlockGroups; octet += 8) {
    // Signs of the octet: one draw, byte k for slot octet + k.
    const uint64_t signs = draw();
    const uint32_t octet_flip = static_cast<uint32_t>(draw());  // one bit a residue modulo 32
    for (int quad = octet; quad < octet + 8; quad += 4) {
      const uint32_t quad_flip = static_cast<uint32_t>(draw());  // one bit a residue modulo 16
      for (int pair = quad; pair < quad + 4; pair += 2) {
        const uint32_t pair_flip = static_cast<uint32_t>(draw());  // one bit a residue modulo 8
        for (int slot = pair; slot < pair + 2; ++slot) {
          // Bits 0..2: a random permutation of the lanes (Fisher-Yates from the top).
          uint8_t residue[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7};
          uint64_t bits = draw();
          for (uint32_t k = kLanes - 1; k > 0; --k) {
            const uint32_t pick = static_cast<uint32_t>((bits & 0xff) * (k + 1) >> 8);
            bits >>= 8;
            const uint8_t swapped = residue[k];
            residue[k] = residue[pick];
            residue[pick] = swapped;
          }
          for (int j = 0; j < kLanes; ++j) {
            uint32_t h = residue[j];
            h |= ((pair_flip >> h & 1) ^ (slot & 1)) << 3;
            h |= ((quad_flip >> h & 1) ^ (slot >> 1 & 1)) << 4;
            h |= ((octet_flip >> h & 1) ^ (slot >> 2 & 1)) << 5;
            table.bucket[slot][j] = static_cast<uint8_t>(h);
          }
          table.minus[slot] = static_cast<uint8_t>(signs >> (8 * (slot - octet)));
        }
      }
    }
  }
  return table;
}

inline constexpr SketchTable kSketchTable = MakeSketchTable();

}  // namespace assay
