#include "runtime/process_info.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "base/wall_clock.h"

namespace assay {
namespace {

// A whole number from 0 to 2^30 out of the first variable that holds one; fallback otherwise.
// The launcher that is asked first wins where several are nested (torchrun under Slurm): the inner one knows the rank.
int32_t FirstNumber(std::initializer_list<const char*> names, int32_t fallback) {
  for (const char* name : names) {
    const char* text = std::getenv(name);
    if (text == nullptr || *text == '\0') continue;
    char* end = nullptr;
    const long value = std::strtol(text, &end, 10);
    if (*end == '\0' && value >= 0 && value <= (1L << 30)) return static_cast<int32_t>(value);
  }
  return fallback;
}

// Arguments end in NUL there, the last one too; empty ones are kept. A longer command line is cut.
// From /proc: a library does not see the arguments of main.
std::vector<std::string> CommandLine() {
  constexpr size_t kMaxBytes = 1 << 20;  // of a command line that is kept
  std::vector<std::string> argv;
  const int file = ::open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
  if (file < 0) return argv;
  std::string text;
  char buffer[4096];
  ssize_t got = 0;
  while (text.size() < kMaxBytes && (got = ::read(file, buffer, sizeof(buffer))) > 0) {
    text.append(buffer, static_cast<size_t>(got));
  }
  ::close(file);
  for (size_t at = 0; at < text.size();) {
    argv.emplace_back(text.c_str() + at);
    at += argv.back().size() + 1;
  }
  return argv;
}

}  // namespace

// What cannot be found out stays empty: recording does not depend on it.
ProcessInfo DescribeThisProcess() {
  ProcessInfo info;
  char text[4096];
  if (::gethostname(text, sizeof(text)) == 0) {
    text[sizeof(text) - 1] = '\0';
    info.host = text;
  }
  info.pid = ::getpid();
  info.rank = FirstNumber({"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID"}, 0);
  info.world_size =
      FirstNumber({"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_NTASKS"}, 1);
  // Of the recording, not of the process: they differ by the host's start-up.
  info.start_time_ns = WallClockNs();
  info.command = CommandLine();
  if (::getcwd(text, sizeof(text)) != nullptr) info.cwd = text;
  return info;
}

}  // namespace assay
