// What a host may do to a recording: threads, limits, full disks, fork, exec, several writers in one folder.
#include <dirent.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <thread>

#include "base/sha256.h"
#include "trace/manifest.h"
#include "trace/reader.h"
#include "trace/writer.h"
#include "trace_testing.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define ASSAY_TEST_SANITIZED 1
#endif
#endif
#ifndef ASSAY_TEST_SANITIZED
#define ASSAY_TEST_SANITIZED 0
#endif

namespace assay {
namespace {

using testing::SomeEvent;
using testing::SomeProcess;
using testing::TempDir;

TraceWriterOptions SmallOptions(const std::string& dir) {
  TraceWriterOptions options;
  options.dir = dir;
  options.reserve_step = 256 << 10;
  options.ready_step = 64 << 10;
  return options;
}

std::unique_ptr<TraceWriter> OpenWriter(const TraceWriterOptions& options) {
  Result<std::unique_ptr<TraceWriter>> writer = TraceWriter::Open(options, SomeProcess());
  EXPECT_TRUE(writer.ok()) << writer.status().message();
  return writer.ok() ? std::move(writer).value() : nullptr;
}

std::unique_ptr<Trace> OpenTrace(const std::string& path) {
  Result<std::unique_ptr<Trace>> trace = Trace::Open(path);
  EXPECT_TRUE(trace.ok()) << trace.status().message();
  return trace.ok() ? std::move(trace).value() : nullptr;
}

std::string Slurp(const std::string& path) {
  std::ostringstream out;
  out << std::ifstream(path, std::ios::binary).rdbuf();
  return out.str();
}

// Runs body in a child; its exit code. The child must not return into the test.
template <class F>
int InChild(F body) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::alarm(60);
    ::_exit(body());
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

TEST(Writer, EventsOfManyThreadsAllComeBackOnce) {
  const TempDir dir;
  auto writer = OpenWriter(SmallOptions(dir.path() + "/t"));
  constexpr int kThreads = 4, kEach = 3000;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      Event e = SomeEvent(static_cast<uint64_t>(t), 1 + t);
      e.rank = t;
      e.site = writer->AddSite("site-" + std::to_string(t), "", "").value();
      for (int i = 0; i < kEach; ++i) {
        e.step = i;
        ASSERT_TRUE(writer->Write(e).ok());
      }
    });
  }
  for (std::thread& t : threads) t.join();
  ASSERT_TRUE(writer->Close().ok());
  auto trace = OpenTrace(writer->dir());
  ASSERT_EQ(trace->event_count(), uint64_t{kThreads * kEach});
  EXPECT_TRUE(trace->damages().empty());
  std::set<std::pair<int32_t, int64_t>> seen;
  std::set<uint64_t> sequences;
  for (uint64_t i = 0; i < trace->event_count(); ++i) {
    const EventView view = trace->event(i);
    seen.emplace(view.rank(), view.step());
    sequences.insert(view.sequence());
    EXPECT_EQ(trace->site_names()[view.global_site()], "site-" + std::to_string(view.rank()));
  }
  EXPECT_EQ(seen.size(), size_t{kThreads * kEach});
  EXPECT_EQ(*sequences.rbegin(), uint64_t{kThreads * kEach - 1});
}

TEST(Writer, ByteCapDropsEventsAndKeepsTheRest) {
  const TempDir dir;
  TraceWriterOptions options = SmallOptions(dir.path() + "/t");
  options.byte_cap = 100 << 10;
  auto writer = OpenWriter(options);
  int written = 0;
  for (int i = 0; i < 1000; ++i) written += writer->Write(SomeEvent(1)).ok() ? 1 : 0;
  EXPECT_GT(written, 150);
  EXPECT_LT(written, 200);
  EXPECT_EQ(writer->drops().byte_cap, static_cast<uint64_t>(1000 - written));
  EXPECT_TRUE(writer->WriteCoverage({"a", "dropped", 1, ""}).ok());
  ASSERT_TRUE(writer->Close().ok());
  auto trace = OpenTrace(writer->dir());
  EXPECT_EQ(trace->event_count(), static_cast<uint64_t>(written));
  EXPECT_EQ(trace->processes()[0].drops.byte_cap, static_cast<uint64_t>(1000 - written));
  EXPECT_EQ(trace->processes()[0].coverage.size(), 1u);
}

TEST(Writer, EnormousCapIsCutToTheAddressesThatThereAre) {
  const TempDir dir;
  TraceWriterOptions options = SmallOptions(dir.path() + "/t");
  options.byte_cap = UINT64_MAX;
  auto writer = OpenWriter(options);
  EXPECT_TRUE(writer->Write(SomeEvent(1)).ok());
}

// A service may run under a limit of its address space.
TEST(Writer, LimitedAddressSpaceMakesTheCapSmaller) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || ASSAY_TEST_SANITIZED
  GTEST_SKIP() << "address and thread sanitizers need the addresses themselves";
#endif
  const TempDir dir;
  EXPECT_EQ(InChild([&] {
              const rlimit limit{uint64_t{1} << 30, uint64_t{1} << 30};
              if (::setrlimit(RLIMIT_AS, &limit) != 0) return 2;
              const auto writer = TraceWriter::Open(SmallOptions(dir.path() + "/t"), SomeProcess());
              return writer.ok() && writer.value()->Write(SomeEvent(1)).ok() ? 0 : 3;
            }),
            0);
}

std::atomic<int> g_reserve_error{0};
int FailReserve(uint64_t, uint64_t) { return g_reserve_error.load(); }

TEST(Writer, FullDiskStopsRecordingAndFreedSpaceResumesIt) {
  const TempDir dir;
  TraceWriterOptions options = SmallOptions(dir.path() + "/t");
  options.reserve_hook = FailReserve;
  g_reserve_error = 0;
  auto writer = OpenWriter(options);
  (void)writer->AddSite("a", "", "").value();
  g_reserve_error = ENOSPC;
  int written = 0;
  Status last;
  for (int i = 0; i < 1000; ++i) {
    last = writer->Write(SomeEvent(1));
    written += last.ok() ? 1 : 0;
  }
  EXPECT_EQ(last.code(), Code::kEnvironment);
  EXPECT_NE(last.message().find("No space left on device"), std::string::npos) << last.message();
  EXPECT_GT(written, 0);
  EXPECT_EQ(writer->drops().disk_full, static_cast<uint64_t>(1000 - written));
  g_reserve_error = 0;
  EXPECT_TRUE(writer->Write(SomeEvent(1)).ok());
  ASSERT_TRUE(writer->Close().ok());
  auto trace = OpenTrace(writer->dir());
  EXPECT_EQ(trace->event_count(), static_cast<uint64_t>(written + 1));
  EXPECT_TRUE(trace->damages().empty());
}

TEST(Writer, FullDiskAtOpenIsAnErrorWithPathAndReason) {
  const TempDir dir;
  TraceWriterOptions options = SmallOptions(dir.path() + "/t");
  options.reserve_hook = FailReserve;
  g_reserve_error = ENOSPC;
  const auto writer = TraceWriter::Open(options, SomeProcess());
  g_reserve_error = 0;
  EXPECT_EQ(writer.status().code(), Code::kEnvironment);
  EXPECT_NE(writer.status().message().find(dir.path()), std::string::npos);
  EXPECT_NE(writer.status().message().find("No space left"), std::string::npos);
}

TEST(Writer, UnwritableFolderIsAnError) {
  const TempDir dir;
  ASSERT_TRUE(std::ofstream(dir.path() + "/file").put('x').good());
  const auto writer = TraceWriter::Open(SmallOptions(dir.path() + "/file/t"), SomeProcess());
  EXPECT_EQ(writer.status().code(), Code::kEnvironment);
}

// The kernel answers growth beyond RLIMIT_FSIZE with SIGXFSZ, which would end the host.
TEST(Writer, FileSizeLimitOfTheHostDropsEventsAndSparesTheHost) {
  const TempDir dir;
  const int code = InChild([&] {
    const rlimit limit{1 << 20, 1 << 20};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 2;
    auto writer = std::move(TraceWriter::Open(SmallOptions(dir.path() + "/t"), SomeProcess())).value();
    int written = 0;
    for (int i = 0; i < 5000; ++i) written += writer->Write(SomeEvent(1)).ok() ? 1 : 0;
    if (written < 1000 || writer->drops().disk_full != static_cast<uint64_t>(5000 - written)) return 3;
    const std::string big(2 << 20, 'x');
    if (writer->WritePayload(big.data(), big.size()).ok() || writer->drops().disk_full <= 5000u - written) return 4;
    return writer->Close().ok() ? 0 : 5;
  });
  ASSERT_EQ(code, 0);
  EXPECT_GT(OpenTrace(dir.path() + "/t")->event_count(), 1000u);
}

TEST(Writer, ForkedChildOpensItsOwnFileAndLeavesTheParentsAlone) {
  const TempDir dir;
  auto writer = OpenWriter(SmallOptions(dir.path() + "/t"));
  Event e = SomeEvent(1);
  e.site = writer->AddSite("first", "", "").value();
  const uint32_t second = writer->AddSite("second", "engine.second", "T h").value();
  ASSERT_TRUE(writer->WriteProcessMeta("dtype", "f32").ok());
  ASSERT_TRUE(writer->Write(e).ok());
  const std::string parents_path = writer->path();
  const std::string before = Slurp(parents_path);
  const int code = InChild([&] {
    e.site = second;
    for (int i = 0; i < 10; ++i) {
      if (!writer->Write(e).ok()) return 2;
    }
    if (writer->path() == parents_path) return 3;
    if (writer->AddSite("second", "", "").value() != second) return 4;
    if (writer->AddSite("third", "", "").value() != 2u) return 5;
    return writer->Close().ok() ? 0 : 6;
  });
  ASSERT_EQ(code, 0);
  EXPECT_EQ(Slurp(parents_path), before);
  ASSERT_TRUE(writer->Write(e).ok());
  ASSERT_TRUE(writer->Close().ok());

  auto trace = OpenTrace(writer->dir());
  ASSERT_EQ(trace->processes().size(), 2u);
  EXPECT_EQ(trace->event_count(), 12u);
  const TraceProcess& child = trace->processes()[1];
  EXPECT_NE(child.info.pid, trace->processes()[0].info.pid);
  ASSERT_EQ(child.sites.size(), 3u);
  EXPECT_EQ(child.sites[1].name, "second");
  EXPECT_EQ(child.sites[1].engine_name, "engine.second");
  EXPECT_TRUE(child.closed);
  const auto& meta = child.info.meta;
  EXPECT_TRUE(std::count(meta.begin(), meta.end(), std::make_pair(std::string("dtype"), std::string("f32"))) == 1);
}

TEST(Writer, ChildThatNeverRecordsMakesNoFile) {
  const TempDir dir;
  auto writer = OpenWriter(SmallOptions(dir.path() + "/t"));
  ASSERT_EQ(InChild([&] { return writer->Close().ok() ? 0 : 1; }), 0);
  ASSERT_TRUE(writer->Write(SomeEvent(1)).ok());
  ASSERT_TRUE(writer->Close().ok());
  EXPECT_EQ(OpenTrace(writer->dir())->processes().size(), 1u);
}

// The parent's threads hold the writer's locks at arbitrary moments; the child must not wait for threads that it does
// not have.
TEST(Writer, ForkInTheMiddleOfOtherThreadsCallsDoesNotBlockTheChild) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || ASSAY_TEST_SANITIZED
  GTEST_SKIP() << "the sanitizer's own allocator may be locked at the fork, and then blocks the child";
#endif
  const TempDir dir;
  auto writer = OpenWriter(SmallOptions(dir.path() + "/t"));
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; !stop; ++i) {
        (void)writer->AddSite(std::to_string(t) + "." + std::to_string(i % 200), "", "");
        (void)writer->Write(SomeEvent(static_cast<uint64_t>(i), 3));
      }
    });
  }
  int failures = 0;
  for (int i = 0; i < 30; ++i) {
    failures += InChild([&] {
      if (!writer->Write(SomeEvent(7)).ok()) return 2;
      return writer->AddSite("child", "", "").ok() && writer->Close().ok() ? 0 : 3;
    });
  }
  stop = true;
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(failures, 0);
  ASSERT_TRUE(writer->Close().ok());
  auto trace = OpenTrace(writer->dir());
  EXPECT_EQ(trace->processes().size(), 31u);
  for (const Damage& d : trace->damages()) EXPECT_TRUE(d.benign) << d.file << " " << d.offset << " " << d.what;
}

TEST(Writer, DescriptorsDoNotSurviveExec) {
  const TempDir dir;
  auto writer = OpenWriter(SmallOptions(dir.path() + "/t"));
  int checked = 0;
  for (int fd = 3; fd < 64; ++fd) {
    char target[512] = "";
    if (::readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), target, sizeof target - 1) < 0) continue;
    if (std::string(target).find(".assay") == std::string::npos) continue;
    ++checked;
    EXPECT_NE(::fcntl(fd, F_GETFD) & FD_CLOEXEC, 0);
  }
  EXPECT_EQ(checked, 1);
}

TEST(Writer, ClosedWriterRefusesAndCounts) {
  const TempDir dir;
  auto writer = OpenWriter(SmallOptions(dir.path() + "/t"));
  ASSERT_TRUE(writer->Write(SomeEvent(1)).ok());
  ASSERT_TRUE(writer->Close().ok());
  EXPECT_TRUE(writer->Close().ok());
  EXPECT_EQ(writer->Write(SomeEvent(1)).code(), Code::kEnvironment);
  EXPECT_EQ(writer->drops().internal, 1u);
  EXPECT_EQ(OpenTrace(writer->dir())->event_count(), 1u);
}

TEST(Writer, FolderDeletedMeanwhileIsAnErrorAtClose) {
  const TempDir dir;
  auto writer = OpenWriter(SmallOptions(dir.path() + "/t"));
  ASSERT_TRUE(writer->Write(SomeEvent(1)).ok());
  std::filesystem::remove_all(dir.path() + "/t");
  EXPECT_TRUE(writer->Write(SomeEvent(2)).ok()) << "the host goes on";
  const Status closed = writer->Close();
  EXPECT_EQ(closed.code(), Code::kEnvironment);
  EXPECT_NE(closed.message().find("was deleted while it was written"), std::string::npos) << closed.message();
  EXPECT_FALSE(std::filesystem::exists(dir.path() + "/t")) << "no folder that looks like a trace";
}

TEST(Writer, CloseGivesTheReservedTailBack) {
  const TempDir dir;
  auto writer = OpenWriter(SmallOptions(dir.path() + "/t"));
  ASSERT_TRUE(writer->Write(SomeEvent(1)).ok());
  struct stat info;
  ASSERT_EQ(::stat(writer->path().c_str(), &info), 0);
  EXPECT_GE(info.st_size, 64 << 10);  // in memory; 256 << 10 on a disk
  ASSERT_TRUE(writer->Close().ok());
  ASSERT_EQ(::stat(writer->path().c_str(), &info), 0);
  EXPECT_LT(info.st_size, 8192);
}

// On tmpfs space that is reserved is memory that nobody else has.
TEST(Writer, SmallTraceInMemoryTakesLittleOfIt) {
  std::string dir = "/dev/shm/assay-test-XXXXXX";
  if (::mkdtemp(dir.data()) == nullptr) GTEST_SKIP() << "no /dev/shm";
  TraceWriterOptions options;  // as they are for users
  options.dir = dir;
  auto writer = OpenWriter(options);
  (void)writer->AddSite("a", "", "").value();
  uint64_t written = 0;
  for (; written < 1000; ++written) ASSERT_TRUE(writer->Write(SomeEvent(written)).ok());
  struct stat info;
  ASSERT_EQ(::stat(writer->path().c_str(), &info), 0);
  EXPECT_LT(info.st_blocks * 512, 2 << 20);
  ASSERT_TRUE(writer->Close().ok());
  auto trace = OpenTrace(dir);
  EXPECT_EQ(trace->event_count(), written);
  EXPECT_TRUE(trace->damages().empty());
  std::filesystem::remove_all(dir);
}

TEST(Writer, OpenTraceCanBeReadWhileItIsWritten) {
  const TempDir dir;
  auto writer = OpenWriter(SmallOptions(dir.path() + "/t"));
  for (uint64_t n = 1; n <= 5; ++n) {
    ASSERT_TRUE(writer->Write(SomeEvent(n)).ok());
    auto trace = OpenTrace(writer->dir());
    EXPECT_EQ(trace->event_count(), n);
    EXPECT_FALSE(trace->processes()[0].closed);
  }
}

TEST(Writer, FolderPatternNamesRankPidHostAndTheNextFreeNumber) {
  const TempDir dir;
  ProcessInfo process = SomeProcess();
  process.pid = 77;
  const auto open = [&](const std::string& pattern) {
    return std::move(TraceWriter::Open(SmallOptions(dir.path() + pattern), process)).value()->dir();
  };
  EXPECT_EQ(open("/r%r-p%p-%h"), dir.path() + "/r1-p77-testhost");
  EXPECT_EQ(open("/a/%i/"), dir.path() + "/a/0");
  EXPECT_EQ(open("/a/%i"), dir.path() + "/a/1");
  EXPECT_EQ(open("/100%%-%%p"), dir.path() + "/100%-%p");
  EXPECT_EQ(open("/%%i"), dir.path() + "/%i");
}

TEST(Payload, EqualContentIsStoredOnceAcrossWriters) {
  const TempDir dir;
  auto first = OpenWriter(SmallOptions(dir.path() + "/t"));
  auto second = OpenWriter(SmallOptions(dir.path() + "/t"));
  const std::string content(5000, 'q');
  const PayloadRef a = first->WritePayload(content.data(), content.size()).value();
  const PayloadRef b = second->WritePayload(content.data(), content.size()).value();
  EXPECT_EQ(a.sha256, Sha256::HexOf(content.data(), content.size()));
  EXPECT_EQ(a.sha256, b.sha256);
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(dir.path() + "/t/payloads")) {
    files += entry.is_regular_file() ? 1 : 0;
  }
  EXPECT_EQ(files, 1u);
  ASSERT_TRUE(first->Close().ok());
  auto trace = OpenTrace(first->dir());
  const auto bytes = trace->payload(a);
  ASSERT_TRUE(bytes.ok()) << bytes.status().message();
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes->data()), bytes->size()), content);
}

TEST(Payload, BudgetCountsNewBytesOnly) {
  const TempDir dir;
  TraceWriterOptions options = SmallOptions(dir.path() + "/t");
  options.payload_budget = 1000;
  auto writer = OpenWriter(options);
  const std::string a(600, 'a'), b(600, 'b'), c(400, 'c');
  EXPECT_TRUE(writer->WritePayload(a.data(), a.size()).ok());
  EXPECT_TRUE(writer->WritePayload(a.data(), a.size()).ok());
  EXPECT_EQ(writer->WritePayload(b.data(), b.size()).status().code(), Code::kEnvironment);
  EXPECT_TRUE(writer->WritePayload(c.data(), c.size()).ok());
  EXPECT_FALSE(writer->WritePayload("x", 1).ok());
  EXPECT_EQ(writer->drops().payload_budget, 2u);
}

TEST(Payload, DamagedOrForgedPayloadIsBadInput) {
  const TempDir dir;
  auto writer = OpenWriter(SmallOptions(dir.path() + "/t"));
  const std::string content = "some tensor";
  PayloadRef ref = writer->WritePayload(content.data(), content.size()).value();
  ASSERT_TRUE(writer->Close().ok());
  auto trace = OpenTrace(writer->dir());
  ref.size_bytes = 5;
  EXPECT_EQ(trace->payload(ref).status().code(), Code::kBadInput);
  ref.size_bytes = content.size();
  EXPECT_TRUE(trace->payload(ref).ok());
  std::ofstream(writer->dir() + "/payloads/" + ref.sha256) << "sOme tensor";
  auto damaged = OpenTrace(writer->dir());
  EXPECT_TRUE(damaged->payload_damages().empty()) << "not read yet";
  for (int i = 0; i < 2; ++i) EXPECT_EQ(damaged->payload(ref).status().code(), Code::kBadInput);
  ASSERT_EQ(damaged->payload_damages().size(), 1u);
  EXPECT_NE(damaged->payload_damages()[0].file.find(ref.sha256), std::string::npos);
  ref.sha256 = "../manifest.json";
  EXPECT_EQ(trace->payload(ref).status().code(), Code::kBadInput);
}

TEST(Manifest, HoldsCommandCountsDropsAndCoverage) {
  const TempDir dir;
  auto writer = OpenWriter(SmallOptions(dir.path() + "/t"));
  (void)writer->AddSite("a", "", "").value();
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(writer->Write(SomeEvent(1)).ok());
  Event bad = SomeEvent(1);
  bad.shape.assign(65, 1);
  bad.strides.clear();
  EXPECT_FALSE(writer->Write(bad).ok());
  ASSERT_TRUE(writer->WriteCoverage({"layers.9.x", "not found", 0, "nearest: \"layers.3.x\""}).ok());
  ASSERT_TRUE(writer->WriteProcessMeta("note", "tab\there").ok());
  ASSERT_TRUE(writer->Close().ok());
  const auto json = nlohmann::json::parse(Slurp(writer->dir() + "/manifest.json"));
  EXPECT_EQ(json["schema"], "assay.manifest/1");
  EXPECT_EQ(json["events"], 3);
  EXPECT_EQ(json["dropped"], 1);
  const auto& process = json["processes"][0];
  EXPECT_EQ(process["events"], 3);
  EXPECT_EQ(process["dropped"]["internal"], 1);
  EXPECT_EQ(process["closed"], true);
  EXPECT_EQ(process["command"][3], "it's a \"test\" $HOME");
  EXPECT_EQ(process["run_again"], "cd '/srv/run 1' && python serve.py --prompt 'it'\\''s a \"test\" $HOME'");
  EXPECT_EQ(process["coverage"][0]["detail"], "nearest: \"layers.3.x\"");
  EXPECT_EQ(process["meta"]["note"], "tab\there");
}

TEST(Manifest, IsRebuiltFromTheFilesAlone) {
  const TempDir dir;
  auto writer = OpenWriter(SmallOptions(dir.path() + "/t"));
  ASSERT_TRUE(writer->Write(SomeEvent(1)).ok());
  ASSERT_TRUE(writer->Close().ok());
  const std::string path = writer->dir() + "/manifest.json";
  const std::string derived = Slurp(path);
  ASSERT_EQ(::unlink(path.c_str()), 0);
  ASSERT_TRUE(RebuildManifest(writer->dir()).ok());
  EXPECT_EQ(Slurp(path), derived);
  // A file that is no trace is listed, not fatal.
  std::ofstream(writer->dir() + "/junk.assay") << "junk";
  ASSERT_TRUE(RebuildManifest(writer->dir()).ok());
  EXPECT_EQ(nlohmann::json::parse(Slurp(path))["processes"].size(), 2u);
}

TEST(Manifest, ShellReadsTheQuotedWordsBack) {
  const std::vector<std::string> words = {"printf", "%s|",       "a b",         "it's", "\"$HOME\"", "`x`", "",
                                          "*",      "new\nline", "back\\slash", "~",    "#no",       "a=b", "!x"};
  FILE* pipe = ::popen(ShellCommand(words).c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  std::string out(1000, '\0');
  out.resize(::fread(out.data(), 1, out.size(), pipe));
  EXPECT_EQ(::pclose(pipe), 0);
  std::string expected;
  for (size_t i = 2; i < words.size(); ++i) expected += words[i] + "|";
  EXPECT_EQ(out, expected);
  EXPECT_EQ(ShellCommand({"A=b", "c"}), "'A=b' c");
}

}  // namespace
}  // namespace assay
