#include "stats/histogram.h"

#include <algorithm>
#include <bit>

#include "tensor/decode.h"

namespace assay {
namespace {

// floor(log2 |x|) of every finite non-zero double lies in [-1074, 1023].
constexpr int kLowest = -1074;
constexpr int kBins = 1023 - kLowest + 1;

int ExponentOf(double value) {
  const uint64_t magnitude = std::bit_cast<uint64_t>(value) & 0x7fffffffffffffffu;
  const int field = static_cast<int>(magnitude >> 52);
  if (field != 0) return field - 1023;
  return 63 - std::countl_zero(magnitude) + kLowest;  // subnormal: the leading bit is the exponent
}

}  // namespace

void SampleHistogram(const Layout& layout, int64_t first_row, int64_t n_rows, Stats* stats) {
  stats->histogram.clear();
  stats->histogram_samples = 0;
  if (n_rows <= 0 || layout.cols <= 0) return;
  // Groups of eight local columns, row after row; one of every `stride` is taken, which one is hashed.
  const int64_t per_row = (layout.cols + kLanes - 1) / kLanes;
  const uint64_t groups = static_cast<uint64_t>(per_row) * static_cast<uint64_t>(n_rows);
  int shift = 0;
  while ((groups >> shift) > static_cast<uint64_t>(kHistogramGroups)) ++shift;

  uint16_t counts[kBins];  // 512 samples at most
  int low = kBins;
  int high = -1;
  Stage stage;
  for (uint64_t k = 0; k << shift < groups; ++k) {
    const uint64_t mask = (uint64_t{1} << shift) - 1;
    const uint64_t group = (k << shift) + (Mix64(k + 1) & mask);
    if (group >= groups) break;
    const int64_t row = first_row + static_cast<int64_t>(group / static_cast<uint64_t>(per_row));
    const int64_t col = static_cast<int64_t>(group % static_cast<uint64_t>(per_row)) * kLanes;
    int64_t n = 0;
    const uint8_t* data = Fetch(layout, row, col, std::min<int64_t>(kLanes, layout.cols - col), &stage, &n);
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
  }
  if (high < 0) return;
  size_t used = 0;
  for (int bin = low; bin <= high; ++bin) used += counts[bin] != 0;
  stats->histogram.reserve(used);
  for (int bin = low; bin <= high; ++bin) {
    if (counts[bin] != 0) stats->histogram.push_back({static_cast<int16_t>(bin + kLowest), counts[bin]});
  }
}

}  // namespace assay
