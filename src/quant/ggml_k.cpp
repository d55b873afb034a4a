// The k-quants: blocks of 256 whose groups have small integer scales under one or two half-precision ones. The low bits
// of a block lie in planes: bits (2s, 2s + 1) of 32 consecutive bytes are elements 32 s .. 32 s + 31 of a half block
// of 128 (nibbles: of a quarter of 64), and so do the high bits.
#include "quant/bits.h"
#include "quant/ggml_block.h"

namespace assay {
namespace {

// Eight 6-bit scales and eight 6-bit minima in twelve bytes: 0..3 of each in the low six bits of bytes 0..3 and 4..7;
// 4..7 have their low nibbles in bytes 8..11 and their two high bits on top of the first eight.
void SixBitPairs(const uint8_t* packed, int group, int* scale, int* minimum) {
  if (group < 4) {
    *scale = packed[group] & 63;
    *minimum = packed[group + 4] & 63;
  } else {
    *scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6 << 4);
    *minimum = (packed[group + 4] >> 4) | (packed[group] >> 6 << 4);
  }
}

// halves: d and dmin; packed: SixBitPairs.
void ScaleByPairs(const uint8_t* halves, const uint8_t* packed, GgmlBlock* block) {
  const float d = HalfAt(halves), dmin = HalfAt(halves + 2);
  for (int g = 0; g < 8; ++g) {
    int scale = 0, minimum = 0;
    SixBitPairs(packed, g, &scale, &minimum);
    block->scale[g] = d * static_cast<float>(scale);
    block->minimum[g] = dmin * static_cast<float>(minimum);
  }
}

}  // namespace

// 16 bytes of (scale, minimum) nibbles, 64 bytes of two-bit codes, half d, half dmin.
void UnpackQ2K(const uint8_t* bytes, GgmlBlock* block) {
  const uint8_t* codes = bytes + 16;
  const float d = HalfAt(bytes + 80), dmin = HalfAt(bytes + 82);
  for (int g = 0; g < 16; ++g) {
    block->scale[g] = d * static_cast<float>(bytes[g] & 15);
    block->minimum[g] = dmin * static_cast<float>(bytes[g] >> 4);
  }
  for (int i = 0; i < 256; ++i) {
    const int half = i >> 7, plane = (i >> 5) & 3;
    block->code[i] = static_cast<int8_t>(codes[32 * half + (i & 31)] >> (2 * plane) & 3);
  }
}

// 32 bytes of third bits (plane p of bit p), 64 bytes of two-bit codes, 12 bytes of 16 six-bit scales, half d. A third
// bit that is clear takes 4 off.
void UnpackQ3K(const uint8_t* bytes, GgmlBlock* block) {
  const uint8_t *codes = bytes + 32, *packed = bytes + 96;
  const float d = HalfAt(bytes + 108);
  for (int g = 0; g < 16; ++g) {
    // Scales are six bits wide and lie 32 above their value: low nibbles in eight bytes, two high bits each in the last
    // four.
    const int low = g < 8 ? packed[g] & 15 : packed[g - 8] >> 4;
    const int high = packed[8 + (g & 3)] >> (2 * (g >> 2)) & 3;
    block->scale[g] = d * static_cast<float>((low | high << 4) - 32);
  }
  for (int i = 0; i < 256; ++i) {
    const int half = i >> 7, plane = (i >> 5) & 3;
    const int low = codes[32 * half + (i & 31)] >> (2 * plane) & 3, third = bytes[i & 31] >> (i >> 5) & 1;
    block->code[i] = static_cast<int8_t>(low - (third == 0 ? 4 : 0));
  }
}

// half d, half dmin, 12 bytes of pairs, 128 bytes of nibbles.
void UnpackQ4K(const uint8_t* bytes, GgmlBlock* block) {
  ScaleByPairs(bytes, bytes + 4, block);
  const uint8_t* codes = bytes + 16;
  for (int q = 0; q < 4; ++q) {
    for (int j = 0; j < 32; ++j) {
      const uint8_t byte = codes[32 * q + j];
      block->code[64 * q + j] = static_cast<int8_t>(byte & 15);
      block->code[64 * q + 32 + j] = static_cast<int8_t>(byte >> 4);
    }
  }
}

// half d, half dmin, 12 bytes of pairs, 32 bytes of fifth bits, 128 bytes of nibbles.
void UnpackQ5K(const uint8_t* bytes, GgmlBlock* block) {
  ScaleByPairs(bytes, bytes + 4, block);
  const uint8_t *fifth = bytes + 16, *codes = bytes + 48;
  for (int q = 0; q < 4; ++q) {
    for (int j = 0; j < 32; ++j) {
      const uint8_t byte = codes[32 * q + j];
      block->code[64 * q + j] = static_cast<int8_t>((byte & 15) | (fifth[j] >> (2 * q) & 1) << 4);
      block->code[64 * q + 32 + j] = static_cast<int8_t>((byte >> 4) | (fifth[j] >> (2 * q + 1) & 1) << 4);
    }
  }
}

// 128 bytes of low nibbles, 64 bytes of two high bits, 16 signed scales, half d. Codes lie 32 above.
void UnpackQ6K(const uint8_t* bytes, GgmlBlock* block) {
  const float d = HalfAt(bytes + 208);
  for (int g = 0; g < 16; ++g) {
    block->scale[g] = d * static_cast<float>(static_cast<int8_t>(bytes[192 + g]));
  }
  for (int i = 0; i < 256; ++i) {
    const int half = i >> 7, plane = (i >> 5) & 3;
    const uint8_t byte = bytes[64 * half + (i & 63)];
    const int low = (plane < 2 ? byte & 15 : byte >> 4), high = bytes[128 + 32 * half + (i & 31)] >> (2 * plane) & 3;
    block->code[i] = static_cast<int8_t>((low | high << 4) - 32);
  }
}

// float d, 256 signed bytes, 16 sums of 16 (not needed).
void UnpackQ8K(const uint8_t* bytes, GgmlBlock* block) {
  block->scale[0] = LoadAs<float>(bytes);
  std::memcpy(block->code, bytes + 4, 256);
}

}  // namespace assay
