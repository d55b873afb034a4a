// One weight of a checkpoint under its logical name, however it is stored: shape, and rows decoded to float or double.
//
// Double rows are exact where the format is (products of codes and scales of 32 bits or fewer are, a division by a
// global scale is rounded once); float rows are the exact value rounded once. The bytes are hostile: constructors check
// shapes against each other (MakeX functions give a Status), and decoding then reads inside of them alone; what the
// values are (NaN scales, zeros) is passed on as it is, for the audit to judge.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "io/safetensors.h"
#include "tensor/dtype.h"

namespace assay {

// What a row's elements are made of: value = (code - zero) * scale, each of them [cols].
struct WeightParts {
  std::vector<double> code, zero, scale;
  std::vector<int32_t> group;  // which scale of the row's block of rows

  // Room for n elements; zeros are 0, the others what they were.
  void Resize(size_t n) {
    code.resize(n);
    zero.assign(n, 0);
    scale.resize(n);
    group.resize(n);
  }
};

// Of all decoded float elements.
struct WeightTally {
  uint64_t nan = 0, inf = 0, zero = 0;
  double min = 0, max = 0, sum_sq = 0;  // over finite elements; min > max: there is none

  WeightTally();
  void Add(float value, uint64_t times);
};

// A stored tensor that a weight is made of.
struct StoredPart {
  std::string role;  // "weight", "scale", "global_scale", "zero", "g_idx", "blocks"
  const CheckpointTensor* tensor;
};

// Immutable once made; decoding may run in several threads. Borrows the stored tensors.
class Weight {
 public:
  virtual ~Weight() = default;

  const std::string& name() const { return name_; }
  const std::string& format() const { return format_; }         // for people: "f8_e4m3fn, blocks 128x128"
  const std::vector<int64_t>& shape() const { return shape_; }  // [..., cols]; leading axes are flattened to rows
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  // Elements with equal row / block_rows and equal group (WeightParts), which is column / block_cols unless columns
  // were reordered, share a scale; 0: stored as plain numbers.
  int64_t block_rows() const { return block_rows_; }
  int64_t block_cols() const { return block_cols_; }
  bool quantised() const { return block_cols_ > 0; }
  const std::vector<StoredPart>& stored() const { return stored_; }
  const StoredPart* part(const char* role) const;
  // Its share of the stored bytes.
  virtual uint64_t stored_bytes() const;
  // Some rows of a stored tensor, whose other rows are other weights.
  virtual bool is_view() const { return false; }

  // Rows [first, first + count) to out[count * cols]; the range must lie in [0, rows()).
  virtual void Decode(int64_t first, int64_t count, float* out) const = 0;
  virtual void Decode(int64_t first, int64_t count, double* out) const = 0;
  // Measures by counting codes under each scale instead of decoding; false: this format cannot, *tally is untouched.
  virtual bool Tally(WeightTally*) const { return false; }
  // Slow; for explanations. Plain numbers are codes under scale 1.
  virtual void Parts(int64_t row, WeightParts* parts) const;

 protected:
  Weight(std::string name, std::string format, std::vector<int64_t> shape);
  // For formats with scales; others stay at 0.
  void SetBlock(int64_t rows, int64_t cols) { block_rows_ = rows, block_cols_ = cols; }
  void AddPart(const char* role, const CheckpointTensor* tensor) {
    if (tensor != nullptr) stored_.push_back({role, tensor});
  }
  void TakeParts(const std::vector<StoredPart>& parts) { stored_.insert(stored_.end(), parts.begin(), parts.end()); }

 private:
  std::string name_, format_;
  std::vector<int64_t> shape_;
  int64_t rows_ = 1, cols_ = 1;
  int64_t block_rows_ = 0, block_cols_ = 0;
  std::vector<StoredPart> stored_;
};

using WeightPtr = std::shared_ptr<const Weight>;

// A concrete weight writes Rows<T> once for both element types.
template <class Concrete>
class DecodedWeight : public Weight {
 public:
  void Decode(int64_t first, int64_t count, float* out) const override {
    static_cast<const Concrete*>(this)->Rows(first, count, out);
  }
  void Decode(int64_t first, int64_t count, double* out) const override {
    static_cast<const Concrete*>(this)->Rows(first, count, out);
  }

 protected:
  using Weight::Weight;
};

// Product of the shape; 0 as soon as one extent is 0, however large the others are said to be.
int64_t ElementCount(const std::vector<int64_t>& shape);
// "[2, 3]".
std::string ShapeText(const std::vector<int64_t>& shape);
// "FILE: tensor "NAME" at offset N: WHY", kBadInput.
Status BadTensor(const CheckpointTensor& tensor, const std::string& why);

// ---- Formats, one file each ------------------------------------------------------------------------------------
// Tensors must outlive the weight. Optional ones may be null.

// Float of any kind, unscaled.
Result<WeightPtr> MakePlainWeight(std::string name, const CheckpointTensor& tensor);

// One-byte codes (float8 or int8) under a grid of scales. code [N, K] (leading axes allowed with a single scale or one
// a row); scale: one, [N] or [N, 1], or [ceil(N / block_rows), ceil(K / block_cols)] with a block; zero like scale, of
// int8. f8_e8m0 scales, and u8 ones, are exponents.
Result<WeightPtr> MakeByteWeight(std::string name, const CheckpointTensor& code, const CheckpointTensor* scale,
                                 const CheckpointTensor* zero, int64_t block_rows, int64_t block_cols);

// Two e2m1 codes a byte, the low nibble first, with a scale every `group` columns and an optional scale of the whole.
struct Fp4Layout {
  int64_t group = 16;
  bool exponent_scales = false;  // u8 2^(s - 127); otherwise e4m3
  bool divide_global = false;    // value / global rather than value * global
};
Result<WeightPtr> MakeFp4Weight(std::string name, const CheckpointTensor& code, const CheckpointTensor& scale,
                                const CheckpointTensor* global, const Fp4Layout& layout);

// Integers of 2, 4 or 8 bits in 32-bit words.
enum class IntPacking : uint8_t { kGptq, kGptqV2, kAwq, kCompressed };
struct PackedIntTensors {
  const CheckpointTensor *code = nullptr, *scale = nullptr;
  const CheckpointTensor* zero = nullptr;   // packed as the codes; kCompressed without one: symmetric
  const CheckpointTensor* g_idx = nullptr;  // group of each column; null: column / group size
  const CheckpointTensor* shape = nullptr;  // kCompressed: [N, K]
};
// Whether there is a decoder; what has none is no fault of the checkpoint.
bool DecodesPackedInts(IntPacking packing, int bits);
Result<WeightPtr> MakePackedIntWeight(std::string name, IntPacking packing, int bits, const PackedIntTensors& tensors);

// Types whose size is known but not their codes (iq1 to iq3, ternary) have no decoder.
bool DecodesGgml(uint32_t type_id);
// A tensor of a GGUF file. type_id: ggml's number; tensor.dtype is ignored, tensor.shape is the logical one.
Result<WeightPtr> MakeGgmlWeight(std::string name, const CheckpointTensor& tensor, uint32_t type_id);

// ---- Views -----------------------------------------------------------------------------------------------------

// Rows of another weight in the given order, under another name and shape (rows times cols must fit).
WeightPtr MakeRowView(std::string name, WeightPtr base, std::vector<int64_t> shape, std::vector<int64_t> rows);
// kv_b_proj [H (dn + dv), c] of MLA from ggml's halves: k_b [H, c, dn] (transposed) and v_b [H, dv, c].
Result<WeightPtr> MakeJoinedKvB(std::string name, WeightPtr k_b, WeightPtr v_b);

}  // namespace assay
