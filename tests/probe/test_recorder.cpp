#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/wall_clock.h"
#include "probe/recorder.h"
#include "trace/reader.h"
#include "trace/request_key.h"

namespace assay {
namespace {

namespace fs = std::filesystem;

class RecorderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/assay-recorder-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    folder_ = name;
    settings_.profile = "all";
    settings_.dir = folder_ + "/trace";
    for (size_t i = 0; i < values_.size(); ++i) values_[i] = static_cast<float>(i) * 0.25f;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::unique_ptr<Recorder> Open() {
    ProcessInfo process;
    process.host = "host";
    process.pid = ::getpid();
    Result<std::unique_ptr<Recorder>> recorder = Recorder::Open(settings_, process);
    EXPECT_TRUE(recorder.ok()) << recorder.status().message();
    return recorder.ok() ? std::move(recorder).value() : nullptr;
  }
  std::unique_ptr<Trace> Read() {
    Result<std::unique_ptr<Trace>> trace = Trace::Open(settings_.dir);
    EXPECT_TRUE(trace.ok()) << trace.status().message();
    return trace.ok() ? std::move(trace).value() : nullptr;
  }
  // A [4, 2, 3] tensor at the site; one request from position 60, so that it is cut at 64 when there are enough rows.
  Observation At(std::string_view site, int64_t step = -1) {
    Observation o;
    o.site = site;
    o.step = step;
    o.view = {values_.data(), DType::kF32, shape_, strides_, 0};
    return o;
  }
  // "site:reason" of every coverage note of the first process.
  static std::vector<std::string> Notes(const Trace& trace) {
    std::vector<std::string> out;
    for (const CoverageNote& n : trace.processes().at(0).coverage) out.push_back(n.site + ":" + n.reason);
    return out;
  }
  static std::vector<std::string> Sites(const Trace& trace) {
    std::vector<std::string> out;
    for (uint64_t i = 0; i < trace.event_count(); ++i) {
      out.push_back(trace.site_names()[trace.event(i).global_site()]);
    }
    return out;
  }

  std::string folder_;
  Settings settings_;
  std::vector<float> values_ = std::vector<float>(24);
  std::vector<int64_t> shape_{4, 2, 3}, strides_{6, 3, 1};
};

TEST_F(RecorderTest, EventComesBackWithItsWholeIdentity) {
  auto recorder = Open();
  const RowRun runs[] = {{.request = 11, .first_row = 0, .n_rows = 3, .first_position = 62},
                         {.request = 0, .first_row = 3, .n_rows = 1, .first_position = 0, .padding = true}};
  const std::pair<std::string_view, std::string_view> meta[] = {{"kv_scale", "0.5"}};
  Observation o = At("layers.2.attn.q", 7);
  o.engine_name = "model.layers.2.self_attn.q";
  o.rank = 3;
  o.phase = Phase::kDecode;
  o.compute_dtype = DType::kBF16;
  o.runs = runs;
  o.shard = {.index = 1, .count = 2, .col_offset = 6, .full_cols = 12};
  o.stream = 99;
  o.flags = kEventBeforeInplace;
  o.meta = meta;
  ASSERT_TRUE(recorder->Record(o).ok());
  ASSERT_TRUE(recorder->Close().ok());

  const auto trace = Read();
  ASSERT_EQ(trace->event_count(), 1u);
  const Event event = trace->event(0).Decode();
  EXPECT_EQ(Sites(*trace)[0], "layers.2.attn.q");
  EXPECT_EQ(trace->processes()[0].sites[0].engine_name, "model.layers.2.self_attn.q");
  EXPECT_EQ(trace->processes()[0].sites[0].axes, "T H d");
  EXPECT_EQ(event.rank, 3);
  EXPECT_EQ(event.step, 7);
  EXPECT_EQ(event.phase, Phase::kDecode);
  EXPECT_EQ(event.dtype, DType::kF32);
  EXPECT_EQ(event.compute_dtype, DType::kBF16);
  EXPECT_EQ(event.shape, shape_);
  EXPECT_EQ(event.strides, strides_);
  EXPECT_EQ(event.base_address, reinterpret_cast<uintptr_t>(values_.data()));
  EXPECT_EQ(event.stream, 99u);
  EXPECT_EQ(event.flags, kEventBeforeInplace);
  EXPECT_EQ(event.row_axis, 0);
  EXPECT_EQ(event.head_axis, 1);
  EXPECT_EQ(event.shard.col_offset, 6);
  EXPECT_EQ(event.shard.full_cols, 12);
  EXPECT_EQ(event.meta, (Metadata{{"kv_scale", "0.5"}}));
  ASSERT_EQ(event.segments.size(), 3u);  // 62..63, 64, padding
  EXPECT_EQ(event.segments[0].request, 11u);
  EXPECT_EQ(event.segments[0].n_rows, 2);
  EXPECT_EQ(event.segments[1].first_position, 64);
  EXPECT_TRUE(event.segments[2].padding);
}

TEST_F(RecorderTest, FiltersLeaveOutAndCountSkipped) {
  settings_.include.patterns = {"layers.*.attn.*", "nowhere*"};
  settings_.exclude.patterns = {"*.attn.k"};
  settings_.layers.ranges = {{0, 1}};
  settings_.steps.ranges = {{2, 3}};
  auto recorder = Open();
  EXPECT_TRUE(recorder->wants("layers.0.attn.q", -1, 2));
  EXPECT_FALSE(recorder->wants("layers.0.attn.q", -1, 4));
  EXPECT_TRUE(recorder->wants("layers.0.attn.q", -1, -1));
  EXPECT_FALSE(recorder->wants("layers.0.attn.k", -1, 2));
  EXPECT_FALSE(recorder->wants("layers.5.attn.q", -1, 2));
  for (int64_t step = 0; step < 5; ++step) {
    for (const char* site : {"layers.0.attn.q", "layers.0.attn.k", "layers.5.attn.q", "logits"}) {
      EXPECT_TRUE(recorder->Record(At(site, step)).ok());
    }
  }
  ASSERT_TRUE(recorder->Close().ok());
  const auto trace = Read();
  EXPECT_EQ(Sites(*trace), (std::vector<std::string>{"layers.0.attn.q", "layers.0.attn.q"}));
  EXPECT_EQ(Notes(*trace),
            (std::vector<std::string>{"nowhere*:not found", "layers.0.attn.q:skipped", "layers.0.attn.k:skipped",
                                      "layers.5.attn.q:skipped", "logits:skipped"}));
}

// wants() makes the site known under its name alone; Record then fills in what only it knows.
TEST_F(RecorderTest, AskingFirstLosesNeitherAxesNorCoverage) {
  settings_.exclude.patterns = {"*.k"};
  auto recorder = Open();
  EXPECT_TRUE(recorder->wants("my.site", -1, -1));
  EXPECT_TRUE(recorder->wants("my.other", -1, -1));
  EXPECT_FALSE(recorder->wants("my.k", -1, -1));
  Observation o = At("my.site");
  o.axes = "T H d";
  o.engine_name = "engine.site";
  ASSERT_TRUE(recorder->Record(o).ok());
  ASSERT_TRUE(recorder->Close().ok());
  const auto trace = Read();
  ASSERT_EQ(trace->processes()[0].sites.size(), 1u);
  EXPECT_EQ(trace->processes()[0].sites[0].axes, "T H d");
  EXPECT_EQ(trace->processes()[0].sites[0].engine_name, "engine.site");
  EXPECT_EQ(Notes(*trace), (std::vector<std::string>{"my.k:skipped", "my.other:never fired"}));
}

TEST_F(RecorderTest, DisarmedRecordsNothing) {
  auto recorder = Open();
  recorder->arm(false);
  EXPECT_TRUE(recorder->Record(At("logits")).ok());
  recorder->arm(true);
  EXPECT_TRUE(recorder->Record(At("embed")).ok());
  EXPECT_EQ(recorder->recorded(), 1u);
  ASSERT_TRUE(recorder->Close().ok());
  EXPECT_EQ(Sites(*Read()), (std::vector<std::string>{"embed"}));
}

TEST_F(RecorderTest, PayloadIsTheContiguousTensor) {
  settings_.level = Level::kPayload;
  auto recorder = Open();
  strides_ = {1, 12, 4};  // transposed in memory
  ASSERT_TRUE(recorder->Record(At("layers.0.attn.q")).ok());
  ASSERT_TRUE(recorder->Close().ok());
  const auto trace = Read();
  const Event event = trace->event(0).Decode();
  const auto bytes = trace->payload(event.payload);
  ASSERT_TRUE(bytes.ok()) << bytes.status().message();
  ASSERT_EQ(bytes->size(), 24 * sizeof(float));
  std::vector<float> stored(24);
  std::memcpy(stored.data(), bytes->data(), bytes->size());
  for (int64_t t = 0; t < 4; ++t) {
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t d = 0; d < 3; ++d) {
        EXPECT_EQ(stored[static_cast<size_t>(t * 6 + h * 3 + d)], values_[static_cast<size_t>(t + 12 * h + 4 * d)]);
      }
    }
  }
}

// The first tensor takes 96 of 100 bytes; the second keeps its statistics and loses its values.
TEST_F(RecorderTest, PayloadBeyondItsBudgetIsCountedAndTheEventStays) {
  settings_.level = Level::kPayload;
  settings_.payload_budget = 100;
  auto recorder = Open();
  ASSERT_TRUE(recorder->Record(At("embed")).ok());
  values_[0] = -1;  // other content
  EXPECT_EQ(recorder->Record(At("logits")).code(), Code::kEnvironment);
  EXPECT_EQ(recorder->drops().payload_budget, 1u);
  ASSERT_TRUE(recorder->Close().ok());
  const auto trace = Read();
  EXPECT_EQ(trace->event_count(), 2u);
  EXPECT_EQ(Notes(*trace), (std::vector<std::string>{"logits:dropped"}));
}

// Token ids are the user's text: without the setting only the key, a hash of them, is kept.
TEST_F(RecorderTest, TokensAreStoredOnlyWhenAsked) {
  const std::vector<int64_t> tokens = {5, 6, 7};
  for (bool asked : {false, true}) {
    settings_.tokens = asked;
    settings_.dir = folder_ + (asked ? "/with" : "/without");
    auto recorder = Open();
    RequestInfo request;
    request.tokens = tokens;
    request.engine_id = "cmpl-1";
    ASSERT_TRUE(recorder->AddRequest(request).ok());
    ASSERT_TRUE(recorder->Close().ok());
    const RequestInfo read = Read()->processes()[0].requests.at(0);
    EXPECT_EQ(read.key, RequestKey(tokens, 0));
    EXPECT_EQ(read.prompt_tokens, 3);
    EXPECT_EQ(read.engine_id, "cmpl-1");
    EXPECT_EQ(read.tokens, asked ? tokens : std::vector<int64_t>{});
  }
}

TEST_F(RecorderTest, MisfitIsCountedAndNamedInTheCoverage) {
  auto recorder = Open();
  Observation o = At("layers.0.attn.q");
  o.row_axis = 9;
  EXPECT_EQ(recorder->Record(o).code(), Code::kUsage);
  EXPECT_EQ(recorder->Record(o).code(), Code::kUsage);
  EXPECT_EQ(recorder->drops().internal, 2u);
  ASSERT_TRUE(recorder->Close().ok());
  const auto trace = Read();
  EXPECT_EQ(trace->event_count(), 0u);
  ASSERT_EQ(Notes(*trace), (std::vector<std::string>{"layers.0.attn.q:dropped"}));
  EXPECT_EQ(trace->processes()[0].coverage[0].count, 2u);
  EXPECT_NE(trace->processes()[0].coverage[0].detail.find("row axis 9"), std::string::npos);
}

TEST_F(RecorderTest, StrictTurnsUnknownPatternsAndDropsIntoErrorsAtClose) {
  settings_.strict = true;
  settings_.include.patterns = {"layres.*"};
  EXPECT_EQ(Open()->Close().code(), Code::kUsage);
  settings_.include.patterns = {};
  settings_.dir = folder_ + "/second";
  auto recorder = Open();
  Observation o = At("logits");
  o.head_axis = 9;
  EXPECT_FALSE(recorder->Record(o).ok());
  EXPECT_EQ(recorder->Close().code(), Code::kEnvironment);
}

TEST_F(RecorderTest, RingWritesTheLastStepsWhenANonFiniteValueAppears) {
  settings_.ring_steps = 2;
  auto recorder = Open();
  for (int64_t step = 0; step < 8; ++step) {
    if (step == 5) values_[3] = std::nanf("");
    ASSERT_TRUE(recorder->Record(At("embed", step)).ok());
    if (step == 5) values_[3] = 1;
    ASSERT_TRUE(recorder->Record(At("logits", step)).ok());
  }
  ASSERT_TRUE(recorder->Close().ok());
  const auto trace = Read();
  std::vector<int64_t> steps;
  for (uint64_t i = 0; i < trace->event_count(); ++i) {
    steps.push_back(trace->event(i).step());
    EXPECT_EQ(trace->event(i).flags(), kEventAnomalyRing);
  }
  EXPECT_EQ(steps, (std::vector<int64_t>{4, 4, 5, 5}));
}

// Events of the ring are written much later than they were seen.
TEST_F(RecorderTest, RingKeepsTheTimeOfTheObservation) {
  settings_.ring_steps = 2;
  auto recorder = Open();
  const uint64_t before = WallClockNs();
  ASSERT_TRUE(recorder->Record(At("embed", 0)).ok());
  const uint64_t observed = WallClockNs();
  while (WallClockNs() <= observed) {
  }
  ASSERT_TRUE(recorder->Trigger("later").ok());
  ASSERT_TRUE(recorder->Close().ok());
  const auto trace = Read();
  ASSERT_EQ(trace->event_count(), 1u);
  EXPECT_GE(trace->event(0).time_ns(), before);
  EXPECT_LE(trace->event(0).time_ns(), observed);
}

TEST_F(RecorderTest, RingIsWrittenOnAnExplicitTriggerAndOtherwiseEmpty) {
  settings_.ring_steps = 1;
  auto recorder = Open();
  ASSERT_TRUE(recorder->Record(At("embed", 0)).ok());
  ASSERT_TRUE(recorder->Record(At("embed", 1)).ok());
  ASSERT_TRUE(recorder->Trigger("bad answer").ok());
  ASSERT_TRUE(recorder->Record(At("embed", 2)).ok());
  ASSERT_TRUE(recorder->Close().ok());
  const auto trace = Read();
  ASSERT_EQ(trace->event_count(), 1u);
  EXPECT_EQ(trace->event(0).step(), 1);
  bool reason = false;
  for (const auto& [key, value] : trace->processes()[0].info.meta)
    reason |= key == "ring.trigger" && value == "bad answer";
  EXPECT_TRUE(reason);
}

TEST_F(RecorderTest, ForkedChildGoesOnInItsOwnFile) {
  auto recorder = Open();
  ASSERT_TRUE(recorder->Record(At("embed", 0)).ok());
  // Threads record while the process forks: no lock may stay taken in the child.
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; !stop.load(); ++i) {
        (void)recorder->Record(At("layers." + std::to_string((i * 2 + t) % 500) + ".out", 1));
      }
    });
  }
  const pid_t child = ::fork();
  if (child == 0) {
    const bool ok = recorder->Record(At("logits", 2)).ok() && recorder->Close().ok();
    ::_exit(ok ? 0 : 1);
  }
  int state = 0;
  ASSERT_EQ(::waitpid(child, &state, 0), child);
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(WIFEXITED(state) && WEXITSTATUS(state) == 0) << state;
  ASSERT_TRUE(recorder->Close().ok());
  const auto trace = Read();
  ASSERT_EQ(trace->processes().size(), 2u);
  std::vector<std::string> of_child;
  for (uint64_t i = 0; i < trace->event_count(); ++i) {
    const EventView event = trace->event(i);
    if (trace->processes()[event.file()].info.pid == child) {
      of_child.push_back(trace->site_names()[event.global_site()] + "@" + std::to_string(event.step()));
    }
  }
  EXPECT_EQ(of_child, (std::vector<std::string>{"logits@2"}));
}

// Four threads at seven sites that none of them has announced.
TEST_F(RecorderTest, ThreadsLoseNothing) {
  auto recorder = Open();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        const std::string site = "layers." + std::to_string(i % 7) + ".out";
        Observation o = At(site, i);
        o.rank = t;
        EXPECT_TRUE(recorder->Record(o).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(recorder->Close().ok());
  const auto trace = Read();
  EXPECT_EQ(trace->event_count(), 800u);
  EXPECT_EQ(trace->site_names().size(), 7u);
}

TEST_F(RecorderTest, OffAndUnwritableFoldersAreErrors) {
  Settings off;
  EXPECT_EQ(Recorder::Open(off, {}).status().code(), Code::kUsage);
  std::ofstream(folder_ + "/file") << "x";
  settings_.dir = folder_ + "/file/trace";
  EXPECT_EQ(Recorder::Open(settings_, {}).status().code(), Code::kEnvironment);
}

TEST_F(RecorderTest, StderrSinkWritesALineAndNoTrace) {
  settings_.sink = "stderr";
  auto recorder = Open();
  ::testing::internal::CaptureStderr();
  ASSERT_TRUE(recorder->Record(At("embed", 1)).ok());
  const std::string out = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(out.find("assay embed f32 [4, 2, 3] step 1 rank 0 norm "), 0u) << out;
  EXPECT_EQ(out.back(), '\n');
  ASSERT_TRUE(recorder->Close().ok());
  EXPECT_TRUE(recorder->dir().empty());
  EXPECT_FALSE(fs::exists(settings_.dir));
}

// What is recorded once more when the thread or the process ends.
struct LastWords {
  Recorder* recorder = nullptr;
  const Observation* observation = nullptr;
  // Twice: what the first gives back for the next one to take is what ended.
  bool Say() const { return recorder->Record(*observation).ok() && recorder->Record(*observation).ok(); }
};
LastWords at_exit;

// In a process of its own, where freed memory reads as garbage. exit() ends the thread_locals of the thread first.
TEST_F(RecorderTest, RecordingFromAnExitHandlerIsKept) {
  const auto child = [&] {
    ::mallopt(M_PERTURB, 0x5a);
    static const std::unique_ptr<Recorder> recorder = Open();
    static const Observation observation = At("layers.0.attn.q");
    at_exit = {recorder.get(), &observation};
    std::atexit([] {
      if (!at_exit.Say() || !at_exit.recorder->Close().ok()) ::_exit(1);
    });
    std::exit(at_exit.Say() ? 0 : 2);
  };
  EXPECT_EXIT(child(), ::testing::ExitedWithCode(0), "");
  EXPECT_EQ(Sites(*Read()).size(), 4u);
}

// Made before the recorder's own thread_locals, so that it ends behind them.
TEST_F(RecorderTest, RecordingFromAThreadLocalOfTheHostIsKept) {
  const auto child = [&] {
    ::mallopt(M_PERTURB, 0x5a);
    const auto recorder = Open();
    const Observation observation = At("layers.0.attn.q");
    std::thread([&] {
      struct Host : LastWords {
        ~Host() {
          if (!Say()) ::_exit(1);
        }
      };
      thread_local Host host;
      host.recorder = recorder.get(), host.observation = &observation;
      if (!host.Say()) ::_exit(2);
    }).join();
    ::_exit(recorder->Close().ok() ? 0 : 3);
  };
  EXPECT_EXIT(child(), ::testing::ExitedWithCode(0), "");
  EXPECT_EQ(Sites(*Read()).size(), 4u);
}

}  // namespace
}  // namespace assay
