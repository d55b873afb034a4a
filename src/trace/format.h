// The bytes of a trace file, as docs/trace-format.md specifies them. Everything is little-endian; offsets of records
// are multiples of 8. These structs are copied with memcpy to and from the file, never pointed into it.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace assay::format {

static_assert(std::endian::native == std::endian::little, "the trace format is little-endian; this host is not");

// 0x89 catches 7-bit channels, \r\n and \n line-ending translation, 0x1a stops DOS `type`.
inline constexpr unsigned char kMagic[8] = {0x89, 'A', 'S', 'Y', '\r', '\n', 0x1a, '\n'};
// See "Changing the format" in docs/trace-format.md for when which of these goes up.
inline constexpr uint16_t kMajor = 1;
inline constexpr uint16_t kMinor = 0;
inline constexpr uint16_t kMinReaderMinor = 0;  // oldest reader minor that understands what this writer writes
inline constexpr uint64_t kHeaderBytes = 4096;  // one page; records begin behind it
inline constexpr uint64_t kAlign = 8;
// Bounds what a reader checksums for one forged length.
inline constexpr uint32_t kMaxRecordBytes = 64u << 20;
inline constexpr char kFileSuffix[] = ".assay";

// First 64 bytes of a file, written once.
struct FileHeader {
  unsigned char magic[8];
  uint16_t major;
  uint16_t minor;
  uint16_t min_reader_minor;
  uint16_t reserved0;
  uint32_t header_bytes;  // where records begin
  uint32_t reserved1;
  uint64_t required_features;  // a reader that does not know one of these bits must refuse the file
  uint64_t optional_features;  // may be ignored
  uint64_t file_id;            // random
  uint32_t reserved2[3];
  uint32_t crc;  // CRC-32C of the 60 bytes before
};
static_assert(sizeof(FileHeader) == 64);

// Bytes 64 to 191 of a file: counters that the writer keeps up to date in place, so that they survive kill -9. Not
// checksummed; a reader takes them as hints and never trusts them for bounds.
struct LiveArea {
  uint64_t tail;             // offset behind the last reserved record; kTailClosed added by Close()
  uint64_t committed_bytes;  // sum of the sizes of committed records
  uint64_t next_sequence;    // number of events that were given space
  uint64_t aux_head;         // offset of the newest record that is not an event; 0 none
  uint64_t closed;           // 1 after Close()
  uint64_t reserved[3];
  uint64_t drops[8];  // by DropReason
};
static_assert(sizeof(LiveArea) == 128);
inline constexpr uint64_t kLiveOffset = 64;
inline constexpr uint64_t kTailClosed = uint64_t{1} << 63;

// Index into LiveArea::drops; the words of manifest.json stand in the same order.
enum DropReason : uint8_t { kDropByteCap = 0, kDropDiskFull = 1, kDropPayloadBudget = 2, kDropInternal = 3 };

// Every record: 16 bytes, then the body, then zero bytes up to a multiple of 8. Tag and size are one aligned 8-byte
// store: first with kTagReserved, so that a record that is never committed still has a length; then, when all else is
// in place, with kTagCommitted (release).
struct RecordHeader {
  uint32_t tag;
  uint32_t size_bytes;  // of the whole record, padding included
  uint32_t crc;         // CRC-32C of size_bytes (4 bytes), then of everything from `kind` to the end
  uint16_t kind;
  uint16_t reserved;
};
static_assert(sizeof(RecordHeader) == 16);
// Two words that are unlikely in content: as floats both are about -1e-20.
inline constexpr uint32_t kTagReserved = 0x9E56A55A;
inline constexpr uint32_t kTagCommitted = 0x9E57A55A;

// Never reused. A new kind is skipped by old readers, so it may only hold what they can do without.
enum RecordKind : uint16_t {
  kKindProcess = 1,
  kKindSite = 2,
  kKindEvent = 3,
  kKindRequest = 4,
  kKindCoverage = 5,
  kKindMeta = 6,
};

// Records other than events begin with an AuxHead; the chain lets a summary be read without scanning the events.
struct AuxHead {
  uint64_t previous;  // offset of the non-event record before this one; 0: the first
};

// Optional groups of an event, in the order in which they follow the fixed part; the shape stands behind kGroupShard.
// Groups that a reader does not know lie behind those it knows.
enum EventGroup : uint16_t {
  kGroupShard = 1 << 0,          // ShardGroup
  kGroupStream = 1 << 1,         // u64
  kGroupStorageOffset = 1 << 2,  // i64
  kGroupStrides = 1 << 3,        // ndim x i64; absent: contiguous row-major
  kGroupPayload = 1 << 4,        // PayloadGroup, then n_rows x i64
  kGroupMeta = 1 << 5,           // n_meta x {u32 key bytes, u32 value bytes, key, value}, padded to 8
};

// At offset 16 of the record. Behind it the groups, then the segment table, then the segments.
struct EventFixed {
  uint64_t sequence;
  uint64_t time_ns;
  int64_t step;
  uint64_t base_address;
  uint32_t site;
  int32_t rank;
  uint32_t flags;
  uint8_t phase;
  uint8_t dtype;
  uint8_t compute_dtype;
  uint8_t ndim;
  int8_t row_axis;
  int8_t head_axis;
  uint16_t fixed_bytes;  // size of this struct in the writer's version; groups begin behind it
  uint32_t segments_at;  // offset of the segment table in the record
  uint32_t n_segments;
  uint16_t n_meta;
  uint16_t groups;  // EventGroup bits
};
static_assert(sizeof(EventFixed) == 64);

// Shard of trace/event.h, field by field.
struct ShardGroup {
  int32_t index;
  int32_t count;
  int64_t col_offset;
  int64_t full_cols;
};
static_assert(sizeof(ShardGroup) == 24);

// PayloadRef of trace/event.h, its hash as bytes.
struct PayloadGroup {
  unsigned char sha256[32];
  uint64_t size_bytes;
  uint64_t n_rows;
};
static_assert(sizeof(PayloadGroup) == 48);

// At segments_at: u32 offset in the record of each segment but the first, padded to 8; then the segments.
enum SegmentFlags : uint32_t {
  kSegmentPadding = 1 << 0,
  kSegmentDigestSplit = 1 << 1,
  kSegmentRare = 1 << 2,          // RareCounts follow (some count in them is not zero)
  kSegmentSketch = 1 << 3,        // 64 x f32 follow, times 2^sketch_exponent; absent: all zero
  kSegmentWideHistogram = 1 << 4  // bins are {i16, u16 0, u32 count} instead of {i16, u16 count}
};

// Behind it, in this order: RareCounts, sketch, row cells, head cells, histogram bins, padding to 8.
struct SegmentFixed {
  uint64_t request;
  int64_t first_position;
  int64_t first_row;
  uint64_t count;
  uint64_t digest;
  double sum;
  double sum_sq;
  double min;
  double max;
  double abs_max;
  uint64_t abs_max_index;
  uint64_t zero;
  uint32_t n_rows;
  uint32_t flags;
  uint32_t size_bytes;  // of the whole segment
  uint32_t n_row_cells;
  uint32_t n_head_cells;
  uint32_t histogram_samples;
  uint16_t n_bins;
  int16_t sketch_exponent;
  uint16_t fixed_bytes;  // size of this struct in the writer's version
  uint16_t reserved;
};
static_assert(sizeof(SegmentFixed) == 128);

// Counts that are zero in nearly every healthy segment: left out then, which saves 32 bytes an event.
struct RareCounts {
  uint64_t nan;
  uint64_t pos_inf;
  uint64_t neg_inf;
  uint64_t subnormal;
};
static_assert(sizeof(RareCounts) == 32);

// Each cell has its own exponent: one row of 1e38 must not flush its neighbours to zero.
struct RowCellBytes {
  uint64_t digest;
  double sum_sq;
  float sketch[4];  // times 2^exponent
  uint32_t nonfinite;
  int16_t exponent;
  uint16_t reserved;
};
static_assert(sizeof(RowCellBytes) == 40);

// Over all rows of the segment.
struct HeadCellBytes {
  double sum_sq;
  float sketch[16];  // times 2^exponent
  uint32_t nonfinite;
  int16_t exponent;
  uint16_t reserved;
};
static_assert(sizeof(HeadCellBytes) == 80);

// n is at most 2^64 - 8; sizes here are bounded by kMaxRecordBytes long before.
constexpr uint64_t PadTo8(uint64_t n) { return (n + 7) & ~uint64_t{7}; }

}  // namespace assay::format
