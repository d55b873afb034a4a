#include "trace/codec.h"

#include <cstddef>
#include <cstring>

#include "base/crc32c.h"
#include "base/hex.h"
#include "trace/segment_codec.h"

namespace assay::codec {
namespace {

using format::EventFixed;
using format::PadTo8;
using format::RecordHeader;

// Axes that a format field could hold up to 255; nobody has more than a handful, and a bound keeps EventFixed::ndim
// honest.
constexpr size_t kMaxRank = 64;
constexpr uint64_t kEventGroupsAt = sizeof(RecordHeader) + sizeof(EventFixed);

// Row-major without gaps: such strides are left out. A product that overflows is nothing that a host can have.
bool IsContiguous(const Event& event) {
  if (event.strides.size() != event.shape.size()) return false;
  int64_t expected = 1;
  for (size_t axis = event.shape.size(); axis-- > 0;) {
    if (event.strides[axis] != expected) return false;
    if (__builtin_mul_overflow(expected, event.shape[axis], &expected)) return false;
  }
  return true;
}

// Columns beyond what a double counts are forged: readers add widths to them.
constexpr int64_t kMaxColumn = int64_t{1} << 53;
bool IsColumn(int64_t column) { return column >= -kMaxColumn && column <= kMaxColumn; }

// Whether it says anything but "not sharded".
bool HasShard(const Shard& s) { return s.index != 0 || s.count != 1 || s.col_offset != 0 || s.full_cols != 0; }

// A group is there when its content differs from what its absence means; most events then have metadata alone or no
// group.
uint16_t GroupsOf(const Event& event) {
  unsigned groups = 0;
  if (HasShard(event.shard)) groups |= format::kGroupShard;
  if (event.stream != 0) groups |= format::kGroupStream;
  if (event.storage_offset != 0) groups |= format::kGroupStorageOffset;
  if (!IsContiguous(event)) groups |= format::kGroupStrides;
  if (!event.payload.sha256.empty()) groups |= format::kGroupPayload;
  if (!event.meta.empty()) groups |= format::kGroupMeta;
  return static_cast<uint16_t>(groups);
}

// Of the metadata group: two lengths of 4 bytes a pair, the texts, padding.
uint64_t MetaBytes(const Metadata& meta) {
  uint64_t bytes = 0;
  for (const auto& [key, value] : meta) bytes += 8 + key.size() + value.size();
  return PadTo8(bytes);
}

// Of the segment table, padding included.
uint64_t TableBytes(uint64_t n_segments) { return n_segments > 1 ? PadTo8(4 * (n_segments - 1)) : 0; }

// Puts plain values one behind the other.
class Put {
 public:
  explicit Put(unsigned char* at) : at_(at) {}
  template <class T>
  void Value(const T& value) {
    Bytes(&value, sizeof value);
  }
  void Bytes(const void* data, size_t n) {
    if (n > 0) std::memcpy(at_, data, n);
    at_ += n;
  }
  // Zeros up to the next multiple of 8 from `start`, which is 8-aligned in the file.
  void PadFrom(const unsigned char* start) {
    while ((at_ - start) % 8 != 0) *at_++ = 0;
  }
  unsigned char* at() const { return at_; }

 private:
  unsigned char* at_;
};

}  // namespace

// Must add up exactly what EncodeEvent puts down: the space is reserved by it before a byte is written.
Result<uint32_t> EventSize(const Event& event) {
  if (event.shape.size() > kMaxRank) return Status::Usage("event has more than 64 axes");
  const size_t n_strides = event.strides.size();
  if (n_strides != 0 && n_strides != event.shape.size()) return Status::Usage("event has not one stride an axis");
  if (event.row_axis < -1 || event.row_axis >= 64 || event.head_axis < -1 || event.head_axis >= 64) {
    return Status::Usage("event's row or head axis is out of range");
  }
  if (event.meta.size() > 0xffff) return Status::Usage("event has more than 65535 metadata pairs");
  const unsigned groups = GroupsOf(event);
  uint64_t bytes = kEventGroupsAt + 8 * event.shape.size();
  if (groups & format::kGroupShard) bytes += sizeof(format::ShardGroup);
  if (groups & format::kGroupStream) bytes += 8;
  if (groups & format::kGroupStorageOffset) bytes += 8;
  if (groups & format::kGroupStrides) bytes += 8 * event.shape.size();
  if (groups & format::kGroupPayload) {
    unsigned char hash[32];
    if (!HexDecode(event.payload.sha256, hash, sizeof hash)) {
      return Status::Usage("payload hash of an event is not 64 hex digits");
    }
    bytes += sizeof(format::PayloadGroup) + 8 * event.payload.rows.size();
  }
  if (!IsColumn(event.shard.col_offset) || !IsColumn(event.shard.full_cols)) {
    return Status::Usage("columns of an event's shard are beyond 2^53");
  }
  if (groups & format::kGroupMeta) bytes += MetaBytes(event.meta);
  bytes += TableBytes(event.segments.size());
  for (const Segment& segment : event.segments) {
    const uint64_t segment_bytes = SegmentSize(segment);
    if (segment_bytes == 0)
      return Status::Usage("segment of an event has a count beyond its field, or not one row cell a row");
    bytes += segment_bytes;
  }
  if (bytes > format::kMaxRecordBytes) return Status::Usage("event needs more than 64 MiB in the trace");
  return static_cast<uint32_t>(bytes);
}

// The fixed part comes last, when the place of the segment table is known.
void EncodeEvent(const Event& event, unsigned char* record) {
  const uint16_t groups = GroupsOf(event);
  RecordHeader header{};
  header.kind = format::kKindEvent;
  std::memcpy(record + 12, reinterpret_cast<const unsigned char*>(&header) + 12, 4);

  Put put(record + kEventGroupsAt);
  if (groups & format::kGroupShard) {
    put.Value(format::ShardGroup{event.shard.index, event.shard.count, event.shard.col_offset, event.shard.full_cols});
  }
  put.Bytes(event.shape.data(), 8 * event.shape.size());
  if (groups & format::kGroupStream) put.Value(event.stream);
  if (groups & format::kGroupStorageOffset) put.Value(event.storage_offset);
  if (groups & format::kGroupStrides) {
    for (size_t i = 0; i < event.shape.size(); ++i) put.Value(i < event.strides.size() ? event.strides[i] : int64_t{0});
  }
  if (groups & format::kGroupPayload) {
    format::PayloadGroup payload{};
    HexDecode(event.payload.sha256, payload.sha256, sizeof payload.sha256);
    payload.size_bytes = event.payload.size_bytes;
    payload.n_rows = event.payload.rows.size();
    put.Value(payload);
    put.Bytes(event.payload.rows.data(), 8 * event.payload.rows.size());
  }
  if (groups & format::kGroupMeta) {
    for (const auto& [key, value] : event.meta) {
      put.Value(static_cast<uint32_t>(key.size()));
      put.Value(static_cast<uint32_t>(value.size()));
      put.Bytes(key.data(), key.size());
      put.Bytes(value.data(), value.size());
    }
    put.PadFrom(record);
  }
  const auto segments_at = static_cast<uint32_t>(put.at() - record);
  unsigned char* segment_at = put.at() + TableBytes(event.segments.size());
  for (size_t i = 0; i < event.segments.size(); ++i) {
    if (i > 0) put.Value(static_cast<uint32_t>(segment_at - record));
    segment_at = EncodeSegment(event.segments[i], segment_at);
  }
  if (event.segments.size() > 1) put.PadFrom(record);

  EventFixed fixed{};
  fixed.sequence = event.sequence;
  fixed.time_ns = event.time_ns;
  fixed.step = event.step;
  fixed.base_address = event.base_address;
  fixed.site = event.site;
  fixed.rank = event.rank;
  fixed.flags = event.flags;
  fixed.phase = static_cast<uint8_t>(event.phase);
  fixed.dtype = static_cast<uint8_t>(event.dtype);
  fixed.compute_dtype = static_cast<uint8_t>(event.compute_dtype);
  fixed.ndim = static_cast<uint8_t>(event.shape.size());
  fixed.row_axis = static_cast<int8_t>(event.row_axis);
  fixed.head_axis = static_cast<int8_t>(event.head_axis);
  fixed.fixed_bytes = sizeof fixed;
  fixed.segments_at = segments_at;
  fixed.n_segments = static_cast<uint32_t>(event.segments.size());
  fixed.n_meta = static_cast<uint16_t>(event.meta.size());
  fixed.groups = groups;
  std::memcpy(record + sizeof(RecordHeader), &fixed, sizeof fixed);
}

void PatchEvent(unsigned char* record, uint64_t sequence, uint64_t time_ns) {
  unsigned char* fixed = record + sizeof(RecordHeader);
  std::memcpy(fixed + offsetof(EventFixed, sequence), &sequence, 8);
  std::memcpy(fixed + offsetof(EventFixed, time_ns), &time_ns, 8);
}

// No sum overflows: `at` is held against segments_at after each part, and a 64-bit count is compared with what is
// left divided by the size of one.
bool CheckEvent(const unsigned char* record, uint32_t size_bytes) {
  if (size_bytes < kEventGroupsAt) return false;
  EventFixed fixed;
  std::memcpy(&fixed, record + sizeof(RecordHeader), sizeof fixed);
  if (fixed.fixed_bytes < sizeof(EventFixed) || fixed.ndim > kMaxRank) return false;
  const uint64_t segments_at = fixed.segments_at;
  if (segments_at % 8 != 0 || segments_at > size_bytes) return false;
  uint64_t at = sizeof(RecordHeader) + fixed.fixed_bytes + 8 * uint64_t{fixed.ndim};
  if (fixed.groups & format::kGroupShard) at += sizeof(format::ShardGroup);
  if (fixed.groups & format::kGroupStream) at += 8;
  if (fixed.groups & format::kGroupStorageOffset) at += 8;
  if (fixed.groups & format::kGroupStrides) at += 8 * uint64_t{fixed.ndim};
  if (at > segments_at) return false;
  if (fixed.groups & format::kGroupShard) {
    format::ShardGroup shard;
    std::memcpy(&shard, record + sizeof(RecordHeader) + fixed.fixed_bytes, sizeof shard);
    if (!IsColumn(shard.col_offset) || !IsColumn(shard.full_cols)) return false;
  }
  if (fixed.groups & format::kGroupPayload) {
    if (segments_at - at < sizeof(format::PayloadGroup)) return false;
    format::PayloadGroup payload;
    std::memcpy(&payload, record + at, sizeof payload);
    at += sizeof payload;
    if (payload.n_rows > (segments_at - at) / 8) return false;
    at += 8 * payload.n_rows;
  }
  if (fixed.groups & format::kGroupMeta) {
    for (uint32_t i = 0; i < fixed.n_meta; ++i) {
      if (segments_at - at < 8) return false;
      uint32_t lengths[2];
      std::memcpy(lengths, record + at, 8);
      at += 8;
      if (uint64_t{lengths[0]} + lengths[1] > segments_at - at) return false;
      at += uint64_t{lengths[0]} + lengths[1];
    }
  } else if (fixed.n_meta != 0) {
    return false;
  }
  const uint64_t table_bytes = TableBytes(fixed.n_segments);
  if (table_bytes > size_bytes - segments_at) return false;
  // Segments may not share bytes: a forged table must not make one segment into millions.
  uint64_t free_from = segments_at + table_bytes;
  for (uint32_t i = 0; i < fixed.n_segments; ++i) {
    uint64_t segment_at = free_from;
    if (i > 0) {
      uint32_t entry;
      std::memcpy(&entry, record + segments_at + 4 * uint64_t{i - 1}, 4);
      segment_at = entry;
    }
    if (segment_at < free_from || segment_at > size_bytes) return false;
    const uint64_t segment_bytes = CheckSegment(record + segment_at, size_bytes - segment_at);
    if (segment_bytes == 0) return false;
    free_from = segment_at + segment_bytes;
  }
  return true;
}

// Walks the groups as CheckEvent did. Not shared with DecodeEvent, which wants every field of them.
std::string_view FindMeta(const unsigned char* record, std::string_view key) {
  EventFixed fixed;
  std::memcpy(&fixed, record + sizeof(RecordHeader), sizeof fixed);
  if (!(fixed.groups & format::kGroupMeta)) return {};
  const unsigned char* at = record + sizeof(RecordHeader) + fixed.fixed_bytes;
  if (fixed.groups & format::kGroupShard) at += sizeof(format::ShardGroup);
  at += 8 * uint64_t{fixed.ndim};
  if (fixed.groups & format::kGroupStream) at += 8;
  if (fixed.groups & format::kGroupStorageOffset) at += 8;
  if (fixed.groups & format::kGroupStrides) at += 8 * uint64_t{fixed.ndim};
  if (fixed.groups & format::kGroupPayload) {
    format::PayloadGroup payload;
    std::memcpy(&payload, at, sizeof payload);
    at += sizeof payload + 8 * payload.n_rows;
  }
  for (uint32_t i = 0; i < fixed.n_meta; ++i) {
    uint32_t lengths[2];
    std::memcpy(lengths, at, 8);
    const char* text = reinterpret_cast<const char*>(at + 8);
    if (std::string_view(text, lengths[0]) == key) return {text + lengths[0], lengths[1]};
    at += 8 + uint64_t{lengths[0]} + lengths[1];
  }
  return {};
}

// The order of groups is that of EncodeEvent; CheckEvent has bounded each of them, so nothing is checked again.
Event DecodeEvent(const unsigned char* record) {
  EventFixed fixed;
  std::memcpy(&fixed, record + sizeof(RecordHeader), sizeof fixed);
  Event event;
  event.sequence = fixed.sequence;
  event.time_ns = fixed.time_ns;
  event.site = fixed.site;
  event.rank = fixed.rank;
  event.step = fixed.step;
  event.phase = static_cast<Phase>(fixed.phase);
  event.dtype = static_cast<DType>(fixed.dtype);
  event.compute_dtype = static_cast<DType>(fixed.compute_dtype);
  event.flags = fixed.flags;
  event.base_address = fixed.base_address;
  event.row_axis = fixed.row_axis;
  event.head_axis = fixed.head_axis;

  const unsigned char* at = record + sizeof(RecordHeader) + fixed.fixed_bytes;
  const auto get = [&at](void* out, size_t n) {
    if (n > 0) std::memcpy(out, at, n);
    at += n;
  };
  if (fixed.groups & format::kGroupShard) {
    format::ShardGroup shard;
    get(&shard, sizeof shard);
    event.shard = {shard.index, shard.count, shard.col_offset, shard.full_cols};
  }
  event.shape.resize(fixed.ndim);
  get(event.shape.data(), 8 * event.shape.size());
  if (fixed.groups & format::kGroupStream) get(&event.stream, 8);
  if (fixed.groups & format::kGroupStorageOffset) get(&event.storage_offset, 8);
  event.strides.resize(fixed.ndim);
  if (fixed.groups & format::kGroupStrides) {
    get(event.strides.data(), 8 * event.strides.size());
  } else {
    uint64_t stride = 1;  // unsigned: a forged shape may overflow
    for (size_t axis = event.shape.size(); axis-- > 0;) {
      event.strides[axis] = static_cast<int64_t>(stride);
      stride *= static_cast<uint64_t>(event.shape[axis]);
    }
  }
  if (fixed.groups & format::kGroupPayload) {
    format::PayloadGroup payload;
    get(&payload, sizeof payload);
    event.payload.sha256 = HexEncode(payload.sha256, sizeof payload.sha256);
    event.payload.size_bytes = payload.size_bytes;
    event.payload.rows.resize(payload.n_rows);
    get(event.payload.rows.data(), 8 * event.payload.rows.size());
  }
  if (fixed.groups & format::kGroupMeta) {
    for (uint32_t i = 0; i < fixed.n_meta; ++i) {
      uint32_t lengths[2];
      get(lengths, 8);
      std::string key(lengths[0], '\0'), value(lengths[1], '\0');
      get(key.data(), key.size());
      get(value.data(), value.size());
      event.meta.emplace_back(std::move(key), std::move(value));
    }
  }
  event.segments.resize(fixed.n_segments);
  for (uint32_t i = 0; i < fixed.n_segments; ++i) DecodeSegment(SegmentAt(record, i), &event.segments[i]);
  return event;
}

// Skips tag (it changes when the record is committed) and the checksum itself.
uint32_t RecordCrc(const unsigned char* record, uint32_t size_bytes) {
  return Crc32cExtend(Crc32c(&size_bytes, 4), record + 12, size_bytes - 12);
}

}  // namespace assay::codec
