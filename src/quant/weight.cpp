#include "quant/weight.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "quant/bits.h"
#include "tensor/decode.h"

namespace assay {

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i != 0 ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

int64_t ElementCount(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (const int64_t d : shape) {
    if (d == 0) return 0;
  }
  for (const int64_t d : shape) n *= d;  // bounded: the bytes are there
  return n;
}

Status BadTensor(const CheckpointTensor& tensor, const std::string& why) {
  return Status::BadInput(tensor.file + ": tensor \"" + tensor.name + "\" at offset " +
                          std::to_string(tensor.file_offset) + ": " + why);
}

WeightTally::WeightTally() : min(std::numeric_limits<double>::infinity()), max(-min) {}

// In double: squares of bf16's largest values do not overflow it.
void WeightTally::Add(float value, uint64_t times) {
  if (times == 0) return;
  const double wide = static_cast<double>(value);
  if (std::isnan(value)) {
    nan += times;
  } else if (std::isinf(value)) {
    inf += times;
  } else {
    if (value == 0) zero += times;
    min = std::min(min, wide);
    max = std::max(max, wide);
    sum_sq += wide * wide * static_cast<double>(times);
  }
}

// A scalar is one row of one column.
Weight::Weight(std::string name, std::string format, std::vector<int64_t> shape)
    : name_(std::move(name)), format_(std::move(format)), shape_(std::move(shape)) {
  if (!shape_.empty()) cols_ = shape_.back();
  rows_ = ElementCount(shape_) == 0 ? 0 : ElementCount(shape_) / cols_;
}

const StoredPart* Weight::part(const char* role) const {
  for (const StoredPart& part : stored_) {
    if (part.role == role) return &part;
  }
  return nullptr;
}

uint64_t Weight::stored_bytes() const {
  uint64_t total = 0;
  for (const StoredPart& part : stored_) total += part.tensor->size_bytes;
  return total;
}

void Weight::Parts(int64_t row, WeightParts* parts) const {
  const size_t n = static_cast<size_t>(cols_);
  parts->code.resize(n);
  parts->zero.assign(n, 0);
  parts->scale.assign(n, 1);
  parts->group.assign(n, 0);
  Decode(row, 1, parts->code.data());
}

namespace {

// As stored; float rows of f64 are rounded.
class PlainWeight final : public DecodedWeight<PlainWeight> {
 public:
  PlainWeight(std::string name, const CheckpointTensor& tensor)
      : DecodedWeight(std::move(name), std::string(NameOf(tensor.dtype)), tensor.shape), tensor_(tensor) {
    AddPart("weight", &tensor);
  }
  template <class T>
  void Rows(int64_t first, int64_t count, T* out) const {
    const int64_t n = count * cols();
    if (tensor_.dtype != DType::kBF16) return DecodeTo(tensor_.data, first * cols(), n, tensor_.dtype, out);
    // By far the most common type: a shift, which the compiler turns into vectors.
    const std::byte* from = tensor_.data + 2 * first * cols();
    for (int64_t i = 0; i < n; ++i) {
      out[i] = static_cast<T>(std::bit_cast<float>(static_cast<uint32_t>(LoadAs<uint16_t>(from + 2 * i)) << 16));
    }
  }

 private:
  const CheckpointTensor& tensor_;
};

// Shares the base's bytes; stored_bytes is its share by rows.
class RowView final : public DecodedWeight<RowView> {
 public:
  RowView(std::string name, WeightPtr base, std::vector<int64_t> shape, std::vector<int64_t> order)
      : DecodedWeight(std::move(name), base->format(), std::move(shape)),
        base_(std::move(base)),
        order_(std::move(order)) {
    // Blocks over several rows do not survive another order of rows; those of a row do.
    if (base_->quantised()) SetBlock(1, base_->block_cols());
    TakeParts(base_->stored());
  }
  template <class T>
  void Rows(int64_t first, int64_t count, T* out) const {
    for (int64_t i = 0; i < count;) {  // runs of consecutive rows at once
      const int64_t start = order_[static_cast<size_t>(first + i)];
      int64_t run = 1;
      // An expert's rows and most others lie in the file's order: they are decoded at once.
      while (i + run < count && order_[static_cast<size_t>(first + i + run)] == start + run) ++run;
      base_->Decode(start, run, out + i * cols());
      i += run;
    }
  }
  uint64_t stored_bytes() const override {
    return base_->rows() == 0
               ? 0
               : base_->stored_bytes() / static_cast<uint64_t>(base_->rows()) * static_cast<uint64_t>(rows());
  }
  bool is_view() const override { return true; }
  void Parts(int64_t row, WeightParts* parts) const override { base_->Parts(order_[static_cast<size_t>(row)], parts); }

 private:
  WeightPtr base_;
  std::vector<int64_t> order_;
};

// Row (h, i) is W_UK's for i < dn, else W_UV's. k_b is stored transposed, so that a row of W_UK is a column there:
// the whole head is decoded once and kept while its rows are read.
class JoinedKvB final : public DecodedWeight<JoinedKvB> {
 public:
  JoinedKvB(std::string name, WeightPtr k_b, WeightPtr v_b)
      : DecodedWeight(std::move(name), k_b->format(),
                      {k_b->shape()[0] * (k_b->shape()[2] + v_b->shape()[1]), v_b->shape()[2]}),
        nope_(k_b->shape()[2]),
        value_(v_b->shape()[1]),
        k_b_(std::move(k_b)),
        v_b_(std::move(v_b)) {
    TakeParts(k_b_->stored());
    TakeParts(v_b_->stored());
  }
  template <class T>
  void Rows(int64_t first, int64_t count, T* out) const {
    const int64_t latent = cols();
    std::vector<T> head;  // [c, dn] of the head at hand
    int64_t held = -1;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t h = (first + i) / (nope_ + value_), within = (first + i) % (nope_ + value_);
      T* row = out + i * latent;
      if (within >= nope_) {
        v_b_->Decode(h * value_ + within - nope_, 1, row);
        continue;
      }
      if (held != h) {
        head.resize(static_cast<size_t>(latent * nope_));
        k_b_->Decode(h * latent, latent, head.data());
        held = h;
      }
      for (int64_t c = 0; c < latent; ++c) row[c] = head[static_cast<size_t>(c * nope_ + within)];
    }
  }

 private:
  int64_t nope_, value_;
  WeightPtr k_b_, v_b_;
};

}  // namespace

Result<WeightPtr> MakePlainWeight(std::string name, const CheckpointTensor& tensor) {
  if (BitsOf(tensor.dtype) < 8) return BadTensor(tensor, "four-bit numbers need their scales");
  return WeightPtr(std::make_shared<PlainWeight>(std::move(name), tensor));
}

WeightPtr MakeRowView(std::string name, WeightPtr base, std::vector<int64_t> shape, std::vector<int64_t> rows) {
  return std::make_shared<RowView>(std::move(name), std::move(base), std::move(shape), std::move(rows));
}

Result<WeightPtr> MakeJoinedKvB(std::string name, WeightPtr k_b, WeightPtr v_b) {
  const auto &k = k_b->shape(), &v = v_b->shape();
  if (k.size() != 3 || v.size() != 3 || k[0] != v[0] || k[1] != v[2]) {
    return BadTensor(*k_b->stored().front().tensor, "shapes " + ShapeText(k) + " and " + ShapeText(v) +
                                                        " are no halves [H, c, dn] and [H, dv, c] of kv_b_proj");
  }
  return WeightPtr(std::make_shared<JoinedKvB>(std::move(name), std::move(k_b), std::move(v_b)));
}

}  // namespace assay
