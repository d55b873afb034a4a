// Whatever the writer takes, the reader gives back.
#include <limits>

#include "trace/codec.h"
#include "trace/reader.h"
#include "trace_testing.h"

namespace assay {
namespace {

using testing::ExpectEvent;
using testing::SomeEvent;
using testing::SomeProcess;
using testing::TempDir;

std::unique_ptr<TraceWriter> OpenWriter(const TempDir& dir) {
  TraceWriterOptions options;
  options.dir = dir.path() + "/trace";
  options.reserve_step = 1 << 20;
  Result<std::unique_ptr<TraceWriter>> writer = TraceWriter::Open(options, SomeProcess());
  EXPECT_TRUE(writer.ok()) << writer.status().message();
  return std::move(writer).value();
}

std::unique_ptr<Trace> OpenTrace(const std::string& path) {
  Result<std::unique_ptr<Trace>> trace = Trace::Open(path);
  EXPECT_TRUE(trace.ok()) << trace.status().message();
  return trace.ok() ? std::move(trace).value() : nullptr;
}

// An event that uses every field, extremes of the numbers among them.
Event FullEvent() {
  Event e = SomeEvent(5, 130, 32, 4);
  e.rank = 3;
  e.step = std::numeric_limits<int64_t>::max();
  e.flags = kEventBeforeInplace | kEventInGraph;
  e.shape = {130, 4, 8};
  e.strides = {-64, 0, 1};
  e.storage_offset = -7;
  e.stream = 0xdeadbeef;
  e.row_axis = 0;
  e.head_axis = 1;
  e.shard = {2, 8, 64, 256};
  e.meta = {{"kv_cache_dtype", "fp8"}, {"", ""}, {"note", std::string("\0\n\xff", 3)}};
  e.payload.sha256 = std::string(64, 'a');
  e.payload.size_bytes = 77;
  e.payload.rows = {0, 5, 129};
  e.segments[1].padding = true;
  Stats& s = e.segments[1].stats;
  s.nan = 1, s.pos_inf = 2, s.neg_inf = 3, s.subnormal = 4;
  s.digest_split = true;
  s.min = s.max = s.abs_max = std::nan("");
  s.histogram[0].count = 70000;
  s.sum_sq = 1e307;
  s.sketch[3] = 1e38, s.sketch[4] = 1e-3, s.sketch[5] = std::numeric_limits<double>::infinity();
  e.segments[0].stats.sketch.fill(0);
  e.segments[0].rows[7].sum_sq = 1e76;
  e.segments[0].rows[7].sketch = {1e38, -1e38, 1e30, 0};
  e.segments[0].rows[7].nonfinite = 9;
  e.segments[2].heads[1].sketch[15] = 1.7e308;
  e.segments[2].heads[0].sketch.fill(3e-308);
  return e;
}

TEST(RoundTrip, EveryFieldOfAnEventComesBack) {
  const TempDir dir;
  auto writer = OpenWriter(dir);
  Event wrote = FullEvent();
  wrote.site = writer->AddSite("layers.3.attn.q", "model.layers.3.self_attn.q", "T H d").value();
  ASSERT_TRUE(writer->Write(wrote).ok());
  ASSERT_TRUE(writer->Close().ok());
  auto trace = OpenTrace(writer->dir());
  ASSERT_EQ(trace->event_count(), 1u);
  ExpectEvent(wrote, trace->event(0).Decode());
  EXPECT_TRUE(trace->damages().empty());
}

TEST(RoundTrip, OneGarbageRowDoesNotFlushItsNeighboursToZero) {
  const TempDir dir;
  auto writer = OpenWriter(dir);
  Event wrote = SomeEvent(1, 2);
  wrote.segments[0].rows[0].sketch.fill(1e38);
  wrote.segments[0].rows[0].sum_sq = 1e78;
  wrote.segments[0].rows[1].sketch.fill(1e-3);
  wrote.segments[0].rows[1].sum_sq = 1e-6;
  ASSERT_TRUE(writer->Write(wrote).ok());
  ASSERT_TRUE(writer->Close().ok());
  auto trace = OpenTrace(writer->dir());
  RowCell cell;
  trace->event(0).row_cell(0, 1, &cell);
  EXPECT_NEAR(cell.sketch[0], 1e-3, 1e-10);
  EXPECT_EQ(cell.sum_sq, 1e-6);
}

TEST(RoundTrip, ViewAndDecodedEventAgree) {
  const TempDir dir;
  auto writer = OpenWriter(dir);
  Event wrote = FullEvent();
  wrote.site = writer->AddSite("a", "", "").value();
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(writer->Write(wrote).ok());
  ASSERT_TRUE(writer->Close().ok());
  auto trace = OpenTrace(writer->dir());
  ASSERT_EQ(trace->event_count(), 3u);
  for (uint64_t i = 0; i < 3; ++i) {
    const EventView view = trace->event(i);
    const Event event = view.Decode();
    EXPECT_EQ(view.sequence(), i);
    EXPECT_EQ(event.sequence, i);
    EXPECT_EQ(view.time_ns(), event.time_ns);
    EXPECT_GT(event.time_ns, uint64_t{1} << 60);
    EXPECT_EQ(view.site(), event.site);
    EXPECT_EQ(view.rank(), event.rank);
    EXPECT_EQ(view.step(), event.step);
    EXPECT_EQ(view.phase(), event.phase);
    EXPECT_EQ(view.dtype(), event.dtype);
    EXPECT_EQ(view.compute_dtype(), event.compute_dtype);
    EXPECT_EQ(view.flags(), event.flags);
    EXPECT_EQ(view.shard().col_offset, event.shard.col_offset);
    EXPECT_EQ(view.file(), 0u);
    ASSERT_EQ(view.n_segments(), 3);
    for (int32_t s = 0; s < 3; ++s) {
      const Segment& segment = event.segments[static_cast<size_t>(s)];
      const SegmentSummary summary = view.segment(s);
      EXPECT_EQ(summary.request, segment.request);
      EXPECT_EQ(summary.first_position, segment.first_position);
      EXPECT_EQ(summary.n_rows, segment.n_rows);
      EXPECT_EQ(summary.padding, segment.padding);
      EXPECT_EQ(summary.count, segment.stats.count);
      EXPECT_EQ(summary.nonfinite, segment.stats.nonfinite());
      EXPECT_EQ(summary.sum, segment.stats.sum);
      EXPECT_EQ(summary.sum_sq, segment.stats.sum_sq);
      testing::ExpectSame(summary.abs_max, segment.stats.abs_max);
      EXPECT_EQ(summary.digest, segment.stats.digest);
      EXPECT_EQ(summary.digest_split, segment.stats.digest_split);
      ASSERT_EQ(summary.n_row_cells, static_cast<int32_t>(segment.rows.size()));
      ASSERT_EQ(summary.n_head_cells, static_cast<int32_t>(segment.heads.size()));
      double sketch[kSketchSize];
      view.sketch(s, sketch);
      for (size_t k = 0; k < kSketchSize; ++k) testing::ExpectSame(sketch[k], segment.stats.sketch[k]);
      RowCell row;
      view.row_cell(s, summary.n_row_cells - 1, &row);
      EXPECT_EQ(row.digest, segment.rows.back().digest);
      HeadCell head;
      view.head_cell(s, summary.n_head_cells - 1, &head);
      EXPECT_EQ(head.sketch, segment.heads.back().sketch);
    }
  }
}

TEST(RoundTrip, ProcessSitesRequestsAndCoverageComeBack) {
  const TempDir dir;
  auto writer = OpenWriter(dir);
  EXPECT_EQ(writer->AddSite("embed", "model.embed_tokens", "T h").value(), 0u);
  EXPECT_EQ(writer->AddSite("logits", "", "T vocab").value(), 1u);
  EXPECT_EQ(writer->AddSite("embed", "", "").value(), 0u);
  RequestInfo request;
  request.key = 42, request.prompt_tokens = 3, request.ordinal = 1, request.engine_id = "req-7";
  request.tokens = {1, -2, 3};
  ASSERT_TRUE(writer->WriteRequest(request).ok());
  ASSERT_TRUE(writer->WriteCoverage({"layers.9.attn.q", "not found", 4, "nearest: layers.3.attn.q"}).ok());
  ASSERT_TRUE(writer->WriteProcessMeta("dtype", "f32").ok());
  ASSERT_TRUE(writer->WriteProcessMeta("seed", "7").ok());
  ASSERT_TRUE(writer->Close().ok());
  auto trace = OpenTrace(writer->path());
  ASSERT_EQ(trace->processes().size(), 1u);
  const TraceProcess& p = trace->processes()[0];
  EXPECT_TRUE(p.closed);
  EXPECT_EQ(p.drops.total(), 0u);
  EXPECT_EQ(p.info.host, "testhost");
  EXPECT_EQ(p.info.rank, 1);
  EXPECT_EQ(p.info.command, SomeProcess().command);
  EXPECT_EQ(p.info.cwd, "/srv/run 1");
  const Metadata meta = {{"engine", "test"}, {"dtype", "f32"}, {"seed", "7"}};
  EXPECT_EQ(p.info.meta, meta);
  ASSERT_EQ(p.sites.size(), 2u);
  EXPECT_EQ(p.sites[0].engine_name, "model.embed_tokens");
  EXPECT_EQ(p.sites[1].axes, "T vocab");
  ASSERT_EQ(p.requests.size(), 1u);
  EXPECT_EQ(p.requests[0].key, 42u);
  EXPECT_EQ(p.requests[0].ordinal, 1);
  EXPECT_EQ(p.requests[0].engine_id, "req-7");
  EXPECT_EQ(p.requests[0].tokens, request.tokens);
  ASSERT_EQ(p.coverage.size(), 1u);
  EXPECT_EQ(p.coverage[0].reason, "not found");
  EXPECT_EQ(p.coverage[0].count, 4u);
}

TEST(RoundTrip, SmallEventTakesAtMost700Bytes) {
  const Event decode_step = SomeEvent(3, 1, 256, 0);
  const Result<uint32_t> size_bytes = codec::EventSize(decode_step);
  ASSERT_TRUE(size_bytes.ok());
  RecordProperty("bytes", static_cast<int>(size_bytes.value()));
  EXPECT_LE(size_bytes.value(), 700u);
  // A shard, strides of a slice and two metadata pairs on top.
  Event richer = decode_step;
  richer.shard = {1, 8, 256, 2048};
  richer.strides = {4096, 1};
  richer.meta = {{"kv_cache_dtype", "bf16"}, {"kv_scale", "1"}};
  EXPECT_LE(codec::EventSize(richer).value(), 700u);
}

TEST(RoundTrip, TimeOfTheObservationIsKept) {
  const TempDir dir;
  auto writer = OpenWriter(dir);
  Event e = SomeEvent(1);
  e.time_ns = 123;
  ASSERT_TRUE(writer->Write(e).ok());
  ASSERT_TRUE(writer->Close().ok());
  EXPECT_EQ(OpenTrace(writer->dir())->event(0).time_ns(), 123u);
}

TEST(RoundTrip, FilesOfOneFolderShareGlobalSites) {
  const TempDir dir;
  auto first = OpenWriter(dir);
  auto second = OpenWriter(dir);
  Event e = SomeEvent(1);
  e.site = first->AddSite("a", "", "").value();
  ASSERT_TRUE(first->Write(e).ok());
  (void)second->AddSite("b", "", "").value();
  e.site = second->AddSite("a", "", "").value();
  ASSERT_TRUE(second->Write(e).ok());
  ASSERT_TRUE(second->Write(e).ok());
  ASSERT_TRUE(first->Close().ok());
  ASSERT_TRUE(second->Close().ok());
  auto trace = OpenTrace(first->dir());
  ASSERT_EQ(trace->processes().size(), 2u);
  ASSERT_EQ(trace->event_count(), 3u);
  for (uint64_t i = 0; i < 3; ++i) EXPECT_EQ(trace->site_names()[trace->event(i).global_site()], "a");
}

TEST(RoundTrip, FolderWithoutTraceIsBadInput) {
  const TempDir dir;
  EXPECT_EQ(Trace::Open(dir.path()).status().code(), Code::kBadInput);
  EXPECT_EQ(Trace::Open(dir.path() + "/absent").status().code(), Code::kBadInput);
}

TEST(RoundTrip, EventThatTheFormatCannotHoldIsDroppedAndCounted) {
  const TempDir dir;
  auto writer = OpenWriter(dir);
  Event e = SomeEvent(1);
  e.shape.assign(65, 1);
  e.strides.assign(65, 1);
  EXPECT_EQ(writer->Write(e).code(), Code::kEnvironment);
  e = SomeEvent(1);
  e.payload.sha256 = "../../etc/passwd";
  EXPECT_FALSE(writer->Write(e).ok());
  EXPECT_EQ(writer->drops().internal, 2u);
  EXPECT_TRUE(writer->Write(SomeEvent(1)).ok());
}

}  // namespace
}  // namespace assay
