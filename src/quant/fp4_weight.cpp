// NVFP4 and MXFP4. e2m1 * scale is exact in float (5 significant bits); the global scale then rounds once.
#include <array>

#include "quant/bits.h"
#include "quant/weight.h"

namespace assay {
namespace {

// Both codes of a byte.
struct Pair {
  float low, high;
};

// One look-up gives two elements: a byte is the unit that is stored.
constexpr std::array<Pair, 256> MakePairs() {
  std::array<Pair, 256> pairs{};
  for (uint32_t i = 0; i < 256; ++i) {
    pairs[i] = {static_cast<float>(DecodeSmallFloat(i & 15, kFormatF4E2M1)),
                static_cast<float>(DecodeSmallFloat(i >> 4, kFormatF4E2M1))};
  }
  return pairs;
}
constexpr std::array<Pair, 256> kPairs = MakePairs();

// value = e2m1 * scale of the group, then times (or divided by) the global scale. cols is even, and a multiple of the
// group.
class Fp4Weight final : public DecodedWeight<Fp4Weight> {
 public:
  Fp4Weight(std::string name, const std::string& format, std::vector<int64_t> shape, const CheckpointTensor& code,
            const CheckpointTensor& scale, const CheckpointTensor* global, const Fp4Layout& layout)
      : DecodedWeight(std::move(name), format, std::move(shape)), code_(code), scale_(scale), layout_(layout) {
    SetBlock(1, layout.group);
    table_ = ByteFloatTable(layout.exponent_scales ? DType::kF8E8M0 : DType::kF8E4M3FN);
    if (global != nullptr) {
      has_global_ = true;
      global_ = static_cast<float>(DecodeBits(LoadBits(global->data, 0, global->dtype), global->dtype));
    }
    AddPart("weight", &code);
    AddPart("scale", &scale);
    AddPart("global_scale", global);
  }

  template <class T>
  void Rows(int64_t first, int64_t count, T* out) const {
    const int64_t groups = cols() / layout_.group, bytes = layout_.group / 2;
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(code_.data) + first * (cols() / 2);
    const uint8_t* scales = reinterpret_cast<const uint8_t*>(scale_.data) + first * groups;
    for (int64_t g = 0; g < count * groups; ++g, codes += bytes, out += layout_.group) {
      const T scale = static_cast<T>(table_[scales[g]]);
      for (int64_t i = 0; i < bytes; ++i) {
        out[2 * i] = static_cast<T>(kPairs[codes[i]].low) * scale;
        out[2 * i + 1] = static_cast<T>(kPairs[codes[i]].high) * scale;
      }
      if (has_global_) ByGlobal(out);
    }
  }

  // counts[scale byte][code byte], in runs of rows that cannot overflow 32 bits.
  // Exact, since an element's value depends on its scale byte and its code byte alone: 65536 kinds are decoded once
  // each, instead of all elements.
  bool Tally(WeightTally* tally) const override {
    const int64_t groups = cols() / layout_.group, bytes = layout_.group / 2, row_bytes = cols() / 2;
    const int64_t run = std::max<int64_t>(1, (int64_t{1} << 31) / row_bytes);
    std::vector<uint32_t> counts(256 * 256);
    for (int64_t r = 0; r < rows(); r += run) {
      const int64_t n = std::min(run, rows() - r) * groups;
      const uint8_t* codes = reinterpret_cast<const uint8_t*>(code_.data) + r * row_bytes;
      const uint8_t* scales = reinterpret_cast<const uint8_t*>(scale_.data) + r * groups;
      std::fill(counts.begin(), counts.end(), 0);
      for (int64_t g = 0; g < n; ++g, codes += bytes) {
        uint32_t* row = counts.data() + 256 * static_cast<size_t>(scales[g]);
        for (int64_t i = 0; i < bytes; ++i) ++row[codes[i]];
      }
      for (size_t at = 0; at < counts.size(); ++at) {
        if (counts[at] == 0) continue;
        const float scale = table_[at >> 8];
        float pair[2] = {kPairs[at & 255].low * scale, kPairs[at & 255].high * scale};
        for (float& value : pair) {
          if (has_global_) value = layout_.divide_global ? value / global_ : value * global_;
          tally->Add(value, counts[at]);
        }
      }
    }
    return true;
  }

  void Parts(int64_t row, WeightParts* parts) const override {
    const size_t n = static_cast<size_t>(cols());
    parts->Resize(n);
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(code_.data) + row * (cols() / 2);
    const uint8_t* scales = reinterpret_cast<const uint8_t*>(scale_.data) + row * (cols() / layout_.group);
    for (int64_t c = 0; c < cols(); ++c) {
      const size_t i = static_cast<size_t>(c);
      parts->code[i] = DecodeSmallFloat(codes[c / 2] >> (4 * (c & 1)) & 15u, kFormatF4E2M1);
      double scale = static_cast<double>(table_[scales[c / layout_.group]]);
      if (has_global_)
        scale = layout_.divide_global ? scale / static_cast<double>(global_) : scale * static_cast<double>(global_);
      parts->scale[i] = scale;
      parts->group[i] = static_cast<int32_t>(c / layout_.group);
    }
  }

 private:
  // After the product, as its own rounding.
  template <class T>
  void ByGlobal(T* group) const {
    const T global = static_cast<T>(global_);
    if (layout_.divide_global) {
      for (int64_t i = 0; i < layout_.group; ++i) group[i] /= global;
    } else {
      for (int64_t i = 0; i < layout_.group; ++i) group[i] *= global;
    }
  }

  const CheckpointTensor &code_, &scale_;
  Fp4Layout layout_;
  std::array<float, 256> table_;
  bool has_global_ = false;
  float global_ = 1;
};

}  // namespace

// [.., K / 2] bytes, or gpt-oss's [.., K / 32, 16].
Result<WeightPtr> MakeFp4Weight(std::string name, const CheckpointTensor& code, const CheckpointTensor& scale,
                                const CheckpointTensor* global, const Fp4Layout& layout) {
  if (BitsOf(code.dtype) != 8)
    return BadTensor(code, "packed codes of one byte expected, found " + std::string(NameOf(code.dtype)));
  if (BitsOf(scale.dtype) != 8) {
    return BadTensor(scale, std::string("scales of one byte expected, found ") + std::string(NameOf(scale.dtype)) +
                                (scale.dtype == DType::kF32 ? " (float scales where exponents belong?)" : ""));
  }
  if (code.size_bytes == 0) return BadTensor(code, "no elements");
  if (code.shape.empty()) return BadTensor(code, "a scalar cannot be packed");
  std::vector<int64_t> shape = code.shape;
  // Blocks of their own axis: [..., K / 32, 16] bytes beside [..., K / 32] scales.
  if (shape.size() >= 2 && shape.size() == scale.shape.size() + 1 && shape.back() * 2 == layout.group) {
    shape.pop_back();
    shape.back() *= layout.group;
  } else {
    shape.back() *= 2;
  }
  std::vector<int64_t> want = shape;
  want.back() /= layout.group;
  if (shape.back() % layout.group != 0) {
    return BadTensor(
        code, "rows of " + std::to_string(shape.back()) + " do not fill groups of " + std::to_string(layout.group));
  }
  if (scale.shape != want) {
    return BadTensor(scale, "scales " + ShapeText(scale.shape) + ": weight " + ShapeText(shape) + " in groups of " +
                                std::to_string(layout.group) + " needs " + ShapeText(want));
  }
  if (global != nullptr &&
      (global->size_bytes == 0 || global->size_bytes * 8 != static_cast<uint64_t>(BitsOf(global->dtype)))) {
    return BadTensor(*global, "one global scale expected, found shape " + ShapeText(global->shape));
  }
  std::string format = layout.exponent_scales ? "mxfp4" : "nvfp4";
  format += ", groups of " + std::to_string(layout.group);
  return WeightPtr(std::make_shared<Fp4Weight>(std::move(name), format, std::move(shape), code, scale, global, layout));
}

}  // namespace assay
