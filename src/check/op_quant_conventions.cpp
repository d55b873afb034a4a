// Conventions of quantised formats that a kernel may take otherwise than declared: zero points, scales, places, codes.
#include <algorithm>
#include <cmath>

#include "check/op_quant_explain.h"

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

// The value in a float of so many significant bits, hidden one included.
double Rounded(double x, int bits) {
  int exponent = 0;
  const double m = std::frexp(x, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(m, bits)), exponent - bits);
}

// Mistakes in the scales' values, each applied to all of them; a change that changes nothing is no explanation and is
// not tried.
Found TryScaleValues(const QuantTrial& t) {
  const Cells& s = t.scales();
  const auto each = [&](auto change, const std::string& text) -> Found {
    Cells used = s;
    for (double& x : used) x = change(x);
    if (used == s) return std::nullopt;
    return t.Try(t.WithScales(used), Why(t, fault_class::kQScale, text));
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
            each([&, b = bits](double x) { return Rounded(x, b); }, std::string("with scales rounded to ") + name))
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

// A grid written with rows as wide as it is and read with rows of a padded width, or the reverse. Places behind the
// written ones hold padding: ones (the exponent 127) or zeros.
Found TryPitches(const QuantTrial& t, const Cells& cells, const char* what,
                 const std::function<DequantParts(const Cells&)>& with) {
  const int64_t rows = t.grid_rows(), cols = t.grid_cols();
  if (rows < 2) return std::nullopt;
  std::vector<int64_t> pitches;
  for (int64_t unit : {2, 4, 8, 16, 32, 64, 128}) {
    const int64_t pitch = (cols + unit - 1) / unit * unit;
    if (pitch != cols && std::find(pitches.begin(), pitches.end(), pitch) == pitches.end()) pitches.push_back(pitch);
  }
  for (int64_t pitch : pitches) {
    for (const bool read_wide : {true, false}) {
      for (double padding : {1.0, 0.0}) {
        Cells used(cells.size(), padding);
        for (int64_t i = 0; i < rows * cols; ++i) {
          const int64_t at = read_wide ? i / cols * pitch + i % cols : i;  // in the flat buffer
          const int64_t row = read_wide ? at / cols : at / pitch, col = read_wide ? at % cols : at % pitch;
          if (row < rows && col < cols) used[static_cast<size_t>(i)] = cells[static_cast<size_t>(row * cols + col)];
        }
        if (used == cells) continue;
        if (auto why = t.Try(with(used), Why(t, fault_class::kQLayout,
                                             std::string("with ") + what + " written with rows of " +
                                                 std::to_string(read_wide ? cols : pitch) + " and read with rows of " +
                                                 std::to_string(read_wide ? pitch : cols))))
          return why;
      }
    }
  }
  return std::nullopt;
}

// The moves that a grid of scales or zero points goes through at load.
// cells [grid_rows, grid_cols], row-major. A place is wrong when the grid was transposed, shifted by a few, reversed,
// or its halves (ranks, gate and up) exchanged.
Found TryPlaces(const QuantTrial& t, const Cells& cells, const char* what,
                const std::function<DequantParts(const Cells&)>& with) {
  const int64_t rows = t.grid_rows(), cols = t.grid_cols();
  const auto at = [&](const std::function<int64_t(int64_t, int64_t)>& from, const std::string& text,
                      double constant = kNone, const std::string& meaning = "") -> Found {
    const Cells moved = Placed(t, cells, from);
    if (moved == cells) return std::nullopt;
    return t.Try(with(moved),
                 Why(t, fault_class::kQLayout, std::string("with ") + what + " " + text, constant, meaning));
  };
  if (rows > 1 && cols > 1) {
    if (auto why = at([&](int64_t m, int64_t k) { return (m * cols + k) % rows * cols + (m * cols + k) / rows; },
                      "transposed and read in the shape of the grid"))
      return why;
    if (auto why = at(
            [&](int64_t m, int64_t k) {
              const int64_t i = k * rows + m;
              return i;
            },
            "stored by columns and read by rows"))
      return why;
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
  if (auto why = TryPitches(t, cells, what, with)) return why;
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

// Elements under the scale of groups of another size, or interleaved.
// Twice, half, four times and a quarter of the declared size: what configs of one model family use.
Found TryGroupSizes(const QuantTrial& t) {
  const DequantParts& p = t.parts();
  if (p.block_cols == 0 && t.scales().size() > 1 && t.grid_rows() == p.rows) {  // the list of groups not looked at
    DequantParts plain = p;
    const int64_t size = (p.cols + t.grid_cols() - 1) / t.grid_cols();
    for (int64_t i = 0; i < p.rows * p.cols; ++i) {
      plain.group[static_cast<size_t>(i)] = static_cast<int32_t>(i / p.cols * t.grid_cols() + i % p.cols / size);
    }
    for (size_t i = 0; i < plain.zero.size() && !t.zeros().empty(); ++i)
      plain.zero[i] = static_cast<float>(t.zeros()[static_cast<size_t>(plain.group[i])]);
    if (auto why =
            t.Try(plain, Why(t, fault_class::kQLayout, "with columns in the order of their scales, without g_idx")))
      return why;
  }
  if (p.block_cols == 0 || t.scales().size() < 2) return std::nullopt;
  // One scale a row taken for one a column, or the reverse.
  for (const bool of_rows : {true, false}) {
    const int64_t n = of_rows ? t.grid_rows() : t.grid_cols();
    if ((of_rows ? t.grid_cols() : t.grid_rows()) != 1 || n != (of_rows ? p.rows : p.cols)) continue;
    if ((of_rows ? p.cols : p.rows) > n) continue;  // there would be none for some
    DequantParts turned = t.WithScales(t.scales());
    for (int64_t r = 0; r < p.rows; ++r)
      for (int64_t c = 0; c < p.cols; ++c)
        turned.group[static_cast<size_t>(r * p.cols + c)] = static_cast<int32_t>(of_rows ? c : r);
    if (auto why =
            t.Try(turned, Why(t, fault_class::kQLayout,
                              of_rows ? "with the scale of row k on column k" : "with the scale of column k on row k")))
      return why;
  }
  const auto with = [&](const std::function<int64_t(int64_t, int64_t)>& cell, const std::string& text) -> Found {
    DequantParts other = t.WithScales(t.scales());
    for (int64_t r = 0; r < p.rows; ++r)
      for (int64_t c = 0; c < p.cols; ++c)
        other.group[static_cast<size_t>(r * p.cols + c)] = static_cast<int32_t>(cell(r, c));
    if (other.Values().values == t.declared().values) return std::nullopt;
    return t.Try(other, Why(t, fault_class::kQLayout, text));
  };
  const int64_t rows = t.grid_rows(), cols = t.grid_cols();
  for (int64_t size : {p.block_cols * 2, p.block_cols / 2, p.block_cols * 4, p.block_cols / 4}) {
    if (size < 1 || cols < 2) continue;
    if (auto why = with([&](int64_t r, int64_t c) { return r / p.block_rows * cols + c / size % cols; },
                        "under scales of groups of " + std::to_string(size) + " columns, " +
                            std::to_string(p.block_cols) + " declared"))
      return why;
  }
  if (auto why = with([&](int64_t r, int64_t c) { return r / p.block_rows * cols + c % cols; },
                      "under scales that alternate from column to column"))
    return why;
  if (p.block_rows > 1 && rows > 1)
    return with([&](int64_t r, int64_t c) { return r % rows * cols + c / p.block_cols; },
                "under scales that alternate from row to row");
  return std::nullopt;
}

// ---- zero points ---------------------------------------------------------------------------------------------------

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
    return t.Try(t.WithZeros(used), Why(t, fault_class::kQZero, text, constant,
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
  // A difference below zero in a type without sign.
  for (double modulus : {256.0, levels, 65536.0}) {
    DequantParts wrapped = t.parts();
    bool any = false;
    for (size_t i = 0; i < wrapped.code.size(); ++i) {
      if (wrapped.code[i] >= wrapped.zero[i]) continue;
      wrapped.code[i] += static_cast<float>(modulus);
      any = true;
    }
    if (!any) continue;
    if (auto why = t.Try(
            wrapped, Why(t, fault_class::kQZero, "with code less zero point taken in an unsigned type, wrapped below 0",
                         modulus, "error of the codes, in scales of their group")))
      return why;
  }
  // Subtracted from the value, not from the code.
  // s q - z in place of s (q - z).
  Array value = t.WithZeros(Cells(z.size(), 0)).Values();
  for (int64_t i = 0; i < value.size(); ++i) value[i] -= double{t.parts().zero[static_cast<size_t>(i)]};
  if (auto why = t.TryValue(value, Why(t, fault_class::kQZero, "with zero points taken from the scaled value")))
    return why;
  return TryPlaces(t, z, "zero points", [&](const Cells& cells) { return t.WithZeros(cells); });
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
  const auto with = [&](const std::function<float(int64_t, int64_t)>& code, const std::string& text,
                        double constant = kNone) -> Found {
    DequantParts other = p;
    for (int64_t r = 0; r < p.rows; ++r)
      for (int64_t c = 0; c < p.cols; ++c) other.code[static_cast<size_t>(r * p.cols + c)] = code(r, c);
    if (other.code == p.code) return std::nullopt;
    return t.Try(other,
                 Why(t, fault_class::kQLayout, text, constant, std::isnan(constant) ? "" : "share of codes kept"));
  };
  const auto own = [&](int64_t r, int64_t c) { return p.code[static_cast<size_t>(r * p.cols + c)]; };
  for (const bool along_rows : {false, true}) {
    const int64_t length = along_rows ? p.rows : p.cols;
    for (const Order& order : Orders(length)) {
      const auto n = static_cast<int64_t>(order.from.size());
      if (length % n != 0) continue;
      const auto moved = [&](int64_t i) { return i / n * n + order.from[static_cast<size_t>(i % n)]; };
      if (!p.zero.empty()) {  // zero points that went through the same words
        DequantParts both = p;
        for (int64_t r = 0; r < p.rows; ++r) {
          for (int64_t c = 0; c < p.cols; ++c) {
            const auto to = static_cast<size_t>(r * p.cols + c);
            const auto from = static_cast<size_t>(along_rows ? moved(r) * p.cols + c : r * p.cols + moved(c));
            both.code[to] = p.code[from];
            both.zero[to] = p.zero[from];
          }
        }
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
  if (auto why = with([&](int64_t r, int64_t c) { return c % 2 == 0 ? own(r, c) : 0; },
                      "with every other column alone: the high nibbles are lost", 0.5))
    return why;
  if (auto why = with([&](int64_t r, int64_t c) { return c % 2 == 1 ? own(r, c) : 0; },
                      "with every other column alone: the low nibbles are lost", 0.5))
    return why;
  if (auto why = with([&](int64_t r, int64_t c) { return 2 * c < p.cols ? own(r, c) : 0; },
                      "with the first half of its columns alone", 0.5))
    return why;
  if (!p.integers) return std::nullopt;
  const auto levels = static_cast<float>(std::exp2(p.bits));
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
    if (!other.ok() || other->Values().values == t.declared().values) return std::nullopt;
    return t.Try(*other, why);
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
  if (auto why = TryPlaces(trial, trial.scales(), "scales", [&](const Cells& c) { return trial.WithScales(c); }))
    return why;
  if (auto why = TryGroupSizes(trial)) return why;
  return TryCodes(trial);
}

}  // namespace assay::op
