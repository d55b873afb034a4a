#include "stats/histogram.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "tensor/decode.h"

namespace assay {
namespace {

// floor(log2 |x|) of every finite non-zero double lies in [-1074, 1023].
constexpr int kLowest = -1074;
constexpr int kBins = 1023 - kLowest + 1;

// floor(log2 |value|); value is finite and not 0.
int ExponentOf(double value) {
  const uint64_t magnitude = std::bit_cast<uint64_t>(value) & 0x7fffffffffffffffu;
  const int field = static_cast<int>(magnitude >> 52);
  if (field != 0) return field - 1023;
  return 63 - std::countl_zero(magnitude) + kLowest;  // subnormal: the leading bit is the exponent
}

// Groups of eight local columns, row after row; one of every 2^shift is taken, which one is hashed.
// The hash of the interval's number, not a random generator: the same tensor gives the same sample everywhere, and no
// stride of the data (heads, channels) can fall in step with it.
struct Sampling {
  uint64_t per_row, groups;
  int shift = 0;

  Sampling(const Layout& layout, int64_t n_rows)
      : per_row(static_cast<uint64_t>((layout.cols + kLanes - 1) / kLanes)),
        groups(per_row * static_cast<uint64_t>(n_rows)) {
    while ((groups >> shift) > static_cast<uint64_t>(kHistogramGroups)) ++shift;
  }
  // One row, all of whose groups are taken: a decoder's step.
  bool is_one_row() const { return groups == per_row && shift == 0; }
  // Calls take(row from 0, column) for each group taken, in ascending order.
  template <class Take>
  void Each(const Take& take) const {
    const uint64_t mask = (uint64_t{1} << shift) - 1;
    uint64_t row = 0, row_begin = 0;  // first group of the row at hand
    for (uint64_t k = 0; k << shift < groups; ++k) {
      const uint64_t group = (k << shift) + (shift == 0 ? 0 : Mix64(k + 1) & mask);
      if (group >= groups) break;
      if (group - row_begin >= per_row) {  // a division takes as long as a group
        row = group / per_row;
        row_begin = row * per_row;
      }
      take(static_cast<int64_t>(row), static_cast<int64_t>(group - row_begin) * kLanes);
    }
  }
};

// One group more than kHistogramGroups is taken where their number is not a multiple of 2^shift; whole vectors of
// fields.
constexpr size_t kMaxSamples = ((kHistogramGroups + 1) * kLanes + kFieldsAlign - 1) / kFieldsAlign * kFieldsAlign;

// Sixteen exponent fields at a time; the compiler has such vectors on every machine.
using Bytes = uint8_t __attribute__((vector_size(16)));

// How many of n fields (n a multiple of 16, at most kMaxSamples) are `field`. Lanes count to 64 at most.
// A compare gives -1 in equal lanes, so subtracting counts.
int CountOf(const uint8_t* fields, size_t n, uint8_t field) {
  Bytes sums = {};
  for (size_t i = 0; i < n; i += sizeof(Bytes)) {
    Bytes some;
    std::memcpy(&some, fields + i, sizeof(some));
    sums -= reinterpret_cast<Bytes>(some == field);
  }
  uint64_t halves[2];
  std::memcpy(halves, &sums, sizeof(halves));
  uint64_t total = 0;
  for (const uint64_t half : halves) {
    // Adds eight byte counts: neighbours to 16-bit sums, then all four by one multiplication into the top 16 bits.
    const uint64_t pairs = (half & 0x00ff00ff00ff00ffu) + (half >> 8 & 0x00ff00ff00ff00ffu);
    total += pairs * 0x0001000100010001u >> 48;
  }
  return static_cast<int>(total);
}

// Types whose exponents are counted from their fields, where groups are contiguous: what a decoder mostly consists of,
// and at one row a step the histogram would cost as much as all the rest.
template <class Word, int kMantissa, int kBias>
struct Binary {
  using word = Word;
  static constexpr int kFieldMax = (1 << (static_cast<int>(sizeof(Word)) * 8 - 1 - kMantissa)) - 1;
  static constexpr int kExponentBias = kBias;
  static constexpr int kMantissaBits = kMantissa;
  static uint8_t FieldOf(Word bits) { return static_cast<uint8_t>(bits >> kMantissa & kFieldMax); }
  static uint32_t MantissaOf(Word bits) { return static_cast<uint32_t>(bits & ((Word{1} << kMantissa) - 1)); }
};
using Bf16Bits = Binary<uint16_t, 7, 127>;
using F16Bits = Binary<uint16_t, 10, 15>;
using F32Bits = Binary<uint32_t, 23, 127>;

// Whether the columns are runs of whole groups, as those of heads that are cut out of wider ones.
bool HasRuns(const Layout& layout) {
  return layout.axes.size() == 2 && layout.axes[1].stride == 1 && layout.axes[1].size % kLanes == 0;
}

// Where columns lie in a row. REQUIRES: all side by side, or HasRuns.
class Place {
 public:
  explicit Place(const Layout& layout)
      : size_(layout.contiguous ? layout.cols : layout.axes[1].size),
        stride_(layout.contiguous ? 0 : layout.axes[0].stride) {}
  int64_t run_size() const { return size_; }
  // Of the first column of a group; neighbours are asked for one after the other.
  int64_t Of(int64_t col) {
    if (col < begin_ || col - begin_ >= size_) {
      const int64_t run = col / size_;
      begin_ = run * size_;
      at_ = run * stride_;
    }
    return at_ + col - begin_;
  }

 private:
  int64_t size_, stride_;       // of a run, in elements; from run to run
  int64_t begin_ = 0, at_ = 0;  // of the run at hand: its first column, and where that lies
};

template <class Bits>
void SampleGroups(const Layout& layout, const Kernel& kernel, int64_t first_row, const Sampling& sampling,
                  Stats* stats) {
  constexpr auto kTop = static_cast<uint8_t>(Bits::kFieldMax);  // not finite
  typename Bits::word values[kMaxSamples];
  const auto* data = static_cast<const uint8_t*>(layout.data);
  constexpr auto kBytes = static_cast<int64_t>(sizeof(values[0]));
  size_t n = 0;
  const auto row_at = [&](int64_t row) { return layout.offset_elems + (first_row + row) * layout.row_stride; };
  Place place(layout);
  if (sampling.is_one_row()) {
    n = static_cast<size_t>(layout.cols);
    for (int64_t col = 0; col < layout.cols; col += place.run_size()) {
      std::memcpy(values + col, data + (row_at(0) + place.Of(col)) * kBytes,
                  static_cast<size_t>(place.run_size() * kBytes));
    }
  } else {
    sampling.Each([&](int64_t row, int64_t col) {
      const int64_t some = std::min<int64_t>(kLanes, layout.cols - col);
      const uint8_t* from = data + (row_at(row) + place.Of(col)) * kBytes;
      if (some == kLanes) {  // a size that the compiler knows
        std::memcpy(values + n, from, kLanes * kBytes);
      } else {
        std::memcpy(values + n, from, static_cast<size_t>(some * kBytes));
      }
      n += static_cast<size_t>(some);
    });
  }
  stats->histogram_samples = n;
  const size_t padded = (n + kFieldsAlign - 1) / kFieldsAlign * kFieldsAlign;
  // The number of padding zeros is known: zeros beyond it are the sample's.
  for (size_t i = n; i < padded; ++i) values[i] = 0;
  alignas(kFieldsAlign) uint8_t fields[kMaxSamples];
  for (size_t i = 0; i < padded; ++i) fields[i] = Bits::FieldOf(values[i]);
  FieldCounts counts;
  kernel.count_fields(fields, padded, kTop, &counts);
  stats->histogram.reserve(counts.high >= counts.low ? static_cast<size_t>(counts.high - counts.low) + 1 : 0);
  if (counts.zeros != padded - n) {  // zeros, subnormals
    // Subnormals have no exponent field; their exponent is that of the leading bit.
    uint16_t subnormal[Bits::kMantissaBits] = {};
    for (size_t i = 0; i < n; ++i) {
      const uint32_t mantissa = Bits::MantissaOf(values[i]);
      if (fields[i] == 0 && mantissa != 0) ++subnormal[31 - std::countl_zero(mantissa)];
    }
    for (int bit = 0; bit < Bits::kMantissaBits; ++bit) {
      if (subnormal[bit] == 0) continue;
      // Bit `bit` of the mantissa is worth 2^(1 - bias - kMantissaBits + bit).
      const int exponent = 1 - Bits::kExponentBias - Bits::kMantissaBits + bit;
      stats->histogram.push_back({static_cast<int16_t>(exponent), subnormal[bit]});
    }
  }
  for (int field = counts.low; field <= counts.high; ++field) {
    if (counts.counts[field] == 0) continue;
    stats->histogram.push_back({static_cast<int16_t>(field - Bits::kExponentBias), counts.counts[field]});
  }
}

}  // namespace

void CountFieldsPortable(const uint8_t* fields, size_t n, uint8_t left_out, FieldCounts* out) {
  // low is less by one on the way, so that a field of 0 is out of its way.
  Bytes lows = ~Bytes{}, highs = {};
  for (size_t i = 0; i < n; i += sizeof(Bytes)) {
    Bytes some;
    std::memcpy(&some, fields + i, sizeof(some));
    some &= ~reinterpret_cast<Bytes>(some == left_out);
    const Bytes less = some - 1;
    const auto lower = reinterpret_cast<Bytes>(less < lows), higher = reinterpret_cast<Bytes>(some > highs);
    lows = (less & lower) | (lows & ~lower);
    highs = (some & higher) | (highs & ~higher);
  }
  int low = UINT8_MAX, high = 0;
  for (size_t i = 0; i < sizeof(Bytes); ++i) {
    low = std::min<int>(low, lows[i] + 1);
    high = std::max<int>(high, highs[i]);
  }
  out->zeros = static_cast<uint16_t>(CountOf(fields, n, 0));
  out->low = static_cast<uint8_t>(low);
  out->high = static_cast<uint8_t>(high);
  for (int field = low; field <= high; ++field) {
    out->counts[field] = static_cast<uint16_t>(CountOf(fields, n, static_cast<uint8_t>(field)));
  }
}

void SampleHistogram(const Layout& layout, const Kernel& kernel, int64_t first_row, int64_t n_rows, Stats* stats) {
  stats->histogram.clear();
  stats->histogram_samples = 0;
  if (n_rows <= 0 || layout.cols <= 0) return;
  const Sampling sampling(layout, n_rows);
  if (layout.contiguous || HasRuns(layout)) {
    if (layout.dtype == DType::kBF16) return SampleGroups<Bf16Bits>(layout, kernel, first_row, sampling, stats);
    if (layout.dtype == DType::kF16) return SampleGroups<F16Bits>(layout, kernel, first_row, sampling, stats);
    if (layout.dtype == DType::kF32) return SampleGroups<F32Bits>(layout, kernel, first_row, sampling, stats);
  }

  uint16_t counts[kBins];  // 512 samples at most
  int low = kBins;
  int high = -1;
  Stage stage;
  sampling.Each([&](int64_t row, int64_t col) {
    int64_t n = 0;
    const uint8_t* data = Fetch(layout, first_row + row, col, std::min<int64_t>(kLanes, layout.cols - col), &stage, &n);
    double values[kLanes];
    DecodeTo(data, 0, n, layout.dtype, values);
    stats->histogram_samples += static_cast<uint64_t>(n);
    for (int64_t j = 0; j < n; ++j) {
      if (values[j] == 0 || !(values[j] - values[j] == 0)) continue;
      const int bin = ExponentOf(values[j]) - kLowest;
      // counts is cleared only where it is used: most types span few exponents.
      if (high < 0) {
        low = high = bin;
        counts[bin] = 0;
      }
      while (low > bin) counts[--low] = 0;
      while (high < bin) counts[++high] = 0;
      ++counts[bin];
    }
  });
  if (high < 0) return;
  size_t used = 0;
  for (int bin = low; bin <= high; ++bin) used += counts[bin] != 0;
  stats->histogram.reserve(used);
  for (int bin = low; bin <= high; ++bin) {
    if (counts[bin] != 0) stats->histogram.push_back({static_cast<int16_t>(bin + kLowest), counts[bin]});
  }
}

}  // namespace assay
