#include "quant/ggml_block.h"

namespace assay {
namespace {

// Sizes are those of io/gguf.cpp; groups and bits are the format's own (ggml-common.h, the block structs).
constexpr GgmlFormat kFormats[] = {
    {2, 32, 32, false, UnpackQ4_0, 4},   {3, 32, 32, true, UnpackQ4_1, 4},     {6, 32, 32, false, UnpackQ5_0, 5},
    {7, 32, 32, true, UnpackQ5_1, 5},    {8, 32, 32, false, UnpackQ8_0, 8},    {9, 32, 32, false, UnpackQ8_1, 8},
    {10, 256, 16, true, UnpackQ2K, 2},   {11, 256, 16, false, UnpackQ3K, 3},   {12, 256, 32, true, UnpackQ4K, 4},
    {13, 256, 32, true, UnpackQ5K, 5},   {14, 256, 16, false, UnpackQ6K, 6},   {15, 256, 256, false, UnpackQ8K, 8},
    {20, 32, 32, false, UnpackIq4Nl, 4}, {23, 256, 32, false, UnpackIq4Xs, 4}, {39, 32, 32, false, UnpackMxfp4, 4},
    {40, 64, 16, false, UnpackNvfp4, 4},
};

}  // namespace

const GgmlFormat* FindGgmlFormat(uint32_t id) {
  for (const GgmlFormat& format : kFormats) {
    if (format.id == id) return &format;
  }
  return nullptr;
}

}  // namespace assay
