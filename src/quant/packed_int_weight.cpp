// GPTQ, AWQ and compressed-tensors' pack-quantized: integers in 32-bit words, scales and zero points by groups of input
// columns. (code - zero) is exact, so that each value is rounded once.
//
//   GPTQ        code [K / p, N]: word (k / p, n), bits b (k mod p); zero [G, N / p] along N; scale [G, N]
//   AWQ         code [K, N / p], zero [G, N / p]: nibble i of a word is column 0 2 4 6 1 3 5 7 [i]; scale [G, N]
//   compressed  code [N, ceil(K / p)]; zero [N / p, G] along N; scale [N, G] (or [N, 1], or one)
// with p = 32 / b codes a word.
#include <algorithm>

#include "quant/bits.h"
#include "quant/weight.h"

namespace assay {
namespace {

constexpr int kAwqPlace[8] = {0, 4, 1, 5, 2, 6, 3, 7};  // nibble that holds column c of its eight

// Everything that Make... has checked and derived.
struct IntLayout {
  IntPacking packing = IntPacking::kGptq;
  int bits = 4;
  int64_t rows = 0, cols = 0;     // N, K of the logical weight
  int64_t groups = 0;             // G
  std::vector<int32_t> group;     // of each column, each in [0, G)
  bool scale_once_a_row = false;  // compressed with one group, or one scale in all
  bool one_scale = false;
};

// Elements are decoded one by one: the bits of a code and the place of its scale follow from the packing alone.
class PackedIntWeight final : public DecodedWeight<PackedIntWeight> {
 public:
  PackedIntWeight(std::string name, const std::string& format, IntLayout layout, const PackedIntTensors& tensors)
      : DecodedWeight(std::move(name), format, {layout.rows, layout.cols}),
        layout_(std::move(layout)),
        tensors_(tensors) {
    SetBlock(1, std::max<int64_t>(1, layout_.cols / std::max<int64_t>(layout_.groups, 1)));
    AddPart("weight", tensors.code);
    AddPart("scale", tensors.scale);
    AddPart("zero", tensors.zero);
    AddPart("g_idx", tensors.g_idx);
  }

  // All rows of the range side by side, so that the words of the transposed layouts are read along the file.
  template <class T>
  void Rows(int64_t first, int64_t count, T* out) const {
    std::vector<T> scale(static_cast<size_t>(layout_.groups * count)), zero(scale.size());
    for (int64_t g = 0; g < layout_.groups; ++g) {
      for (int64_t i = 0; i < count; ++i) {
        scale[static_cast<size_t>(g * count + i)] = static_cast<T>(Scale(first + i, g));
        zero[static_cast<size_t>(g * count + i)] = static_cast<T>(Zero(first + i, g));
      }
    }
    const bool by_rows = layout_.packing == IntPacking::kCompressed;
    const int64_t outer = by_rows ? count : cols(), inner = by_rows ? cols() : count;
    for (int64_t a = 0; a < outer; ++a) {
      for (int64_t b = 0; b < inner; ++b) {
        const int64_t i = by_rows ? a : b, k = by_rows ? b : a;
        const size_t at = static_cast<size_t>(layout_.group[static_cast<size_t>(k)] * count + i);
        out[i * cols() + k] = (static_cast<T>(Code(first + i, k)) - zero[at]) * scale[at];
      }
    }
  }

  void Parts(int64_t row, WeightParts* parts) const override {
    const size_t n = static_cast<size_t>(cols());
    parts->code.resize(n);
    parts->zero.resize(n);
    parts->scale.resize(n);
    parts->group = layout_.group;
    for (size_t c = 0; c < n; ++c) {
      parts->code[c] = Code(row, static_cast<int64_t>(c));
      parts->zero[c] = Zero(row, layout_.group[c]);
      parts->scale[c] = Scale(row, layout_.group[c]);
    }
  }

 private:
  // The code at `place` in a word; the file is little-endian.
  int Field(const CheckpointTensor* tensor, int64_t word, int64_t place) const {
    const uint32_t value = LoadAs<uint32_t>(tensor->data + 4 * word);
    return static_cast<int>(value >> (layout_.bits * place) & ((1u << layout_.bits) - 1));
  }
  // n: output row, k: input column of the logical weight.
  int Code(int64_t n, int64_t k) const {
    const int64_t p = 32 / layout_.bits;
    switch (layout_.packing) {
      case IntPacking::kGptq:
      case IntPacking::kGptqV2:
        return Field(tensors_.code, k / p * layout_.rows + n, k % p);
      case IntPacking::kAwq:
        return Field(tensors_.code, k * (layout_.rows / p) + n / p, kAwqPlace[n % 8]);
      case IntPacking::kCompressed:
        break;
    }
    return Field(tensors_.code, n * ((layout_.cols + p - 1) / p) + k / p, k % p);
  }
  double Zero(int64_t n, int64_t g) const {
    const int64_t p = 32 / layout_.bits;
    if (tensors_.zero == nullptr) return 1 << (layout_.bits - 1);  // symmetric
    switch (layout_.packing) {
      case IntPacking::kGptq:  // stored less 1; a stored maximum means 0 + 2^b, as readers take it
        return Field(tensors_.zero, g * ((layout_.rows + p - 1) / p) + n / p, n % p) + 1;
      case IntPacking::kGptqV2:
        return Field(tensors_.zero, g * ((layout_.rows + p - 1) / p) + n / p, n % p);
      case IntPacking::kAwq:
        return Field(tensors_.zero, g * (layout_.rows / p) + n / p, kAwqPlace[n % 8]);
      case IntPacking::kCompressed:
        break;
    }
    return Field(tensors_.zero, n / p * layout_.groups + g, n % p);
  }
  double Scale(int64_t n, int64_t g) const {
    int64_t at = g * layout_.rows + n;
    if (layout_.packing == IntPacking::kCompressed) at = layout_.one_scale ? 0 : n * layout_.groups + g;
    return DecodeBits(LoadBits(tensors_.scale->data, at, tensors_.scale->dtype), tensors_.scale->dtype);
  }

  IntLayout layout_;
  PackedIntTensors tensors_;
};

// Shape [a, b], exactly.
Status Expect(const CheckpointTensor& tensor, int64_t a, int64_t b) {
  if (tensor.shape != std::vector<int64_t>{a, b}) {
    return BadTensor(tensor, "shape " + ShapeText(tensor.shape) + " where " + ShapeText({a, b}) + " is needed");
  }
  return {};
}

// compressed-tensors: the logical shape stands in a tensor of two integers.
Status CompressedShape(const PackedIntTensors& t, int64_t p, IntLayout* layout) {
  layout->rows = t.code->shape[0];
  layout->cols = t.code->shape[1] * p;
  if (t.shape != nullptr) {
    if (ElementCount(t.shape->shape) != 2 || IsFloat(t.shape->dtype))
      return BadTensor(*t.shape, "two integers expected");
    const double n = DecodeBits(LoadBits(t.shape->data, 0, t.shape->dtype), t.shape->dtype);
    const double k = DecodeBits(LoadBits(t.shape->data, 1, t.shape->dtype), t.shape->dtype);
    if (n != static_cast<double>(layout->rows) || !(k >= 1) || k > static_cast<double>(layout->cols) ||
        k <= static_cast<double>(layout->cols - p)) {
      return BadTensor(*t.shape, "does not fit the packed codes " + ShapeText(t.code->shape));
    }
    layout->cols = static_cast<int64_t>(k);
  }
  const int64_t scales = ElementCount(t.scale->shape);
  layout->one_scale = scales == 1;
  layout->groups = layout->one_scale || layout->rows == 0 ? 1 : scales / layout->rows;
  if (!layout->one_scale) ASSAY_RETURN_IF_ERROR(Expect(*t.scale, layout->rows, layout->groups));
  if (t.zero != nullptr) ASSAY_RETURN_IF_ERROR(Expect(*t.zero, (layout->rows + p - 1) / p, layout->groups));
  return {};
}

// GPTQ and AWQ, which store [in, out].
Status TransposedShape(const PackedIntTensors& t, int64_t p, IntLayout* layout) {
  const bool awq = layout->packing == IntPacking::kAwq;
  layout->rows = t.code->shape[1] * (awq ? p : 1);
  layout->cols = t.code->shape[0] * (awq ? 1 : p);
  if (t.scale->shape.size() != 2) return BadTensor(*t.scale, "rank 2 expected, found " + ShapeText(t.scale->shape));
  layout->groups = t.scale->shape[0];
  ASSAY_RETURN_IF_ERROR(Expect(*t.scale, layout->groups, layout->rows));
  if (t.zero == nullptr) return {};
  return Expect(*t.zero, layout->groups, awq ? layout->rows / p : (layout->rows + p - 1) / p);
}

// From g_idx (act order), or in equal runs of columns.
Status Groups(const PackedIntTensors& t, IntLayout* layout) {
  if (layout->groups <= 0 || layout->cols <= 0) return BadTensor(*t.scale, "no scales");
  layout->group.resize(static_cast<size_t>(layout->cols));
  if (t.g_idx != nullptr && ElementCount(t.g_idx->shape) > 0) {
    if (ElementCount(t.g_idx->shape) != layout->cols || IsFloat(t.g_idx->dtype)) {
      return BadTensor(*t.g_idx, "one integer for each of " + std::to_string(layout->cols) + " columns expected");
    }
    for (int64_t k = 0; k < layout->cols; ++k) {
      const double g = DecodeBits(LoadBits(t.g_idx->data, k, t.g_idx->dtype), t.g_idx->dtype);
      if (!(g >= 0 && g < static_cast<double>(layout->groups))) {
        return BadTensor(*t.g_idx, "column " + std::to_string(k) + " has group " +
                                       std::to_string(static_cast<int64_t>(g)) + " of " +
                                       std::to_string(layout->groups));
      }
      layout->group[static_cast<size_t>(k)] = static_cast<int32_t>(g);
    }
    return {};
  }
  const int64_t size = (layout->cols + layout->groups - 1) / layout->groups;
  for (int64_t k = 0; k < layout->cols; ++k) layout->group[static_cast<size_t>(k)] = static_cast<int32_t>(k / size);
  return {};
}

}  // namespace

bool DecodesPackedInts(IntPacking packing, int bits) {
  return bits == 4 || (packing != IntPacking::kAwq && (bits == 2 || bits == 8));
}

Result<WeightPtr> MakePackedIntWeight(std::string name, IntPacking packing, int bits, const PackedIntTensors& tensors) {
  const CheckpointTensor& code = *tensors.code;
  if (!DecodesPackedInts(packing, bits)) {
    return BadTensor(code, "this packing of " + std::to_string(bits) +
                               "-bit codes (2, 4 and 8 bits are read, AWQ: 4) is not decoded");
  }
  if (tensors.scale == nullptr) return BadTensor(code, "its scales are missing");
  if (BitsOf(code.dtype) != 32 || code.shape.size() != 2) {
    return BadTensor(code, "packed codes are 32-bit words of rank 2, found " + std::string(NameOf(code.dtype)) + " " +
                               ShapeText(code.shape));
  }
  if (code.size_bytes == 0) return BadTensor(code, "no elements");
  if (!IsFloat(tensors.scale->dtype) || BitsOf(tensors.scale->dtype) < 8) {
    return BadTensor(*tensors.scale, "scales are floats, found " + std::string(NameOf(tensors.scale->dtype)));
  }
  if (tensors.zero != nullptr && BitsOf(tensors.zero->dtype) != 32) {
    return BadTensor(*tensors.zero,
                     "packed zero points are 32-bit words, found " + std::string(NameOf(tensors.zero->dtype)));
  }
  IntLayout layout;
  layout.packing = packing;
  layout.bits = bits;
  const int64_t p = 32 / bits;
  ASSAY_RETURN_IF_ERROR(packing == IntPacking::kCompressed ? CompressedShape(tensors, p, &layout)
                                                           : TransposedShape(tensors, p, &layout));
  ASSAY_RETURN_IF_ERROR(Groups(tensors, &layout));
  const char* names[] = {"gptq", "gptq_v2", "awq", "int"};
  const std::string format = std::string(names[static_cast<int>(packing)]) + " " + std::to_string(bits) + " bit, " +
                             std::to_string(layout.groups) + " groups";
  return WeightPtr(std::make_shared<PackedIntWeight>(std::move(name), format, std::move(layout), tensors));
}

}  // namespace assay
