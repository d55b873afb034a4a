#include "trace/segment_codec.h"

#include <algorithm>
#include <bit>

#include "stats/measure.h"
#include "trace/codec.h"

namespace assay::codec {
namespace {

using format::HeadCellBytes;
using format::PadTo8;
using format::RareCounts;
using format::RowCellBytes;
using format::SegmentFixed;

constexpr uint64_t kSketchBytes = 4 * kSketchSize;

// Vectors of some doubles: as they are, as halves in the order of memory, and as floats.
struct Narrow {  // every machine has those
  using Doubles = double __attribute__((vector_size(16)));
  using Halves = int32_t __attribute__((vector_size(16)));
  using Floats = float __attribute__((vector_size(8)));
};
struct Wide {  // AVX2
  using Doubles = double __attribute__((vector_size(32)));
  using Halves = int32_t __attribute__((vector_size(32)));
  using Floats = float __attribute__((vector_size(16)));
};

static_assert(kSketchSize % 4 == 0 && kRowSketchSize % 4 == 0 && kHeadSketchSize % 4 == 0);  // whole vectors

// Biased exponent; 0x7ff for a non-finite value.
uint32_t ExponentOf(double value) { return static_cast<uint32_t>(std::bit_cast<uint64_t>(value) >> 52 & 0x7ff); }

// The largest of n biased exponents, n a multiple of 4.
template <class Vectors>
[[gnu::always_inline]] inline uint32_t TopExponent(const double* values, int n) {
  using Halves = typename Vectors::Halves;
  constexpr int kStep = sizeof(Halves) / sizeof(double);
  Halves upper = {}, tops = {};  // upper: the upper halves without the sign
  for (int k = 1; k < 2 * kStep; k += 2) upper[k] = 0x7fffffff;
  for (int i = 0; i < n; i += kStep) {
    Halves some;
    std::memcpy(&some, values + i, sizeof some);
    some &= upper;
    const Halves more = some > tops;
    tops = (some & more) | (tops & ~more);
  }
  int32_t top = 0;
  for (int k = 1; k < 2 * kStep; k += 2) top = std::max(top, tops[k]);
  return static_cast<uint32_t>(top) >> 20;
}

// Bits, not values: a sketch with a negative zero is stored. Mostly the first tells.
bool AllZero(const std::array<double, kSketchSize>& sketch) {
  for (double value : sketch) {
    if (std::bit_cast<uint64_t>(value) != 0) return false;
  }
  return true;
}

// Bytes behind the fixed part, unpadded; counts are at most 2^32, so the sum cannot overflow.
uint64_t VariableBytes(uint32_t flags, uint64_t n_rows, uint64_t n_heads, uint64_t n_bins) {
  uint64_t bytes = n_rows * sizeof(RowCellBytes) + n_heads * sizeof(HeadCellBytes);
  if (flags & format::kSegmentRare) bytes += sizeof(RareCounts);
  if (flags & format::kSegmentSketch) bytes += kSketchBytes;
  return bytes + n_bins * ((flags & format::kSegmentWideHistogram) ? 8 : 4);
}

// Flags follow from the content, so they need not be kept between SegmentSize and EncodeSegment.
uint32_t FlagsOf(const Segment& segment) {
  const Stats& s = segment.stats;
  uint32_t flags = 0;
  if (segment.padding) flags |= format::kSegmentPadding;
  if (s.digest_split) flags |= format::kSegmentDigestSplit;
  if ((s.nan | s.pos_inf | s.neg_inf | s.subnormal) != 0) flags |= format::kSegmentRare;
  if (!AllZero(s.sketch)) flags |= format::kSegmentSketch;
  for (const ExponentBin& bin : s.histogram) {
    if (bin.count > 0xffff) flags |= format::kSegmentWideHistogram;
  }
  return flags;
}

template <class T>
// Returns the first byte behind it.
unsigned char* PutValue(unsigned char* out, const T& value) {
  std::memcpy(out, &value, sizeof value);
  return out + sizeof value;
}

// What RowCellBytes and HeadCellBytes end with.
struct CellEnd {
  uint32_t nonfinite;
  int16_t exponent;
  uint16_t reserved;
};
static_assert(sizeof(RowCellBytes) == 16 + sizeof(RowCellBytes::sketch) + sizeof(CellEnd));
static_assert(sizeof(HeadCellBytes) == 8 + sizeof(HeadCellBytes::sketch) + sizeof(CellEnd));

// The product is exact unless it leaves the range of double: a float has 24 bits, the scale is a power of two.
void ReadFloats(const unsigned char* at, int n, int16_t exponent, double* out) {
  const double scale = ScaleOf(exponent);
  for (int i = 0; i < n; ++i) {
    float value;
    std::memcpy(&value, at + 4 * i, 4);
    out[i] = static_cast<double>(value) * scale;
  }
}

// float32 of values[i] * 2^-exponent, where exponent, which it returns, is that of the largest finite magnitude (-1022
// when all are zero): relative rounding 2^-24 for values down to 2^-126 of the largest. n is a multiple of 4.
// With the exponent taken out, the largest magnitude lies in [1, 2): no value overflows a float, bf16's range (1e38)
// included. Non-finite values pass through as they are.
template <class Vectors>
[[gnu::always_inline]] inline int16_t ScaleTo(const double* values, int n, unsigned char* out_floats) {
  uint32_t top = TopExponent<Vectors>(values, n);
  if (top == 0x7ff) {  // rare: look again at the finite ones alone
    top = 0;
    for (int i = 0; i < n; ++i) {
      if (ExponentOf(values[i]) != 0x7ff) top = std::max(top, ExponentOf(values[i]));
    }
  }
  // 2^-exponent must be a normal number or the one subnormal 2^-1023; all zero or subnormal counts as exponent -1022.
  const int exponent = std::max(static_cast<int>(top), 1) - 1023;
  const double scale = exponent == 1023 ? 0x1p-1023 : ScaleOf(static_cast<int16_t>(-exponent));
  using Doubles = typename Vectors::Doubles;
  using Floats = typename Vectors::Floats;
  constexpr int kStep = sizeof(Doubles) / sizeof(double);
  for (int i = 0; i < n; i += kStep) {
    Doubles some;
    std::memcpy(&some, values + i, sizeof some);
    const auto floats = __builtin_convertvector(some * scale, Floats);
    std::memcpy(out_floats + sizeof(float) * static_cast<size_t>(i), &floats, sizeof floats);
  }
  return static_cast<int16_t>(exponent);
}

// Padding and reserved fields are written as zeros: equal segments have equal bytes.
template <class Vectors>
[[gnu::always_inline]] inline unsigned char* Encode(const Segment& segment, unsigned char* out) {
  const Stats& s = segment.stats;
  const uint32_t flags = FlagsOf(segment);
  SegmentFixed fixed{};
  unsigned char* at = out + sizeof fixed;
  if (flags & format::kSegmentRare) at = PutValue(at, RareCounts{s.nan, s.pos_inf, s.neg_inf, s.subnormal});
  if (flags & format::kSegmentSketch) {
    fixed.sketch_exponent = ScaleTo<Vectors>(s.sketch.data(), kSketchSize, at);
    at += kSketchBytes;
  }
  // Field by field into the record: a copy of a whole cell would wait for the stores to its parts.
  for (const RowCell& row : segment.rows) {
    at = PutValue(at, row.digest);
    at = PutValue(at, row.sum_sq);
    const int16_t exponent = ScaleTo<Vectors>(row.sketch.data(), kRowSketchSize, at);
    at = PutValue(at + sizeof(RowCellBytes::sketch), CellEnd{row.nonfinite, exponent, 0});
  }
  for (const HeadCell& head : segment.heads) {
    at = PutValue(at, head.sum_sq);
    const int16_t exponent = ScaleTo<Vectors>(head.sketch.data(), kHeadSketchSize, at);
    at = PutValue(at + sizeof(HeadCellBytes::sketch), CellEnd{head.nonfinite, exponent, 0});
  }
  for (const ExponentBin& bin : s.histogram) {
    at = PutValue(at, bin.exponent);
    if (flags & format::kSegmentWideHistogram) {
      at = PutValue(at, uint16_t{0});
      at = PutValue(at, bin.count);
    } else {
      at = PutValue(at, static_cast<uint16_t>(bin.count));
    }
  }
  while ((at - out) % 8 != 0) *at++ = 0;

  fixed.request = segment.request;
  fixed.first_position = segment.first_position;
  fixed.first_row = segment.first_row;
  fixed.count = s.count;
  fixed.digest = s.digest;
  fixed.sum = s.sum;
  fixed.sum_sq = s.sum_sq;
  fixed.min = s.min;
  fixed.max = s.max;
  fixed.abs_max = s.abs_max;
  fixed.abs_max_index = s.abs_max_index;
  fixed.zero = s.zero;
  fixed.n_rows = static_cast<uint32_t>(segment.n_rows);
  fixed.flags = flags;
  fixed.size_bytes = static_cast<uint32_t>(at - out);
  fixed.n_row_cells = static_cast<uint32_t>(segment.rows.size());
  fixed.n_head_cells = static_cast<uint32_t>(segment.heads.size());
  fixed.histogram_samples = static_cast<uint32_t>(s.histogram_samples);
  fixed.n_bins = static_cast<uint16_t>(s.histogram.size());
  fixed.fixed_bytes = sizeof fixed;
  std::memcpy(out, &fixed, sizeof fixed);
  return at;
}

using Encoder = unsigned char* (*)(const Segment&, unsigned char*);

unsigned char* EncodePortable(const Segment& segment, unsigned char* out) { return Encode<Narrow>(segment, out); }
#if defined(__x86_64__)
// The same source for wider vectors: a segment with eight heads has 200 numbers to scale.
__attribute__((target("avx2"))) unsigned char* EncodeAvx2(const Segment& segment, unsigned char* out) {
  return Encode<Wide>(segment, out);
}
#endif

Encoder EncoderOf([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx2 || isa == Isa::kAvx512) return EncodeAvx2;
#endif
  return EncodePortable;
}

}  // namespace

// Clamped: an exponent of a forged file must give a number, not an infinity.
double ScaleOf(int16_t exponent) {
  const int e = std::clamp<int>(exponent, -1022, 1023);
  return std::bit_cast<double>(static_cast<uint64_t>(e + 1023) << 52);
}

uint64_t SegmentSize(const Segment& segment) {
  const Stats& s = segment.stats;
  if (segment.n_rows < 0 || segment.n_rows > int64_t{0xffffffff} || s.histogram_samples > 0xffffffffu ||
      segment.heads.size() > 0x7fffffffu || s.histogram.size() > 0xffff) {
    return 0;
  }
  if (!segment.rows.empty() && segment.rows.size() != static_cast<uint64_t>(segment.n_rows)) return 0;
  const uint64_t bytes = sizeof(SegmentFixed) +
                         VariableBytes(FlagsOf(segment), segment.rows.size(), segment.heads.size(), s.histogram.size());
  return bytes > format::kMaxRecordBytes ? 0 : PadTo8(bytes);
}

unsigned char* EncodeSegment(const Segment& segment, unsigned char* out) {
  static const Encoder encode = EncoderOf(ActiveIsa());
  return encode(segment, out);
}

// Bits and fields of a later version are not refused: what they add lies behind what is known here (fixed_bytes,
// size_bytes).
uint64_t CheckSegment(const unsigned char* at, uint64_t available) {
  if (available < sizeof(SegmentFixed)) return 0;
  SegmentFixed fixed;
  std::memcpy(&fixed, at, sizeof fixed);
  if (fixed.fixed_bytes < sizeof(SegmentFixed) || fixed.size_bytes > available) return 0;
  // Cells of more rows than the segment has would be named as rows that do not exist.
  if (fixed.n_row_cells != 0 && fixed.n_row_cells != fixed.n_rows) return 0;
  // Readers add the number of rows to both without looking for an overflow; without rows they count one.
  const int64_t rows = std::max<int64_t>(fixed.n_rows, 1);
  if (fixed.first_row < 0 || fixed.first_row > INT64_MAX - rows || fixed.first_position > INT64_MAX - rows) return 0;
  // Counts are handed out as int32_t.
  if (fixed.n_row_cells > 0x7fffffffu || fixed.n_head_cells > 0x7fffffffu) return 0;
  const uint64_t needed =
      fixed.fixed_bytes + VariableBytes(fixed.flags, fixed.n_row_cells, fixed.n_head_cells, fixed.n_bins);
  return needed <= fixed.size_bytes ? fixed.size_bytes : 0;
}

SegmentParts PartsOf(const unsigned char* at) {
  SegmentParts parts;
  std::memcpy(&parts.fixed, at, sizeof parts.fixed);
  const unsigned char* next = at + parts.fixed.fixed_bytes;
  if (parts.fixed.flags & format::kSegmentRare) {
    parts.rare = next;
    next += sizeof(RareCounts);
  }
  if (parts.fixed.flags & format::kSegmentSketch) {
    parts.sketch = next;
    next += kSketchBytes;
  }
  parts.rows = next;
  next += uint64_t{parts.fixed.n_row_cells} * sizeof(RowCellBytes);
  parts.heads = next;
  next += uint64_t{parts.fixed.n_head_cells} * sizeof(HeadCellBytes);
  parts.bins = next;
  return parts;
}

void ReadSketch(const SegmentParts& parts, double out[kSketchSize]) {
  if (parts.sketch != nullptr) {
    ReadFloats(parts.sketch, kSketchSize, parts.fixed.sketch_exponent, out);
  } else {
    std::fill(out, out + kSketchSize, 0.0);
  }
}

void ReadRowCell(const SegmentParts& parts, uint32_t row, RowCell* out) {
  RowCellBytes bytes;
  std::memcpy(&bytes, parts.rows + uint64_t{row} * sizeof bytes, sizeof bytes);
  out->sum_sq = bytes.sum_sq;
  out->digest = bytes.digest;
  out->nonfinite = bytes.nonfinite;
  ReadFloats(reinterpret_cast<const unsigned char*>(bytes.sketch), kRowSketchSize, bytes.exponent, out->sketch.data());
}

void ReadHeadCell(const SegmentParts& parts, uint32_t head, HeadCell* out) {
  HeadCellBytes bytes;
  std::memcpy(&bytes, parts.heads + uint64_t{head} * sizeof bytes, sizeof bytes);
  out->sum_sq = bytes.sum_sq;
  out->nonfinite = bytes.nonfinite;
  ReadFloats(reinterpret_cast<const unsigned char*>(bytes.sketch), kHeadSketchSize, bytes.exponent, out->sketch.data());
}

uint64_t ReadHistogram(const SegmentParts& parts, std::vector<ExponentBin>* out) {
  out->resize(parts.fixed.n_bins);
  const bool wide = (parts.fixed.flags & format::kSegmentWideHistogram) != 0;
  for (uint32_t i = 0; i < parts.fixed.n_bins; ++i) {
    const unsigned char* bin = parts.bins + uint64_t{i} * (wide ? 8 : 4);
    std::memcpy(&(*out)[i].exponent, bin, 2);
    uint16_t narrow_count = 0;
    std::memcpy(&narrow_count, bin + 2, 2);
    (*out)[i].count = narrow_count;
    if (wide) std::memcpy(&(*out)[i].count, bin + 4, 4);
  }
  return parts.fixed.histogram_samples;
}

// Allocates for the cells: at most what the checked record holds, within a small factor (a row cell takes 56 bytes in
// memory for 40 in the file).
void DecodeSegment(const unsigned char* at, Segment* out) {
  const SegmentParts parts = PartsOf(at);
  const SegmentFixed& fixed = parts.fixed;
  out->request = fixed.request;
  out->first_position = fixed.first_position;
  out->first_row = fixed.first_row;
  out->n_rows = fixed.n_rows;
  out->padding = (fixed.flags & format::kSegmentPadding) != 0;
  Stats& s = out->stats;
  s.count = fixed.count;
  s.zero = fixed.zero;
  if (parts.rare != nullptr) {
    RareCounts rare;
    std::memcpy(&rare, parts.rare, sizeof rare);
    s.nan = rare.nan;
    s.pos_inf = rare.pos_inf;
    s.neg_inf = rare.neg_inf;
    s.subnormal = rare.subnormal;
  }
  s.min = fixed.min;
  s.max = fixed.max;
  s.abs_max = fixed.abs_max;
  s.abs_max_index = fixed.abs_max_index;
  s.sum = fixed.sum;
  s.sum_sq = fixed.sum_sq;
  s.digest = fixed.digest;
  s.digest_split = (fixed.flags & format::kSegmentDigestSplit) != 0;
  s.histogram_samples = fixed.histogram_samples;
  ReadSketch(parts, s.sketch.data());
  out->rows.resize(fixed.n_row_cells);
  for (uint32_t i = 0; i < fixed.n_row_cells; ++i) ReadRowCell(parts, i, &out->rows[i]);
  out->heads.resize(fixed.n_head_cells);
  for (uint32_t i = 0; i < fixed.n_head_cells; ++i) ReadHeadCell(parts, i, &out->heads[i]);
  ReadHistogram(parts, &s.histogram);
}

}  // namespace assay::codec
