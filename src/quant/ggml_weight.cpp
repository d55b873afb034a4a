#include "io/gguf.h"
#include "quant/ggml_block.h"
#include "quant/weight.h"
#include "tensor/decode.h"

namespace assay {
namespace {

// ggml's numbers of types that are no blocks; kInvalid for the others.
DType PlainType(uint32_t id) {
  switch (id) {
    case 0:
      return DType::kF32;
    case 1:
      return DType::kF16;
    case 24:
      return DType::kI8;
    case 25:
      return DType::kI16;
    case 26:
      return DType::kI32;
    case 27:
      return DType::kI64;
    case 28:
      return DType::kF64;
    case 30:
      return DType::kBF16;
    default:
      return DType::kInvalid;
  }
}

// Numbers as they are, decoded by tensor/decode.h.
class GgmlPlain final : public DecodedWeight<GgmlPlain> {
 public:
  GgmlPlain(std::string name, const CheckpointTensor& tensor, DType dtype)
      : DecodedWeight(std::move(name), std::string(NameOf(dtype)), tensor.shape), tensor_(tensor), dtype_(dtype) {
    AddPart("weight", &tensor);
  }
  template <class T>
  void Rows(int64_t first, int64_t count, T* out) const {
    DecodeTo(tensor_.data, first * cols(), count * cols(), dtype_, out);
  }

 private:
  const CheckpointTensor& tensor_;
  DType dtype_;
};

// Rows are whole blocks: the GGUF reader has made sure of it.
class GgmlWeight final : public DecodedWeight<GgmlWeight> {
 public:
  GgmlWeight(std::string name, const CheckpointTensor& tensor, const GgmlFormat& format, const GgmlSize& size)
      : DecodedWeight(std::move(name), size.name, tensor.shape), tensor_(tensor), format_(format), size_(size) {
    SetBlock(1, format.group);
    AddPart("blocks", &tensor);
  }

  template <class T>
  void Rows(int64_t first, int64_t count, T* out) const {
    const int64_t blocks = cols() / size_.block_elems;
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(tensor_.data) + first * blocks * size_.block_bytes;
    GgmlBlock block;
    for (int64_t b = 0; b < count * blocks; ++b, bytes += size_.block_bytes) {
      format_.unpack(bytes, &block);
      const int8_t* code = block.code;
      for (int g = 0; g < format_.block_elems / format_.group; ++g, code += format_.group, out += format_.group) {
        const T scale = static_cast<T>(block.scale[g]);
        if (format_.has_minimum) {
          const T minimum = static_cast<T>(block.minimum[g]);
          for (int i = 0; i < format_.group; ++i) out[i] = scale * static_cast<T>(code[i]) - minimum;
        } else {
          for (int i = 0; i < format_.group; ++i) out[i] = scale * static_cast<T>(code[i]);
        }
      }
    }
  }

  void Parts(int64_t row, WeightParts* parts) const override {
    const size_t n = static_cast<size_t>(cols());
    parts->Resize(n);
    const int64_t blocks = cols() / size_.block_elems;
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(tensor_.data) + row * blocks * size_.block_bytes;
    GgmlBlock block;
    for (int64_t b = 0; b < blocks; ++b, bytes += size_.block_bytes) {
      format_.unpack(bytes, &block);
      for (int i = 0; i < format_.block_elems; ++i) {
        const size_t at = static_cast<size_t>(b * format_.block_elems + i);
        const double scale = static_cast<double>(block.scale[i / format_.group]);
        parts->code[at] = block.code[i];
        parts->scale[at] = scale;
        parts->group[at] = static_cast<int32_t>(static_cast<int64_t>(at) / format_.group);
        // A minimum under scale 0 has no zero point; the value is then the minimum alone.
        if (format_.has_minimum && scale != 0)
          parts->zero[at] = static_cast<double>(block.minimum[i / format_.group]) / scale;
      }
    }
  }

 private:
  const CheckpointTensor& tensor_;
  const GgmlFormat& format_;
  const GgmlSize& size_;
};

}  // namespace

bool DecodesGgml(uint32_t type_id) {
  if (PlainType(type_id) != DType::kInvalid) return true;
  return FindGgmlSize(type_id) != nullptr && FindGgmlFormat(type_id) != nullptr;
}

// A type without a decoder is a problem of the tensor, not of the file.
Result<WeightPtr> MakeGgmlWeight(std::string name, const CheckpointTensor& tensor, uint32_t type_id) {
  if (const DType plain = PlainType(type_id); plain != DType::kInvalid) {
    return WeightPtr(std::make_shared<GgmlPlain>(std::move(name), tensor, plain));
  }
  const GgmlSize* size = FindGgmlSize(type_id);
  const GgmlFormat* format = FindGgmlFormat(type_id);
  if (size == nullptr || format == nullptr) {
    const std::string type = size != nullptr ? std::string(size->name) : std::to_string(type_id);
    return BadTensor(tensor, "type " + type + " is not decoded");
  }
  return WeightPtr(std::make_shared<GgmlWeight>(std::move(name), tensor, *format, *size));
}

}  // namespace assay
