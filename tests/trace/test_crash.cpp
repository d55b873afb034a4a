// kill -9 at random moments: what a returned call has recorded is in the trace.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <set>
#include <thread>

#include "trace/reader.h"
#include "trace/writer.h"
#include "trace_testing.h"

namespace assay {
namespace {

using testing::SomeEvent;
using testing::SomeProcess;
using testing::TempDir;

constexpr int kThreads = 4;

struct Ack {
  int32_t thread;
  int32_t number;
  auto operator<=>(const Ack&) const = default;
};

// Records from four threads for ever; a call that has returned is told through the pipe. Never returns.
[[noreturn]] void Host(const std::string& dir, int pipe) {
  TraceWriterOptions options;
  options.dir = dir;
  options.reserve_step = 128 << 10;  // many growths in a short life
  options.ready_step = 16 << 10;
  auto writer = std::move(TraceWriter::Open(options, SomeProcess())).value();
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      Event e = SomeEvent(static_cast<uint64_t>(t), 1 + 2 * t, 64);
      e.rank = t;
      for (int32_t number = 0;; ++number) {
        e.step = number;
        if (number % 50 == 0)
          e.site = writer->AddSite(std::to_string(t) + "/" + std::to_string(number), "", "").value();
        if (!writer->Write(e).ok()) ::_exit(1);
        const Ack ack{t, number};
        if (::write(pipe, &ack, sizeof ack) != sizeof ack) ::_exit(0);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ::_exit(1);
}

TEST(Crash, EveryAcknowledgedEventSurvivesKill9) {
  SplitMix64 random(20240601);
  uint64_t acknowledged = 0;
  const int rounds = ASSAY_SANITIZED ? 50 : 200;  // the start of a sanitized process takes long
  for (int round = 0; round < rounds; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const TempDir dir;
    int pipe[2];
    ASSERT_EQ(::pipe(pipe), 0);
    const pid_t pid = ::fork();
    ASSERT_GE(pid, 0);
    if (pid == 0) {
      ::close(pipe[0]);
      Host(dir.path() + "/t", pipe[1]);
    }
    ::close(pipe[1]);
    // Behind up to 400 acknowledgements: some kills hit the opening of sites, some a growth. Counted, not timed, so
    // that a slow machine tests the same.
    std::set<Ack> acks;
    Ack buffer[256];
    const auto take = [&] {
      const ssize_t got = ::read(pipe[0], buffer, sizeof buffer);
      for (ssize_t i = 0; i < got / static_cast<ssize_t>(sizeof(Ack)); ++i) acks.insert(buffer[i]);
      return got > 0;
    };
    const size_t enough = 1 + random.Next() % 400;
    while (acks.size() < enough) ASSERT_TRUE(take());
    ::kill(pid, SIGKILL);
    while (take()) {
    }
    ::close(pipe[0]);
    int status = 0;
    ASSERT_EQ(::waitpid(pid, &status, 0), pid);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);

    Result<std::unique_ptr<Trace>> trace = Trace::Open(dir.path() + "/t");
    ASSERT_TRUE(trace.ok()) << trace.status().message();
    std::set<Ack> found;
    for (uint64_t i = 0; i < trace.value()->event_count(); ++i) {
      const EventView view = trace.value()->event(i);
      found.insert({view.rank(), static_cast<int32_t>(view.step())});
      EXPECT_EQ(view.segment(0).n_rows, 1 + 2 * view.rank());
    }
    for (const Ack& ack : acks) EXPECT_EQ(found.count(ack), 1u) << ack.thread << "/" << ack.number;
    acknowledged += acks.size();
    bool tail_reported = false;
    for (const Damage& d : trace.value()->damages()) {
      EXPECT_TRUE(d.benign) << d.offset << " " << d.what;
      tail_reported = tail_reported || d.what.find("torn tail") == 0;
    }
    EXPECT_TRUE(tail_reported);
    EXPECT_FALSE(trace.value()->processes()[0].closed);
  }
  EXPECT_GT(acknowledged, 2000u);
}

}  // namespace
}  // namespace assay
