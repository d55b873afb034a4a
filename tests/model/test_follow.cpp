// Following another run's tokens and rows, out of traces that say what cannot be.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "engine_runs.h"
#include "model/follow.h"
#include "model/layer_input.h"
#include "trace/request_key.h"
#include "trace/writer.h"

namespace assay {
namespace {

using namespace testing;  // NOLINT: this file is about one thing

// A trace of one event with a payload whose only segment begins at first_row.
std::unique_ptr<Trace> TraceWithRows(const std::string& folder, const std::string& site, DType dtype,
                                     const std::vector<int64_t>& shape, int64_t first_row) {
  TraceWriterOptions options;
  options.dir = folder;
  auto writer = std::move(TraceWriter::Open(options, ProcessInfo{})).value();
  const std::vector<int64_t> values(8, 5);
  Event event;
  event.site = writer->AddSite(site, "", "").value();
  event.dtype = dtype;
  event.shape = shape;
  event.strides.assign(shape.size(), 1);
  if (shape.size() == 2) event.strides[0] = shape[1];
  event.row_axis = 0;
  event.payload = writer->WritePayload(values.data(), values.size() * sizeof(int64_t)).value();
  Segment segment;
  segment.request = RequestKey(std::vector<int64_t>{1, 2}, 0);
  segment.first_position = 1;
  segment.n_rows = 1;
  segment.first_row = first_row;
  event.segments.push_back(segment);
  EXPECT_TRUE(writer->Write(event).ok());
  EXPECT_TRUE(writer->Close().ok());
  return std::move(Trace::Open(folder)).value();
}

TEST(Follow, RowsOutsideOfThePayloadAreRefused) {
  // 2^61 - 1 rows of 8 bytes begin 8 bytes before 2^64, and end at 0.
  for (const int64_t first_row : {int64_t{8}, (int64_t{1} << 61) - 1, int64_t{1} << 61}) {
    const TempFolder folder;
    const auto trace = TraceWithRows(folder.path(), "next_token", DType::kI64, {8}, first_row);
    std::vector<PromptInput> prompts{{{1, 2}, {}}};
    const Status status = FollowTrace(*trace, &prompts);
    EXPECT_EQ(status.code(), Code::kBadInput) << first_row << " " << status.message();
  }
}

TEST(Follow, LastRowOfThePayloadIsRead) {
  const TempFolder folder;
  const auto trace = TraceWithRows(folder.path(), "next_token", DType::kI64, {8}, 7);
  std::vector<PromptInput> prompts{{{1, 2}, {}}};
  ASSERT_TRUE(FollowTrace(*trace, &prompts).ok());
  EXPECT_EQ(prompts[0].forced, std::vector<int64_t>{5});
}

TEST(LayerInput, RowsOutsideOfTheTensorAreRefused) {
  for (const int64_t first_row : {int64_t{8}, int64_t{1} << 61}) {
    const TempFolder folder;
    (void)TraceWithRows(folder.path(), "layers.0.out", DType::kF32, {8, 2}, first_row);
    LayerInput<float> input;
    EXPECT_EQ(input.Open(folder.path(), 0, 2).code(), Code::kBadInput) << first_row;
  }
}

}  // namespace
}  // namespace assay
