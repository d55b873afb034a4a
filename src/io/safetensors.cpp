#include "io/safetensors.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <optional>
#include <set>

#include "base/files.h"
#include "base/mapped_file.h"
#include "io/json.h"
#include "io/text_file.h"

namespace assay {
namespace {

constexpr uint64_t kMaxIndexBytes = 256u << 20;  // an index of a million tensors has about 100 MB

// A row a dtype of the format; bits is that of one element, kept here as dtype.h has it for all of assay's types.
struct DTypeName {
  std::string_view name;
  DType dtype;
  uint64_t bits;
};

// The format's own spellings; tensor/dtype.h has assay's.
constexpr std::array<DTypeName, 19> kDTypes{{
    {"F64", DType::kF64, 64},
    {"F32", DType::kF32, 32},
    {"F16", DType::kF16, 16},
    {"BF16", DType::kBF16, 16},
    {"F8_E4M3", DType::kF8E4M3FN, 8},
    {"F8_E5M2", DType::kF8E5M2, 8},
    {"F8_E4M3FNUZ", DType::kF8E4M3FNUZ, 8},
    {"F8_E5M2FNUZ", DType::kF8E5M2FNUZ, 8},
    {"F8_E8M0", DType::kF8E8M0, 8},
    {"F4", DType::kF4E2M1, 4},
    {"I64", DType::kI64, 64},
    {"I32", DType::kI32, 32},
    {"I16", DType::kI16, 16},
    {"I8", DType::kI8, 8},
    {"U64", DType::kU64, 64},
    {"U32", DType::kU32, 32},
    {"U16", DType::kU16, 16},
    {"U8", DType::kU8, 8},
    {"BOOL", DType::kBool, 8},
}};

// Exact spelling: the format knows no other.
const DTypeName* FindDType(std::string_view name) {
  for (const DTypeName& d : kDTypes) {
    if (d.name == name) return &d;
  }
  return nullptr;
}

// nullptr: a type that the format cannot store.
const DTypeName* FindDType(DType dtype) {
  for (const DTypeName& d : kDTypes) {
    if (d.dtype == dtype) return &d;
  }
  return nullptr;
}

// Bytes of a contiguous tensor; nothing when the product overflows, a dimension is negative or bits do not fill bytes.
std::optional<uint64_t> SizeBytes(const std::vector<int64_t>& shape, uint64_t bits) {
  uint64_t total_bits = bits;
  bool zero = false;
  for (const int64_t d : shape) {
    if (d < 0) return std::nullopt;
    if (d == 0) zero = true;
    // The shape [2^40, 2^40, 0] is empty and legal, so a 0 ends the multiplication: sizes in front of it may still
    // overflow, which is refused.
    if (!zero && __builtin_mul_overflow(total_bits, static_cast<uint64_t>(d), &total_bits)) return std::nullopt;
  }
  if (zero) return 0;
  if (total_bits % 8 != 0) return std::nullopt;
  return total_bits / 8;
}

// "[2, 3]", for messages.
std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

// A JSON integer in 0 .. 2^63 - 1.
std::optional<int64_t> AsSize(const Json& json) {
  if (!json.is_number_integer()) return std::nullopt;
  if (json.is_number_unsigned()) {
    const uint64_t value = json.get<uint64_t>();
    if (value > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
    return static_cast<int64_t>(value);
  }
  const int64_t value = json.get<int64_t>();
  return value >= 0 ? std::optional<int64_t>(value) : std::nullopt;
}

// One entry of the header. data: start of the data section, data_bytes its length, data_start its offset in the file.
Result<CheckpointTensor> ParseEntry(const std::string& name, const Json& entry, const std::string& file,
                                    const std::byte* data, uint64_t data_bytes, uint64_t data_start) {
  const auto bad = [&](const std::string& why) {
    return Status::BadInput(file + ": header at offset 8, entry \"" + name + "\": " + why);
  };
  if (!entry.is_object()) return bad("not an object");
  for (const auto& [key, value] : entry.get_ref<const Json::object_t&>()) {
    if (key != "dtype" && key != "shape" && key != "data_offsets") return bad("unknown key \"" + key + "\"");
  }
  CheckpointTensor tensor;
  tensor.name = name;
  tensor.file = file;

  const Json* dtype = FindKey(entry, "dtype");
  if (dtype == nullptr || !dtype->is_string()) return bad("dtype is missing or no string");
  const DTypeName* known = FindDType(dtype->get_ref<const std::string&>());
  if (known == nullptr) return bad("unknown dtype \"" + dtype->get<std::string>() + "\"");
  tensor.dtype = known->dtype;

  const Json* shape = FindKey(entry, "shape");
  if (shape == nullptr || !shape->is_array()) return bad("shape is missing or no array");
  if (shape->size() > static_cast<size_t>(kMaxSafetensorsRank)) {
    return bad("rank " + std::to_string(shape->size()) + " is above the limit of " +
               std::to_string(kMaxSafetensorsRank));
  }
  for (const Json& d : *shape) {
    const std::optional<int64_t> size = AsSize(d);
    if (!size) return bad("shape entry " + WriteJson(d, -1) + " is no size");
    tensor.shape.push_back(*size);
  }

  const Json* offsets = FindKey(entry, "data_offsets");
  if (offsets == nullptr || !offsets->is_array() || offsets->size() != 2) return bad("data_offsets is no pair");
  const std::optional<int64_t> begin = AsSize((*offsets)[0]), end = AsSize((*offsets)[1]);
  if (!begin || !end) return bad("data_offsets " + WriteJson(*offsets, -1) + " are no sizes");
  const uint64_t b = static_cast<uint64_t>(*begin), e = static_cast<uint64_t>(*end);
  const std::string range = "[" + std::to_string(b) + ", " + std::to_string(e) + ")";
  if (b > e) return bad("data_offsets " + range + " run backwards");
  if (e > data_bytes) {
    return bad("data_offsets " + range + " end beyond the file: the data section at offset " +
               std::to_string(data_start) + " has " + std::to_string(data_bytes) + " bytes (truncated file?)");
  }
  const std::optional<uint64_t> size_bytes = SizeBytes(tensor.shape, known->bits);
  if (!size_bytes) return bad("shape " + ShapeText(tensor.shape) + " of " + std::string(known->name) + " overflows");
  if (*size_bytes != e - b) {
    return bad("data_offsets " + range + " hold " + std::to_string(e - b) + " bytes, shape " + ShapeText(tensor.shape) +
               " of " + std::string(known->name) + " needs " + std::to_string(*size_bytes));
  }
  tensor.data = data + b;
  tensor.size_bytes = e - b;
  tensor.file_offset = data_start + b;
  return tensor;
}

// Sorted by offset the tensors must follow each other from the first byte of the data section to its last.
// Overlaps would let two names share bytes, holes would hide some; the reference implementation refuses both.
Status CheckTiling(const std::vector<CheckpointTensor>& tensors, const std::string& file, uint64_t data_start,
                   uint64_t data_bytes) {
  std::vector<const CheckpointTensor*> order;
  for (const CheckpointTensor& t : tensors) order.push_back(&t);
  // Empty tensors share the offset of what follows them and must come first, hence the size as second key.
  std::sort(order.begin(), order.end(), [](const CheckpointTensor* a, const CheckpointTensor* b) {
    return std::pair(a->file_offset, a->size_bytes) < std::pair(b->file_offset, b->size_bytes);
  });
  uint64_t expected = data_start;
  for (const CheckpointTensor* t : order) {
    if (t->file_offset != expected) {
      return Status::BadInput(file + ": tensor \"" + t->name + "\" starts at offset " + std::to_string(t->file_offset) +
                              ", expected " + std::to_string(expected) +
                              (t->file_offset < expected ? " (overlaps the one before)" : " (unused bytes before it)"));
    }
    expected += t->size_bytes;
  }
  if (expected != data_start + data_bytes) {
    return Status::BadInput(file + ": " + std::to_string(data_start + data_bytes - expected) + " bytes at offset " +
                            std::to_string(expected) + " belong to no tensor");
  }
  return {};
}

bool ByName(const CheckpointTensor& a, const CheckpointTensor& b) { return a.name < b.name; }

// Tensor name -> shard file name of an index. Shards are plain names in the index's own folder: no path leads out.
Result<std::map<std::string, std::string>> ReadIndex(const std::string& path) {
  ASSAY_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(path, kMaxIndexBytes));
  ASSAY_ASSIGN_OR_RETURN(const Json index, ParseJson(text, path));
  const Json* weight_map = FindKey(index, "weight_map");
  if (weight_map == nullptr || !weight_map->is_object()) {
    return Status::BadInput(path + ": key \"weight_map\" is missing or no object");
  }
  std::map<std::string, std::string> shards;
  for (const auto& [name, value] : weight_map->get_ref<const Json::object_t&>()) {
    if (!value.is_string()) return Status::BadInput(path + ": weight_map[\"" + name + "\"] is no string");
    const std::string& shard = value.get_ref<const std::string&>();
    if (shard.empty() || shard.find('/') != std::string::npos || shard.find('\0') != std::string::npos ||
        shard == "." || shard == "..") {
      return Status::BadInput(path + ": weight_map[\"" + name + "\"] names \"" + shard +
                              "\", which is no file name inside the folder");
    }
    shards.emplace(name, shard);
  }
  return shards;
}

}  // namespace

Result<SafetensorsFile> ParseSafetensors(const std::byte* data, uint64_t size_bytes, const std::string& file) {
  if (size_bytes < 8) {
    return Status::BadInput(file + ": " + std::to_string(size_bytes) +
                            " bytes, too short for the header length at offset 0");
  }
  uint64_t header_bytes = 0;
  for (int i = 0; i < 8; ++i) header_bytes |= std::to_integer<uint64_t>(data[i]) << (8 * i);
  if (header_bytes > kMaxSafetensorsHeader) {
    return Status::BadInput(file + ": header length " + std::to_string(header_bytes) +
                            " at offset 0 is above the limit of " + std::to_string(kMaxSafetensorsHeader) +
                            " (not a safetensors file?)");
  }
  // size_bytes >= 8 was asked above: the subtraction cannot wrap, and 8 + header_bytes stays inside the file.
  if (header_bytes > size_bytes - 8) {
    return Status::BadInput(file + ": header of " + std::to_string(header_bytes) +
                            " bytes at offset 8 ends beyond the file of " + std::to_string(size_bytes) + " bytes");
  }
  const std::string_view text(reinterpret_cast<const char*>(data) + 8, header_bytes);
  ASSAY_ASSIGN_OR_RETURN(const Json header, ParseJson(text, file, 8));
  if (!header.is_object()) return Status::BadInput(file + ": header at offset 8 is no JSON object");

  const uint64_t data_start = 8 + header_bytes, data_bytes = size_bytes - data_start;
  SafetensorsFile parsed;
  for (const auto& [name, entry] : header.get_ref<const Json::object_t&>()) {
    if (name == "__metadata__") {
      if (!entry.is_object()) return Status::BadInput(file + ": __metadata__ is no object");
      for (const auto& [key, value] : entry.get_ref<const Json::object_t&>()) {
        if (!value.is_string()) return Status::BadInput(file + ": __metadata__[\"" + key + "\"] is no string");
        parsed.metadata.emplace_back(key, value.get<std::string>());
      }
      continue;
    }
    ASSAY_ASSIGN_OR_RETURN(CheckpointTensor tensor,
                           ParseEntry(name, entry, file, data + data_start, data_bytes, data_start));
    parsed.tensors.push_back(std::move(tensor));
  }
  ASSAY_RETURN_IF_ERROR(CheckTiling(parsed.tensors, file, data_start, data_bytes));
  std::sort(parsed.tensors.begin(), parsed.tensors.end(), ByName);
  return parsed;
}

struct Checkpoint::Impl {
  std::string path;
  std::vector<MappedFile> files;
  std::vector<CheckpointTensor> tensors;

  // Maps and parses one file and appends its tensors.
  // Spans of the tensors stay valid while files is moved, as a MappedFile keeps its addresses.
  Status Add(const std::string& file) {
    ASSAY_ASSIGN_OR_RETURN(MappedFile mapped, MappedFile::Open(file));
    ASSAY_ASSIGN_OR_RETURN(SafetensorsFile parsed,
                           ParseSafetensors(mapped.bytes().data(), mapped.bytes().size(), file));
    files.push_back(std::move(mapped));
    std::move(parsed.tensors.begin(), parsed.tensors.end(), std::back_inserter(tensors));
    return {};
  }

  // All shards of an index, held against it in both directions.
  Status AddSharded(const std::string& index_path) {
    const size_t slash = index_path.rfind('/');
    const std::string folder = slash == std::string::npos ? "" : index_path.substr(0, slash + 1);
    using Index = std::map<std::string, std::string>;
    ASSAY_ASSIGN_OR_RETURN(const Index index, ReadIndex(index_path));
    // A shard is opened once, however many tensors it holds.
    std::set<std::string> shards;
    for (const auto& [name, shard] : index) shards.insert(shard);
    for (const std::string& shard : shards) {
      const size_t first = tensors.size();
      if (Status status = Add(folder + shard); !status.ok()) {
        return {status.code(), status.message() + " (shard named by " + index_path + ")"};
      }
      for (size_t i = first; i < tensors.size(); ++i) {
        const auto listed = index.find(tensors[i].name);
        if (listed == index.end() || listed->second != shard) {
          return Status::BadInput(folder + shard + ": tensor \"" + tensors[i].name + "\" at offset " +
                                  std::to_string(tensors[i].file_offset) + " is " +
                                  (listed == index.end()
                                       ? "not listed in " + index_path
                                       : "listed in " + index_path + " as part of " + listed->second));
        }
      }
    }
    std::sort(tensors.begin(), tensors.end(), ByName);
    for (const auto& [name, shard] : index) {
      const auto at = std::lower_bound(tensors.begin(), tensors.end(), name,
                                       [](const CheckpointTensor& t, const std::string& n) { return t.name < n; });
      if (at == tensors.end() || at->name != name) {
        return Status::BadInput(folder + shard + ": tensor \"" + name + "\" is listed in " + index_path +
                                " but not in the file");
      }
    }
    return {};
  }
};

Checkpoint::Checkpoint() : impl_(std::make_unique<Impl>()) {}
Checkpoint::~Checkpoint() = default;

Result<std::shared_ptr<const Checkpoint>> Checkpoint::Open(const std::string& path) {
  std::shared_ptr<Checkpoint> checkpoint(new Checkpoint);
  checkpoint->impl_->path = path;
  if (IsDirectory(path)) {
    const std::string single = path + "/model.safetensors", index = path + "/model.safetensors.index.json";
    if (FileExists(single)) {
      ASSAY_RETURN_IF_ERROR(checkpoint->impl_->Add(single));
    } else if (FileExists(index)) {
      ASSAY_RETURN_IF_ERROR(checkpoint->impl_->AddSharded(index));
    } else {
      return Status::BadInput(path + ": holds neither model.safetensors nor model.safetensors.index.json");
    }
  } else if (path.ends_with(".json")) {
    ASSAY_RETURN_IF_ERROR(checkpoint->impl_->AddSharded(path));
  } else {
    ASSAY_RETURN_IF_ERROR(checkpoint->impl_->Add(path));
  }
  return std::shared_ptr<const Checkpoint>(std::move(checkpoint));
}

// tensors are sorted by name.
const CheckpointTensor* Checkpoint::find(std::string_view name) const {
  const auto& all = impl_->tensors;
  const auto at = std::lower_bound(all.begin(), all.end(), name,
                                   [](const CheckpointTensor& t, std::string_view n) { return t.name < n; });
  return at != all.end() && at->name == name ? &*at : nullptr;
}

const std::vector<CheckpointTensor>& Checkpoint::tensors() const { return impl_->tensors; }
const std::string& Checkpoint::path() const { return impl_->path; }

// Names go into the header's own vector: setting members one by one would search all earlier ones.
Status WriteSafetensors(const std::string& path, const std::vector<CheckpointTensor>& tensors,
                        const std::vector<std::pair<std::string, std::string>>& metadata) {
  Json header = Json::object();
  if (!metadata.empty()) {
    Json& entries = header["__metadata__"] = Json::object();
    for (const auto& [key, value] : metadata) entries[key] = value;
  }
  uint64_t offset = 0;
  std::set<std::string_view> names;
  for (const CheckpointTensor& t : tensors) {
    const DTypeName* dtype = FindDType(t.dtype);
    if (dtype == nullptr) return Status::Usage(path + ": tensor \"" + t.name + "\": safetensors has no such dtype");
    if (t.name == "__metadata__" || !names.insert(t.name).second) {
      return Status::Usage(path + ": tensor name \"" + t.name + "\" is reserved or used twice");
    }
    const std::optional<uint64_t> size_bytes = SizeBytes(t.shape, dtype->bits);
    if (!size_bytes || *size_bytes != t.size_bytes) {
      return Status::Usage(path + ": tensor \"" + t.name + "\": " + std::to_string(t.size_bytes) +
                           " bytes do not fit shape " + ShapeText(t.shape) + " of " + std::string(dtype->name));
    }
    Json entry = Json::object();
    entry["dtype"] = std::string(dtype->name);
    entry["shape"] = t.shape;
    entry["data_offsets"] = {offset, offset + t.size_bytes};
    static_cast<Json::object_t::Container&>(header.get_ref<Json::object_t&>()).emplace_back(t.name, std::move(entry));
    offset += t.size_bytes;
  }
  std::string text = WriteJson(header, -1);
  // Spaces behind the object are legal JSON; with them the data starts at a multiple of 8 (8 bytes of length come
  // first).
  text.resize((text.size() + 7) / 8 * 8, ' ');

  // Beyond a limit of the process's file size the kernel would end it, and the half that is written would stay.
  if (8 + text.size() + offset > FileSizeLimit()) {
    return Status::Environment(path + ": cannot be written: " + std::to_string(8 + text.size() + offset) +
                               " bytes are above the limit of a file's size (ulimit -f), " +
                               std::to_string(FileSizeLimit()));
  }

  // Written under a temporary name beside the target: a reader never meets half a file.
  const std::string temporary = path + ".tmp" + std::to_string(::getpid());
  std::FILE* out = std::fopen(temporary.c_str(), "wb");
  if (out == nullptr) return Status::Environment(temporary + ": cannot be written: " + std::strerror(errno));
  unsigned char length[8];
  for (int i = 0; i < 8; ++i) length[i] = static_cast<unsigned char>(text.size() >> (8 * i));
  bool good = std::fwrite(length, 1, 8, out) == 8 && std::fwrite(text.data(), 1, text.size(), out) == text.size();
  for (const CheckpointTensor& t : tensors) {
    good = good && (t.size_bytes == 0 || std::fwrite(t.data, 1, t.size_bytes, out) == t.size_bytes);
  }
  // fclose flushes: what did not fit the disk shows there at the latest.
  int error = good ? 0 : errno;
  if (std::fclose(out) != 0 && error == 0) error = errno;
  if (error == 0 && std::rename(temporary.c_str(), path.c_str()) != 0) error = errno;
  if (error != 0) {
    std::remove(temporary.c_str());
    return Status::Environment(path + ": cannot be written: " + std::strerror(error));
  }
  return {};
}

}  // namespace assay
