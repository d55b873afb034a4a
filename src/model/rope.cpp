// RoPE frequencies of the four kinds that config.h knows, and the softmax scale, in double.
#include <algorithm>
#include <cmath>

#include "model/config.h"

namespace assay {
namespace {

constexpr double kPi = 3.14159265358979323846;

// The magnitude correction of YaRN for a context stretched by `factor`.
// arXiv 2309.00071, section 3.4, has 0.1 ln(s) + 1; DeepSeek puts a weight before the logarithm.
double YarnMagnitude(double factor, double weight) { return factor <= 1 ? 1.0 : 0.1 * weight * std::log(factor) + 1.0; }

// YaRN leaves the fast pairs alone, divides the slow ones by `factor`, and blends linearly between the pairs that turn
// beta_fast and beta_slow times within the original context.
void ApplyYarn(const RopeConfig& rope, double dim, std::vector<double>* inv_freq) {
  // YaRN, section 3.2: the pair whose wave fits so many times into the original context (theta^(2i/d) 2 pi turns = L).
  const auto pair_turning = [&](double turns) {
    return dim * std::log(rope.original_max_position / (turns * 2 * kPi)) / (2 * std::log(rope.theta));
  };
  double low = pair_turning(rope.beta_fast), high = pair_turning(rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1);
  if (low == high) high += 0.001;  // as in transformers: no division by zero
  for (size_t i = 0; i < inv_freq->size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    double& f = (*inv_freq)[i];
    f = f / rope.factor * ramp + f * (1 - ramp);
  }
}

// Llama 3: by wavelength, long waves are stretched by `factor`, short ones kept, blended between.
void ApplyLlama3(const RopeConfig& rope, std::vector<double>* inv_freq) {
  const double context = rope.original_max_position;
  for (double& f : *inv_freq) {
    const double wavelength = 2 * kPi / f;
    if (wavelength > context / rope.low_freq_factor) {
      f /= rope.factor;
    } else if (wavelength >= context / rope.high_freq_factor) {
      const double smooth =
          (context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
      f = (1 - smooth) * f / rope.factor + smooth * f;
    }
  }
}

}  // namespace

// inv_freq[i] = theta^(-2i / d), then as the kind says. d is the part that is rotated, not the head.
RopeTable MakeRopeTable(const ModelConfig& config) {
  const RopeConfig& rope = config.rope;
  RopeTable table;
  const int64_t head = config.mla() ? config.qk_rope_head_dim : config.head_dim;
  table.rotary_dim = static_cast<int64_t>(static_cast<double>(head) * rope.partial_rotary_factor);
  const double dim = static_cast<double>(table.rotary_dim);
  for (int64_t i = 0; i < table.rotary_dim / 2; ++i) {
    table.inv_freq.push_back(1.0 / std::pow(rope.theta, static_cast<double>(2 * i) / dim));
  }
  switch (rope.kind) {
    case RopeKind::kDefault:
      break;
    case RopeKind::kLinear:
      for (double& f : table.inv_freq) f /= rope.factor;
      break;
    case RopeKind::kLlama3:
      ApplyLlama3(rope, &table.inv_freq);
      break;
    case RopeKind::kYarn:
      ApplyYarn(rope, dim, &table.inv_freq);
      if (rope.attention_factor > 0) {
        table.scaling = rope.attention_factor;
      } else if (rope.mscale != 0 && rope.mscale_all_dim != 0) {
        table.scaling = YarnMagnitude(rope.factor, rope.mscale) / YarnMagnitude(rope.factor, rope.mscale_all_dim);
      } else {
        table.scaling = YarnMagnitude(rope.factor, 1.0);
      }
      break;
  }
  return table;
}

// config.h, SoftmaxScale: the square, as queries and keys both carry the magnitude.
double SoftmaxScale(const ModelConfig& config) {
  double scale = 1.0 / std::sqrt(static_cast<double>(config.qk_head_dim()));
  if (config.mla() && config.rope.kind != RopeKind::kDefault && config.rope.mscale_all_dim != 0) {
    const double magnitude = YarnMagnitude(config.rope.factor, config.rope.mscale_all_dim);
    scale *= magnitude * magnitude;
  }
  return scale;
}

}  // namespace assay
