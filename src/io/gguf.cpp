#include "io/gguf.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <set>

namespace assay {
namespace {

// Block sizes of ggml's types by their number there; numbers that are missing were given up by ggml. A type is listed
// here as soon as its size is known, so that files with it open: whether it can be decoded is for src/quant to say.
constexpr std::array<GgmlSize, 34> kSizes{{
    {0, "f32", 1, 4},         {1, "f16", 1, 2},         {2, "q4_0", 32, 18},      {3, "q4_1", 32, 20},
    {6, "q5_0", 32, 22},      {7, "q5_1", 32, 24},      {8, "q8_0", 32, 34},      {9, "q8_1", 32, 36},
    {10, "q2_k", 256, 84},    {11, "q3_k", 256, 110},   {12, "q4_k", 256, 144},   {13, "q5_k", 256, 176},
    {14, "q6_k", 256, 210},   {15, "q8_k", 256, 292},   {16, "iq2_xxs", 256, 66}, {17, "iq2_xs", 256, 74},
    {18, "iq3_xxs", 256, 98}, {19, "iq1_s", 256, 50},   {20, "iq4_nl", 32, 18},   {21, "iq3_s", 256, 110},
    {22, "iq2_s", 256, 82},   {23, "iq4_xs", 256, 136}, {24, "i8", 1, 1},         {25, "i16", 1, 2},
    {26, "i32", 1, 4},        {27, "i64", 1, 8},        {28, "f64", 1, 8},        {29, "iq1_m", 256, 56},
    {30, "bf16", 1, 2},       {34, "tq1_0", 256, 54},   {35, "tq2_0", 256, 66},   {39, "mxfp4", 32, 17},
    {40, "nvfp4", 64, 36},    {41, "q1_0", 128, 18},
}};

constexpr uint64_t kMinPairBytes = 8 + 4 + 1;        // empty key, type, one byte of value
constexpr uint64_t kMinTensorBytes = 8 + 4 + 4 + 8;  // empty name, rank 0, type, offset
constexpr uint64_t kMaxAlignment = 1u << 20;         // real files use 32 to 4096
constexpr uint64_t kMaxNameBytes = 65535;            // of keys and tensor names; the format's own limit

// Of one number in a pair's value; 0 for what has no fixed size.
uint64_t ElementBytes(GgufType type) {
  switch (type) {
    case GgufType::kU8:
    case GgufType::kI8:
    case GgufType::kBool:
      return 1;
    case GgufType::kU16:
    case GgufType::kI16:
      return 2;
    case GgufType::kU32:
    case GgufType::kI32:
    case GgufType::kF32:
      return 4;
    case GgufType::kU64:
    case GgufType::kI64:
    case GgufType::kF64:
      return 8;
    case GgufType::kString:
    case GgufType::kArray:
      break;
  }
  return 0;
}

// Values in the file have no alignment.
template <class T>
T Load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

// Walks the bytes; the first fault sticks and names its offset.
class Cursor {
 public:
  Cursor(const std::byte* data, uint64_t size, const std::string& file) : data_(data), size_(size), file_(file) {}

  uint64_t at() const { return at_; }
  uint64_t left() const { return size_ - at_; }
  const std::byte* here() const { return data_ + at_; }

  Status Fault(const std::string& what) const { return FaultAt(at_, what); }
  // Every error of the parser comes from here: file, what, offset.
  Status FaultAt(uint64_t offset, const std::string& what) const {
    return Status::BadInput(file_ + ": " + what + " at offset " + std::to_string(offset));
  }
  // The one place where the cursor moves, so bounds are checked once.
  Status Skip(uint64_t bytes, const char* what) {
    if (bytes > left()) {
      return Fault(std::string(what) + " of " + std::to_string(bytes) + " bytes ends beyond the file of " +
                   std::to_string(size_) + " bytes (truncated?)");
    }
    at_ += bytes;
    return {};
  }
  template <class T>
  Status Read(T* value, const char* what) {
    const std::byte* from = here();
    ASSAY_RETURN_IF_ERROR(Skip(sizeof(T), what));
    *value = Load<T>(from);
    return {};
  }
  // The text stays in the file's bytes.
  Status ReadText(std::string_view* text, const char* what) {
    uint64_t length = 0;
    ASSAY_RETURN_IF_ERROR(Read(&length, what));
    const std::byte* from = here();
    ASSAY_RETURN_IF_ERROR(Skip(length, what));
    *text = std::string_view(reinterpret_cast<const char*>(from), length);
    return {};
  }
  Status ReadName(std::string* name, const char* what) {
    std::string_view text;
    const uint64_t start = at_;
    ASSAY_RETURN_IF_ERROR(ReadText(&text, what));
    if (text.size() > kMaxNameBytes) {
      return FaultAt(start, std::string(what) + " of " + std::to_string(text.size()) + " bytes is above the limit of " +
                                std::to_string(kMaxNameBytes));
    }
    name->assign(text);
    return {};
  }

 private:
  const std::byte* data_;
  uint64_t size_;
  const std::string& file_;
  uint64_t at_ = 0;  // <= size_
};

// Leaves value->raw at the checked bytes; accessors read them later without a check.
Status ReadValue(Cursor* in, GgufValue* value) {
  ASSAY_RETURN_IF_ERROR(in->ReadName(&value->key, "key"));
  const uint64_t type_at = in->at();
  uint32_t type = 0;
  ASSAY_RETURN_IF_ERROR(in->Read(&type, "value type"));
  if (type == static_cast<uint32_t>(GgufType::kArray)) {
    value->array = true;
    ASSAY_RETURN_IF_ERROR(in->Read(&type, "element type"));
    ASSAY_RETURN_IF_ERROR(in->Read(&value->count, "array length"));
  }
  if (type > static_cast<uint32_t>(GgufType::kF64) || type == static_cast<uint32_t>(GgufType::kArray)) {
    return in->FaultAt(type_at, "key \"" + value->key + "\": unknown or nested type " + std::to_string(type));
  }
  value->type = static_cast<GgufType>(type);
  value->raw = in->here();
  const uint64_t start = in->at();
  if (value->type == GgufType::kString) {
    // A forged count ends at the file's end: no memory is taken for the strings, and texts() finds them again.
    for (uint64_t i = 0; i < value->count; ++i) {  // each takes 8 bytes of the file at least
      std::string_view text;
      ASSAY_RETURN_IF_ERROR(in->ReadText(&text, "string"));
    }
  } else {
    const uint64_t each = ElementBytes(value->type);
    // Divided instead of multiplied: count * each may overflow. each is not 0, as strings and arrays were taken out
    // above.
    if (value->count > in->left() / each) {
      return in->Fault("array \"" + value->key + "\" of " + std::to_string(value->count) +
                       " elements ends beyond the file");
    }
    ASSAY_RETURN_IF_ERROR(in->Skip(value->count * each, "value"));
  }
  value->raw_bytes = in->at() - start;
  return {};
}

// data and size_bytes stay unset: where the data begins is known after the last entry. *offset: as the entry says.
Status ReadTensor(Cursor* in, GgufTensor* tensor, uint64_t* offset) {
  ASSAY_RETURN_IF_ERROR(in->ReadName(&tensor->name, "tensor name"));
  const uint64_t entry_at = in->at();
  // Names the entry, as a file has thousands.
  const auto bad = [&](const std::string& why) {
    return in->FaultAt(entry_at, "tensor \"" + tensor->name + "\": " + why);
  };
  uint32_t rank = 0, type = 0;
  ASSAY_RETURN_IF_ERROR(in->Read(&rank, "tensor rank"));
  if (rank > static_cast<uint32_t>(kMaxGgufRank)) return bad("rank " + std::to_string(rank) + " is above 4");
  uint64_t elements = 1;
  for (uint32_t i = 0; i < rank; ++i) {
    uint64_t dimension = 0;
    ASSAY_RETURN_IF_ERROR(in->Read(&dimension, "tensor dimension"));
    // Zero would hide an overflow behind it, and no tensor of a model is empty.
    if (dimension == 0 || dimension > static_cast<uint64_t>(INT64_MAX) ||
        __builtin_mul_overflow(elements, dimension, &elements)) {
      return bad("dimension " + std::to_string(dimension) + " is no size");
    }
    // The file has the fastest dimension first; shapes here have it last.
    tensor->shape.insert(tensor->shape.begin(), static_cast<int64_t>(dimension));
  }
  ASSAY_RETURN_IF_ERROR(in->Read(&type, "tensor type"));
  ASSAY_RETURN_IF_ERROR(in->Read(offset, "tensor offset"));
  tensor->type = FindGgmlSize(type);
  if (tensor->type == nullptr) return bad("unknown type " + std::to_string(type));
  // Blocks lie along rows and do not cross from one into the next.
  const uint64_t row = tensor->shape.empty() ? 1 : static_cast<uint64_t>(tensor->shape.back());
  if (row % tensor->type->block_elems != 0) {
    return bad("rows of " + std::to_string(row) + " do not fill blocks of " + tensor->type->name);
  }
  if (__builtin_mul_overflow(elements / tensor->type->block_elems, uint64_t{tensor->type->block_bytes},
                             &tensor->size_bytes)) {
    return bad("size overflows");
  }
  return {};
}

}  // namespace

const GgmlSize* FindGgmlSize(uint32_t id) {
  for (const GgmlSize& size : kSizes) {
    if (size.id == id) return &size;
  }
  return nullptr;
}

// REQUIRES of both: the value came from ParseGguf.
std::optional<int64_t> GgufValue::integer(uint64_t i) const {
  if (i >= count) return std::nullopt;
  const std::byte* at = raw + i * ElementBytes(type);
  switch (type) {
    case GgufType::kU8:
    case GgufType::kBool:
      return Load<uint8_t>(at);
    case GgufType::kI8:
      return Load<int8_t>(at);
    case GgufType::kU16:
      return Load<uint16_t>(at);
    case GgufType::kI16:
      return Load<int16_t>(at);
    case GgufType::kU32:
      return Load<uint32_t>(at);
    case GgufType::kI32:
      return Load<int32_t>(at);
    case GgufType::kI64:
      return Load<int64_t>(at);
    case GgufType::kU64: {
      const uint64_t value = Load<uint64_t>(at);
      if (value > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
      return static_cast<int64_t>(value);
    }
    default:
      return std::nullopt;
  }
}

// Integers count as numbers, exact up to 2^53.
std::optional<double> GgufValue::number(uint64_t i) const {
  if (i >= count) return std::nullopt;
  const std::byte* at = raw + i * ElementBytes(type);
  if (type == GgufType::kF32) return static_cast<double>(Load<float>(at));
  if (type == GgufType::kF64) return Load<double>(at);
  const std::optional<int64_t> value = integer(i);
  return value ? std::optional<double>(static_cast<double>(*value)) : std::nullopt;
}

std::optional<std::string_view> GgufValue::text() const {
  if (type != GgufType::kString || array) return std::nullopt;
  return std::string_view(reinterpret_cast<const char*>(raw) + 8, raw_bytes - 8);
}

std::vector<std::string_view> GgufValue::texts() const {
  std::vector<std::string_view> all;
  if (type != GgufType::kString || !array) return all;
  all.reserve(count);  // backed by 8 bytes of the file each
  const std::byte* at = raw;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t length = Load<uint64_t>(at);
    all.emplace_back(reinterpret_cast<const char*>(at) + 8, length);
    at += 8 + length;
  }
  return all;
}

const GgufValue* GgufFile::find(std::string_view key) const {
  for (const GgufValue& value : metadata) {
    if (value.key == key) return &value;
  }
  return nullptr;
}

// Every count is held against the bytes that are left before anything is allocated for it, so a forged header costs
// at most what the file itself takes. Names must be distinct: two answers to one question are damage.
Result<GgufFile> ParseGguf(const std::byte* data, uint64_t size_bytes, const std::string& file) {
  Cursor in(data, size_bytes, file);
  uint32_t magic = 0;
  GgufFile parsed;
  ASSAY_RETURN_IF_ERROR(in.Read(&magic, "magic"));
  if (magic != 0x46554747u) return in.FaultAt(0, "no GGUF file: the magic is missing");
  ASSAY_RETURN_IF_ERROR(in.Read(&parsed.version, "version"));
  if (parsed.version != 2 && parsed.version != 3) {
    const bool swapped = (parsed.version & 0xffffu) == 0;  // a small number seen from the other end
    return in.FaultAt(4, swapped ? "big-endian GGUF is not read: version"
                                 : "GGUF version " + std::to_string(parsed.version) + " is not read (2 and 3 are)");
  }
  uint64_t n_tensors = 0, n_pairs = 0;
  ASSAY_RETURN_IF_ERROR(in.Read(&n_tensors, "number of tensors"));
  ASSAY_RETURN_IF_ERROR(in.Read(&n_pairs, "number of pairs"));
  // A first bound from the smallest entry that the grammar allows; the entries themselves are bounded one by one below.
  if (n_tensors > in.left() / kMinTensorBytes || n_pairs > in.left() / kMinPairBytes) {
    return in.FaultAt(8, "counts of " + std::to_string(n_tensors) + " tensors and " + std::to_string(n_pairs) +
                             " pairs do not fit the file of " + std::to_string(size_bytes) + " bytes");
  }

  // A set, as hostile files have many pairs: comparing each with all before it would take quadratic time.
  std::set<std::string, std::less<>> seen;
  for (uint64_t i = 0; i < n_pairs; ++i) {
    const uint64_t start = in.at();
    GgufValue value;
    ASSAY_RETURN_IF_ERROR(ReadValue(&in, &value));
    if (!seen.insert(value.key).second) return in.FaultAt(start, "key \"" + value.key + "\" stands twice");
    parsed.metadata.push_back(std::move(value));
  }
  // The format's default (ggml, docs/gguf.md, "general.alignment").
  uint64_t alignment = 32;
  if (const GgufValue* value = parsed.find("general.alignment")) {
    const std::optional<int64_t> given = value->integer();
    if (!given || *given <= 0 || static_cast<uint64_t>(*given) > kMaxAlignment || (*given & (*given - 1)) != 0) {
      return in.Fault("general.alignment is no power of two up to " + std::to_string(kMaxAlignment) + "; pairs end");
    }
    alignment = static_cast<uint64_t>(*given);
  }

  seen.clear();
  std::vector<uint64_t> offsets;
  for (uint64_t i = 0; i < n_tensors; ++i) {
    const uint64_t start = in.at();
    GgufTensor tensor;
    offsets.push_back(0);
    ASSAY_RETURN_IF_ERROR(ReadTensor(&in, &tensor, &offsets.back()));
    if (!seen.insert(tensor.name).second) return in.FaultAt(start, "tensor \"" + tensor.name + "\" stands twice");
    parsed.tensors.push_back(std::move(tensor));
  }
  // A file may end before the padding when it has no tensors.
  const uint64_t data_start = (in.at() + alignment - 1) / alignment * alignment;
  for (size_t i = 0; i < parsed.tensors.size(); ++i) {
    GgufTensor& tensor = parsed.tensors[i];
    // Each subtraction is safe only because the test before it held: data_start <= size, then offset <= size -
    // data_start. Tensors may overlap as far as this reader is concerned: nothing is written through them.
    if (offsets[i] % alignment != 0 || data_start > size_bytes || offsets[i] > size_bytes - data_start ||
        tensor.size_bytes > size_bytes - data_start - offsets[i]) {
      return in.FaultAt(data_start, "tensor \"" + tensor.name + "\": " + std::to_string(tensor.size_bytes) +
                                        " bytes at " + std::to_string(offsets[i]) +
                                        " are misaligned or end beyond the file of " + std::to_string(size_bytes) +
                                        " bytes (truncated?); the data section begins");
    }
    tensor.file_offset = data_start + offsets[i];
    tensor.data = data + tensor.file_offset;
  }
  // Offsets were paired with tensors by index, so sorting waits until they are used up.
  std::sort(parsed.tensors.begin(), parsed.tensors.end(),
            [](const GgufTensor& a, const GgufTensor& b) { return a.name < b.name; });
  return parsed;
}

}  // namespace assay
