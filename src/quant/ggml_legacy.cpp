// q4_0, q4_1, q5_0, q5_1, q8_0, q8_1: blocks of 32 under one half-precision scale. Byte j of the four-bit part holds
// element j in its low nibble and element 16 + j in its high one; fifth bits are a 32-bit word, bit i for element i.
#include "quant/bits.h"
#include "quant/ggml_block.h"

namespace assay {
namespace {

// offset: what stored codes lie above their values.
void Nibbles(const uint8_t* from, int offset, int8_t* code) {
  for (int j = 0; j < 16; ++j) {
    code[j] = static_cast<int8_t>((from[j] & 15) - offset);
    code[16 + j] = static_cast<int8_t>((from[j] >> 4) - offset);
  }
}

// fifth: the 32-bit word of bits 4.
void NibblesAndFifthBits(const uint8_t* fifth, const uint8_t* from, int offset, int8_t* code) {
  const uint32_t high = LoadAs<uint32_t>(fifth);
  for (int j = 0; j < 16; ++j) {
    code[j] = static_cast<int8_t>((from[j] & 15) + static_cast<int>((high >> j & 1) << 4) - offset);
    code[16 + j] = static_cast<int8_t>((from[j] >> 4) + static_cast<int>((high >> (16 + j) & 1) << 4) - offset);
  }
}

}  // namespace

void UnpackQ4_0(const uint8_t* bytes, GgmlBlock* block) {  // half scale, 16 bytes
  block->scale[0] = HalfAt(bytes);
  Nibbles(bytes + 2, 8, block->code);
}

void UnpackQ4_1(const uint8_t* bytes, GgmlBlock* block) {  // half scale, half offset (added), 16 bytes
  block->scale[0] = HalfAt(bytes);
  block->minimum[0] = -HalfAt(bytes + 2);
  Nibbles(bytes + 4, 0, block->code);
}

void UnpackQ5_0(const uint8_t* bytes, GgmlBlock* block) {  // half scale, fifth bits, 16 bytes
  block->scale[0] = HalfAt(bytes);
  NibblesAndFifthBits(bytes + 2, bytes + 6, 16, block->code);
}

void UnpackQ5_1(const uint8_t* bytes, GgmlBlock* block) {  // half scale, half offset, fifth bits, 16 bytes
  block->scale[0] = HalfAt(bytes);
  block->minimum[0] = -HalfAt(bytes + 2);
  NibblesAndFifthBits(bytes + 4, bytes + 8, 0, block->code);
}

void UnpackQ8_0(const uint8_t* bytes, GgmlBlock* block) {  // half scale, 32 signed bytes
  block->scale[0] = HalfAt(bytes);
  std::memcpy(block->code, bytes + 2, 32);
}

void UnpackQ8_1(const uint8_t* bytes, GgmlBlock* block) {  // half scale, half sum (not needed), 32 signed bytes
  block->scale[0] = HalfAt(bytes);
  std::memcpy(block->code, bytes + 4, 32);
}

}  // namespace assay
