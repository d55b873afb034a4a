// Reads GGUF files (versions 2 and 3, little-endian) from memory: key-value metadata and tensors in place, nothing
// copied but the keys and scalar values. Hostile bytes: every count, length and offset is checked before use, and
// nothing is allocated from a size that the file does not back with bytes.
//
// The format: "GGUF", u32 version, u64 number of tensors, u64 number of pairs; the pairs (string key, u32 type, value);
// the tensors (string name, u32 rank, u64 dimensions with the fastest first, u32 type, u64 offset); the data from the
// next multiple of general.alignment (32 without it), each tensor at its offset from there. A string is u64 length and
// bytes. What a tensor's bytes mean is the business of src/quant.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace assay {

// ggml's own limit of dimensions.
constexpr int kMaxGgufRank = 4;

// The numbers of the file format.
enum class GgufType : uint32_t {
  kU8 = 0,
  kI8 = 1,
  kU16 = 2,
  kI16 = 3,
  kU32 = 4,
  kI32 = 5,
  kF32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kU64 = 10,
  kI64 = 11,
  kF64 = 12,
};

// One pair of the metadata; `raw` lies in the file's bytes. Arrays of arrays are refused.
struct GgufValue {
  std::string key;
  GgufType type = GgufType::kU8;  // of an array: of its elements
  bool array = false;
  uint64_t count = 1;              // elements of an array
  const std::byte* raw = nullptr;  // value, or the first element
  uint64_t raw_bytes = 0;          // all elements, string lengths included

  // Element i < count as a number; nothing for strings.
  std::optional<double> number(uint64_t i = 0) const;
  std::optional<int64_t> integer(uint64_t i = 0) const;  // nothing for floats and beyond int64 too
  std::optional<std::string_view> text() const;          // a single string
  std::vector<std::string_view> texts() const;           // an array of strings; empty otherwise
};

// Elements a block and bytes a block of a ggml type.
struct GgmlSize {
  uint32_t id;
  const char* name;  // "q4_k"
  uint32_t block_elems;
  uint32_t block_bytes;
};
const GgmlSize* FindGgmlSize(uint32_t id);  // nullptr: unknown type

// Where a tensor lies; size_bytes is what shape and type ask for, inside the file.
struct GgufTensor {
  std::string name;
  std::vector<int64_t> shape;  // row-major as everywhere in assay: the file's dimensions in reverse
  const GgmlSize* type = nullptr;
  const std::byte* data = nullptr;  // not aligned; lives as long as the bytes
  uint64_t size_bytes = 0;
  uint64_t file_offset = 0;  // of data
};

// Points into the bytes that ParseGguf was given; they must outlive it.
struct GgufFile {
  uint32_t version = 0;
  std::vector<GgufValue> metadata;  // in the file's order, keys distinct
  std::vector<GgufTensor> tensors;  // ascending name, names distinct

  const GgufValue* find(std::string_view key) const;  // nullptr when absent
};

// file names the bytes in messages: "FILE: WHAT at offset N". kBadInput on every damage.
Result<GgufFile> ParseGguf(const std::byte* data, uint64_t size_bytes, const std::string& file);

}  // namespace assay
