#include "cli/machine.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>

namespace assay::cli {
namespace {

namespace fs = std::filesystem;

// Empty where /proc/cpuinfo does not say.
std::string CpuModel() {
  std::ifstream in("/proc/cpuinfo");
  std::string line;
  while (std::getline(in, line)) {
    // x86 says "model name", other architectures "Processor" or nothing.
    if (line.rfind("model name", 0) == 0 || line.rfind("Processor", 0) == 0) {
      const size_t colon = line.find(": ");
      if (colon != std::string::npos) return line.substr(colon + 2);
    }
  }
  return {};
}

// 0: not known, as sysconf says -1 for that.
uint64_t SysconfOrZero(int name) {
  const long value = sysconf(name);
  return value > 0 ? static_cast<uint64_t>(value) : 0;
}

// Empty parts are left out: they would mean the current folder.
std::vector<std::string> SplitPath(const char* variable) {
  std::vector<std::string> parts;
  const char* value = std::getenv(variable);
  std::istringstream in(value != nullptr ? value : "");
  for (std::string part; std::getline(in, part, ':');) {
    if (!part.empty()) parts.push_back(part);
  }
  return parts;
}

// Full path of a program in PATH, or empty.
std::string FindProgram(const std::string& name) {
  for (const std::string& folder : SplitPath("PATH")) {
    const std::string path = folder + "/" + name;
    if (access(path.c_str(), X_OK) == 0) return path;
  }
  return {};
}

// Versions of installed packages, asked of the interpreter itself: it alone knows its search path (virtual
// environments, version managers). Reads metadata and imports none of the packages.
std::vector<EngineFact> PythonEngines() {
  const std::string python = FindProgram("python3");
  if (python.empty()) return {};
  static constexpr const char* kScript =
      "import importlib.metadata as m\n"
      "for n in (\"torch\", \"transformers\", \"vllm\", \"sglang\", \"llama_cpp_python\", \"jax\"):\n"
      "    try: print(n, m.version(n))\n"
      "    except m.PackageNotFoundError: pass\n";
  const std::string command = fmt::format("python3 -I -c '{}' 2>/dev/null", kScript);
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  std::vector<EngineFact> found;
  char name[64], version[64];
  while (pipe != nullptr && std::fscanf(pipe.get(), "%63s %63s", name, version) == 2) {
    found.push_back({name, version, python});
  }
  return found;
}

}  // namespace

// Usable cores come from the affinity mask: in a container or under taskset they are fewer than those online.
CpuFacts ReadCpuFacts() {
  CpuFacts facts;
  facts.model = CpuModel();
  utsname names{};
  if (uname(&names) == 0) {
    facts.architecture = names.machine;
    facts.kernel = fmt::format("{} {}", names.sysname, names.release);
  }
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) facts.cores_usable = CPU_COUNT(&set);
  facts.cores_online = static_cast<int>(SysconfOrZero(_SC_NPROCESSORS_ONLN));
  facts.memory_bytes = SysconfOrZero(_SC_PHYS_PAGES) * SysconfOrZero(_SC_PAGESIZE);
#ifdef _SC_LEVEL3_CACHE_SIZE
  facts.llc_bytes = SysconfOrZero(_SC_LEVEL3_CACHE_SIZE);
#endif
  return facts;
}

// Through the driver and without the runtime: nothing of CUDA is linked or installed for this.
CudaFacts ReadCudaFacts() {
  CudaFacts facts;
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) {
    facts.detail = "no CUDA driver (libcuda.so.1 not found)";
    return facts;
  }
  // The few driver calls needed, by their documented C signatures; CUresult and CUdevice are int.
  const auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(driver, "cuInit"));
  const auto version = reinterpret_cast<int (*)(int*)>(dlsym(driver, "cuDriverGetVersion"));
  const auto count = reinterpret_cast<int (*)(int*)>(dlsym(driver, "cuDeviceGetCount"));
  const auto name = reinterpret_cast<int (*)(char*, int, int)>(dlsym(driver, "cuDeviceGetName"));
  const auto memory = reinterpret_cast<int (*)(size_t*, int)>(dlsym(driver, "cuDeviceTotalMem_v2"));
  int devices = 0, number = 0, error = 0;
  if (init == nullptr || version == nullptr || count == nullptr || name == nullptr || memory == nullptr) {
    facts.detail = "libcuda.so.1 lacks expected functions";
  } else if ((error = init(0)) != 0) {
    facts.detail = fmt::format("cuInit failed with CUDA error {}", error);
  } else if ((error = count(&devices)) != 0 || devices == 0) {
    facts.detail = fmt::format("driver present, no device (CUDA error {})", error);
  } else {
    facts.present = true;
    if (version(&number) == 0) facts.detail = fmt::format("CUDA {}.{}", number / 1000, number % 1000 / 10);
    for (int device = 0; device < devices; ++device) {  // ordinals are device handles
      char text[128] = "";
      size_t bytes = 0;
      if (name(text, sizeof text, device) != 0 || memory(&bytes, device) != 0) continue;
      facts.devices.push_back(fmt::format("{}, {} GiB", text, bytes >> 30));
    }
  }
  dlclose(driver);
  return facts;
}

// Only by what lies on the disk: nothing found is run, but for python3, which is asked for its packages.
std::vector<EngineFact> FindEngines() {
  std::vector<EngineFact> found = PythonEngines();
  for (const char* program : {"llama-cli", "llama-server", "llama-completion"}) {
    const std::string path = FindProgram(program);
    if (!path.empty()) {
      found.push_back({"llama.cpp", "", path});
      break;
    }
  }
  std::vector<std::string> folders = SplitPath("LD_LIBRARY_PATH");
  for (const char* folder : {"/usr/local/lib", "/usr/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"}) {
    folders.emplace_back(folder);
  }
  for (const std::string& folder : folders) {
    const std::string path = folder + "/libggml.so";
    if (access(path.c_str(), R_OK) == 0) {
      found.push_back({"ggml", "", path});
      break;
    }
  }
  return found;
}

// The trace folder itself may not exist yet; whether it can be made is asked of the nearest one that does.
FolderFacts CheckFolder(const std::string& trace_dir) {
  FolderFacts facts;
  std::error_code error;
  fs::path path = fs::absolute(trace_dir, error);
  while (!fs::exists(path, error) && path.has_relative_path()) {
    if (fs::is_symlink(fs::symlink_status(path, error))) {
      facts.path = path.string();
      facts.detail = facts.path + " is a symbolic link that leads nowhere";
      return facts;
    }
    path = path.parent_path();
  }
  facts.path = path.string();
  if (!fs::is_directory(path, error)) {
    facts.detail = facts.path + " is not a folder";
    return facts;
  }
  std::string probe = (path / ".assay-doctor-XXXXXX").string();
  const int fd = mkstemp(probe.data());
  if (fd < 0) {
    facts.detail = fmt::format("cannot create a file in {}: {}", facts.path, std::strerror(errno));
  } else {
    facts.writable = true;
    close(fd);
    unlink(probe.c_str());
  }
  struct statvfs space {};
  if (statvfs(facts.path.c_str(), &space) == 0) facts.free_bytes = uint64_t{space.f_bavail} * space.f_frsize;
  return facts;
}

}  // namespace assay::cli
