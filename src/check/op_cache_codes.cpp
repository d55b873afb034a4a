#include "check/op_cache_codes.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <vector>

#include "tensor/decode.h"

namespace assay::op {
namespace {

constexpr DType kBytes[] = {DType::kF8E4M3FN, DType::kF8E5M2, DType::kF8E4M3FNUZ, DType::kF8E5M2FNUZ, DType::kI8};

// The codes of a type with finite values, in their order.
class Codes {
 public:
  explicit Codes(DType dtype) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const double value = DecodeBits(byte, dtype);
      // Negative zero has the value of zero, and its byte is what a small negative number leaves.
      if (std::isfinite(value)) codes_.push_back({value, byte});
    }
    std::stable_sort(codes_.begin(), codes_.end(), [](const Code& a, const Code& b) {
      return a.value < b.value || (a.value == b.value && a.byte > b.byte);  // -0 (the greater byte) before 0
    });
  }
  // The nearest code to x, saturating, and its two neighbours: the quotient by the scale has roundings of its own.
  std::array<uint32_t, 3> Near(double x) const {
    const auto above =
        std::lower_bound(codes_.begin(), codes_.end(), x, [](const Code& c, double value) { return c.value < value; });
    auto at = std::min<ptrdiff_t>(above - codes_.begin(), static_cast<ptrdiff_t>(codes_.size()) - 1);
    if (at > 0 && x - Value(at - 1) < Value(at) - x) --at;
    const ptrdiff_t last = static_cast<ptrdiff_t>(codes_.size()) - 1;
    return {Byte(at), Byte(std::max<ptrdiff_t>(at - 1, 0)), Byte(std::min(at + 1, last))};
  }

 private:
  struct Code {
    double value;
    uint32_t byte;
  };
  double Value(ptrdiff_t i) const { return codes_[static_cast<size_t>(i)].value; }
  uint32_t Byte(ptrdiff_t i) const { return codes_[static_cast<size_t>(i)].byte; }
  std::vector<Code> codes_;
};

bool IsJudged(std::span<const char> judged, int64_t i, int64_t width) {
  return judged.empty() || judged[static_cast<size_t>(i / width)] != 0;
}

// Share of elements, zeros left out, that are a neighbour's code of `written` read as `read`; 0 where fewer than 32 of
// them, or fewer than 8 different values, would say nothing. An element fits by chance three times in 256.
double ShareOf(const oracle::Array& have, const oracle::Array& due, std::span<const double> scale, DType written,
               DType read, std::span<const char> judged) {
  const Codes codes(written);
  const int64_t width = have.size() / std::max<int64_t>(static_cast<int64_t>(judged.size()), 1);
  int64_t n = 0, hits = 0;
  std::set<double> values;
  for (int64_t i = 0; i < have.size(); ++i) {
    const double by = scale[static_cast<size_t>(i)];
    if (!IsJudged(judged, i, width) || due[i] == 0 || !std::isfinite(due[i]) || !(by > 0)) continue;
    ++n;
    for (const uint32_t byte : codes.Near(due[i] / by)) {
      const double want = DecodeBits(byte, read) * by;
      // Within a rounding of the product to bf16, coarser than what rows are read back in.
      if (std::isnan(want) ? std::isnan(have[i])
                           : have[i] == want || std::abs(have[i] - want) <= 0x1p-8 * std::abs(want)) {
        ++hits;
        if (values.size() < 8) values.insert(want);
        break;
      }
    }
  }
  return n < 32 || values.size() < 8 ? 0 : static_cast<double>(hits) / static_cast<double>(n);
}

}  // namespace

std::optional<Explanation> ExplainOtherCodes(const oracle::Array& have, const oracle::Array& due,
                                             std::span<const double> code_scale, DType declared,
                                             std::span<const char> judged) {
  if (std::find(std::begin(kBytes), std::end(kBytes), declared) == std::end(kBytes) || have.size() != due.size() ||
      code_scale.size() < have.values.size()) {
    return std::nullopt;
  }
  constexpr double kAll = 0.98;  // a few codes lie at a tie, or are cut
  // The declared type explains nothing: it was judged before.
  for (const bool written_as_declared : {true, false}) {
    for (const DType other : kBytes) {
      if (other == declared) continue;
      const DType written = written_as_declared ? declared : other, read = written_as_declared ? other : declared;
      const double share = ShareOf(have, due, code_scale, written, read, judged);
      if (share < kAll) continue;
      return Explanation{fault_class::kKvScale, "fits codes that were written as " + std::string(NameOf(written)) +
                                                    " and read as " + std::string(NameOf(read)) + " (" +
                                                    std::string(NameOf(declared)) + " is declared)"};
    }
  }
  return std::nullopt;
}

bool GoWithTheirOwn(const oracle::Array& have, const oracle::Array& due, std::span<const char> judged) {
  const int64_t width = have.size() / std::max<int64_t>(static_cast<int64_t>(judged.size()), 1);
  if (have.size() != due.size() || width == 0) return false;
  // Signs and not sizes: one wild element would decide a sum of products.
  int64_t same = 0, n = 0;
  for (int64_t i = 0; i < have.size(); ++i) {
    if (!IsJudged(judged, i, width) || std::isnan(have[i]) || have[i] == 0 || due[i] == 0) continue;
    if (std::abs(have[i] - due[i]) <= 0.1 * std::abs(due[i])) continue;  // right, or right but for its code
    ++n;
    same += (have[i] < 0) == (due[i] < 0);
  }
  // Rows of other positions have most of their signs in common in models whose keys have a large mean.
  return n > 0 && static_cast<double>(same) >= 0.97 * static_cast<double>(n);
}

}  // namespace assay::op
