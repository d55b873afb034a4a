#include "oracle/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/rounding.h"

namespace assay::oracle {
namespace {

// Radians of one turn.
constexpr double kTurn = 2 * std::numbers::pi;
// Least relative error of an engine's angle, in units of its accumulator; what a pair may need beyond: BaseRoundings.
constexpr double kAngleRoundings = 20;

// theta^(-2i/d) as engines compute it, and the product with the position, one rounding. By a power: the exponent's
// rounding moves the result by its logarithm, |ln f|; two for the power, one for the reciprocal. Or by i products with
// theta^(-2/d), each of which adds one rounding and that factor's own error: two for the power, and of its exponent
// what in all i of them is |ln f| again.
double BaseRoundings(double inverse, size_t pair) {
  return std::max(kAngleRoundings, std::abs(std::log(inverse)) + 1 + std::max(3.0, 3 * static_cast<double>(pair)));
}

// A blend f (slow / factor + 1 - slow) whose `slow` is off by `slack` roundoffs, absolutely: relative to the blend,
// with four roundings of its own.
double BlendRoundings(double slow, double factor, double slack) {
  return 4 + slack * std::abs(1 - 1 / factor) / (slow / factor + (1 - slow));
}

// Fast pairs stay, slow ones are divided by the factor; a linear ramp between the pairs that turn beta_fast and
// beta_slow times within the original context.
void StretchYarn(const RopeSpec& spec, RopeFrequencies* f) {
  const double dim = static_cast<double>(spec.dim);
  // Pair i has the wavelength 2π θ^(2i/dim): solved for the i whose wave fits `turns` times into the original context
  // (Peng et al. 2023, YaRN, arXiv 2309.00071, section 3.2; find_correction_dim of the usual code).
  const auto pair_that_turns = [&](double turns) {
    return dim * std::log(spec.original_max_position / (turns * kTurn)) / (2 * std::log(spec.theta));
  };
  double low = pair_that_turns(spec.beta_fast), high = pair_that_turns(spec.beta_slow);
  if (spec.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1);
  if (low == high) high += 0.001;  // what the usual code does against a division by zero
  // Ends that are no whole numbers come out of logarithms, six roundings each.
  const double slack_of_ends = spec.truncate ? 0 : 6 * std::max(std::abs(low), std::abs(high)) / std::abs(high - low);
  for (size_t i = 0; i < f->inverse.size(); ++i) {
    const double slow = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    f->inverse[i] *= slow / spec.factor + (1 - slow);
    const bool blended = slow > 0 && slow < 1;
    f->roundings[i] += BlendRoundings(slow, spec.factor, blended ? 3 * slow + 2 + slack_of_ends : 0);
  }
}

// By wavelength: long waves are stretched by the factor, short ones stay, a blend between.
void StretchLlama3(const RopeSpec& spec, RopeFrequencies* f) {
  const double span = spec.high_freq_factor - spec.low_freq_factor;
  for (size_t i = 0; i < f->inverse.size(); ++i) {
    const double turns = spec.original_max_position * f->inverse[i] / kTurn;  // within the original context
    const double smooth = std::clamp((turns - spec.low_freq_factor) / span, 0.0, 1.0);
    // `turns` has the frequency's own error and three more; the difference and the quotient round too.
    const double slack = turns * (f->roundings[i] + 3) / span + 2 * smooth;
    f->inverse[i] *= (1 - smooth) / spec.factor + smooth;
    f->roundings[i] += BlendRoundings(1 - smooth, spec.factor, smooth > 0 && smooth < 1 ? slack : 0);
  }
}

// Factor of cosines and sines, as configs ask for it.
double MagnitudeOf(const RopeSpec& spec) {
  if (spec.scaling != RopeScaling::kYarn) return spec.attention_factor.value_or(1.0);
  if (spec.attention_factor) return *spec.attention_factor;
  // A weight of 0 counts as unset, as it does in the usual code.
  if (spec.mscale.value_or(0) != 0 && spec.mscale_all_dim.value_or(0) != 0) {
    return YarnMagnitude(spec.factor, *spec.mscale) / YarnMagnitude(spec.factor, *spec.mscale_all_dim);
  }
  return YarnMagnitude(spec.factor, 1);
}

// f16 has no spacing below 2^-24; that of bf16 is f32's, below every angle.
int LeastExponent(int bits) { return bits == 11 ? -24 : -133; }

// What rounding may move an angle by where an engine's own, in f32, lies on the other side of the middle between two
// values; 0 anywhere else.
double TieSlack(double x, int bits) {
  if (x == 0 || !std::isfinite(x)) return 0;
  const double spacing = SpacingAt(x, bits, LeastExponent(bits)), steps = std::abs(x) / spacing;
  const double from_middle = std::abs(steps - std::floor(steps) - 0.5);
  return from_middle * spacing <= kAngleRoundings * 0x1p-24 * std::abs(x) ? spacing : 0;
}

}  // namespace

// YaRN, section 3.4, equation for sqrt(1/t), with the weight that DeepSeek's configs add.
double YarnMagnitude(double factor, double weight) { return factor <= 1 ? 1 : 0.1 * weight * std::log(factor) + 1; }

// Written apart from the native runtime's (model/rope.cpp): an oracle that shared its code would share its mistakes.
Result<RopeFrequencies> MakeFrequencies(const RopeSpec& spec) {
  const bool stretched = spec.scaling == RopeScaling::kYarn || spec.scaling == RopeScaling::kLlama3;
  if (spec.dim < 2 || spec.dim % 2 != 0 || spec.dim > 1 << 20) {
    return Status::BadInput("RoPE over " + std::to_string(spec.dim) + " elements: an even number is needed");
  }
  if (!(spec.theta > 0) || !std::isfinite(spec.theta) || !(spec.factor > 0) || !std::isfinite(spec.factor)) {
    return Status::BadInput("RoPE's theta and factor must be positive numbers");
  }
  if (stretched && !(spec.original_max_position > 0)) {
    return Status::BadInput("this scaling of RoPE needs rope.original_max_position");
  }
  if (spec.scaling == RopeScaling::kYarn && (spec.theta == 1 || !(spec.beta_fast > 0) || !(spec.beta_slow > 0))) {
    return Status::BadInput("YaRN needs a theta other than 1 and positive rope.beta_fast, rope.beta_slow");
  }
  if (spec.scaling == RopeScaling::kLlama3 && !(spec.high_freq_factor > spec.low_freq_factor)) {
    return Status::BadInput("rope.high_freq_factor must be above rope.low_freq_factor");
  }
  RopeFrequencies f;
  for (int64_t i = 0; i < spec.dim / 2; ++i) {
    f.inverse.push_back(std::pow(spec.theta, -static_cast<double>(2 * i) / static_cast<double>(spec.dim)));
    f.roundings.push_back(BaseRoundings(f.inverse.back(), static_cast<size_t>(i)));
  }
  // Position interpolation (Chen et al. 2023, arXiv 2306.15595): every pair turns slower by the factor.
  if (spec.scaling == RopeScaling::kLinear) {
    for (double& v : f.inverse) v /= spec.factor;
    for (double& n : f.roundings) n += 1;
  } else if (spec.scaling == RopeScaling::kLlama3) {
    StretchLlama3(spec, &f);
  } else if (spec.scaling == RopeScaling::kYarn) {
    StretchYarn(spec, &f);
  }
  f.magnitude = MagnitudeOf(spec);
  return f;
}

Computed CosSinTable(const RopeFrequencies& f, std::span<const double> positions) {
  const int64_t half = static_cast<int64_t>(f.inverse.size());
  const std::vector<int64_t> shape{static_cast<int64_t>(positions.size()), 2 * half};
  Computed c{Array::Filled(shape), Array::Filled(shape), Array::Filled(shape), 2, kAngleRoundings, 1};
  const AngleRounding& coarse = f.rounding;
  const auto rounded = [&](double x, bool here) {
    return here && coarse.significant_bits > 0
               ? RoundToBits(x, coarse.significant_bits, LeastExponent(coarse.significant_bits))
               : x;
  };
  for (int64_t p = 0; p < shape[0]; ++p) {
    for (int64_t i = 0; i < half; ++i) {
      const double position = rounded(positions[static_cast<size_t>(p)], coarse.position);
      const double product = position * rounded(f.inverse[static_cast<size_t>(i)], coarse.inverse);
      const double angle = rounded(product, coarse.angle);
      const double cosine = rounded(std::cos(angle) * f.magnitude, coarse.table),
                   sine = rounded(std::sin(angle) * f.magnitude, coarse.table);
      const int64_t at = p * 2 * half + i;
      c.value[at] = cosine;
      c.value[at + half] = sine;
      c.scale[at] = std::abs(cosine);
      c.scale[at + half] = std::abs(sine);
      // |cos(a + e) - cos a| <= |e sin a| + e² / 2 <= 2 |e| while |e| is below 2: no sine, whose zeros would be too
      // sharp.
      const double roundings =
          f.roundings.empty() ? kAngleRoundings : f.roundings[static_cast<size_t>(i)];  // k_inner is one for all pairs
      c.inner[at] = c.inner[at + half] = 2 * std::abs(angle * f.magnitude) * roundings / kAngleRoundings;
      if (!coarse.angle || coarse.significant_bits == 0) continue;
      // In units of what multiplies `inner` in the bound of an f32 accumulator.
      const double tie = TieSlack(product, coarse.significant_bits) / (kAngleRoundings * 0x1p-24) * f.magnitude;
      c.inner[at] += tie;
      c.inner[at + half] += tie;
    }
  }
  return c;
}

// k 3: two products and a sum. Elements that are not rotated are copies, whose scale is their own magnitude.
Result<Computed> Rotate(const Array& x, std::span<const double> positions, const RopeFrequencies& f,
                        const RopeLayout& layout) {
  const int64_t half = static_cast<int64_t>(f.inverse.size()), d = x.cols();
  if (x.rank() < 2 || x.shape[0] != static_cast<int64_t>(positions.size()) || d < 2 * half) {
    return Status::BadInput("RoPE over " + std::to_string(2 * half) + " elements and " +
                            std::to_string(positions.size()) + " positions does not fit " + ShapeText(x.shape));
  }
  Computed c{x, Array::Filled(x.shape), Array::Filled(x.shape), 3, kAngleRoundings, 3};
  for (int64_t i = 0; i < x.size(); ++i) c.scale[i] = std::abs(x[i]);
  if (x.size() == 0) return c;
  const Computed table = CosSinTable(f, positions);
  const int64_t heads = x.rows() / x.shape[0];
  // The partner of element i: half a head away, or its neighbour (Su et al. 2021, RoFormer, arXiv 2104.09864, section
  // 3.4.2, has the interleaved form).
  const int64_t step = layout.pairing == Pairing::kInterleaved ? 2 : 1;
  const int64_t other = layout.pairing == Pairing::kInterleaved ? 1 : half;
  for (int64_t r = 0; r < x.rows(); ++r) {
    const std::span<const double> row = table.value.row(r / heads);
    const std::span<const double> slack = table.inner.row(r / heads);
    for (int64_t i = 0; i < half; ++i) {
      const int64_t at = r * d + (layout.from_end ? d - 2 * half : 0) + i * step;
      const double a = x[at], b = x[at + other];
      const double cosine = row[static_cast<size_t>(i)], sine = row[static_cast<size_t>(half + i)];
      c.value[at] = a * cosine - b * sine;
      c.value[at + other] = b * cosine + a * sine;
      c.scale[at] = std::abs(a * cosine) + std::abs(b * sine);
      c.scale[at + other] = std::abs(b * cosine) + std::abs(a * sine);
      c.inner[at] = c.inner[at + other] = (std::abs(a) + std::abs(b)) * slack[static_cast<size_t>(i)];
    }
  }
  return c;
}

}  // namespace assay::oracle
