#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "probe/observe.h"
#include "probe/site_registry.h"
#include "probe/stderr_sink.h"

namespace assay {
namespace {

// A [T, H, d] tensor of 6 rows, 2 heads, 4 channels, and the observation that names it.
struct Fixture {
  std::vector<float> values = std::vector<float>(48);
  std::vector<int64_t> shape{6, 2, 4}, strides{8, 4, 1};
  Settings settings;
  std::unique_ptr<SiteRegistry> registry;
  std::string name;
  Observation o;
  PendingEvent pending;

  explicit Fixture(std::string site = "layers.0.attn.q") : name(std::move(site)) {
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) - 20.5f;
    settings.profile = "all";
    o.site = name;
    o.view = {values.data(), DType::kF32, shape, strides, 0};
  }
  Status Run() {
    registry = std::make_unique<SiteRegistry>(settings);
    pending = PendingEvent();
    pending.site = registry->Find(o.site, o.engine_name, o.axes);
    return Observe(settings, o, &pending);
  }
};

TEST(Observe, CanonicalNameGivesRowAndHeadAxis) {
  Fixture f;
  ASSERT_TRUE(f.Run().ok());
  EXPECT_EQ(f.pending.event.row_axis, 0);
  EXPECT_EQ(f.pending.event.head_axis, 1);
  ASSERT_EQ(f.pending.event.segments.size(), 1u);
  EXPECT_EQ(f.pending.event.segments[0].n_rows, 6);
  EXPECT_EQ(f.pending.event.segments[0].rows.size(), 6u);
  EXPECT_EQ(f.pending.event.segments[0].heads.size(), 2u);
}

// Axes of two letters for a tensor of rank 3 are a slip of the host's, and said.
TEST(Observe, GivenAxesWinAndMustFitTheRank) {
  Fixture f("my.tensor");
  f.o.axes = "H d T";
  ASSERT_TRUE(f.Run().ok());
  EXPECT_EQ(f.pending.event.row_axis, 2);
  EXPECT_EQ(f.pending.event.head_axis, 0);
  f.o.axes = "T d";
  const Status refused = f.Run();
  EXPECT_EQ(refused.code(), Code::kUsage);
  EXPECT_EQ(refused.message(), "my.tensor: axes \"T d\" do not fit a tensor of rank 3");
}

// Axis 0 stands for the rows of the statistics where there are no token rows, and cannot be the heads as well.
TEST(Observe, HeadsFirstWithoutTokenRowsAreMeasuredWithoutAHeadGrid) {
  Fixture f("layers.0.attn.W_UV");
  f.o.axes = "H c dv";
  f.o.phase = Phase::kLoad;
  ASSERT_TRUE(f.Run().ok());
  EXPECT_EQ(f.pending.event.row_axis, -1);
  EXPECT_EQ(f.pending.event.head_axis, 0);
  ASSERT_EQ(f.pending.event.segments.size(), 1u);
  EXPECT_EQ(f.pending.event.segments[0].stats.count, 48u);
  EXPECT_TRUE(f.pending.event.segments[0].heads.empty());
}

// The host records the site in a shape of its own: without rows rather than with wrong ones.
TEST(Observe, CanonicalAxesOfAnotherRankAreIgnored) {
  Fixture f("layers.0.attn.q");
  f.shape = {6, 8};
  f.strides = {8, 1};
  f.o.view.shape = f.shape;
  f.o.view.strides = f.strides;
  ASSERT_TRUE(f.Run().ok());
  EXPECT_EQ(f.pending.event.row_axis, -1);
}

TEST(Observe, LevelsKeepWhatTheySay) {
  Fixture f;
  f.settings.level = Level::kNames;
  ASSERT_TRUE(f.Run().ok());
  EXPECT_TRUE(f.pending.event.shape.empty());
  f.settings.level = Level::kShapes;
  f.o.view.data = nullptr;  // not read
  ASSERT_TRUE(f.Run().ok());
  EXPECT_EQ(f.pending.event.shape, f.shape);
  EXPECT_TRUE(f.pending.event.segments.empty());
  f.o.view.data = f.values.data();
  f.settings.level = Level::kStats;
  ASSERT_TRUE(f.Run().ok());
  EXPECT_EQ(f.pending.event.segments.size(), 1u);
  EXPECT_FALSE(f.pending.has_payload);
  f.settings.level = Level::kPayload;
  ASSERT_TRUE(f.Run().ok());
  ASSERT_EQ(f.pending.payload.size(), 48 * sizeof(float));
  EXPECT_EQ(std::memcmp(f.pending.payload.data(), f.values.data(), f.pending.payload.size()), 0);
  EXPECT_TRUE(f.pending.payload_rows.empty());
  f.settings.level = Level::kSample;
  f.settings.sample_rows = 2;
  ASSERT_TRUE(f.Run().ok());
  ASSERT_EQ(f.pending.payload_rows.size(), 2u);
  const auto row = static_cast<size_t>(f.pending.payload_rows[1]);
  EXPECT_EQ(std::memcmp(f.pending.payload.data() + 32, f.values.data() + row * 8, 32), 0);
}

// Everything about token ids but the number of rows and the digests is content.
TEST(Observe, TokenIdsBelowPayloadKeepDigestsAlone) {
  Fixture f("next_token");
  const std::vector<int64_t> ids = {17, 4, 4};
  f.shape = {3};
  f.strides = {1};
  f.o.view = {ids.data(), DType::kI64, f.shape, f.strides, 0};
  f.settings.level = Level::kSample;
  ASSERT_TRUE(f.Run().ok());
  EXPECT_FALSE(f.pending.has_payload);
  ASSERT_EQ(f.pending.event.segments.size(), 1u);
  const Segment& s = f.pending.event.segments[0];
  EXPECT_NE(s.stats.digest, 0u);
  EXPECT_EQ(s.stats.count, 3u);
  EXPECT_EQ(s.stats.sum, 0);
  EXPECT_EQ(s.stats.max, 0);
  EXPECT_TRUE(s.stats.histogram.empty());
  for (double x : s.stats.sketch) EXPECT_EQ(x, 0);
  ASSERT_EQ(s.rows.size(), 3u);
  EXPECT_EQ(s.rows[1].digest, s.rows[2].digest);
  EXPECT_NE(s.rows[0].digest, s.rows[1].digest);
  EXPECT_EQ(s.rows[0].sum_sq, 0);

  f.settings.level = Level::kStats;
  f.settings.tokens = true;
  ASSERT_TRUE(f.Run().ok());
  EXPECT_EQ(f.pending.event.segments[0].stats.max, 17);
  EXPECT_EQ(f.pending.payload.size(), 3 * sizeof(int64_t));
}

TEST(Observe, MarginBesideTheTokensIsNoContent) {
  Fixture f("next_token.margin");
  f.shape = {6};
  f.strides = {1};
  f.o.view.shape = f.shape;
  f.o.view.strides = f.strides;
  ASSERT_TRUE(f.Run().ok());
  EXPECT_NE(f.pending.event.segments[0].stats.sum_sq, 0);
}

// Row 5 is padding, where anything may stand; an lse of -inf is that of a row without keys.
TEST(Observe, NonFiniteIsAnAnomalyButNotInPaddingAndNotMinusInfinityInAnLse) {
  const float inf = std::numeric_limits<float>::infinity();
  Fixture f;
  ASSERT_TRUE(f.Run().ok());
  EXPECT_FALSE(HasAnomaly(f.pending));
  f.values[45] = inf;
  ASSERT_TRUE(f.Run().ok());
  EXPECT_TRUE(HasAnomaly(f.pending));
  const RowRun runs[] = {{.request = 3, .first_row = 0, .n_rows = 5, .first_position = 0},
                         {.request = 0, .first_row = 5, .n_rows = 1, .first_position = 0, .padding = true}};
  f.o.runs = runs;
  ASSERT_TRUE(f.Run().ok());
  EXPECT_FALSE(HasAnomaly(f.pending));

  Fixture lse("layers.0.attn.lse");
  lse.values[0] = -inf;
  lse.shape = {6, 8};
  lse.strides = {8, 1};
  lse.o.view.shape = lse.shape;
  lse.o.view.strides = lse.strides;
  ASSERT_TRUE(lse.Run().ok());
  EXPECT_FALSE(HasAnomaly(lse.pending));
  lse.values[0] = std::nanf("");
  ASSERT_TRUE(lse.Run().ok());
  EXPECT_TRUE(HasAnomaly(lse.pending));
}

TEST(Observe, MisfitsNameTheSite) {
  Fixture f;
  f.o.view.dtype = static_cast<DType>(99);
  EXPECT_EQ(f.Run().message(), "layers.0.attn.q: unknown dtype 99");
  f.o.view.dtype = DType::kF32;
  f.o.row_axis = 3;
  EXPECT_EQ(f.Run().code(), Code::kUsage);
  f.o.row_axis = -1;
  const RowRun beyond[] = {{.request = 1, .first_row = 4, .n_rows = 3, .first_position = 0}};
  f.o.runs = beyond;
  const Status status = f.Run();
  EXPECT_EQ(status.code(), Code::kUsage);
  EXPECT_EQ(status.message().find("layers.0.attn.q: "), 0u) << status.message();
}

TEST(Observe, RowsWithoutARowAxisAreRefusedNotDropped) {
  Fixture f("some.vector");
  const RowRun rows[] = {{.request = 7, .first_row = 0, .n_rows = 6, .first_position = 0}};
  f.o.runs = rows;
  for (const Level level : {Level::kShapes, Level::kStats}) {
    f.settings.level = level;
    const Status status = f.Run();
    EXPECT_EQ(status.code(), Code::kUsage);
    EXPECT_NE(status.message().find("without a row axis"), std::string::npos) << status.message();
  }
  f.o.row_axis = 0;
  EXPECT_TRUE(f.Run().ok());
  EXPECT_EQ(f.pending.event.segments[0].request, 7u);
}

// Addresses that overflow or wrap would be read otherwise.
TEST(Observe, StridesBeyondAnyMemoryAreRefusedNotFollowed) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max(), kMin = std::numeric_limits<int64_t>::min();
  Fixture f("some.tensor");
  f.shape = {2, 2};
  for (const std::vector<int64_t>& strides : std::vector<std::vector<int64_t>>{
           {kMax, kMin}, {kMax / 2, 1}, {kMax / 4, 1}, {1, kMin}, {int64_t{1} << 55, 1}}) {
    f.strides = strides;
    f.o.view.shape = f.shape;
    f.o.view.strides = f.strides;
    EXPECT_EQ(f.Run().code(), Code::kUsage) << strides[0] << ", " << strides[1];
  }
  f.strides = {2, 1};
  f.o.view.strides = f.strides;
  for (const int64_t offset : {kMax, kMin}) {
    f.o.view.offset_elems = offset;
    EXPECT_EQ(f.Run().code(), Code::kUsage) << offset;
  }
  f.o.view.offset_elems = 0;
  EXPECT_TRUE(f.Run().ok());
}

// No elements, but a row cell for each of 2^63 rows.
TEST(Observe, HugeExtentWithoutElementsIsRefusedNotWalked) {
  Fixture f("some.tensor");
  f.shape = {std::numeric_limits<int64_t>::max(), 0};
  f.strides = {0, 1};
  f.o.view.shape = f.shape;
  f.o.view.strides = f.strides;
  EXPECT_EQ(f.Run().code(), Code::kUsage);
  f.shape = {5, 0};
  EXPECT_TRUE(f.Run().ok());
}

TEST(StderrLine, HasSiteShapeNormAndNonFiniteCounts) {
  Fixture f;
  f.values.assign(48, 0.0f);
  f.values[0] = 3;
  f.values[9] = -4;
  f.values[10] = std::nanf("");
  f.o.step = 4;
  f.o.phase = Phase::kDecode;
  ASSERT_TRUE(f.Run().ok());
  EXPECT_EQ(FormatEventLine("layers.0.attn.q", f.pending.event),
            "assay layers.0.attn.q f32 [6, 2, 4] step 4 decode rank 0 norm 5 min -4 max 3 nan 1 inf 0\n");
}

// A pattern that matches nothing names its nearest site; a drop is counted with the first of its reasons.
TEST(SiteRegistry, CoverageNamesWhatWasNotFoundAndWhatNeverFired) {
  Settings settings;
  settings.include.patterns = {"layers.*.attn.*", "logitz"};
  SiteRegistry registry(settings);
  ProbeSite* q = registry.Find("layers.0.attn.q", "", "");
  ProbeSite* logits = registry.Find("logits", "lm_head", "");
  registry.Find("layers.1.attn.q", "", "");
  EXPECT_TRUE(q->wanted);
  EXPECT_FALSE(logits->wanted);
  EXPECT_EQ(registry.Find("layers.0.attn.q", "", ""), q);
  EXPECT_EQ(registry.At(1), logits);
  EXPECT_EQ(registry.At(3), nullptr);
  q->recorded = 5;
  logits->skipped = 2;
  registry.CountDrop(q, "first");
  registry.CountDrop(q, "second");
  int not_found = 0;
  const std::vector<CoverageNote> notes = registry.Coverage(&not_found);
  EXPECT_EQ(not_found, 1);
  ASSERT_EQ(notes.size(), 4u);
  EXPECT_EQ(notes[0].site + "|" + notes[0].reason + "|" + notes[0].detail, "logitz|not found|nearest: logits");
  EXPECT_EQ(notes[1].site + "|" + notes[1].reason + "|" + notes[1].detail, "layers.0.attn.q|dropped|first");
  EXPECT_EQ(notes[1].count, 2u);
  EXPECT_EQ(notes[2].site + "|" + notes[2].reason, "logits|skipped");
  EXPECT_EQ(notes[3].site + "|" + notes[3].reason, "layers.1.attn.q|never fired");
}

TEST(SiteRegistry, EngineNamesAndLayersFilterToo) {
  Settings settings;
  settings.include.patterns = {"model.layers.*.self_attn"};
  settings.layers.ranges = {{1, 2}};
  SiteRegistry registry(settings);
  EXPECT_FALSE(registry.Find("layers.0.attn.out", "model.layers.0.self_attn", "")->wanted);
  EXPECT_TRUE(registry.Find("layers.1.attn.out", "model.layers.1.self_attn", "")->wanted);
  EXPECT_FALSE(registry.Find("layers.1.attn.q", "", "")->wanted);
}

}  // namespace
}  // namespace assay
