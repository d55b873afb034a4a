// Conventions of quantised formats that a kernel may take otherwise than declared: zero points, scales, places, codes.
#include <algorithm>
#include <cmath>

#include "base/rounding.h"
#include "check/op_quant_explain.h"
#include "quant/misreading.h"

namespace assay::op {
namespace {

using oracle::Array;
using Cells = std::vector<double>;
using Found = std::optional<Explanation>;

Explanation Why(const QuantTrial& t, std::string_view cls, const std::string& text, double constant = kNone,
                std::string meaning = "") {
  return {cls, "fits " + t.product().name + " " + text, constant, std::move(meaning)};
}

// ---- scales --------------------------------------------------------------------------------------------------------

// Mistakes in the scales' values, each applied to all of them; a change that changes nothing is no explanation and is
// not tried.
Found TryScaleValues(const QuantTrial& t) {
  const Cells& s = t.scales();
  const auto each = [&](auto change, const std::string& text) -> Found {
    Cells used = s;
    for (double& x : used) x = change(x);
    if (used == s) return std::nullopt;
    return t.TryScales(used, Why(t, fault_class::kQScale, text));
  };
  const auto power = [](double x, double (*to)(double)) {
    return x == 0 ? 0 : std::copysign(std::exp2(to(std::log2(std::abs(x)))), x);
  };
  const auto [least, most] = std::minmax_element(s.begin(), s.end());
  const double low = *least, top = *most, first = s.front(), last = s.back();
  if (auto why = each([&](double x) { return power(x, std::ceil); }, "with scales rounded up to powers of two"))
    return why;
  if (auto why = each([&](double x) { return power(x, std::floor); }, "with scales cut to powers of two")) return why;
  if (auto why = each([&](double x) { return power(x, std::nearbyint); }, "with scales rounded to powers of two"))
    return why;
  if (auto why = each([](double) { return 1.0; }, "without its scales")) return why;
  if (auto why = each([](double x) { return x * x; }, "with scales applied twice")) return why;
  if (auto why = each([](double x) { return x == 0 ? 0 : 1 / x; }, "divided by its scales")) return why;
  if (s.size() > 1) {
    if (auto why = each([=](double) { return top; }, "with the largest scale for all")) return why;
    if (auto why = each([=](double) { return first; }, "with the first scale for all")) return why;
    if (auto why = each([=](double) { return low; }, "with the smallest scale for all")) return why;
    if (auto why = each([=](double) { return last; }, "with the last scale for all")) return why;
  }
  // Significant bits of the types that loaders narrow scales to.
  for (auto [bits, name] : {std::pair{11, "float16"}, std::pair{8, "bfloat16"}, std::pair{4, "float8 e4m3"}}) {
    if (auto why =
            each([&, b = bits](double x) { return RoundToBits(x, b); }, std::string("with scales rounded to ") + name))
      return why;
  }
  // Bytes of a float32 taken for exponents.
  for (int byte = 0; byte < 4; ++byte) {
    const auto exponent = [byte](double x) {
      const auto f = static_cast<float>(x);
      uint32_t bits = 0;
      static_assert(sizeof bits == sizeof f);
      std::copy_n(reinterpret_cast<const char*>(&f), sizeof f, reinterpret_cast<char*>(&bits));
      return std::exp2(static_cast<double>(bits >> (8 * byte) & 255) - 127);
    };
    if (auto why = each(exponent, "with bits of its float32 scales taken for exponents")) return why;
  }
  return std::nullopt;
}

// Cells in another place: cell i of the result holds cell from(i) of the grid.
Cells Placed(const QuantTrial& t, const Cells& cells, const std::function<int64_t(int64_t, int64_t)>& from) {
  Cells out(cells.size());
  for (int64_t m = 0; m < t.grid_rows(); ++m)
    for (int64_t k = 0; k < t.grid_cols(); ++k)
      out[static_cast<size_t>(m * t.grid_cols() + k)] = cells[static_cast<size_t>(from(m, k))];
  return out;
}

// The moves that a grid of scales or zero points goes through at load.
// cells [grid_rows, grid_cols], row-major. A place is wrong when the grid was transposed, shifted by a few, reversed,
// or its halves (ranks, gate and up) exchanged.
Found TryPlaces(const QuantTrial& t, const Cells& cells, const char* what,
                const std::function<Found(const Cells&, const Explanation&)>& attempt) {
  const int64_t rows = t.grid_rows(), cols = t.grid_cols();
  const auto at = [&](const std::function<int64_t(int64_t, int64_t)>& from, const std::string& text,
                      double constant = kNone, const std::string& meaning = "") -> Found {
    const Cells moved = Placed(t, cells, from);
    if (moved == cells) return std::nullopt;
    return attempt(moved, Why(t, fault_class::kQLayout, std::string("with ") + what + " " + text, constant, meaning));
  };
  for (const GridReading& reading : OtherGridReadings(rows, cols)) {
    // What lies outside is padding: scales of 0 or 1 (an exponent byte of 127), zero points of 0.
    const bool open = std::any_of(reading.from.begin(), reading.from.end(), [](int64_t i) { return i < 0; });
    for (const double padding : {0.0, 1.0}) {
      if (padding != 0 && !open) continue;
      Cells moved;
      for (int64_t i : reading.from) moved.push_back(i < 0 ? padding : cells[static_cast<size_t>(i)]);
      if (moved == cells) continue;
      if (auto why = attempt(moved, Why(t, fault_class::kQLayout, std::string("with ") + what + " " + reading.how)))
        return why;
    }
  }
  // Small shifts only: larger ones are found by solving for each scale (op_quant_solve.cpp).
  for (int64_t by = 1; by <= 8; ++by) {
    for (int64_t step : {by, -by}) {
      if (by < rows) {
        if (auto why = at([&](int64_t m, int64_t k) { return ((m + step) % rows + rows) % rows * cols + k; },
                          "of the row " + std::to_string(step) + " further", static_cast<double>(step),
                          "row of the grid used - expected"))
          return why;
      }
      if (by < cols) {
        if (auto why = at([&](int64_t m, int64_t k) { return m * cols + ((k + step) % cols + cols) % cols; },
                          "of the group " + std::to_string(step) + " further", static_cast<double>(step),
                          "group used - expected"))
          return why;
      }
    }
  }
  if (auto why = at([&](int64_t m, int64_t k) { return (rows - 1 - m) * cols + k; }, "in the reverse order of rows"))
    return why;
  if (auto why = at([&](int64_t m, int64_t k) { return m * cols + cols - 1 - k; }, "in the reverse order of groups"))
    return why;
  for (int64_t half : {rows / 2, cols / 2}) {
    const bool of_rows = half == rows / 2;
    if (half < 1 || (of_rows ? rows : cols) % 2 != 0) continue;
    if (auto why = at(
            [&](int64_t m, int64_t k) { return of_rows ? (m + half) % rows * cols + k : m * cols + (k + half) % cols; },
            std::string("of the other half of the ") + (of_rows ? "rows" : "columns")))
      return why;
  }
  return std::nullopt;
}

// Elements under the scale of another cell: groups of another size, or along the other axis. Zero points stay with
// their scale, or with their element.
Found TryCells(const QuantTrial& t) {
  const DequantParts& p = t.parts();
  if (t.scales().size() < 2) return std::nullopt;
  const ScaleGrid grid{p.rows, p.cols, t.grid_rows(), t.grid_cols(), p.block_rows, p.block_cols};
  for (const CellReading& reading : OtherCells(grid)) {
    const auto why = Why(t, fault_class::kQLayout, "under scales " + reading.how);
    const auto under = [&](bool zeros_too) {
      return t.Try(
          [&](int64_t r, int64_t c) {
            const int64_t i = r * p.cols + c;
            const auto cell = static_cast<size_t>(reading.cell(r, c));
            const double zero = zeros_too ? double{static_cast<float>(t.zeros()[cell])} : t.ZeroAt(i);
            return t.ValueOf(double{p.code[static_cast<size_t>(i)]}, zero, t.scales()[cell]);
          },
          why);
    };
    if (auto fits = under(false)) return fits;
    if (t.zeros().empty()) continue;
    if (auto fits = under(true)) return fits;
  }
  return std::nullopt;
}

// Columns sorted by their group, as kernels of act-order want them, while the input is not; or the reverse.
Found TrySortedColumns(const QuantTrial& t) {
  const DequantParts& p = t.parts();
  if (p.block_cols != 0) return std::nullopt;
  std::vector<size_t> sorted(static_cast<size_t>(p.cols));
  for (size_t c = 0; c < sorted.size(); ++c) sorted[c] = c;
  std::stable_sort(sorted.begin(), sorted.end(), [&](size_t a, size_t b) { return p.group[a] < p.group[b]; });
  const auto with = [&](bool back, const char* text) {
    std::vector<size_t> from = sorted;
    if (back) {
      for (size_t c = 0; c < sorted.size(); ++c) from[sorted[c]] = c;
    }
    return t.Try(
        [&](int64_t r, int64_t c) {
          return t.declared()[r * p.cols + static_cast<int64_t>(from[static_cast<size_t>(c)])];
        },
        Why(t, fault_class::kQLayout, text));
  };
  if (auto why = with(false, "with columns sorted by their group (g_idx), the input is not")) return why;
  return with(true, "with columns put back from the order of their groups (g_idx), in which they do not lie");
}

// ---- zero points ---------------------------------------------------------------------------------------------------

// code - zero in a type that has no room for it: too much by a power of two wherever it is negative (unsigned), or by
// one of either sign beyond the ends (signed).
Found TryWraps(const QuantTrial& t) {
  const DequantParts& p = t.parts();
  for (const int bits : {p.bits, 8, 16}) {
    const auto levels = static_cast<float>(std::exp2(bits));
    for (const bool is_signed : {false, true}) {
      const auto wrapped = [&](int64_t r, int64_t c) {
        const auto i = static_cast<size_t>(r * p.cols + c);
        const float difference = p.code[i] - p.zero[i];
        if (difference < (is_signed ? -levels / 2 : 0)) return double{p.code[i] + levels};
        return double{is_signed && difference >= levels / 2 ? p.code[i] - levels : p.code[i]};
      };
      const std::string type = std::string(is_signed ? "a signed" : "an unsigned") + " type of " + std::to_string(bits);
      if (auto why = t.TryCodes(
              wrapped, Why(t, fault_class::kQZero, "with code - zero taken in " + type + " bits, where it wraps",
                           is_signed ? kNone : double{levels},
                           is_signed ? "" : "error of the codes below their zero point, in scales of their group")))
        return why;
    }
  }
  return std::nullopt;
}

// GPTQ stores zero points less 1, some readers add it and some do not, and the sum wraps within its bits: each way
// leaves a pattern of its own.
Found TryZeros(const QuantTrial& t) {
  const Cells& z = t.zeros();
  if (z.empty()) return std::nullopt;
  const double levels = std::exp2(t.parts().bits);
  const auto each = [&](auto change, const std::string& text, double constant = kNone) -> Found {
    Cells used = z;
    for (double& x : used) x = change(x);
    if (used == z) return std::nullopt;
    return t.TryZeros(used, Why(t, fault_class::kQZero, text, constant,
                                std::isnan(constant) ? "" : "error of the codes, in scales of their group"));
  };
  if (auto why = each([](double) { return 0.0; }, "without its zero points")) return why;
  if (auto why = each([](double x) { return -x; }, "with zero points added in place of subtracted")) return why;
  if (auto why = each([&](double) { return levels / 2; }, "with the middle code for all zero points")) return why;
  // A zero point stored one less (or more) wraps at the ends.
  if (auto why = each([&](double x) { return x == 0 ? levels - 1 : x; },
                      "with zero points of 0 wrapped to the top code", 1 - levels))
    return why;
  if (auto why = each([&](double x) { return x == 0 ? levels : x; },
                      "with zero points of 0 wrapped to one beyond the top code", -levels))
    return why;
  if (auto why = each([&](double x) { return x == levels ? 0 : x; }, "with the last zero point wrapped to 0", levels))
    return why;
  if (auto why = each([&](double x) { return std::fmod(x - 1 + levels, levels); },
                      "with zero points less 1, wrapped within their bits", 1))
    return why;
  if (auto why = each([&](double x) { return std::fmod(x + 1, levels); },
                      "with zero points plus 1, wrapped within their bits", -1))
    return why;
  if (auto why = TryWraps(t)) return why;
  // Subtracted from the value, not from the code.
  // s q - z in place of s (q - z).
  const DequantParts& p = t.parts();
  const auto scaled = [&](int64_t r, int64_t c) {
    const int64_t i = r * p.cols + c;
    return t.ValueOf(double{p.code[static_cast<size_t>(i)]}, 0, p.ScaleOf(i)) - t.ZeroAt(i);
  };
  if (auto why = t.Try(scaled, Why(t, fault_class::kQZero, "with zero points taken from the scaled value"))) return why;
  return TryPlaces(t, z, "zero points",
                   [&](const Cells& cells, const Explanation& why) { return t.TryZeros(cells, why); });
}

// ---- codes ---------------------------------------------------------------------------------------------------------

// Permutations within runs of codes, as packers of words and bytes make them.
struct Order {
  const char* text;
  std::vector<int64_t> from;  // place i of a run of so many codes is taken from place from[i]
};

// longest: columns (or rows) of the weight. The words of eight are those of AWQ and of its inverse.
std::vector<Order> Orders(int64_t longest) {
  std::vector<Order> orders = {
      {"exchanged in pairs", {1, 0}},
      {"reversed in fours", {3, 2, 1, 0}},
      {"reversed in eights", {7, 6, 5, 4, 3, 2, 1, 0}},
      {"in the order 0 2 4 6 1 3 5 7 of words", {0, 2, 4, 6, 1, 3, 5, 7}},
      {"in the order 0 4 1 5 2 6 3 7 of words", {0, 4, 1, 5, 2, 6, 3, 7}},
      {"in bytes of the other order", {6, 7, 4, 5, 2, 3, 0, 1}},
      {"in the order 0 1 8 9 2 3 10 11 of tensor cores", {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15}},
      {"in the order 0 1 4 5 8 9 12 13 of tensor cores", {0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15}}};
  for (int64_t n : {int64_t{16}, int64_t{32}, int64_t{64}, int64_t{128}, int64_t{256}, longest}) {
    if (n > longest || n % 2 != 0 || n < 4) continue;
    Order halves{"of two halves where pairs lie side by side", {}}, pairs{"side by side where two halves follow", {}};
    for (int64_t i = 0; i < n; ++i) {
      halves.from.push_back(i % 2 * (n / 2) + i / 2);
      pairs.from.push_back(i < n / 2 ? 2 * i : 2 * (i - n / 2) + 1);
    }
    orders.push_back(std::move(halves));
    orders.push_back(std::move(pairs));
  }
  return orders;
}

// Codes in another order along rows or columns, halves of them lost, signs taken wrongly.
Found TryCodes(const QuantTrial& t) {
  const DequantParts& p = t.parts();
  const auto with = [&](const QuantTrial::ElementAt& code, const std::string& text, double constant = kNone) -> Found {
    return t.TryCodes(code,
                      Why(t, fault_class::kQLayout, text, constant, std::isnan(constant) ? "" : "share of codes kept"));
  };
  const auto own = [&](int64_t r, int64_t c) { return double{p.code[static_cast<size_t>(r * p.cols + c)]}; };
  for (const bool along_rows : {false, true}) {
    const int64_t length = along_rows ? p.rows : p.cols;
    for (const Order& order : Orders(length)) {
      const auto n = static_cast<int64_t>(order.from.size());
      if (length % n != 0) continue;
      const auto moved = [&](int64_t i) { return i / n * n + order.from[static_cast<size_t>(i % n)]; };
      if (!p.zero.empty()) {  // zero points that went through the same words
        const auto both = [&](int64_t r, int64_t c) {
          const int64_t from = along_rows ? moved(r) * p.cols + c : r * p.cols + moved(c);
          return t.ValueOf(double{p.code[static_cast<size_t>(from)]}, t.ZeroAt(from), p.ScaleOf(r * p.cols + c));
        };
        if (auto why = t.Try(both, Why(t, fault_class::kQLayout,
                                       std::string("with codes and zero points ") + order.text +
                                           (along_rows ? ", along its rows" : ", along its columns"))))
          return why;
      }
      if (auto why =
              with([&](int64_t r, int64_t c) { return along_rows ? own(moved(r), c) : own(r, moved(c)); },
                   std::string("with codes ") + order.text + (along_rows ? ", along its rows" : ", along its columns")))
        return why;
    }
  }
  if (p.rows == p.cols) {
    if (auto why = with([&](int64_t r, int64_t c) { return own(c, r); }, "with codes transposed")) return why;
  }
  if (auto why = with([&](int64_t r, int64_t c) { return c % 2 == 0 ? own(r, c) : 0.0; },
                      "with every other column alone: the high nibbles are lost", 0.5))
    return why;
  if (auto why = with([&](int64_t r, int64_t c) { return c % 2 == 1 ? own(r, c) : 0.0; },
                      "with every other column alone: the low nibbles are lost", 0.5))
    return why;
  if (auto why = with([&](int64_t r, int64_t c) { return 2 * c < p.cols ? own(r, c) : 0.0; },
                      "with the first half of its columns alone", 0.5))
    return why;
  if (!p.integers) return std::nullopt;
  const double levels = std::exp2(p.bits);
  if (auto why = with([&](int64_t r, int64_t c) { return own(r, c) < 0 ? own(r, c) + levels : own(r, c); },
                      "with signed codes taken for unsigned ones"))
    return why;
  return with([&](int64_t r, int64_t c) { return own(r, c) >= levels / 2 ? own(r, c) - levels : own(r, c); },
              "with unsigned codes taken for signed ones");
}

// What a decoder is told otherwise.
// Readings that the decoder itself knows; the rest of the file changes what it has decoded.
Found TryVariants(const QuantTrial& t) {
  const auto with = [&](const DequantVariant& variant, const Explanation& why) -> Found {
    const auto other = t.product().decode(variant);
    if (!other.ok()) return std::nullopt;
    const Array value = other->Values();
    if (value.size() != t.declared().size()) return std::nullopt;
    return t.Try([&](int64_t r, int64_t c) { return value[r * t.parts().cols + c]; }, why);
  };
  if (auto why = with({.other_scale_layout = true}, Why(t, fault_class::kQLayout, "with scales in the other layout")))
    return why;
  if (auto why = with({.high_nibble_first = true}, Why(t, fault_class::kQLayout, "with the high nibble first")))
    return why;
  if (t.parts().quant != "codebook") return std::nullopt;
  for (int64_t entries : {8, 16, 32, 64, 128, 256, 512, 1024, 4}) {
    if (auto why = with({.entries = entries},
                        Why(t, fault_class::kQLayout, "with the index cut to " + std::to_string(entries) + " entries")))
      return why;
  }
  return with({.drop_signs = true}, Why(t, fault_class::kKernel, "with the codebook without its signs"));
}

}  // namespace

// From the cheapest and most telling: a variant decodes once, zero points leave shifts that nothing else leaves; codes
// have the most candidates and come last.
std::optional<Explanation> TryConventions(const QuantTrial& trial) {
  if (auto why = TryVariants(trial)) return why;
  if (auto why = TryZeros(trial)) return why;
  if (auto why = TryScaleValues(trial)) return why;
  if (auto why = TryPlaces(trial, trial.scales(), "scales",
                           [&](const Cells& cells, const Explanation& cause) { return trial.TryScales(cells, cause); }))
    return why;
  if (auto why = TryCells(trial)) return why;
  if (auto why = TrySortedColumns(trial)) return why;
  return TryCodes(trial);
}

}  // namespace assay::op
