#include "cli/child_process.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace assay::cli {
namespace {

// What the handler passes signals on to, 0: nobody. The program runs one child at a time.
volatile sig_atomic_t child_pid = 0;

// Async-signal-safe: kill() and errno alone.
void PassOn(int number) {
  const int saved = errno;
  if (child_pid > 0) ::kill(child_pid, number);
  errno = saved;
}

// Signal dispositions while a child runs; restored at the end of the scope.
// A terminal sends SIGINT and SIGQUIT to the whole group: the child decides, we wait. SIGTERM and SIGHUP reach us
// alone.
class ForegroundSignals {
 public:
  ForegroundSignals() {
    Set(SIGINT, SIG_IGN, 0);
    Set(SIGQUIT, SIG_IGN, 1);
    Set(SIGTERM, PassOn, 2);
    Set(SIGHUP, PassOn, 3);
  }
  ~ForegroundSignals() { Restore(); }
  void Restore() {
    for (size_t i = 0; i < 4; ++i) ::sigaction(numbers_[i], &before_[i], nullptr);
  }

 private:
  void Set(int number, void (*handler)(int), size_t i) {
    struct sigaction action {};
    action.sa_handler = handler;
    numbers_[i] = number;
    ::sigaction(number, &action, &before_[i]);
  }
  int numbers_[4] = {};
  struct sigaction before_[4] = {};
};

}  // namespace

int ChildResult::shell_code() const {
  if (!started) return start_errno == ENOENT ? 127 : 126;
  return signal != 0 ? 128 + signal : exit_code;
}

// Between fork and exec the child calls setenv, which is not async-signal-safe; this program has no other threads
// then.
Result<ChildResult> RunChild(const std::vector<std::string>& argv,
                             const std::vector<std::pair<std::string, std::string>>& environment, bool out_to_err) {
  std::vector<char*> arguments;
  for (const std::string& a : argv) arguments.push_back(const_cast<char*>(a.c_str()));
  arguments.push_back(nullptr);
  // The child reports a failed exec through a pipe that a successful one closes.
  int report[2];
  if (::pipe2(report, O_CLOEXEC) != 0) {
    return Status::Environment(std::string("cannot make a pipe: ") + std::strerror(errno));
  }
  ForegroundSignals signals;
  const pid_t pid = ::fork();
  if (pid < 0) {
    const int error = errno;
    ::close(report[0]);
    ::close(report[1]);
    return Status::Environment(std::string("cannot start a process: ") + std::strerror(error));
  }
  if (pid == 0) {
    signals.Restore();
    for (const auto& [name, value] : environment) ::setenv(name.c_str(), value.c_str(), 1);
    if (out_to_err) ::dup2(STDERR_FILENO, STDOUT_FILENO);
    ::execvp(arguments[0], arguments.data());
    const int error = errno;
    [[maybe_unused]] const ssize_t written = ::write(report[1], &error, sizeof(error));
    ::_exit(127);
  }
  child_pid = pid;
  ::close(report[1]);
  ChildResult result;
  result.pid = pid;
  int error = 0;
  ssize_t got = 0;
  while ((got = ::read(report[0], &error, sizeof(error))) < 0 && errno == EINTR) {
  }
  ::close(report[0]);
  result.started = got == 0;
  result.start_errno = result.started ? 0 : error;
  int state = 0;
  while (::waitpid(pid, &state, 0) < 0 && errno == EINTR) {
  }
  child_pid = 0;
  if (WIFSIGNALED(state)) {
    result.signal = WTERMSIG(state);
  } else {
    result.exit_code = WEXITSTATUS(state);
  }
  return result;
}

}  // namespace assay::cli
