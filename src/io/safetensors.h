// Reads safetensors checkpoints from mapped files: one file, a sharded folder with model.safetensors.index.json, or a
// folder with one model.safetensors. No tensor is copied. Hostile bytes: every offset, shape and length is checked
// before use, and nothing is allocated from a size that the file does not back with bytes.
//
// The format: u64 header length N, little-endian; N bytes of JSON {name: {dtype, shape, data_offsets: [begin, end]}}
// with offsets from the end of the header; the data. As in the reference implementation the tensors must tile the data
// without overlap, hole or rest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "tensor/dtype.h"

namespace assay {

constexpr uint64_t kMaxSafetensorsHeader = 100'000'000;  // bytes, as in the reference implementation
constexpr int kMaxSafetensorsRank = 32;

struct CheckpointTensor {
  std::string name;
  DType dtype = DType::kInvalid;
  std::vector<int64_t> shape;       // row-major contiguous
  const std::byte* data = nullptr;  // mapped, not aligned to the dtype; lives as long as the Checkpoint
  uint64_t size_bytes = 0;
  std::string file;          // for messages
  uint64_t file_offset = 0;  // of data, in bytes
};

// One parsed header over bytes that the caller keeps. file names it in messages.
struct SafetensorsFile {
  std::vector<CheckpointTensor> tensors;                      // ascending name
  std::vector<std::pair<std::string, std::string>> metadata;  // __metadata__, in the file's order
};
Result<SafetensorsFile> ParseSafetensors(const std::byte* data, uint64_t size_bytes, const std::string& file);

class Checkpoint {
 public:
  // path: a .safetensors file, an index file (.json), or a folder; a folder's model.safetensors goes before its
  // model.safetensors.index.json, as in transformers. Every tensor that the index lists must be in the shard it names
  // and every tensor of a shard must be listed. kBadInput names the file and offset; kEnvironment: no permission.
  static Result<std::shared_ptr<const Checkpoint>> Open(const std::string& path);
  ~Checkpoint();
  const CheckpointTensor* find(std::string_view name) const;  // nullptr when absent
  const std::vector<CheckpointTensor>& tensors() const;       // ascending name
  const std::string& path() const;                            // as given to Open

 private:
  Checkpoint();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Writes one safetensors file (payload export, generated checkpoints): tensors contiguous and row-major, in the order
// given, the header padded so that data starts at a multiple of 8. The file appears under its name when complete.
// kUsage: duplicate names, a size that does not fit shape and dtype, a dtype the format lacks; kEnvironment: no space.
Status WriteSafetensors(const std::string& path, const std::vector<CheckpointTensor>& tensors,
                        const std::vector<std::pair<std::string, std::string>>& metadata);

}  // namespace assay
