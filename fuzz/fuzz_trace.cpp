// The trace reader on hostile bytes. The first byte chooses: bit 0, put a good file header before the rest (so that
// inputs stay small); bit 1, make the checksums of all records fit (so that the fuzzer gets behind them).
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "base/crc32c.h"
#include "trace/arrow_stream.h"
#include "trace/codec.h"
#include "trace/format.h"
#include "trace/reader.h"
#include "trace/trace_file.h"

namespace {

using namespace assay;  // NOLINT: a program of one file

std::vector<unsigned char> FileFrom(const uint8_t* data, size_t size_bytes) {
  const uint8_t mode = data[0];
  std::vector<unsigned char> file;
  if (mode & 1) {
    file.resize(format::kHeaderBytes);
    format::FileHeader header{};
    std::memcpy(header.magic, format::kMagic, sizeof header.magic);
    header.major = format::kMajor;
    header.header_bytes = format::kHeaderBytes;
    header.crc = Crc32c(&header, offsetof(format::FileHeader, crc));
    std::memcpy(file.data(), &header, sizeof header);
    const uint64_t aux_head = format::kHeaderBytes;
    std::memcpy(file.data() + format::kLiveOffset + offsetof(format::LiveArea, aux_head), &aux_head, sizeof aux_head);
  }
  file.insert(file.end(), data + 1, data + size_bytes);
  if ((mode & 2) && file.size() > format::kHeaderBytes) {
    for (uint64_t at = format::kHeaderBytes; at + sizeof(format::RecordHeader) <= file.size();) {
      format::RecordHeader header;
      std::memcpy(&header, file.data() + at, sizeof header);
      const bool sane = header.tag == format::kTagCommitted && header.size_bytes >= sizeof header &&
                        header.size_bytes % 8 == 0 && header.size_bytes <= file.size() - at;
      if (sane) {
        const uint32_t crc = codec::RecordCrc(file.data() + at, header.size_bytes);
        std::memcpy(file.data() + at + offsetof(format::RecordHeader, crc), &crc, sizeof crc);
      }
      at += sane ? header.size_bytes : 8;
    }
  }
  return file;
}

void ReadEvents(const Trace& trace) {
  for (uint64_t i = 0; i < trace.event_count(); ++i) {
    const EventView view = trace.event(i);
    (void)trace.site_names().at(view.global_site());
    (void)view.shard();
    const Event event = view.Decode();
    // The two ways to read an event must agree.
    if (view.n_segments() != static_cast<int32_t>(event.segments.size())) std::abort();
    for (int32_t s = 0; s < view.n_segments(); ++s) {
      const SegmentSummary summary = view.segment(s);
      const Segment& segment = event.segments[static_cast<size_t>(s)];
      if (summary.digest != segment.stats.digest || summary.nonfinite != segment.stats.nonfinite() ||
          summary.n_row_cells != static_cast<int32_t>(segment.rows.size())) {
        std::abort();
      }
      double sketch[kSketchSize];
      view.sketch(s, sketch);
      if (std::memcmp(sketch, segment.stats.sketch.data(), sizeof sketch) != 0) std::abort();
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size_bytes) {
  if (size_bytes == 0) return 0;
  const std::vector<unsigned char> file = FileFrom(data, size_bytes);
  TraceFileIndex summary;
  (void)ReadTraceFileSummary(file, "fuzz", &summary);
  Result<std::unique_ptr<Trace>> opened = Trace::FromBytes(file, "fuzz");
  if (!opened.ok()) return 0;
  const std::shared_ptr<const Trace> trace(std::move(opened).value());
  ReadEvents(*trace);
  ArrowArrayStream stream;
  ExportEvents(trace, {.batch_rows = 100}, &stream);
  for (;;) {
    ArrowArray batch;
    if (stream.get_next(&stream, &batch) != 0) std::abort();
    if (batch.release == nullptr) break;
    batch.release(&batch);
  }
  stream.release(&stream);
  return 0;
}
