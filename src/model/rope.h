// Rotary position embedding (RoFormer, arXiv 2104.09864, equation 34) in both pairings, with the frequencies of
// model/config.h (MakeRopeTable; YaRN is arXiv 2309.00071, section 3).
//
// Angles are computed in double and the cosines rounded once, so a float run differs from code that multiplies
// position and frequency in float by up to position * 2^-24 radians (stated where runs are compared).
// The rotated channels keep their places: interleaved pairs stay interleaved. Some engines move the even channels to
// the front; q.k is the same, the tensors are not, and a comparison has to permute first.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "model/config.h"

namespace assay {

// Cosine and sine of one step's rows, scaling included: [rows, rotary_dim / 2] each.
template <class T>
class RopeRows {
 public:
  // positions: one a row of the step.
  void Build(const RopeTable& table, const std::vector<int64_t>& positions) {
    half_ = table.rotary_dim / 2;
    cos_.resize(positions.size() * static_cast<size_t>(half_));
    sin_.resize(cos_.size());
    for (size_t r = 0; r < positions.size(); ++r) {
      for (int64_t i = 0; i < half_; ++i) {
        const double angle = static_cast<double>(positions[r]) * table.inv_freq[static_cast<size_t>(i)];
        cos_[r * static_cast<size_t>(half_) + static_cast<size_t>(i)] = static_cast<T>(std::cos(angle) * table.scaling);
        sin_[r * static_cast<size_t>(half_) + static_cast<size_t>(i)] = static_cast<T>(std::sin(angle) * table.scaling);
      }
    }
  }

  // Rotates the first rotary_dim channels of one head of row r in place: channels (2i, 2i + 1) are a pair when
  // interleaved, else (i, i + rotary_dim / 2); pair i turns by position * inv_freq[i] radians.
  void Rotate(T* head, int64_t r, bool interleaved) const {
    const T* c = cos_.data() + r * half_;
    const T* s = sin_.data() + r * half_;
    const int64_t step = interleaved ? 2 : 1;
    const int64_t other = interleaved ? 1 : half_;
    for (int64_t i = 0; i < half_; ++i) {
      const T a = head[i * step];
      const T b = head[i * step + other];
      head[i * step] = a * c[i] - b * s[i];
      head[i * step + other] = b * c[i] + a * s[i];
    }
  }

  int64_t rotary_dim() const { return 2 * half_; }

 private:
  int64_t half_ = 0;
  std::vector<T> cos_, sin_;
};

}  // namespace assay
