// Float8 and int8 codes: a table of 256 values, then the scale of the block. (code - zero) is exact in float, so that
// each value is rounded once.
#include <array>

#include "quant/bits.h"
#include "quant/weight.h"

namespace assay {
namespace {

// The grid of scales is [ceil(rows / block_rows), ceil(cols / block_cols)]; one scale and one a row are blocks of
// other sizes.
class ByteWeight final : public DecodedWeight<ByteWeight> {
 public:
  // scale_dtype and extents are checked by MakeByteWeight: the grid is [grid_rows, grid_cols].
  ByteWeight(std::string name, const std::string& format, const CheckpointTensor& code, const CheckpointTensor* scale,
             const CheckpointTensor* zero, int64_t block_rows, int64_t block_cols)
      : DecodedWeight(std::move(name), format, code.shape), code_(code), scale_(scale), zero_(zero) {
    SetBlock(std::max<int64_t>(block_rows, 1), std::max<int64_t>(block_cols, 1));
    grid_cols_ = (cols() + this->block_cols() - 1) / this->block_cols();
    table_ = ByteFloatTable(code.dtype);
    scale_dtype_ = scale != nullptr ? scale->dtype : DType::kInvalid;
    if (scale_dtype_ == DType::kU8) scale_dtype_ = DType::kF8E8M0;
    AddPart("weight", &code);
    AddPart("scale", scale);
    AddPart("zero", zero);
  }

  template <class T>
  void Rows(int64_t first, int64_t count, T* out) const {
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(code_.data) + first * cols();
    const int64_t step = block_cols();
    for (int64_t r = first; r < first + count; ++r, codes += cols(), out += cols()) {
      const int64_t grid = r / block_rows() * grid_cols_;
      for (int64_t g = 0, c = 0; c < cols(); ++g, c += step) {
        const int64_t end = std::min(c + step, cols());
        const T scale = ScaleAt<T>(grid + g);
        if (zero_ != nullptr) {
          const T zero = static_cast<T>(DecodeBits(LoadBits(zero_->data, grid + g, zero_->dtype), zero_->dtype));
          for (int64_t i = c; i < end; ++i) out[i] = (static_cast<T>(table_[codes[i]]) - zero) * scale;
        } else {
          for (int64_t i = c; i < end; ++i) out[i] = static_cast<T>(table_[codes[i]]) * scale;
        }
      }
    }
  }

  // Codes of a block are counted in four tables, so that runs of one code do not wait for each other.
  // Counts fit 32 bits: a run has at most 2^31 codes.
  bool Tally(WeightTally* tally) const override {
    constexpr int64_t kWorthwhile = 1024;  // codes a block: as many as the tables take to empty
    if (zero_ != nullptr || block_rows() * block_cols() < kWorthwhile) return false;
    const int64_t run = std::min(block_rows(), std::max<int64_t>(1, (int64_t{1} << 31) / std::max<int64_t>(cols(), 1)));
    std::array<std::array<uint32_t, 256>, 4> counts;
    for (int64_t top = 0; top < rows(); top += block_rows()) {
      const int64_t bottom = std::min(top + block_rows(), rows());
      for (int64_t g = 0, left = 0; left < cols(); ++g, left += block_cols()) {
        const int64_t width = std::min(block_cols(), cols() - left);
        const float scale = ScaleAt<float>(top / block_rows() * grid_cols_ + g);
        for (int64_t r = top; r < bottom; r += run) {
          for (auto& table : counts) table.fill(0);
          for (int64_t i = r; i < std::min(r + run, bottom); ++i) {
            const uint8_t* codes = reinterpret_cast<const uint8_t*>(code_.data) + i * cols() + left;
            int64_t c = 0;
            for (; c + 4 <= width; c += 4) {
              ++counts[0][codes[c]];
              ++counts[1][codes[c + 1]];
              ++counts[2][codes[c + 2]];
              ++counts[3][codes[c + 3]];
            }
            for (; c < width; ++c) ++counts[0][codes[c]];
          }
          for (size_t b = 0; b < 256; ++b) {
            const uint64_t n = uint64_t{counts[0][b]} + counts[1][b] + counts[2][b] + counts[3][b];
            tally->Add(table_[b] * scale, n);
          }
        }
      }
    }
    return true;
  }

  void Parts(int64_t row, WeightParts* parts) const override {
    const size_t n = static_cast<size_t>(cols());
    parts->Resize(n);
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(code_.data) + row * cols();
    for (int64_t c = 0; c < cols(); ++c) {
      const size_t i = static_cast<size_t>(c);
      const int64_t at = row / block_rows() * grid_cols_ + c / block_cols();
      parts->code[i] = static_cast<double>(table_[codes[c]]);
      parts->scale[i] = ScaleAt<double>(at);
      parts->group[i] = static_cast<int32_t>(c / block_cols());
      if (zero_ != nullptr) parts->zero[i] = DecodeBits(LoadBits(zero_->data, at, zero_->dtype), zero_->dtype);
    }
  }

 private:
  // at: row-major in the grid.
  template <class T>
  T ScaleAt(int64_t at) const {
    if (scale_ == nullptr) return T{1};
    return static_cast<T>(DecodeBits(LoadBits(scale_->data, at, scale_dtype_), scale_dtype_));
  }

  const CheckpointTensor& code_;
  const CheckpointTensor *scale_, *zero_;
  DType scale_dtype_;
  int64_t grid_cols_ = 1;
  std::array<float, 256> table_;
};

}  // namespace

// All sizes are held against each other here; Rows and Parts then read without checks.
Result<WeightPtr> MakeByteWeight(std::string name, const CheckpointTensor& code, const CheckpointTensor* scale,
                                 const CheckpointTensor* zero, int64_t block_rows, int64_t block_cols) {
  if (BitsOf(code.dtype) != 8)
    return BadTensor(code, "codes of one byte expected, found " + std::string(NameOf(code.dtype)));
  if (code.size_bytes == 0) return BadTensor(code, "no elements");
  const int64_t cols = code.shape.empty() ? 1 : code.shape.back(),
                rows = cols == 0 ? 0 : ElementCount(code.shape) / cols;
  std::string how = ", unscaled";
  if (scale != nullptr) {
    if (BitsOf(scale->dtype) < 8 || (!IsFloat(scale->dtype) && scale->dtype != DType::kU8)) {
      return BadTensor(*scale, "scales of type " + std::string(NameOf(scale->dtype)));
    }
    const int64_t n = ElementCount(scale->shape);
    if (block_rows > 0 && block_cols > 0) {
      const int64_t grid_rows = (rows + block_rows - 1) / block_rows, grid_cols = (cols + block_cols - 1) / block_cols;
      // Experts that lie together have a grid each; where blocks end with an expert these are one grid.
      const bool stacked = code.shape.size() == 3 && scale->shape.size() == 3 && code.shape[1] % block_rows == 0 &&
                           scale->shape[0] == code.shape[0] && scale->shape[1] == code.shape[1] / block_rows &&
                           scale->shape[2] == grid_cols;
      if (!stacked && scale->shape != std::vector<int64_t>{grid_rows, grid_cols}) {
        const bool turned = scale->shape == std::vector<int64_t>{grid_cols, grid_rows};
        return BadTensor(*scale, "grid " + ShapeText(scale->shape) + (turned ? " is transposed: " : ": ") + "weight " +
                                     ShapeText(code.shape) + " in blocks of " + std::to_string(block_rows) + "x" +
                                     std::to_string(block_cols) + " needs [" + std::to_string(grid_rows) + ", " +
                                     std::to_string(grid_cols) + "]");
      }
      how = ", blocks " + std::to_string(block_rows) + "x" + std::to_string(block_cols);
    } else if (n == 1) {
      block_rows = std::max<int64_t>(rows, 1), block_cols = std::max<int64_t>(cols, 1);
      how = ", one scale";
    } else if (n == rows && (code.shape.size() < 3 || scale->shape.size() < 2 || scale->shape[1] == code.shape[1])) {
      block_rows = 1, block_cols = std::max<int64_t>(cols, 1);
      how = ", scale a row";
    } else {
      return BadTensor(*scale, "shape " + ShapeText(scale->shape) + " is neither one scale nor one a row of weight " +
                                   ShapeText(code.shape));
    }
  } else {
    block_rows = std::max<int64_t>(rows, 1), block_cols = std::max<int64_t>(cols, 1);
  }
  if (zero != nullptr &&
      (scale == nullptr || ElementCount(zero->shape) != ElementCount(scale->shape) || BitsOf(zero->dtype) < 8)) {
    return BadTensor(*zero, "zero points " + ShapeText(zero->shape) + " do not match the scales");
  }
  const std::string format = std::string(NameOf(code.dtype)) + how;
  return WeightPtr(std::make_shared<ByteWeight>(std::move(name), format, code, scale, zero, block_rows, block_cols));
}

}  // namespace assay
