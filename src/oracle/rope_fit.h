// The inverse of a rotation: from a row before and after RoPE, by which position it was turned, in which pairing, and
// by which factor it grew. It assumes the frequencies; another theta or scaling shows as a residual.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "oracle/rope.h"

namespace assay::oracle {

// y ≈ magnitude · R(position) x over the rotated elements of one row, all heads together.
struct RowRotation {
  double position = 0;    // best fit; whole positions are searched first, then refined between them
  double magnitude = 0;   // total factor, that of the frequencies included
  double residual = 1;    // |y - fit| / |y|, 0 to 1; NaN when the row is not finite
  double runner_up = 1;   // smallest residual at a position more than one away: close to residual = not decided
  bool decidable = true;  // false: the rotated part is zero or not finite, position means nothing
};

struct RotationFit {
  RopeLayout layout;
  std::vector<RowRotation> rows;
  double residual = 1;  // over all decidable rows, weighted by |y|
};

// x and y [T, .., d]; positions from first to last are searched in steps of one half, which the fastest pair, turning
// by at most one radian a position, resolves. 0 <= last - first <= 2^22.
Result<RotationFit> FitRotation(const Array& x, const Array& y, const RopeFrequencies& frequencies,
                                const RopeLayout& layout, int64_t first, int64_t last);
// Both pairings, the better one first.
Result<std::vector<RotationFit>> FitPairings(const Array& x, const Array& y, const RopeFrequencies& frequencies,
                                             bool from_end, int64_t first, int64_t last);

// The one frequency that a pair's angles over all rows are nearest to.
struct PairFrequency {
  double inverse = 0;    // radians a position, within (-pi, pi]: whole positions cannot tell more
  double residual = 0;   // root mean square of what is left of the angles, radians, weighted by the pair's energy
  double declared = 0;   // the same under the frequency given
  bool decided = false;  // false: the pair holds nothing, inverse is the one given
};
struct FrequencyFit {
  std::vector<PairFrequency> pairs;
  double magnitude = 1;  // |y| / |x| over the rotated elements of the rows
};
// Rows that count (all where `judged` is empty) and whose position is a whole number from 1 on are looked at.
// kBadInput: shapes, or fewer than four different positions of them, or none up to 4096 to begin with.
Result<FrequencyFit> FitFrequencies(const Array& x, const Array& y, std::span<const double> positions,
                                    std::span<const char> judged, const RopeFrequencies& given,
                                    const RopeLayout& layout);

}  // namespace assay::oracle
