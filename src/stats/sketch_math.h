// What consumers do with statistics and sketches: estimate distances and cosines, and add segments together.
//
// A sketch is linear, so sketch(a) - sketch(b) is the sketch of a - b, and its norm estimates ||a - b||: for 64 buckets
// with a measured standard deviation of 7 to 10 %, unbiased in the square (docs/numerics.md). The functions take any
// number of buckets: 64 of a segment, 16 of a head cell, 4 of a row cell (standard deviation of the norm about
// 1/sqrt(2k)).
#pragma once

#include <span>

#include "stats/stats.h"

namespace assay {

// Estimates of the L2 norm of the tensor, and of the difference of two. Sizes must be equal.
double SketchNorm(std::span<const double> a);
double SketchDistance(std::span<const double> a, std::span<const double> b);

// Estimate of ||a - b|| / ||b||: the exact norm of b comes from its sum of squares. 0 if both are 0, infinite if only
// ||b|| is, NaN if anything is not finite.
double RelativeL2(std::span<const double> a, std::span<const double> b, double sum_sq_b);

// Estimate of the cosine from both exact norms and the estimated distance, clamped to [-1, 1]; 1 if both tensors are 0,
// 0 if one is. Near 1 it is far sharper than the inner product of the sketches: its error shrinks with the distance.
double CosineFromSketches(std::span<const double> a, std::span<const double> b, double sum_sq_a, double sum_sq_b);

// Sketches of equal sizes; of unequal ones only the common buckets are added.
void AddSketch(std::span<const double> from, std::span<double> to);

// Adds `from` to *to: chunks of a sequence, shards of a row, requests of a batch. Counts, sums, sketch and digest add;
// extremes combine; abs_max_index is only meaningful where both index the same view (ties go to the smaller number);
// histograms add bin by bin. A default-constructed Stats is the neutral element.
void MergeStats(const Stats& from, Stats* to);

}  // namespace assay
