// Any bytes as a safetensors file. What is accepted lies inside the bytes, is sorted by name and tiles the data.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "io/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::byte* bytes = reinterpret_cast<const std::byte*>(data);
  const auto parsed = assay::ParseSafetensors(bytes, size, "input");
  if (!parsed.ok()) {
    if (parsed.status().message().compare(0, 7, "input: ") != 0) std::abort();
    return 0;
  }
  uint64_t total = 0;
  unsigned touched = 0;
  const std::string* last = nullptr;
  for (const assay::CheckpointTensor& t : parsed->tensors) {
    if (last != nullptr && !(*last < t.name)) std::abort();
    last = &t.name;
    if (t.file_offset > size || t.size_bytes > size - t.file_offset || t.data != bytes + t.file_offset) std::abort();
    total += t.size_bytes;
    for (uint64_t i = 0; i < t.size_bytes; ++i) touched += std::to_integer<unsigned>(t.data[i]);  // ASan looks on
  }
  volatile unsigned sink = touched;
  (void)sink;
  uint64_t header = 0;
  for (int i = 0; i < 8; ++i) header |= static_cast<uint64_t>(data[i]) << (8 * i);
  if (total != size - 8 - header) std::abort();
  return 0;
}
