#include "fit/constants.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace assay::fit {

// The order is that of preference, as NameConstant takes the first of close ones: plain constants, then the model's own
// numbers, then whole numbers and powers of two, which meet many values by accident.
std::vector<NamedNumber> KnownConstants(std::span<const NamedNumber> numbers) {
  std::vector<NamedNumber> known{
      {"-1", -1}, {"2", 2}, {"1/2", 0.5}, {"log2 e", std::numbers::log2e}, {"ln 2", std::numbers::ln2}, {"0", 0}};
  for (const NamedNumber& x : numbers) {
    if (!std::isfinite(x.value) || x.value == 0) continue;
    known.push_back({x.name, x.value, true});
    known.push_back({"1/" + x.name, 1 / x.value, true});
    if (x.value < 0) continue;
    known.push_back({"sqrt(" + x.name + ")", std::sqrt(x.value), true});
    known.push_back({"1/sqrt(" + x.name + ")", 1 / std::sqrt(x.value), true});
    // YaRN's magnitude enters queries and keys, so its square turns up in scores.
    if (x.name.find("yarn") == std::string::npos && x.name.find("mscale") == std::string::npos) continue;
    known.push_back({x.name + "^2", x.value * x.value, true});
    known.push_back({"1/" + x.name + "^2", 1 / (x.value * x.value), true});
  }
  // 448 and 240: largest values of the two e4m3 forms, whose codes are mixed up between makers of accelerators.
  known.insert(known.end(), {{"448/240", 448.0 / 240},
                             {"240/448", 240.0 / 448},
                             {"sqrt(2)", std::numbers::sqrt2},
                             {"1/sqrt(2)", 1 / std::numbers::sqrt2},
                             {"log2 10", std::log2(10)},
                             {"ln 10", std::numbers::ln10},
                             {"log10 e", std::numbers::log10e},
                             {"448", 448},
                             {"240", 240},
                             {"57344", 57344},
                             {"65504", 65504},
                             {"-2", -2}});
  for (int i = 3; i <= 16; ++i) known.push_back({std::to_string(i), static_cast<double>(i)});
  for (int e = 2; e <= 16; ++e) known.push_back({"1/" + std::to_string(1 << e), std::ldexp(1, -e)});
  for (int e = 5; e <= 16; ++e) known.push_back({std::to_string(1 << e), std::ldexp(1, e)});
  // A named number that happens to be 1 explains nothing.
  std::erase_if(known, [](const NamedNumber& c) { return c.value == 1; });
  return known;
}

std::optional<NamedNumber> NameConstant(double value, double uncertainty, std::span<const NamedNumber> known) {
  if (!std::isfinite(value)) return std::nullopt;
  const double size = std::abs(value);
  // The relative 1e-3 lets a constant fitted from bf16 values be named; the 2 % keep an uncertain one from being named
  // anything.
  const double reach = std::min(std::max(3 * uncertainty, 1e-3 * size), 0.02 * size);
  double closest = reach;
  for (const NamedNumber& c : known) closest = std::min(closest, std::abs(c.value - value));
  for (const NamedNumber& c : known) {
    const double distance = std::abs(c.value - value);
    if (distance <= reach && distance <= closest + std::max(uncertainty, 1e-4 * size)) return c;
  }
  return std::nullopt;
}

std::string ReadingsOf(double value, double uncertainty, std::span<const NamedNumber> known) {
  const auto first = NameConstant(value, uncertainty, known);
  if (!first) return "";
  constexpr int kMostOthers = 2;
  std::string text = first->name;
  if (first->given) return text;
  int others = 0;
  for (const NamedNumber& c : known) {
    if (!c.given || others == kMostOthers) continue;
    if (std::abs(c.value - first->value) > 1e-9 * std::abs(first->value)) continue;
    text += " = " + c.name;
    ++others;
  }
  return text;
}

}  // namespace assay::fit
