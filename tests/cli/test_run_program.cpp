#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "cli/run_program.h"

extern char** environ;

namespace assay::testing {
namespace {

constexpr unsigned kSecondsAtMost = 120;

std::string ReadAll(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

std::vector<char*> Pointers(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (std::string& text : strings) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

void Redirect(const char* path, int flags, int fd) {
  const int file = open(path, flags, 0600);
  if (file < 0 || dup2(file, fd) < 0) _exit(126);
}

}  // namespace

Output RunAssay(const std::vector<std::string>& arguments, const std::vector<std::string>& environment,
                const std::string& working_dir) {
  std::string folder = (std::filesystem::temp_directory_path() / "assay-cli-XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) return {-1, "", "mkdtemp failed"};
  const std::string out_path = folder + "/out", err_path = folder + "/err";

  std::vector<std::string> argv = {ASSAY_BINARY_DIR "/assay"};
  argv.insert(argv.end(), arguments.begin(), arguments.end());
  std::vector<std::string> env;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    if (std::strncmp(*variable, "ASSAY", 5) != 0) env.emplace_back(*variable);
  }
  env.insert(env.end(), environment.begin(), environment.end());
  const std::vector<char*> argv_pointers = Pointers(argv), env_pointers = Pointers(env);

  const pid_t child = fork();
  if (child == 0) {
    Redirect("/dev/null", O_RDONLY, 0);
    Redirect(out_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 1);
    Redirect(err_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 2);
    if (!working_dir.empty() && chdir(working_dir.c_str()) != 0) _exit(126);
    alarm(kSecondsAtMost);  // survives exec
    execve(argv_pointers[0], argv_pointers.data(), env_pointers.data());
    _exit(127);
  }
  int status = 0;
  waitpid(child, &status, 0);
  Output output{WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), ReadAll(out_path), ReadAll(err_path)};
  std::filesystem::remove_all(folder);
  return output;
}

std::string Golden(const std::string& name, const std::string& actual) {
  const std::string path = std::string(ASSAY_SOURCE_DIR "/tests/cli/golden/") + name;
  if (std::getenv("ASSAY_UPDATE_GOLDEN") != nullptr) std::ofstream(path, std::ios::binary) << actual;
  return ReadAll(path);
}

}  // namespace assay::testing
