// Causes of a wrong rotation that lie before it: angles made in a coarse float, another norm of the heads.
#include <cmath>
#include <utility>

#include "base/rounding.h"
#include "check/op_fitted.h"
#include "check/op_other_weight.h"
#include "check/op_rope.h"

namespace assay::op {
namespace {

using oracle::AngleRounding;
using oracle::Array;

// Positions that the type does not hold, by their offset: one offset alone may as well be a wrong position.
bool OffsetsVary(std::span<const double> positions, int bits) {
  double first = 0;
  for (double p : positions) {
    if (p == 0) continue;
    const double off = RoundToBits(p, bits, 0) - p;
    if (off == 0) continue;
    if (first != 0 && off != first) return true;
    first = off;
  }
  return false;
}

std::string TextOf(const AngleRounding& r) {
  std::string text;
  for (const auto& [rounded, what] : {std::pair{r.position, "positions"}, std::pair{r.inverse, "frequencies"},
                                      std::pair{r.angle, "angles"}, std::pair{r.table, "cosines and sines"}}) {
    if (rounded) text += (text.empty() ? "" : ", ") + std::string(what);
  }
  return "fits " + text + " rounded to " + (r.significant_bits == 8 ? "bf16" : "f16");
}

}  // namespace

// Every subset of what may be rounded, the smallest first; all are exact predictions, without a free number.
std::optional<Explanation> ExplainAngles(const Subject& s, const Rotation& declared, std::span<const double> positions,
                                         const oracle::Computed& right, const RunRotation& run) {
  for (int parts = 1; parts <= 4; ++parts) {
    for (int bits : {8, 11}) {
      for (int which = 1; which < 16; ++which) {
        if (__builtin_popcount(static_cast<unsigned>(which)) != parts) continue;
        Rotation coarse = declared;
        AngleRounding& r = coarse.frequencies.rounding;
        r = {bits, (which & 2) != 0, (which & 4) != 0, (which & 1) != 0, (which & 8) != 0};
        const bool alone = r.position && !r.inverse && !r.angle;
        if (alone && !OffsetsVary(positions, bits)) continue;
        if (r.table && std::exp2(-bits) <= s.precision().store) continue;  // a store as coarse as that may round them
        const auto fit = run(coarse);
        if (FitsBetter(s, right, fit)) return Weighed(s, right, *fit, {fault_class::kPrecision, TextOf(r)});
      }
    }
  }
  return std::nullopt;
}

std::optional<Explanation> ExplainNormBefore(const Subject& s, const Operation& turn, const oracle::Computed& right) {
  if (turn.inputs.size() < 2) return std::nullopt;
  const std::vector<Array> declared = turn.arrays();
  const auto attempt = [&](const Array& weight, const Explanation& why) -> std::optional<Explanation> {
    std::vector<Array> in = declared;
    in[1] = weight;
    const auto fit = turn.run(in);
    if (!FitsBetter(s, right, fit)) return std::nullopt;
    return Weighed(s, right, *fit, why);
  };
  const std::string& name = turn.inputs[1].name;
  Array changed = declared[1];
  std::fill(changed.values.begin(), changed.values.end(), 1.0);
  if (auto why = attempt(changed, {fault_class::kLoad, "fits a weight of ones in place of " + name})) return why;
  for (double by : {1.0, -1.0}) {
    changed = declared[1];
    for (double& w : changed.values) w += by;
    if (auto why = attempt(changed, {fault_class::kKernel, "fits " + name + (by > 0 ? " with 1 added" : " less 1")}))
      return why;
  }
  const auto bare = turn.run(std::span(declared).first(1));
  if (FitsBetter(s, right, bare))
    return Weighed(s, right, *bare, {fault_class::kKernel, "fits rows that were rotated without their norm"});
  return ForOtherWeights(s, name, declared[1], [&](const OtherWeight& w) { return attempt(w.value, w.why); });
}

}  // namespace assay::op
