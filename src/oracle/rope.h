// Rotary position embedding: inverse frequencies, the cosine and sine table, and the rotation. The inverse problem, by
// which position was this rotated, is rope_fit.h.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "oracle/bound.h"

namespace assay::oracle {

enum class RopeScaling : uint8_t { kDefault, kLinear, kLlama3, kYarn };
enum class Pairing : uint8_t { kHalf, kInterleaved };  // (i, i + d/2); (2i, 2i + 1)

// Keys of a model's configuration.
struct RopeSpec {
  RopeScaling scaling = RopeScaling::kDefault;
  double theta = 10000;                              // base
  int64_t dim = 0;                                   // rotated elements, even
  double factor = 1;                                 // of the context length
  double original_max_position = 0;                  // llama3 and yarn
  double beta_fast = 32, beta_slow = 1;              // yarn
  bool truncate = true;                              // yarn: the ends of the ramp at whole pairs
  std::optional<double> mscale, mscale_all_dim;      // yarn
  std::optional<double> attention_factor;            // yarn: in place of the magnitude that follows from the factor
  double low_freq_factor = 1, high_freq_factor = 4;  // llama3
};

// Rounding on the way to the angles, as engines do that keep positions or frequencies in a coarse float: to fit faults.
struct AngleRounding {
  int significant_bits = 0;                                              // 8: bf16, 11: f16; 0: nothing is rounded
  bool inverse = false, position = false, angle = false, table = false;  // table: cosines and sines
};

struct RopeFrequencies {
  std::vector<double> inverse;  // radians a position, dim / 2 pairs
  // Of each pair: how many unit roundoffs an engine's angle may be off by, relatively, when it computes the frequency
  // in its accumulator. Empty: 20 each.
  std::vector<double> roundings;
  double magnitude = 1;  // factor of cosines and sines
  AngleRounding rounding = {};
};
// kBadInput: odd or no dim, a base or factor that is not positive, no original_max_position where one is needed.
Result<RopeFrequencies> MakeFrequencies(const RopeSpec& spec);
// m(weight) = 0.1 weight ln(factor) + 1, 1 for factors up to 1. The softmax scale of DeepSeek's YaRN is
// m(mscale_all_dim)² / √d.
double YarnMagnitude(double factor, double weight);

// [positions, dim]: cosines of the pairs, then their sines. stores = 1.
Computed CosSinTable(const RopeFrequencies& frequencies, std::span<const double> positions);

struct RopeLayout {
  Pairing pairing = Pairing::kHalf;
  bool from_end = false;  // the rotated elements are the last of the head, the rest passes through
};
// x [T, .., d], one position for each row of axis 0; d >= dim. Elements keep their places. The bound allows for angles
// in the accumulator's precision (u times the angle) and for a table, products and a sum in the storing type.
Result<Computed> Rotate(const Array& x, std::span<const double> positions, const RopeFrequencies& frequencies,
                        const RopeLayout& layout);

}  // namespace assay::oracle
