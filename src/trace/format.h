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
  unsigned char magic[8];     // kMagic
  uint16_t major;             // another one: the file cannot be read
  uint16_t minor;             // a newer one: what is unknown is skipped
  uint16_t min_reader_minor;  // refused by readers older than this
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
// Bodies: docs/trace-format.md, "Records". All but kKindEvent begin with an AuxHead.
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
  uint64_t sequence;      // from 0 in each file, in order of space given
  uint64_t time_ns;       // CLOCK_REALTIME, of the observation
  int64_t step;           // -1: unknown
  uint64_t base_address;  // of the storage, in the recording process
  uint32_t site;          // number of a kKindSite record of this file
  int32_t rank;           // tensor-parallel rank
  uint32_t flags;         // EventFlags of trace/event.h
  uint8_t phase;          // Phase
  uint8_t dtype;          // DType; 0 at level names
  uint8_t compute_dtype;  // DType; 0: not said
  uint8_t ndim;           // extents of the shape, behind kGroupShard
  int8_t row_axis;        // -1: none
  int8_t head_axis;       // -1: none
  uint16_t fixed_bytes;   // size of this struct in the writer's version; groups begin behind it
  uint32_t segments_at;   // offset of the segment table in the record
  uint32_t n_segments;    // 0 below level stats
  uint16_t n_meta;        // pairs in kGroupMeta
  uint16_t groups;        // EventGroup bits
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
  uint64_t size_bytes;  // of the payload's file
  uint64_t n_rows;      // sampled rows that follow; 0: the whole tensor
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
  uint64_t request;        // 0: of no request
  int64_t first_position;  // in tokens of the request
  int64_t first_row;       // along the tensor's row axis
  uint64_t count;          // elements
  uint64_t digest;         // docs/numerics.md, "The digest"
  double sum;              // of finite elements, as the next four
  double sum_sq;
  double min;
  double max;  // NaN where no element is finite, as min and abs_max
  double abs_max;
  uint64_t abs_max_index;  // row-major number in the view
  uint64_t zero;
  uint32_t n_rows;      // 0: without token rows
  uint32_t flags;       // SegmentFlags
  uint32_t size_bytes;  // of the whole segment
  uint32_t n_row_cells;
  uint32_t n_head_cells;
  uint32_t histogram_samples;  // elements looked at for the bins
  uint16_t n_bins;             // of the histogram, ascending exponent
  int16_t sketch_exponent;     // see kSegmentSketch
  uint16_t fixed_bytes;        // size of this struct in the writer's version
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
  uint64_t digest;  // the row's own, whatever its position
  double sum_sq;
  float sketch[4];     // times 2^exponent
  uint32_t nonfinite;  // NaN and infinities
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
