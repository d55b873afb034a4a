// The Arrow table, read back through the C data interface as a consumer would.
#include <map>

#include "trace/arrow_column.h"
#include "trace/arrow_stream.h"
#include "trace_testing.h"

namespace assay {
namespace {

using testing::SomeEvent;
using testing::SomeProcess;
using testing::TempDir;

// Events with 1, 0 and 3 segments: 5 rows.
std::shared_ptr<const Trace> SomeTrace(const TempDir& dir) {
  TraceWriterOptions options;
  options.dir = dir.path();
  auto writer = std::move(TraceWriter::Open(options, SomeProcess())).value();
  Event e = SomeEvent(1, 1, 32, 2);
  e.site = writer->AddSite("layers.12.attn.q", "", "T H d").value();
  e.meta = {{"key", "value"}, {"", ""}};
  e.segments[0].stats.nan = 2;
  EXPECT_TRUE(writer->Write(e).ok());
  e = SomeEvent(2);
  e.site = writer->AddSite("embed", "emb", "").value();
  e.step = -1;
  e.segments.clear();
  EXPECT_TRUE(writer->Write(e).ok());
  EXPECT_TRUE(writer->Write(SomeEvent(3, 150, 32)).ok());
  EXPECT_TRUE(writer->Close().ok());
  return std::shared_ptr<const Trace>(std::move(Trace::Open(dir.path())).value());
}

struct Columns {
  explicit Columns(ArrowArrayStream* stream) {
    EXPECT_EQ(stream->get_schema(stream, &schema), 0);
    for (int64_t i = 0; i < schema.n_children; ++i) index[schema.children[i]->name] = i;
  }
  ~Columns() { schema.release(&schema); }
  const ArrowArray& of(const ArrowArray& batch, const char* name) const { return *batch.children[index.at(name)]; }

  ArrowSchema schema{};
  std::map<std::string, int64_t> index;
};

bool IsNull(const ArrowArray& a, int64_t i) {
  const auto* validity = static_cast<const uint8_t*>(a.buffers[0]);
  return validity != nullptr && (validity[i / 8] >> (i % 8) & 1) == 0;
}
template <class T>
T ValueOf(const ArrowArray& a, int64_t i) {
  return static_cast<const T*>(a.buffers[1])[i];
}
std::string TextOf(const ArrowArray& a, int64_t i) {
  const auto* offsets = static_cast<const int32_t*>(a.buffers[1]);
  return std::string(static_cast<const char*>(a.buffers[2]) + offsets[i],
                     static_cast<size_t>(offsets[i + 1] - offsets[i]));
}

TEST(Arrow, OneRowASegmentAndOneForAnEventWithout) {
  const TempDir dir;
  ArrowArrayStream stream;
  ExportEvents(SomeTrace(dir), {}, &stream);
  const Columns columns(&stream);
  EXPECT_EQ(std::string(columns.schema.format), "+s");
  ArrowArray batch;
  ASSERT_EQ(stream.get_next(&stream, &batch), 0);
  ASSERT_EQ(batch.length, 5);
  ASSERT_EQ(batch.n_children, columns.schema.n_children);
  for (int64_t i = 0; i < batch.n_children; ++i)
    EXPECT_EQ(batch.children[i]->length, 5) << columns.schema.children[i]->name;

  const Event first = SomeEvent(1, 1, 32, 2);
  EXPECT_EQ(TextOf(columns.of(batch, "site"), 0), "layers.12.attn.q");
  EXPECT_EQ(ValueOf<int32_t>(columns.of(batch, "layer"), 0), 12);
  EXPECT_TRUE(IsNull(columns.of(batch, "engine_name"), 0));
  EXPECT_EQ(TextOf(columns.of(batch, "phase"), 0), "decode");
  EXPECT_EQ(TextOf(columns.of(batch, "dtype"), 0), "bf16");
  EXPECT_EQ(ValueOf<uint64_t>(columns.of(batch, "nan"), 0), 2u);
  EXPECT_EQ(ValueOf<double>(columns.of(batch, "l2"), 0), std::sqrt(first.segments[0].stats.sum_sq));
  EXPECT_EQ(ValueOf<double>(columns.of(batch, "mean"), 0), first.segments[0].stats.sum / 30);
  EXPECT_NEAR(ValueOf<double>(*columns.of(batch, "sketch").children[0], 63), first.segments[0].stats.sketch[63], 1e-6);

  EXPECT_TRUE(IsNull(columns.of(batch, "step"), 1));
  EXPECT_TRUE(IsNull(columns.of(batch, "layer"), 1));
  EXPECT_TRUE(IsNull(columns.of(batch, "segment"), 1));
  EXPECT_TRUE(IsNull(columns.of(batch, "sketch"), 1));
  EXPECT_EQ(TextOf(columns.of(batch, "engine_name"), 1), "emb");

  EXPECT_EQ(ValueOf<int32_t>(columns.of(batch, "segment"), 4), 2);
  EXPECT_EQ(ValueOf<int64_t>(columns.of(batch, "first_position"), 4), 128);
  EXPECT_EQ(ValueOf<uint64_t>(columns.of(batch, "event"), 4), 2u);
  const ArrowArray& shape = columns.of(batch, "shape");
  EXPECT_EQ(static_cast<const int32_t*>(shape.buffers[1])[5], 10);
  EXPECT_EQ(ValueOf<int64_t>(*shape.children[0], 8), 150);
  const ArrowArray& meta = columns.of(batch, "meta");
  EXPECT_EQ(static_cast<const int32_t*>(meta.buffers[1])[1], 2);
  EXPECT_EQ(TextOf(*meta.children[0]->children[1], 0), "value");
  // 64 bucket slots a row, the null one's among them.
  EXPECT_EQ(columns.of(batch, "sketch").children[0]->length, 5 * 64);

  batch.release(&batch);
  EXPECT_EQ(batch.release, nullptr);
  ASSERT_EQ(stream.get_next(&stream, &batch), 0);
  EXPECT_EQ(batch.release, nullptr) << "the stream must end";
  EXPECT_EQ(stream.get_last_error(&stream), nullptr);
  stream.release(&stream);
}

TEST(Arrow, BatchesAreBoundedAndCutInsideAnEvent) {
  const TempDir dir;
  ArrowArrayStream stream;
  ArrowExportOptions options;
  options.batch_rows = 3;
  ExportEvents(SomeTrace(dir), options, &stream);
  const Columns columns(&stream);
  std::vector<int32_t> segments;
  std::vector<int64_t> lengths;
  for (;;) {
    ArrowArray batch;
    ASSERT_EQ(stream.get_next(&stream, &batch), 0);
    if (batch.release == nullptr) break;
    lengths.push_back(batch.length);
    for (int64_t i = 0; i < batch.length; ++i) segments.push_back(ValueOf<int32_t>(columns.of(batch, "segment"), i));
    batch.release(&batch);
  }
  stream.release(&stream);
  EXPECT_EQ(lengths, (std::vector<int64_t>{3, 2}));
  EXPECT_EQ(segments, (std::vector<int32_t>{0, 0, 0, 1, 2}));
}

TEST(Arrow, BytesBoundABatchToo) {
  const TempDir dir;
  ArrowArrayStream stream;
  ArrowExportOptions options;
  options.batch_bytes = 1;
  ExportEvents(SomeTrace(dir), options, &stream);
  int batches = 0;
  for (;; ++batches) {
    ArrowArray batch;
    ASSERT_EQ(stream.get_next(&stream, &batch), 0);
    if (batch.release == nullptr) break;
    EXPECT_EQ(batch.length, 1);
    batch.release(&batch);
  }
  stream.release(&stream);
  EXPECT_EQ(batches, 5);
}

// The interface lets a consumer keep one child and release the rest; ASan sees it when either is freed twice.
TEST(Arrow, ChildMovedOutOutlivesTheBatchAndTheStream) {
  const TempDir dir;
  ArrowArrayStream stream;
  ExportEvents(SomeTrace(dir), {}, &stream);
  int64_t site = 0;
  {
    const Columns columns(&stream);
    site = columns.index.at("site");
  }
  ArrowArray batch;
  ASSERT_EQ(stream.get_next(&stream, &batch), 0);
  ArrowArray kept = *batch.children[site];
  batch.children[site]->release = nullptr;
  batch.release(&batch);
  stream.release(&stream);
  EXPECT_EQ(TextOf(kept, 1), "embed");
  kept.release(&kept);
}

TEST(Arrow, EmptyColumnsAndNullsBeforeTheFirstValueAreWellFormed) {
  ArrowColumn text("t", "u", true);
  text.Null();
  text.Null();
  text.Text("x");
  ArrowArray array;
  text.ExportArray(&array);
  EXPECT_EQ(array.null_count, 2);
  EXPECT_TRUE(IsNull(array, 0) && IsNull(array, 1) && !IsNull(array, 2));
  EXPECT_EQ(TextOf(array, 2), "x");
  array.release(&array);
  text.ExportArray(&array);  // emptied by the first export
  EXPECT_EQ(array.length, 0);
  EXPECT_NE(array.buffers[1], nullptr);
  EXPECT_NE(array.buffers[2], nullptr);
  array.release(&array);
}

}  // namespace
}  // namespace assay
