// Facts about this machine for `assay doctor`: processor, memory, CUDA, inference engines, the trace folder. Looking
// changes nothing, apart from one temporary file in the trace folder, removed at once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace assay::cli {

struct CpuFacts {
  std::string model;          // as the kernel names it; empty: not known
  std::string architecture;   // "x86_64"
  std::string kernel;         // "Linux 6.1.0"
  int cores_usable = 0;       // by this process (affinity)
  int cores_online = 0;       // of the machine
  uint64_t memory_bytes = 0;  // physical
  uint64_t llc_bytes = 0;     // last-level cache of one socket; 0: not known
};
CpuFacts ReadCpuFacts();

// Found through the driver library, which is loaded for the question alone.
struct CudaFacts {
  bool present = false;
  std::string detail;                // why not, or the driver's CUDA version
  std::vector<std::string> devices;  // "NVIDIA H200, 140 GiB"
};
CudaFacts ReadCudaFacts();

struct EngineFact {
  std::string name;     // "torch", "vllm", "llama.cpp"
  std::string version;  // empty: not known
  std::string where;    // Python interpreter, or the path of the program or library
};
// Python packages of the first python3 in PATH, and the programs and libraries of llama.cpp. At most about 0.2 s.
std::vector<EngineFact> FindEngines();

struct FolderFacts {
  std::string path;  // the nearest existing folder, where a trace would be created
  bool writable = false;
  std::string detail;       // why not
  uint64_t free_bytes = 0;  // to this user
};
FolderFacts CheckFolder(const std::string& trace_dir);

}  // namespace assay::cli
