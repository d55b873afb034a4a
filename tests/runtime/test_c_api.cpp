// The C interface against what the reader finds in the trace.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <limits>
#include <vector>

#include "assay/assay.h"
#include "runtime/row_runs.h"
#include "trace/reader.h"

namespace assay {
namespace {

namespace fs = std::filesystem;

class CApi : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/assay-capi-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    folder_ = name;
    shape_[0] = 6;
    shape_[1] = 4;
    event_ = assay_event_init();
    event_.name = "layers.1.out";
    event_.data = values_;
    event_.dtype = ASSAY_DTYPE_F32;
    event_.ndim = 2;
    event_.shape = shape_;
  }
  void TearDown() override {
    assay_close(&trace_, nullptr);
    fs::remove_all(folder_);
  }

  int Open(std::vector<std::string> settings = {}) {
    settings.insert(settings.begin(), {"ASSAY=all", "ASSAY_DIR=" + folder_ + "/trace"});
    std::vector<const char*> pointers;
    for (const std::string& s : settings) pointers.push_back(s.c_str());
    assay_options options = assay_options_init();
    options.settings = pointers.data();
    options.n_settings = pointers.size();
    options.flags = ASSAY_OPEN_NO_ENVIRONMENT;
    options.rank = rank_;
    return assay_open(&options, &trace_, &error_);
  }
  std::unique_ptr<Trace> CloseAndRead() {
    EXPECT_EQ(assay_close(&trace_, &error_), ASSAY_OK) << error_.message;
    Result<std::unique_ptr<Trace>> read = Trace::Open(folder_ + "/trace");
    EXPECT_TRUE(read.ok()) << read.status().message();
    return read.ok() ? std::move(read).value() : nullptr;
  }
  std::string RecordError() {
    EXPECT_EQ(assay_record(trace_, &event_, &error_), ASSAY_ERROR_USAGE);
    return error_.message;
  }

  std::string folder_;
  int32_t rank_ = -1;
  assay_trace* trace_ = nullptr;
  assay_error error_{};
  float values_[24] = {1, 2, 3};
  int64_t shape_[2] = {};
  assay_event event_{};
};

TEST_F(CApi, EveryFieldReachesTheTrace) {
  rank_ = 5;
  ASSERT_EQ(Open(), ASSAY_OK) << error_.message;
  const assay_row_run runs[] = {{42, 0, 4, 100, 0, 0}, {0, 4, 2, 0, 1, 0}};
  const assay_pair meta[] = {{"kv_scale", "0.5"}, {"note", "x"}};
  const int64_t strides[] = {2, 1};
  event_.name = "out";
  event_.layer = 7;
  event_.engine_name = "model.layers.7";
  event_.axes = "T h";
  event_.step = 12;
  event_.phase = ASSAY_PHASE_MIXED;
  event_.flags = ASSAY_FLAG_IN_GRAPH;
  event_.stream = 8;
  event_.strides = strides;
  event_.offset = 3;
  event_.compute_dtype = ASSAY_DTYPE_BF16;
  event_.base_address = 4096;
  event_.runs = runs;
  event_.n_runs = 2;
  event_.shard_index = 1;
  event_.shard_count = 4;
  event_.shard_col_offset = 4;
  event_.shard_full_cols = 16;
  event_.meta = meta;
  event_.n_meta = 2;
  ASSERT_EQ(assay_record(trace_, &event_, &error_), ASSAY_OK) << error_.message;

  const auto trace = CloseAndRead();
  ASSERT_EQ(trace->event_count(), 1u);
  const Event e = trace->event(0).Decode();
  EXPECT_EQ(trace->processes()[0].sites[0].name, "layers.7.out");
  EXPECT_EQ(trace->processes()[0].sites[0].engine_name, "model.layers.7");
  EXPECT_EQ(trace->processes()[0].info.rank, 5);
  EXPECT_EQ(e.rank, 5);
  EXPECT_EQ(e.step, 12);
  EXPECT_EQ(e.phase, Phase::kMixed);
  EXPECT_EQ(e.flags, kEventInGraph);
  EXPECT_EQ(e.stream, 8u);
  EXPECT_EQ(e.strides, (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(e.storage_offset, 3);
  EXPECT_EQ(e.compute_dtype, DType::kBF16);
  EXPECT_EQ(e.base_address, 4096u);
  EXPECT_EQ(e.shard.index, 1);
  EXPECT_EQ(e.shard.count, 4);
  EXPECT_EQ(e.shard.col_offset, 4);
  EXPECT_EQ(e.shard.full_cols, 16);
  EXPECT_EQ(e.meta, (Metadata{{"kv_scale", "0.5"}, {"note", "x"}}));
  ASSERT_EQ(e.segments.size(), 2u);
  EXPECT_EQ(e.segments[0].request, 42u);
  EXPECT_EQ(e.segments[0].first_position, 100);
  EXPECT_TRUE(e.segments[1].padding);
}

TEST_F(CApi, CommandAndSettingsOfTheProcessAreKept) {
  ASSERT_EQ(Open({"ASSAY_LEVEL=names"}), ASSAY_OK) << error_.message;
  const auto trace = CloseAndRead();
  const ProcessInfo& info = trace->processes()[0].info;
  ASSERT_FALSE(info.command.empty());
  EXPECT_NE(info.command[0].find("test_runtime"), std::string::npos);
  EXPECT_EQ(info.pid, ::getpid());
  EXPECT_FALSE(info.host.empty());
  std::string level;
  for (const auto& [key, value] : info.meta) {
    if (key == "ASSAY_LEVEL") level = value;
  }
  EXPECT_EQ(level, "names");
}

TEST_F(CApi, RowsOneByOneBecomeRuns) {
  ASSERT_EQ(Open(), ASSAY_OK) << error_.message;
  const uint64_t requests[] = {7, 7, 9, 9, 9, 0};
  const int64_t positions[] = {3, 4, 0, 1, 5, -1};
  event_.row_requests = requests;
  event_.row_positions = positions;
  event_.n_rows = 6;
  ASSERT_EQ(assay_record(trace_, &event_, &error_), ASSAY_OK) << error_.message;
  const Event e = CloseAndRead()->event(0).Decode();
  ASSERT_EQ(e.segments.size(), 4u);
  const auto is = [&](size_t i, uint64_t request, int64_t position, int64_t rows) {
    const Segment& s = e.segments[i];
    return s.request == request && s.first_position == position && s.n_rows == rows;
  };
  EXPECT_TRUE(is(0, 7, 3, 2));
  EXPECT_TRUE(is(1, 9, 0, 2));
  EXPECT_TRUE(is(2, 9, 5, 1));
  EXPECT_TRUE(e.segments[3].padding);
}

TEST_F(CApi, RowPositionsBeyondTheLastNumberAreRefused) {
  ASSERT_EQ(Open(), ASSAY_OK) << error_.message;
  const int64_t positions[] = {INT64_MAX - 1, INT64_MAX, INT64_MAX};
  shape_[0] = 3;
  shape_[1] = 4;
  event_.name = "layers.0.out";
  event_.axes = "T h";
  event_.row_positions = positions;
  event_.n_rows = 3;
  EXPECT_EQ(assay_record(trace_, &event_, &error_), ASSAY_ERROR_USAGE);
  EXPECT_NE(std::string(error_.message).find("row_positions"), std::string::npos) << error_.message;
}

// An unsigned position above 2^63 arrives as a negative one, and would be a padding row in silence.
TEST_F(CApi, NegativeRowPositionOtherThanPaddingIsRefusedAndCounted) {
  ASSERT_EQ(Open(), ASSAY_OK) << error_.message;
  const uint64_t large[] = {0, (uint64_t{1} << 63) + 5, 1};
  shape_[0] = 3;
  shape_[1] = 4;
  event_.name = "layers.0.out";
  event_.axes = "T h";
  event_.row_positions = reinterpret_cast<const int64_t*>(large);
  event_.n_rows = 3;
  EXPECT_EQ(assay_record(trace_, &event_, &error_), ASSAY_ERROR_USAGE);
  EXPECT_NE(std::string(error_.message).find("row_positions[1] is -9223372036854775803"), std::string::npos)
      << error_.message;
  assay_drop_counts counts = assay_drop_counts_init();
  ASSERT_EQ(assay_drops(trace_, &counts, &error_), ASSAY_OK);
  EXPECT_EQ(counts.internal, 1u);
  EXPECT_EQ(counts.recorded, 0u);
}

TEST(RowRuns, WithoutPositionsEachStretchCountsFromZero) {
  const uint64_t requests[] = {7, 7, 9, 7};
  const std::vector<RowRun> runs = RunsFromRows(requests, nullptr, 4);
  ASSERT_EQ(runs.size(), 3u);
  EXPECT_EQ(runs[0].n_rows, 2);
  EXPECT_EQ(runs[1].first_row, 2);
  EXPECT_EQ(runs[2].first_position, 0);
  const int64_t positions[] = {0, 1, -1, -1, 2};
  const std::vector<RowRun> padded = RunsFromRows(nullptr, positions, 5);
  ASSERT_EQ(padded.size(), 3u);
  EXPECT_TRUE(padded[1].padding);
  EXPECT_EQ(padded[1].n_rows, 2);
  EXPECT_EQ(padded[2].first_position, 2);
  EXPECT_TRUE(RunsFromRows(requests, nullptr, 0).empty());
}

TEST_F(CApi, SitesByNumberAreTheSameAsByName) {
  ASSERT_EQ(Open(), ASSAY_OK) << error_.message;
  assay_site_info info = assay_site_info_init();
  info.name = "layers.1.out";
  uint32_t first = 9, again = 9, other = 9;
  ASSERT_EQ(assay_add_site(trace_, &info, &first, &error_), ASSAY_OK);
  ASSERT_EQ(assay_add_site(trace_, &info, &again, &error_), ASSAY_OK);
  info.name = "logits";
  ASSERT_EQ(assay_add_site(trace_, &info, &other, &error_), ASSAY_OK);
  EXPECT_EQ(first, again);
  EXPECT_NE(first, other);
  ASSERT_EQ(assay_record(trace_, &event_, &error_), ASSAY_OK);
  event_.name = nullptr;
  event_.site = first;
  ASSERT_EQ(assay_record(trace_, &event_, &error_), ASSAY_OK) << error_.message;
  event_.site = 77;
  EXPECT_EQ(RecordError(), "assay_event.site is 77, which assay_add_site never gave");
  const auto trace = CloseAndRead();
  EXPECT_EQ(trace->event_count(), 2u);
  EXPECT_EQ(trace->event(0).site(), trace->event(1).site());
  ASSERT_EQ(trace->processes()[0].coverage.size(), 1u);
  EXPECT_EQ(trace->processes()[0].coverage[0].site, "logits");
  EXPECT_EQ(trace->processes()[0].coverage[0].reason, "never fired");
}

TEST_F(CApi, MisfitsAreRefusedByFieldAndCounted) {
  ASSERT_EQ(Open(), ASSAY_OK) << error_.message;
  const assay_event good = event_;
  event_.ndim = 33;
  EXPECT_EQ(RecordError(), "assay_event.ndim is 33, expected 0 to 32");
  event_ = good;
  event_.shape = nullptr;
  EXPECT_EQ(RecordError(), "assay_event.shape is NULL with ndim above 0");
  event_ = good;
  event_.dtype = 1000;
  EXPECT_EQ(RecordError(), "assay_event.dtype is 1000, expected one of ASSAY_DTYPE_*");
  event_ = good;
  event_.phase = 8;
  EXPECT_EQ(RecordError(), "assay_event.phase is 8, expected one of ASSAY_PHASE_*");
  event_ = good;
  event_.flags = 64;
  EXPECT_EQ(RecordError(), "assay_event.flags is 64, expected a sum of ASSAY_FLAG_*");
  event_ = good;
  event_.name = nullptr;
  EXPECT_EQ(RecordError(), "assay_event has neither a site nor a name");
  event_ = good;
  event_.data = nullptr;
  EXPECT_NE(RecordError().find("layers.1.out"), std::string::npos);
  event_ = good;
  shape_[0] = std::numeric_limits<int64_t>::max();
  EXPECT_NE(RecordError().find("more than 2^63 elements"), std::string::npos);
  shape_[0] = 6;
  event_.shard_index = 4;
  EXPECT_EQ(RecordError(), "assay_event.shard_index is 4, expected 0 to shard_count - 1");
  event_ = good;
  const int64_t positions[] = {0, 1, 2, 3, 4, 5, 6};
  event_.row_positions = positions;
  event_.n_rows = 7;  // one more than the tensor has
  RecordError();
  assay_drop_counts drops = assay_drop_counts_init();
  ASSERT_EQ(assay_drops(trace_, &drops, nullptr), ASSAY_OK);
  EXPECT_EQ(drops.internal, 10u);
  EXPECT_EQ(drops.recorded, 0u);
}

TEST_F(CApi, StructSizesOfOtherVersions) {
  ASSERT_EQ(Open(), ASSAY_OK) << error_.message;
  // A newer caller: the struct is longer, what this library does not know is ignored.
  struct {
    assay_event event;
    uint64_t unknown[4] = {1, 2, 3, 4};
  } newer{event_, {}};
  newer.event.struct_size = sizeof(newer);
  EXPECT_EQ(assay_record(trace_, &newer.event, &error_), ASSAY_OK) << error_.message;
  event_.struct_size = 0;
  EXPECT_EQ(RecordError(),
            "assay_event.struct_size is 0, expected at least 216; make the struct with "
            "assay_event_init()");
  event_.struct_size = UINT64_MAX;
  EXPECT_EQ(assay_record(trace_, &event_, nullptr), ASSAY_ERROR_USAGE);
  EXPECT_EQ(assay_record(trace_, nullptr, nullptr), ASSAY_ERROR_USAGE);
  // An older drop-counts reader would pass a shorter struct; shorter than version 1 is refused.
  assay_drop_counts drops = assay_drop_counts_init();
  drops.struct_size = 8;
  EXPECT_EQ(assay_drops(trace_, &drops, nullptr), ASSAY_ERROR_USAGE);
}

TEST_F(CApi, WrongSettingsLeaveAHandleThatDoesNothing) {
  EXPECT_EQ(Open({"ASSAY_LEVLE=x"}), ASSAY_ERROR_USAGE);
  EXPECT_STREQ(error_.message, "unknown variable ASSAY_LEVLE; did you mean ASSAY_LEVEL?");
  ASSERT_NE(trace_, nullptr);
  EXPECT_EQ(assay_armed(trace_), 0);
  EXPECT_EQ(assay_record(trace_, &event_, &error_), ASSAY_OK);
  EXPECT_STREQ(assay_dir(trace_), "");
  EXPECT_EQ(assay_close(&trace_, nullptr), ASSAY_OK);
  EXPECT_FALSE(fs::exists(folder_ + "/trace"));
}

TEST_F(CApi, UnwritableFolderIsAnEnvironmentError) {
  EXPECT_EQ(Open({"ASSAY_DIR=/proc/nowhere/trace"}), ASSAY_ERROR_ENVIRONMENT);
  EXPECT_NE(std::string(error_.message).find("/proc/nowhere"), std::string::npos) << error_.message;
}

TEST_F(CApi, LongMessagesAreCutAndTerminated) {
  EXPECT_EQ(Open({std::string(5000, 'x') + "=1"}), ASSAY_ERROR_USAGE);
  EXPECT_LT(std::strlen(error_.message), sizeof(error_.message));
}

TEST_F(CApi, SettingsTextTellsItsSizeAndFits) {
  const char* settings[] = {"ASSAY=mla"};
  uint64_t size = 0;
  ASSERT_EQ(assay_settings_text(settings, 1, ASSAY_OPEN_NO_ENVIRONMENT, nullptr, &size, &error_), ASSAY_OK);
  std::string text(size, '#');
  uint64_t small = 3;
  ASSERT_EQ(assay_settings_text(settings, 1, ASSAY_OPEN_NO_ENVIRONMENT, text.data(), &small, &error_), ASSAY_OK);
  EXPECT_EQ(small, size);
  EXPECT_EQ(text[0], '#');
  ASSERT_EQ(assay_settings_text(settings, 1, ASSAY_OPEN_NO_ENVIRONMENT, text.data(), &size, &error_), ASSAY_OK);
  EXPECT_EQ(text.find("ASSAY=mla\n"), 0u);
  EXPECT_EQ(std::strlen(text.c_str()) + 1, size);
}

TEST_F(CApi, NullStringsInTheOptionsAreUsageErrors) {
  const std::string dir = "ASSAY_DIR=" + folder_ + "/trace";
  const char* settings[] = {"ASSAY=all", dir.c_str()};
  assay_options options = assay_options_init();
  options.settings = settings;
  options.n_settings = 2;
  const char* command[] = {"host", nullptr};
  options.command = command;
  options.n_command = 2;
  EXPECT_EQ(assay_open(&options, &trace_, &error_), ASSAY_ERROR_USAGE);
  EXPECT_STREQ(error_.message, "assay_options.command[1] is NULL");
  options.n_command = 1;
  const assay_pair meta[] = {{"engine", "x"}, {"version", nullptr}};
  options.meta = meta;
  options.n_meta = 2;
  EXPECT_EQ(assay_open(&options, &trace_, &error_), ASSAY_ERROR_USAGE);
  EXPECT_STREQ(error_.message, "assay_options.meta[1] has a NULL key or value");
  EXPECT_FALSE(fs::exists(folder_ + "/trace"));
  options.n_meta = 1;
  EXPECT_EQ(assay_open(&options, &trace_, &error_), ASSAY_OK) << error_.message;
  EXPECT_EQ(CloseAndRead()->processes()[0].info.command, std::vector<std::string>{"host"});
}

TEST_F(CApi, NumberOfRowsIsCheckedBeforeTheRowsAreRead) {
  ASSERT_EQ(Open(), ASSAY_OK);
  const uint64_t requests[6] = {1, 1, 1, 1, 1, 1};
  event_.row_requests = requests;
  for (const int32_t axis : {-1, 0}) {
    event_.row_axis = axis;
    for (const uint64_t n : {uint64_t{7}, uint64_t{1} << 62, ~uint64_t{0}}) {
      event_.n_rows = n;
      EXPECT_NE(RecordError().find("expected the extent of the row axis, at most 6"), std::string::npos)
          << error_.message;
    }
  }
  event_.n_rows = 6;
  EXPECT_EQ(assay_record(trace_, &event_, &error_), ASSAY_OK) << error_.message;
}

}  // namespace
}  // namespace assay
