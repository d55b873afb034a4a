// Results too large to be recomputed whole: which rows are, what is said of the others, and a part of a result to judge
// in place of the whole.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "check/op_common.h"

namespace assay::op {

inline constexpr uint64_t kSampleSeed = 1;
inline constexpr int64_t kSampledRows = 64;

// At most `most` of the rows that count, ascending: one at random of each of so many equal stretches.
std::vector<int64_t> SampleRows(std::span<const char> judged, int64_t most);
// "64 of 4096 rows (seed 1)".
std::string SampleText(size_t sampled, std::span<const char> judged);
// At most `most` of these, evenly.
std::vector<int64_t> SomeOf(const std::vector<int64_t>& rows, int64_t most);
// These rows of a tensor, with their identities; without `bytes`.
TensorPtr TakeTensorRows(const Tensor& tensor, std::span<const int64_t> rows);

// Rows that count of s that x wᵀ + bias cannot be, by random projections of all of them (oracle::CheckLinear), and
// those that hold something that is not finite. Empty when shapes do not fit.
std::vector<int64_t> WrongByProjection(const Subject& s, const oracle::Array& x, const oracle::Array& w,
                                       const oracle::Array& bias);

}  // namespace assay::op
