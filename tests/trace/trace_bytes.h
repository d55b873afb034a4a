// Trace files as bytes in memory, for the tests that damage them.
#pragma once

#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "base/crc32c.h"
#include "trace/codec.h"
#include "trace/format.h"
#include "trace/reader.h"
#include "trace_testing.h"

namespace assay::testing {

using Bytes = std::vector<unsigned char>;

inline Bytes ReadBytes(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return Bytes{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

inline void WriteBytes(const std::string& path, const Bytes& bytes) {
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

struct RecordSpan {
  uint64_t offset;
  uint32_t size_bytes;
  uint16_t kind;
};

// Where the records of an undamaged file lie.
inline std::vector<RecordSpan> RecordsOf(const Bytes& bytes) {
  std::vector<RecordSpan> records;
  for (uint64_t at = format::kHeaderBytes; at + sizeof(format::RecordHeader) <= bytes.size();) {
    format::RecordHeader header;
    std::memcpy(&header, bytes.data() + at, sizeof header);
    if (header.tag != format::kTagCommitted) break;
    records.push_back({at, header.size_bytes, header.kind});
    at += header.size_bytes;
  }
  return records;
}

template <class T>
void Poke(Bytes* bytes, uint64_t offset, T value) {
  std::memcpy(bytes->data() + offset, &value, sizeof value);
}
template <class T>
T Peek(const Bytes& bytes, uint64_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

// Makes the checksum of the record at offset fit its bytes again.
inline void Reseal(Bytes* bytes, uint64_t offset) {
  Poke(bytes, offset + 8, codec::RecordCrc(bytes->data() + offset, Peek<uint32_t>(*bytes, offset + 4)));
}
inline void ResealHeader(Bytes* bytes) { Poke(bytes, 60, Crc32c(bytes->data(), 60)); }

// A closed file of one process, one site and n_events events of step 0, 1, …
inline Bytes SomeFile(int n_events) {
  const TempDir dir;
  TraceWriterOptions options;
  options.dir = dir.path();
  options.reserve_step = 64 << 10;
  options.manifest = false;
  auto writer = std::move(TraceWriter::Open(options, SomeProcess())).value();
  for (int i = 0; i < n_events; ++i) {
    Event e = SomeEvent(static_cast<uint64_t>(i), 1 + i % 3, 32, i % 2);
    e.site = writer->AddSite("layers.0.attn.q", "", "T H d").value();
    e.step = i;
    EXPECT_TRUE(writer->Write(e).ok());
  }
  EXPECT_TRUE(writer->Close().ok());
  return ReadBytes(writer->path());
}

inline std::unique_ptr<Trace> Parse(const Bytes& bytes) {
  Result<std::unique_ptr<Trace>> trace = Trace::FromBytes(bytes, "memory");
  EXPECT_TRUE(trace.ok()) << trace.status().message();
  return trace.ok() ? std::move(trace).value() : nullptr;
}

inline std::vector<int64_t> StepsOf(const Trace& trace) {
  std::vector<int64_t> steps;
  for (uint64_t i = 0; i < trace.event_count(); ++i) steps.push_back(trace.event(i).step());
  return steps;
}

// Reads everything that there is to read; a sanitizer sees what lies out of bounds.
inline double Touch(const Trace& trace) {
  double sum = 0;
  for (uint64_t i = 0; i < trace.event_count(); ++i) {
    const EventView view = trace.event(i);
    sum += static_cast<double>(trace.site_names()[view.global_site()].size() + view.shard().full_cols % 7);
    for (int32_t s = 0; s < view.n_segments(); ++s) {
      const SegmentSummary segment = view.segment(s);
      double sketch[kSketchSize];
      view.sketch(s, sketch);
      sum += sketch[0];
      RowCell row;
      for (int32_t r = 0; r < segment.n_row_cells; ++r) view.row_cell(s, r, &row), sum += row.sum_sq;
      HeadCell head;
      for (int32_t h = 0; h < segment.n_head_cells; ++h) view.head_cell(s, h, &head), sum += head.sum_sq;
    }
    sum += static_cast<double>(view.Decode().meta.size());
  }
  return sum;
}

}  // namespace assay::testing
