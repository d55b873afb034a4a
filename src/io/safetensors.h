// Reads safetensors checkpoints from mapped files: one file, a sharded folder with model.safetensors.index.json, or a
// folder with one model.safetensors. Hostile bytes: every offset, shape and length is checked before use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "tensor/dtype.h"

namespace assay {

struct CheckpointTensor {
  std::string name;
  DType dtype = DType::kInvalid;
  std::vector<int64_t> shape;       // row-major contiguous
  const std::byte* data = nullptr;  // mapped; lives as long as the Checkpoint
  uint64_t size_bytes = 0;
  std::string file;                 // for messages
  uint64_t file_offset = 0;
};

class Checkpoint {
 public:
  // kBadInput names the file and offset.
  static Result<std::shared_ptr<const Checkpoint>> Open(const std::string& path);
  ~Checkpoint();
  const CheckpointTensor* find(std::string_view name) const;  // nullptr when absent
  const std::vector<CheckpointTensor>& tensors() const;       // ascending name
  const std::string& path() const;

 private:
  Checkpoint();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Writes one safetensors file (payload export, generated checkpoints). Tensors are contiguous, row-major.
Status WriteSafetensors(const std::string& path, const std::vector<CheckpointTensor>& tensors,
                        const std::vector<std::pair<std::string, std::string>>& metadata);

}  // namespace assay
