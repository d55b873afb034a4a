// Blocks of ggml's quantised types, taken apart into what they all are: small integers, and for each group of them a
// scale and a minimum. value = scale * code - minimum.
//
// Float results are the exact value rounded once: scale * code is exact in float except for q6_k, iq4_xs and q8_k,
// whose minimum is zero. Double results are exact.
#pragma once

#include <cstdint>

namespace assay {

// Elements; the largest block of any type.
constexpr int kMaxGgmlBlock = 256;

// One block. Groups have `group` consecutive elements each (GgmlFormat).
struct GgmlBlock {
  int8_t code[kMaxGgmlBlock];
  float scale[16];
  float minimum[16];
};

// One entry a type, static. id is ggml's number (enum ggml_type), block_elems a multiple of `group`.
struct GgmlFormat {
  uint32_t id;
  int block_elems;
  int group;
  bool has_minimum;  // false: minimum is left unset and counts as 0
  // Reads block_bytes (io/gguf.h, GgmlSize) bytes at any alignment.
  void (*unpack)(const uint8_t* bytes, GgmlBlock* block);
  // The stored pattern of element i, for questions of layout and code books: below 2^bits.
  int bits;
};

// Only types that are quantised and read; nullptr for the others (plain numbers, iq1 to iq3, ternary).
const GgmlFormat* FindGgmlFormat(uint32_t id);

// The grid of iq4_nl and iq4_xs, ascending.
inline constexpr int8_t kIq4Grid[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// One file a family of formats.
// Each reads one block (its layout stands at the definition) and fills code for block_elems elements, scale for
// block_elems / group groups, and minimum where has_minimum is set.
void UnpackQ4_0(const uint8_t* bytes, GgmlBlock* block);
void UnpackQ4_1(const uint8_t* bytes, GgmlBlock* block);
void UnpackQ5_0(const uint8_t* bytes, GgmlBlock* block);
void UnpackQ5_1(const uint8_t* bytes, GgmlBlock* block);
void UnpackQ8_0(const uint8_t* bytes, GgmlBlock* block);
void UnpackQ8_1(const uint8_t* bytes, GgmlBlock* block);
void UnpackQ2K(const uint8_t* bytes, GgmlBlock* block);
void UnpackQ3K(const uint8_t* bytes, GgmlBlock* block);
void UnpackQ4K(const uint8_t* bytes, GgmlBlock* block);
void UnpackQ5K(const uint8_t* bytes, GgmlBlock* block);
void UnpackQ6K(const uint8_t* bytes, GgmlBlock* block);
void UnpackQ8K(const uint8_t* bytes, GgmlBlock* block);
void UnpackIq4Nl(const uint8_t* bytes, GgmlBlock* block);
void UnpackIq4Xs(const uint8_t* bytes, GgmlBlock* block);
void UnpackMxfp4(const uint8_t* bytes, GgmlBlock* block);
void UnpackNvfp4(const uint8_t* bytes, GgmlBlock* block);

}  // namespace assay
