#include "cli/python_host.h"

#include <cstdlib>
#include <filesystem>
#include <system_error>

namespace assay::cli {
namespace {

namespace fs = std::filesystem;

// Holds nothing but sitecustomize.py, so that nothing else of the package gets in front of the host's own modules.
constexpr const char* kHook = "attach/site_hook";  // in the package
constexpr const char* kLibrary = "libassay.so";

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// By the hook, which older packages lack.
bool IsPackage(const fs::path& folder) {
  std::error_code error;
  return fs::exists(folder / kHook / "sitecustomize.py", error);
}

// The package "assay": in PYTHONPATH, where a user who develops it has it; in the checkout whose build folder this
// program lies in; in the share folder or the Python environment whose bin folder it lies in. Empty: nowhere.
fs::path FindPackage(const fs::path& program_dir, const std::string& python_path) {
  std::error_code error;
  for (size_t start = 0; start < python_path.size();) {
    const size_t colon = std::min(python_path.find(':', start), python_path.size());
    const fs::path folder(python_path.substr(start, colon - start));
    if (!folder.empty() && IsPackage(folder / "assay")) return fs::absolute(folder / "assay", error);
    start = colon + 1;
  }
  for (fs::path up = program_dir; up.has_relative_path(); up = up.parent_path()) {
    if (IsPackage(up / "python/assay")) return up / "python/assay";
  }
  const fs::path prefix = program_dir.parent_path();
  if (IsPackage(prefix / "share/assay/python/assay")) return prefix / "share/assay/python/assay";
  for (const char* lib : {"lib", "lib64"}) {
    for (fs::directory_iterator it(prefix / lib, error), end; !error && it != end; it.increment(error)) {
      for (const char* site : {"site-packages/assay", "dist-packages/assay"}) {
        if (it->path().filename().string().rfind("python3", 0) == 0 && IsPackage(it->path() / site)) {
          return it->path() / site;
        }
      }
    }
  }
  return {};
}

}  // namespace

// ASSAY_LIBRARY is left alone when the user has set it.
std::vector<std::pair<std::string, std::string>> PythonEnvironment() {
  std::error_code error;
  const fs::path program_dir = fs::read_symlink("/proc/self/exe", error).parent_path();
  const std::string before = Variable("PYTHONPATH");
  const fs::path package = error ? fs::path() : FindPackage(program_dir, before);
  if (package.empty()) return {};
  std::vector<std::pair<std::string, std::string>> environment;
  environment.emplace_back("PYTHONPATH", (package / kHook).string() + (before.empty() ? "" : ":" + before));
  if (Variable("ASSAY_LIBRARY").empty()) {
    for (const fs::path& folder : {program_dir, package / "lib", program_dir.parent_path() / "lib"}) {
      if (!fs::exists(folder / kLibrary, error)) continue;
      environment.emplace_back("ASSAY_LIBRARY", folder.string());
      break;
    }
  }
  return environment;
}

}  // namespace assay::cli
