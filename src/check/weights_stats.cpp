// One pass over a weight: codes counted where the format allows it (a tally), else a few rows decoded into a buffer
// that stays in the first cache and measured there.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/hash.h"
#include "check/weights_audit.h"
#include "tensor/decode.h"

namespace assay {
namespace {

constexpr int64_t kBufferElems = 4096;
constexpr int kLanes = 16;

// Independent lanes in a fixed order, so that the compiler may use vectors and the result does not depend on them.
struct Lanes {
  std::array<float, kLanes> low, high;
  std::array<float, kLanes> square;  // of one run of at most 64 elements a lane, then flushed to double
  std::array<int32_t, kLanes> zero, odd;
};

// Largest-magnitude finite float; anything else counts as odd and enters nothing.
constexpr float kLargest = 3.4028234663852886e38f;

// Squares of 64 elements a lane stay exact enough in float: a relative error of 64 u, far below what sizes are compared
// by.
void MeasureRun(const float* x, int64_t n, Lanes* lanes) {
  // Copies, so that the compiler knows that x is none of them and keeps them in registers.
  std::array<float, kLanes> low = lanes->low, high = lanes->high, square = lanes->square;
  std::array<int32_t, kLanes> zero = lanes->zero, odd = lanes->odd;
  const auto add = [&](size_t j, float v) {
    const bool finite = std::fabs(v) <= kLargest;
    const float kept = finite ? v : 0.0f;
    odd[j] += finite ? 0 : 1;
    zero[j] += v == 0.0f ? 1 : 0;
    low[j] = kept < low[j] ? kept : low[j];
    high[j] = kept > high[j] ? kept : high[j];
    square[j] += kept * kept;
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (size_t j = 0; j < kLanes; ++j) add(j, x[i + static_cast<int64_t>(j)]);
  }
  for (size_t j = 0; i < n; ++i, ++j) add(j, x[i]);
  *lanes = {low, high, square, zero, odd};
}

class Measure {
 public:
  // min and max start at the first element, so that a tensor of one sign has no 0 among them.
  void Add(const float* x, int64_t n) {
    if (stats_.count == 0 && n > 0) first_ = x[0], low_ = high_ = std::isfinite(x[0]) ? x[0] : 0.0f;
    stats_.count += static_cast<uint64_t>(n);
    constexpr int64_t kRun = 64 * kLanes;
    for (int64_t i = 0; i < n; i += kRun) {
      const int64_t run = std::min(kRun, n - i);
      Lanes lanes;
      lanes.low.fill(low_);
      lanes.high.fill(high_);
      lanes.square.fill(0);
      lanes.zero.fill(0);
      lanes.odd.fill(0);
      MeasureRun(x + i, run, &lanes);
      int64_t odd = 0;
      double square = 0;
      for (size_t j = 0; j < kLanes; ++j) {
        low_ = std::min(low_, lanes.low[j]);
        high_ = std::max(high_, lanes.high[j]);
        square += static_cast<double>(lanes.square[j]);
        stats_.zero += static_cast<uint64_t>(lanes.zero[j]);
        odd += lanes.odd[j];
      }
      if (odd > 0) CountOdd(x + i, run);
      if (!std::isfinite(square)) square = ExactSquare(x + i, run);  // magnitudes beyond 1e19
      stats_.sum_sq += square;
    }
  }

  WeightStats Finish() {
    stats_.min = static_cast<double>(low_);
    stats_.max = static_cast<double>(high_);
    stats_.abs_max = std::max(std::fabs(stats_.min), std::fabs(stats_.max));
    stats_.constant = stats_.count > 0 && stats_.nan + stats_.inf == 0 && low_ == high_;
    return stats_;
  }
  WeightStats* stats() { return &stats_; }

 private:
  void CountOdd(const float* x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      if (std::isnan(x[i])) {
        ++stats_.nan;
      } else if (std::isinf(x[i])) {
        ++stats_.inf;
      }
    }
  }
  static double ExactSquare(const float* x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (std::isfinite(x[i])) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    }
    return sum;
  }

  WeightStats stats_;
  float first_ = 0, low_ = 0, high_ = 0;
};

// Four independent chains of multiply and add over words of 8 bytes: to tell equal tensors, not against an adversary.
uint64_t DigestOf(const std::byte* data, uint64_t n) {
  uint64_t h[4] = {1, 2, 3, 4};
  uint64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    for (int j = 0; j < 4; ++j) {
      uint64_t word = 0;
      std::memcpy(&word, data + i + 8 * static_cast<uint64_t>(j), 8);
      h[j] = (h[j] ^ word) * kGolden64;
      h[j] ^= h[j] >> 29;
    }
  }
  for (; i < n; ++i) h[0] = (h[0] ^ std::to_integer<uint64_t>(data[i])) * kGolden64 + 1;
  return Mix64(h[0] ^ Mix64(h[1] ^ Mix64(h[2] ^ Mix64(h[3] ^ n))));
}

// A scale that is no power of two has more than its leading bit: frexp gives exactly 0.5 for powers.
void CountScale(float v, uint64_t times, ScaleStats* out) {
  if (!std::isfinite(v)) {
    out->nonfinite += times;
    return;
  }
  int exponent = 0;
  if (v == 0) out->zero += times;
  if (v < 0) out->negative += times;
  if (v != 0 && std::frexp(std::fabs(v), &exponent) != 0.5f) out->not_power_of_two += times;
}

// Scales of one byte: by counting their 256 values.
// The median by running counts over the sorted values.
ScaleStats MeasureByteScales(const CheckpointTensor& tensor, DType dtype) {
  std::array<uint64_t, 256> counts{};
  for (uint64_t i = 0; i < tensor.size_bytes; ++i) ++counts[std::to_integer<size_t>(tensor.data[i])];
  ScaleStats out;
  std::vector<std::pair<float, uint64_t>> values;  // finite ones
  uint64_t finite = 0;
  for (size_t b = 0; b < counts.size(); ++b) {
    const float v = static_cast<float>(DecodeBits(b, dtype));
    out.count += counts[b];
    CountScale(v, counts[b], &out);
    if (counts[b] == 0 || !std::isfinite(v)) continue;
    values.emplace_back(v, counts[b]);
    finite += counts[b];
  }
  if (values.empty()) return out;
  std::sort(values.begin(), values.end());
  out.min = static_cast<double>(values.front().first);
  out.max = static_cast<double>(values.back().first);
  uint64_t below = 0;
  for (const auto& [value, count] : values) {
    if (below <= finite / 2) out.median = static_cast<double>(value);
    below += count;
  }
  return out;
}

// u8 scales are exponents (e8m0). The median is the upper one of an even number.
ScaleStats MeasureScales(const CheckpointTensor& tensor) {
  ScaleStats out;
  const DType dtype = tensor.dtype == DType::kU8 ? DType::kF8E8M0 : tensor.dtype;
  if (BitsOf(dtype) == 8) return MeasureByteScales(tensor, dtype);
  const int64_t n = static_cast<int64_t>(tensor.size_bytes * 8 / static_cast<uint64_t>(BitsOf(dtype)));
  std::vector<float> values(static_cast<size_t>(n));
  DecodeTo(tensor.data, 0, n, dtype, values.data());
  out.count = static_cast<uint64_t>(n);
  size_t kept = 0;
  for (const float v : values) {
    CountScale(v, 1, &out);
    if (!std::isfinite(v)) continue;
    values[kept++] = v;
  }
  values.resize(kept);
  if (values.empty()) return out;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(kept / 2);
  std::nth_element(values.begin(), middle, values.end());
  out.median = static_cast<double>(*middle);
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  out.min = static_cast<double>(*low);
  out.max = static_cast<double>(*high);
  return out;
}

// Some 4096 elements at a time: 16 KiB, in the first cache beside the codes.
WeightStats MeasureDecoded(const Weight& weight) {
  Measure measure;
  const int64_t cols = weight.cols(), rows = weight.rows();
  const int64_t step = std::max<int64_t>(1, kBufferElems / std::max<int64_t>(cols, 1));
  std::vector<float> buffer(static_cast<size_t>(std::min(step, rows) * cols));
  for (int64_t r = 0; r < rows; r += step) {
    const int64_t count = std::min(step, rows - r);
    weight.Decode(r, count, buffer.data());
    measure.Add(buffer.data(), count * cols);
  }
  return measure.Finish();
}

}  // namespace

WeightAudit MeasureWeight(const Weight& weight) {
  WeightAudit audit;
  audit.weight = &weight;
  audit.canonical = CanonicalWeightName(weight.name());
  WeightTally tally;
  if (weight.Tally(&tally)) {
    WeightStats& s = audit.stats;
    s.count = static_cast<uint64_t>(weight.rows()) * static_cast<uint64_t>(weight.cols());
    s.nan = tally.nan, s.inf = tally.inf, s.zero = tally.zero, s.sum_sq = tally.sum_sq;
    if (tally.min <= tally.max) s.min = tally.min, s.max = tally.max;
    s.abs_max = std::max(std::fabs(s.min), std::fabs(s.max));
    s.constant = s.count > 0 && s.nan + s.inf == 0 && s.min == s.max;
  } else {
    audit.stats = MeasureDecoded(weight);
  }
  if (weight.is_view()) return audit;
  for (const StoredPart& part : weight.stored()) {
    audit.stats.digest = Mix64(audit.stats.digest + DigestOf(part.tensor->data, part.tensor->size_bytes));
  }
  if (const StoredPart* scale = weight.part("scale")) audit.scales = MeasureScales(*scale->tensor);
  return audit;
}

}  // namespace assay
