// Codes of a quantised weight that stand for other values than declared: another table of a codebook format, another
// 4-bit float, bits in another order: the result is linear in the values, so they are solved for. Bytes of another
// 8-bit type are tried by name.
#include "check/op_quant_tables.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>

#include "base/number_text.h"
#include "fit/least_squares.h"
#include "tensor/decode.h"

namespace assay::op {
namespace {

using oracle::Array;

constexpr size_t kFewest = 4, kMostValues = 32;  // that codes stand for
constexpr int64_t kMostEquations = 4096;
constexpr int64_t kSurplus = 4;  // equations for each value, at least

// Every value of a code is a float. Two zeros are two codes.
uint32_t BitsOfFloat(double x) { return std::bit_cast<uint32_t>(static_cast<float>(x)); }

// Number of each different code, by the bits of what it is due to stand for; empty: too few or too many.
std::map<uint32_t, size_t> Table(const DequantParts& p) {
  std::map<uint32_t, size_t> numbers;
  for (const float v : p.code) {
    numbers.emplace(BitsOfFloat(double{v}), numbers.size());
    if (numbers.size() > kMostValues || std::isnan(v)) return {};
  }
  return numbers.size() < kFewest ? std::map<uint32_t, size_t>{} : numbers;
}

// The product with codes that stand for these values, [rows, cols] flat.
std::optional<Explanation> TryThese(const QuantTrial& t, const std::vector<double>& codes, const Explanation& why) {
  const int64_t cols = t.parts().cols;
  return t.TryCodes([&](int64_t row, int64_t col) { return codes[static_cast<size_t>(row * cols + col)]; }, why);
}

}  // namespace

// Codes of one byte are decoded as each other 8-bit type.
std::optional<Explanation> TryByteTypes(const QuantTrial& t) {
  constexpr DType kBytes[] = {DType::kF8E4M3FN, DType::kF8E5M2, DType::kF8E4M3FNUZ, DType::kF8E5M2FNUZ, DType::kI8};
  const QuantisedProduct& product = t.product();
  const TensorPtr codes =
      product.activation ? t.subject().Operand(product.name + ".q") : t.subject().Weight(product.name + ".codes");
  if (codes == nullptr) return std::nullopt;
  const DType declared = codes->info->event.dtype;
  if (std::find(std::begin(kBytes), std::end(kBytes), declared) == std::end(kBytes)) return std::nullopt;
  std::map<uint32_t, uint32_t> bytes;  // by the bits of the value: two zeros are two codes
  for (uint32_t byte = 0; byte < 256; ++byte) {
    if (const double value = DecodeBits(byte, declared); !std::isnan(value)) bytes[BitsOfFloat(value)] = byte;
  }
  const DequantParts& p = t.parts();
  for (const DType other : kBytes) {
    if (other == declared) continue;
    std::vector<double> changed;
    for (const float v : p.code) {
      const auto at = bytes.find(BitsOfFloat(double{v}));
      if (at == bytes.end()) return std::nullopt;
      changed.push_back(DecodeBits(at->second, other));
    }
    if (auto why =
            TryThese(t, changed,
                     {fault_class::kQLayout, "fits codes of " + product.name + ", " + std::string(NameOf(declared)) +
                                                 ", decoded as " + std::string(NameOf(other))}))
      return why;
  }
  return std::nullopt;
}

std::optional<Explanation> TryTables(const QuantTrial& t) {
  const DequantParts& p = t.parts();
  const QuantisedProduct& product = t.product();
  if (product.activation || product.is_value || !product.plain || !p.zero.empty()) return std::nullopt;
  const std::map<uint32_t, size_t> table = Table(p);
  const std::vector<char>& judged = t.subject().judged();
  const Array& have = t.subject().actual();
  const auto n_rows = static_cast<int64_t>(judged.size()), n = static_cast<int64_t>(table.size());
  const int64_t width = n_rows > 0 ? have.size() / n_rows : 0;
  if (table.empty() || width == 0 || product.other.cols() != p.cols || product.other.rows() != n_rows ||
      product.first + width > p.rows || have.size() < kSurplus * n) {
    return std::nullopt;
  }
  std::vector<size_t> which;
  for (const float v : p.code) which.push_back(table.at(BitsOfFloat(double{v})));
  const auto size = static_cast<size_t>(n);
  std::vector<double> normal(size * size, 0), target(size, 0), part(size);
  const int64_t stride = std::max<int64_t>(1, have.size() / kMostEquations) | 1;  // odd: all columns are met
  for (int64_t i = 0; i < have.size(); i += stride) {
    const int64_t row = i / width, col = i % width;
    if (!judged[static_cast<size_t>(row)] || !std::isfinite(have[i])) continue;
    std::fill(part.begin(), part.end(), 0.0);
    for (int64_t c = 0; c < p.cols; ++c) {
      const int64_t at = (product.first + col) * p.cols + c;
      part[which[static_cast<size_t>(at)]] += product.other[row * p.cols + c] * p.ScaleOf(at) * p.global;
    }
    const double y = have[i] - (product.bias.size() == width ? product.bias[col] : 0);
    for (size_t a = 0; a < size; ++a) {
      target[a] += part[a] * y;
      for (size_t b = 0; b < size; ++b) normal[a * size + b] += part[a] * part[b];
    }
  }
  fit::SolveSymmetric(normal, target);
  if (std::any_of(target.begin(), target.end(), [](double x) { return !std::isfinite(x); })) return std::nullopt;
  std::vector<double> changed;
  for (const size_t i : which) changed.push_back(target[i]);
  std::string text = "fits " + product.name + " with codes that stand for other values: ";
  double largest = 0;  // a hundredth of it is no other value
  for (const double x : target) largest = std::max(largest, std::abs(x));
  size_t differ = 0;
  for (const auto& [bits, k] : table) {
    const double due{std::bit_cast<float>(bits)};
    if (std::abs(target[k] - due) <= 1e-2 * largest) continue;
    if (differ++ < 4) text += (differ > 1 ? ", " : "") + NumberText(target[k], 4) + " for " + NumberText(due, 4);
  }
  // One magnitude taken for another is a slip of the decoder and no other table.
  if (differ < 3) return std::nullopt;
  return TryThese(t, changed, {fault_class::kQLayout, text});
}

}  // namespace assay::op
