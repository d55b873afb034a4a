#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>

#include "../check/small_trace.h"
#include "trace/writer.h"

namespace assay {
namespace {

using testing::Noise;
using testing::Put;
using testing::SmallTrace;

// Three runs: positions 5 to 7 of a, 0 and 1 of b, one row of padding.
TEST(Capture, RowsKnowTheirRequestPositionAndPadding) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2, 3}), b = t.Request({4, 5});
  const std::vector<float> x = Noise(6 * 4, 1);
  t.Record("layers.0.attn.q_proj", "T d", {6, 4}, x,
           {.rows = {{a, 0, 3, 5, false}, {b, 3, 2, 0, false}, {0, 5, 1, 0, true}}});
  const auto capture = t.Open();
  auto tensor = capture->Load(capture->EventsOf("layers.0.attn.q_proj")[0]);
  ASSERT_TRUE(tensor.ok()) << tensor.status().message();
  ASSERT_EQ((*tensor)->rows.size(), 6u);
  EXPECT_EQ((*tensor)->rows[1].request, a);
  EXPECT_EQ((*tensor)->rows[1].position, 6);
  EXPECT_EQ((*tensor)->rows[4].request, b);
  EXPECT_EQ((*tensor)->rows[4].position, 1);
  EXPECT_TRUE((*tensor)->rows[5].padding);
  EXPECT_FALSE((*tensor)->rows[5].real());
  for (size_t i = 0; i < x.size(); ++i) EXPECT_EQ((*tensor)->values[i], static_cast<double>(x[i]));
}

TEST(Capture, RowAxisComesFirstWhateverTheAxes) {
  SmallTrace t;
  const uint64_t a = t.Request({1});
  t.Record<float>("layers.0.attn.q", "H T d", {2, 3, 2}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11},
                  {.rows = {{a, 0, 3, 0, false}}});
  const auto capture = t.Open();
  auto tensor = capture->Load(0);
  ASSERT_TRUE(tensor.ok()) << tensor.status().message();
  EXPECT_EQ((*tensor)->shape, (std::vector<int64_t>{3, 2, 2}));
  EXPECT_EQ((*tensor)->values, (std::vector<double>{0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11}));
}

// Every other element of the memory; strides in the event stay those of the host.
TEST(Capture, StridedViewIsDecodedInOrder) {
  SmallTrace t;
  const uint64_t a = t.Request({1});
  t.Record<float>("layers.0.attn.q_proj", "T d", {2, 2}, {0, 1, 2, 3, 4, 5, 6, 7},
                  {.rows = {{a, 0, 2, 0, false}}, .strides = {4, 2}});
  const auto capture = t.Open();
  auto tensor = capture->Load(0);
  ASSERT_TRUE(tensor.ok()) << tensor.status().message();
  EXPECT_EQ((*tensor)->values, (std::vector<double>{0, 2, 4, 6}));
  EXPECT_EQ((*tensor)->info->event.strides, (std::vector<int64_t>{4, 2}));
}

// Event 6 is the second step's "after": not the first step's, not a look before the operation, not one behind the
// result.
TEST(Capture, OperandIsTheLastOneOfTheStepBeforeTheResultAndNoAuditBefore) {
  SmallTrace t;
  for (int64_t step = 0; step < 2; ++step) {
    t.Record("layers.0.attn.q", "T d", {1, 4}, Noise(4, 1), {.step = step});
    t.Record("layers.0.attn.q", "T d", {1, 4}, Noise(4, 2), {.step = step, .meta = {{"audit", "after"}}});
    t.Record("layers.0.attn.q", "T d", {1, 4}, Noise(4, 3), {.step = step, .meta = {{"audit", "before"}}});
    t.Record("layers.0.attn.out", "T d", {1, 4}, Noise(4, 4), {.step = step});
    t.Record("layers.0.attn.q", "T d", {1, 4}, Noise(4, 5), {.step = step});
  }
  const auto capture = t.Open();
  const auto result = capture->Info(capture->EventsOf("layers.0.attn.out")[1]);
  EXPECT_EQ(capture->Operand(*result, "layers.0.attn.q"), std::optional<EventId>(6));
  EXPECT_EQ(capture->Operand(*result, "layers.0.attn.k"), std::nullopt);
}

// Position 1 is written again in step 1; b's row and what comes behind the result are not in it.
TEST(Capture, RowsOfARequestAreGatheredOverStepsAndTheLatestWins) {
  SmallTrace t;
  const uint64_t a = t.Request({1, 2}), b = t.Request({3});
  t.Record<float>("layers.0.attn.k", "T d", {3, 2}, {0, 1, 2, 3, 90, 91},
                  {.rows = {{a, 0, 2, 0, false}, {b, 2, 1, 0, false}}, .step = 0});
  t.Record<float>("layers.0.attn.k", "T d", {2, 2}, {20, 21, 4, 5}, {.rows = {{a, 0, 2, 1, false}}, .step = 1});
  t.Record<float>("layers.0.attn.out", "T d", {1, 2}, {0, 0}, {.rows = {{a, 0, 1, 2, false}}, .step = 1});
  t.Record<float>("layers.0.attn.k", "T d", {1, 2}, {6, 7}, {.rows = {{a, 0, 1, 3, false}}, .step = 2});
  const auto capture = t.Open();
  auto rows = capture->RowsOf("layers.0.attn.k", a, capture->EventsOf("layers.0.attn.out")[0], 0);
  ASSERT_TRUE(rows.ok()) << rows.status().message();
  EXPECT_EQ(rows->positions, (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(rows->values, (std::vector<double>{0, 1, 20, 21, 4, 5}));
  EXPECT_EQ(rows->at(2)[1], 5);
  EXPECT_TRUE(rows->at(3).empty());
}

// Rank 1 was recorded first: columns say where a part belongs, not the order.
TEST(Capture, ShardsAreStitchedByTheirFields) {
  SmallTrace t(2);
  t.Record<float>("layers.0.attn.out", "T d", {2, 2}, {2, 3, 12, 13}, {.rank = 1, .shard = {1, 2, 2, 4}});
  t.Record<float>("layers.0.attn.out", "T d", {2, 2}, {0, 1, 10, 11}, {.rank = 0, .shard = {0, 2, 0, 4}});
  const auto capture = t.Open();
  auto whole = capture->Stitched(*capture->Info(0));
  ASSERT_TRUE(whole.ok()) << whole.status().message();
  EXPECT_EQ((*whole)->values, (std::vector<double>{0, 1, 2, 3, 10, 11, 12, 13}));
}

TEST(Capture, MissingShardIsSaid) {
  SmallTrace t(2);
  t.Record<float>("layers.0.attn.out", "T d", {1, 2}, {0, 1}, {.shard = {0, 2, 0, 4}});
  const auto capture = t.Open();
  const auto whole = capture->Stitched(*capture->Info(0));
  ASSERT_FALSE(whole.ok());
  EXPECT_NE(whole.status().message().find("1 of 2 shards"), std::string::npos) << whole.status().message();
}

TEST(Capture, EmptyTensorOfAForgedExtentTakesNoMemory) {
  std::string folder = (std::filesystem::temp_directory_path() / "assay-capture-XXXXXX").string();
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  TraceWriterOptions options;
  options.dir = folder;
  auto writer = std::move(TraceWriter::Open(options, ProcessInfo{})).value();
  Event event;
  event.site = writer->AddSite("layers.0.attn.q", "", "").value();
  event.dtype = DType::kF32;
  event.shape = {0, int64_t{1} << 60};
  event.strides = {1, 1};
  event.row_axis = 1;
  event.payload = writer->WritePayload("", 0).value();
  ASSERT_TRUE(writer->Write(event).ok());
  event.shape = {0, 4};
  event.row_axis = 0;
  event.shard = {0, 2, 0, int64_t{1} << 50};
  ASSERT_TRUE(writer->Write(event).ok());
  event.rank = event.shard.index = 1;
  ASSERT_TRUE(writer->Write(event).ok());
  ASSERT_TRUE(writer->Close().ok());
  auto capture = std::move(Capture::Open(folder)).value();
  EXPECT_EQ(capture->Load(0).status().code(), Code::kBadInput);
  EXPECT_EQ(capture->Stitched(*capture->Info(1)).status().code(), Code::kBadInput);
  std::filesystem::remove_all(folder);
}

TEST(Capture, MissingPayloadSaysWhatToRecord) {
  SmallTrace t(1, Level::kStats);
  t.Record("layers.0.attn.q", "T d", {1, 4}, Noise(4, 1));
  const auto capture = t.Open();
  EXPECT_FALSE(capture->has_payloads());
  const auto tensor = capture->Load(0);
  ASSERT_FALSE(tensor.ok());
  EXPECT_NE(tensor.status().message().find("record layers.0.attn.q with ASSAY_LEVEL=payload"), std::string::npos)
      << tensor.status().message();
}

TEST(Capture, MetadataFallsBackToTheModelAndToTheTable) {
  SmallTrace t;
  t.Record("layers.0.attn.out", "T d", {1, 4}, Noise(4, 1),
           {.meta = {{"window", "8"}, {"causal", "0"}, {"soft_cap", "30x"}, {"eps", "nan"}, {"k_scale", "-inf"}}});
  const auto capture = t.Open();
  const auto info = capture->Info(0);
  EXPECT_EQ(capture->Integer(*info, "window"), std::optional<int64_t>(8));
  EXPECT_FALSE(capture->Flag(*info, "causal"));
  for (const char* key : {"soft_cap", "eps", "k_scale"})  // no number, or none that is finite
    EXPECT_EQ(capture->Number(*info, key), std::nullopt) << key;
  EXPECT_EQ(capture->Number(*info, "rope.theta"), std::optional<double>(10000));
  EXPECT_EQ(capture->Text(*info, "rope.pairing"), std::optional<std::string>("half"));
  EXPECT_EQ(capture->Text(*info, "gate_up_layout"), std::optional<std::string>("halves"));
  EXPECT_EQ(capture->Number(*info, "softmax_scale"), std::nullopt);
}

}  // namespace
}  // namespace assay
