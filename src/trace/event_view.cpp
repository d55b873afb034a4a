#include <cstring>

#include "trace/codec.h"
#include "trace/event_layout.h"
#include "trace/reader.h"
#include "trace/segment_codec.h"

namespace assay {
namespace {

using format::EventFixed;

// One field of the fixed part.
template <class T>
T Field(const unsigned char* record, size_t offset) {
  T value;
  std::memcpy(&value, record + sizeof(format::RecordHeader) + offset, sizeof value);
  return value;
}

}  // namespace

uint32_t EventView::file() const { return layout_->file; }
uint64_t EventView::offset() const { return static_cast<uint64_t>(record_ - layout_->base); }
uint64_t EventView::sequence() const { return Field<uint64_t>(record_, offsetof(EventFixed, sequence)); }
uint64_t EventView::time_ns() const { return Field<uint64_t>(record_, offsetof(EventFixed, time_ns)); }
uint32_t EventView::site() const { return Field<uint32_t>(record_, offsetof(EventFixed, site)); }
// In range: IndexTraceFile gives every site id of an event an entry, real or "lost-site-ID".
uint32_t EventView::global_site() const { return layout_->global_sites[site()]; }
int32_t EventView::rank() const { return Field<int32_t>(record_, offsetof(EventFixed, rank)); }
int64_t EventView::step() const { return Field<int64_t>(record_, offsetof(EventFixed, step)); }
Phase EventView::phase() const { return static_cast<Phase>(Field<uint8_t>(record_, offsetof(EventFixed, phase))); }
DType EventView::dtype() const { return static_cast<DType>(Field<uint8_t>(record_, offsetof(EventFixed, dtype))); }
DType EventView::compute_dtype() const {
  return static_cast<DType>(Field<uint8_t>(record_, offsetof(EventFixed, compute_dtype)));
}
uint32_t EventView::flags() const { return Field<uint32_t>(record_, offsetof(EventFixed, flags)); }

// The first group behind the fixed part, when it is there.
Shard EventView::shard() const {
  if ((Field<uint16_t>(record_, offsetof(EventFixed, groups)) & format::kGroupShard) == 0) return {};
  const uint16_t fixed_bytes = Field<uint16_t>(record_, offsetof(EventFixed, fixed_bytes));
  format::ShardGroup shard;
  std::memcpy(&shard, record_ + sizeof(format::RecordHeader) + fixed_bytes, sizeof shard);
  return {shard.index, shard.count, shard.col_offset, shard.full_cols};
}

int32_t EventView::n_segments() const {
  return static_cast<int32_t>(Field<uint32_t>(record_, offsetof(EventFixed, n_segments)));
}

bool EventView::has_payload() const {
  return (Field<uint16_t>(record_, offsetof(EventFixed, groups)) & format::kGroupPayload) != 0;
}

std::string_view EventView::meta(std::string_view key) const { return codec::FindMeta(record_, key); }

SegmentSummary EventView::segment(int32_t i) const {
  const unsigned char* at = codec::SegmentAt(record_, static_cast<uint32_t>(i));
  format::SegmentFixed fixed;
  std::memcpy(&fixed, at, sizeof fixed);
  SegmentSummary s;
  s.request = fixed.request;
  s.first_position = fixed.first_position;
  s.n_rows = fixed.n_rows;
  s.first_row = fixed.first_row;
  s.padding = (fixed.flags & format::kSegmentPadding) != 0;
  s.count = fixed.count;
  if (fixed.flags & format::kSegmentRare) {
    format::RareCounts rare;
    std::memcpy(&rare, at + fixed.fixed_bytes, sizeof rare);
    s.nonfinite = rare.nan + rare.pos_inf + rare.neg_inf;
    s.nan = rare.nan;
  }
  s.zero = fixed.zero;
  s.sum = fixed.sum;
  s.sum_sq = fixed.sum_sq;
  s.min = fixed.min;
  s.max = fixed.max;
  s.abs_max = fixed.abs_max;
  s.digest = fixed.digest;
  s.digest_split = (fixed.flags & format::kSegmentDigestSplit) != 0;
  s.n_row_cells = static_cast<int32_t>(fixed.n_row_cells);
  s.n_head_cells = static_cast<int32_t>(fixed.n_head_cells);
  return s;
}

void EventView::sketch(int32_t i, double out[kSketchSize]) const {
  codec::ReadSketch(codec::PartsOf(codec::SegmentAt(record_, static_cast<uint32_t>(i))), out);
}

uint64_t EventView::histogram(int32_t i, std::vector<ExponentBin>* out) const {
  return codec::ReadHistogram(codec::PartsOf(codec::SegmentAt(record_, static_cast<uint32_t>(i))), out);
}

void EventView::row_cell(int32_t i, int32_t row, RowCell* out) const {
  codec::ReadRowCell(codec::PartsOf(codec::SegmentAt(record_, static_cast<uint32_t>(i))), static_cast<uint32_t>(row),
                     out);
}

// Looking for equal rows reads millions of these and nothing else of the cells.
uint64_t EventView::row_digest(int32_t i, int32_t row) const {
  const codec::SegmentParts parts = codec::PartsOf(codec::SegmentAt(record_, static_cast<uint32_t>(i)));
  uint64_t digest;
  std::memcpy(
      &digest,
      parts.rows + static_cast<uint64_t>(row) * sizeof(format::RowCellBytes) + offsetof(format::RowCellBytes, digest),
      sizeof digest);
  return digest;
}

void EventView::head_cell(int32_t i, int32_t head, HeadCell* out) const {
  codec::ReadHeadCell(codec::PartsOf(codec::SegmentAt(record_, static_cast<uint32_t>(i))), static_cast<uint32_t>(head),
                      out);
}

Event EventView::Decode() const { return codec::DecodeEvent(record_); }

}  // namespace assay
