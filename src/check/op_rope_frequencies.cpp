// Frequencies of a rotation that are not the declared ones: which are used is read off the rotated rows, pair by pair,
// and a formula that makes them is named where one is known.
#include <algorithm>
#include <cmath>

#include "base/number_text.h"
#include "check/op_fitted.h"
#include "check/op_rope.h"
#include "oracle/rope_fit.h"

namespace assay::op {
namespace {

using oracle::FrequencyFit;
using oracle::Pairing;
using oracle::RopeScaling;
using oracle::RopeSpec;

// A declared scaling with other values of one of its keys, and what is said of it.
struct Formula {
  RopeSpec spec;
  std::string text;
  double constant = kNone;
  std::string meaning{};
};

// Values in use: factors and context lengths are powers of two and ten; ends of the ramp those of the papers.
std::vector<Formula> OtherValues(const RopeSpec& declared) {
  std::vector<Formula> out;
  const auto add = [&](const char* key, double value, double usual, auto set) {
    if (value == usual || !(value > 0)) return;
    Formula f{declared, std::string("fits rope.") + key + " " + NumberText(value) + " in place of " + NumberText(usual),
              value, std::string("rope.") + key + " used"};
    set(f.spec);
    out.push_back(std::move(f));
  };
  const bool yarn = declared.scaling == RopeScaling::kYarn, llama3 = declared.scaling == RopeScaling::kLlama3;
  if (!yarn && !llama3) return out;
  for (const double factor :
       {2., 4., 8., 16., 32., 40., 64., 128., 1 / declared.factor, declared.factor * declared.factor})
    add("factor", factor, declared.factor, [&](RopeSpec& s) { s.factor = factor; });
  std::vector<double> lengths = {declared.original_max_position * declared.factor,
                                 declared.original_max_position / declared.factor};
  for (double by = 1. / 64; by <= 64; by *= 2) lengths.push_back(declared.original_max_position * by);
  for (double n = 1024; n <= 262144; n *= 2) lengths.push_back(n);
  for (const double n : lengths)
    add("original_max_position", n, declared.original_max_position, [&](RopeSpec& s) { s.original_max_position = n; });
  Formula plain{declared, "fits linear scaling in place of rope.type=" + std::string(yarn ? "yarn" : "llama3")};
  plain.spec.scaling = RopeScaling::kLinear;
  out.push_back(std::move(plain));
  if (yarn) {
    Formula swapped{declared, "fits a ramp with rope.beta_fast and rope.beta_slow exchanged"};
    std::swap(swapped.spec.beta_fast, swapped.spec.beta_slow);
    out.push_back(std::move(swapped));
    for (const double beta : {8., 16., 32., 64., 128.})
      add("beta_fast", beta, declared.beta_fast, [&](RopeSpec& s) { s.beta_fast = beta; });
    for (const double beta : {0.5, 1., 2., 4.})
      add("beta_slow", beta, declared.beta_slow, [&](RopeSpec& s) { s.beta_slow = beta; });
  } else {
    for (const double low : {1., 2., 4.})
      add("low_freq_factor", low, declared.low_freq_factor, [&](RopeSpec& s) { s.low_freq_factor = low; });
    for (const double high : {2., 4., 8., 32.})
      add("high_freq_factor", high, declared.high_freq_factor, [&](RopeSpec& s) { s.high_freq_factor = high; });
  }
  return out;
}

// Whether frequencies may be those that were read off: half a radian at the farthest row, which none of the pairs that
// tell them apart is near to.
bool MayBe(const oracle::RopeFrequencies& f, const FrequencyFit& fit, double farthest) {
  for (size_t i = 0; i < fit.pairs.size(); ++i) {
    if (fit.pairs[i].decided && std::abs(f.inverse[i] - fit.pairs[i].inverse) * farthest > 0.5) return false;
  }
  return true;
}

// ln(used / declared) of pairs that grows with the pair by one step is another base: theta^(-2 i / d).
std::optional<double> BaseOf(const FrequencyFit& fit, const Rotation& declared) {
  double cross = 0, square = 0;
  for (size_t i = 1; i < fit.pairs.size(); ++i) {
    if (!fit.pairs[i].decided) continue;
    const double ratio = fit.pairs[i].inverse / declared.frequencies.inverse[i];
    if (!(ratio > 0)) return std::nullopt;
    // Weighted by the square of the frequency: a slow pair is known to no better than its angle.
    const double weight = std::pow(fit.pairs[i].inverse, 2), step = static_cast<double>(i);
    cross += weight * step * std::log(ratio);
    square += weight * step * step;
  }
  if (square == 0) return std::nullopt;
  const double theta = declared.spec.theta * std::exp(-cross / square * static_cast<double>(declared.spec.dim) / 2);
  return std::isfinite(theta) && theta > 1 ? std::optional(theta) : std::nullopt;
}

// "pairs 5 to 12", of those that differ.
std::string PairsText(const std::vector<size_t>& pairs) {
  std::string text = pairs.size() == 1 ? "pair " : "pairs ";
  for (size_t i = 0, n = 0; i < pairs.size() && n < 4; ++n) {
    size_t end = i;
    while (end + 1 < pairs.size() && pairs[end + 1] == pairs[end] + 1) ++end;
    text += (n > 0 ? ", " : "") + std::to_string(pairs[i]) + (end > i ? " to " + std::to_string(pairs[end]) : "");
    i = end + 1;
    if (n == 3 && i < pairs.size()) text += " and others";
  }
  return text;
}

// The frequencies as read off, those within their error of the declared ones left as they are. Only where several pairs
// are left that turn at all: rows that are not rotated, and whole rows at other positions, are other faults.
std::optional<Explanation> AsReadOff(const Rotation& declared, const FrequencyFit& fit, Rotation* used) {
  std::vector<size_t> other;
  double least = HUGE_VAL, most = -HUGE_VAL;
  bool any_turns = false;
  used->frequencies.roundings.clear();
  for (size_t i = 0; i < fit.pairs.size(); ++i) {
    const oracle::PairFrequency& pair = fit.pairs[i];
    const double was = declared.frequencies.inverse[i], ratio = pair.inverse / was;
    any_turns = any_turns || pair.residual < std::abs(pair.inverse);
    if (!pair.decided || std::abs(ratio - 1) < 1e-5 || pair.declared <= 2 * pair.residual) continue;
    used->frequencies.inverse[i] = pair.inverse;
    other.push_back(i);
    least = std::min(least, ratio);
    most = std::max(most, ratio);
  }
  if (other.empty() || !any_turns) return std::nullopt;
  Explanation why{fault_class::kRopeForm, "every row fits one constant frequency a pair: " + PairsText(other) + " of " +
                                              std::to_string(fit.pairs.size()) + " by "};
  if (most - least <= 1e-3 * std::abs(most)) {
    why.text += FactorText(most, 6) + " times the declared one";
    why.constant = most;
    why.meaning = "frequency used / declared";
  } else {
    why.text +=
        FactorText(least, 6) + " to " + FactorText(most, 6) + " times the declared ones, by no formula that is known";
  }
  return why;
}

}  // namespace

// Formulas first, the smallest change of what is declared; the frequencies as read off behind them, which is a number a
// pair, and as many angles as there are rows to each of them.
std::optional<Explanation> ExplainFrequencies(const Subject& s, const Rotation& declared, const oracle::Array& before,
                                              std::span<const double> positions, const oracle::Computed& right,
                                              const RunRotation& run) {
  const auto read =
      oracle::FitFrequencies(before, s.actual(), positions, s.judged(), declared.frequencies, declared.layout);
  double farthest = 0;
  for (size_t t = 0; t < positions.size(); ++t)
    if (s.judged()[t]) farthest = std::max(farthest, positions[t]);
  const auto attempt = [&](const RopeSpec& spec) {
    Rotation changed = declared;
    changed.spec = spec;
    const auto f = oracle::MakeFrequencies(spec);
    if (!f.ok() || f->inverse.size() != declared.frequencies.inverse.size()) return false;
    if (read.ok() && !MayBe(*f, *read, farthest)) return false;
    changed.frequencies = *f;
    if (FitsBetter(s, right, run(changed))) return true;
    changed.frequencies.magnitude = declared.frequencies.magnitude;  // the factor may be another in one place alone
    return changed.frequencies.magnitude != f->magnitude && FitsBetter(s, right, run(changed));
  };
  for (const Formula& f : OtherValues(declared.spec)) {
    if (attempt(f.spec)) return Explanation{fault_class::kRopeForm, f.text, f.constant, f.meaning};
  }
  if (!read.ok()) return std::nullopt;
  if (const auto theta = BaseOf(*read, declared); theta && declared.spec.scaling == RopeScaling::kDefault) {
    RopeSpec spec = declared.spec;
    spec.theta = *theta;
    if (attempt(spec))
      return Explanation{fault_class::kRopeForm, "fits another base of the frequencies", *theta, "theta used"};
  }
  for (const bool flipped : {false, true}) {
    Rotation used = declared;
    auto fit = read;
    if (flipped) {
      used.layout.pairing = used.layout.pairing == Pairing::kHalf ? Pairing::kInterleaved : Pairing::kHalf;
      fit = oracle::FitFrequencies(before, s.actual(), positions, s.judged(), declared.frequencies, used.layout);
      if (!fit.ok()) continue;
    }
    auto why = AsReadOff(declared, *fit, &used);
    if (!why) continue;
    const double tolerance = std::max(1e-4, 8 * s.precision().store);
    for (const double magnitude : {declared.frequencies.magnitude, 1.0, fit->magnitude}) {
      if (std::abs(fit->magnitude / magnitude - 1) > tolerance) continue;
      used.frequencies.magnitude = magnitude;
      const auto fitted = run(used);
      if (!FitsBetter(s, right, fitted)) continue;
      if (flipped) why->text += ", in the other pairing of elements";
      return Weighed(s, right, *fitted, *why);
    }
  }
  return std::nullopt;
}

}  // namespace assay::op
