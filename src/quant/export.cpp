#include "quant/export.h"

#include <fnmatch.h>

#include <vector>

namespace assay {

// The sum is taken before anything is decoded.
Status ExportDecoded(const WeightSource& source, const std::string& pattern, uint64_t limit_bytes,
                     const std::string& path) {
  uint64_t total = 0;
  std::vector<const Weight*> chosen;
  for (const WeightPtr& weight : source.weights()) {
    if (!pattern.empty() && ::fnmatch(pattern.c_str(), weight->name().c_str(), 0) != 0) continue;
    chosen.push_back(weight.get());
    total += static_cast<uint64_t>(weight->rows()) * static_cast<uint64_t>(weight->cols()) * sizeof(float);
  }
  if (total > limit_bytes) {
    return Status::Usage(path + ": the decoded weights take " + std::to_string(total >> 20) +
                         " MiB, above the limit of " + std::to_string(limit_bytes >> 20) +
                         " MiB; choose fewer by a pattern");
  }
  // One buffer for all: the tensors written below point into it.
  std::vector<float> values(total / sizeof(float));
  std::vector<CheckpointTensor> tensors;
  float* at = values.data();
  for (const Weight* weight : chosen) {
    weight->Decode(0, weight->rows(), at);
    CheckpointTensor tensor;
    tensor.name = weight->name();
    tensor.dtype = DType::kF32;
    tensor.shape = weight->shape();
    tensor.data = reinterpret_cast<const std::byte*>(at);
    const uint64_t n = static_cast<uint64_t>(weight->rows()) * static_cast<uint64_t>(weight->cols());
    tensor.size_bytes = n * sizeof(float);
    tensors.push_back(std::move(tensor));
    at += n;
  }
  return WriteSafetensors(path, tensors, {{"decoded_from", source.path()}});
}

}  // namespace assay
