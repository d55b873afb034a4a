// Four-bit types with a grid: iq4_nl, iq4_xs (a fixed grid of sixteen integers) and the block floats mxfp4 and nvfp4
// (e2m1, held doubled so that codes are integers; the scale is halved for it). Byte j of a run of 16 holds element j
// low and element 16 + j high; nvfp4 does so by runs of 8.
#include "quant/bits.h"
#include "quant/ggml_block.h"

namespace assay {
namespace {

// half bytes, 2 half codes: low nibbles first.
void Look(const uint8_t* from, int half, const int8_t* grid, int8_t* code) {
  for (int j = 0; j < half; ++j) {
    code[j] = grid[from[j] & 15];
    code[half + j] = grid[from[j] >> 4];
  }
}

}  // namespace

void UnpackIq4Nl(const uint8_t* bytes, GgmlBlock* block) {  // half scale, 16 bytes
  block->scale[0] = HalfAt(bytes);
  Look(bytes + 2, 16, kIq4Grid, block->code);
}

// half d, 16 bits of two high bits a group, four bytes of low nibbles of the eight scales (32 off), 128 bytes.
void UnpackIq4Xs(const uint8_t* bytes, GgmlBlock* block) {
  const float d = HalfAt(bytes);
  const uint32_t high = LoadAs<uint16_t>(bytes + 2);
  for (int g = 0; g < 8; ++g) {
    const int low = bytes[4 + g / 2] >> (4 * (g & 1)) & 15;
    block->scale[g] = d * static_cast<float>((low | static_cast<int>(high >> (2 * g) & 3) << 4) - 32);
    Look(bytes + 8 + 16 * g, 16, kIq4Grid, block->code + 32 * g);
  }
}

void UnpackMxfp4(const uint8_t* bytes, GgmlBlock* block) {  // exponent, 16 bytes
  // Exact: halving a power of two only changes its exponent, and the smallest one becomes a smaller subnormal.
  block->scale[0] = E8m0ToFloat(bytes[0]) * 0.5f;
  Look(bytes + 1, 16, kE2m1Doubled, block->code);
}

// Four unsigned e4m3 scales (0x7f counts as 0, as ggml has it), 32 bytes.
void UnpackNvfp4(const uint8_t* bytes, GgmlBlock* block) {
  for (int g = 0; g < 4; ++g) {
    const uint8_t code = bytes[g] & 0x7f;
    block->scale[g] = code == 0x7f ? 0.0f : static_cast<float>(DecodeSmallFloat(code, kFormatF8E4M3FN)) * 0.5f;
    Look(bytes + 4 + 8 * g, 8, kE2m1Doubled, block->code + 16 * g);
  }
}

}  // namespace assay
