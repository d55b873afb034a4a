// How far apart two right values of a site may be: rounding of the operation, growth of its inputs' difference, and the
// spread of the sketches that measure both. Every number here has its reason beside it; docs/diff.md tells the same in
// prose. Nothing here looks at traces.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "sites/site_table.h"
#include "tensor/dtype.h"

namespace assay {

// sqrt(chi2_k / k) stays below this factor with probability 1 - p: what a sketch of k buckets may read above the truth.
// k even, >= 2; p in (0, 1).
double SpreadAbove(int buckets, double p);

// What an operation does to error, all relative to the norm of a row of its output.
struct OpModel {
  double roundings;  // roundings to the compute dtype between the inputs and the output, worst usual kernel
  bool contracts;    // sums over K products: adds u_acc * sqrt(K), the random walk of K accumulated roundings
  double gain;       // how much larger a relative difference of the inputs may come out
};
OpModel ModelOf(SiteOp op);

// How much more attention makes of a relative difference, and of its own rounding, than the gain of kAttention allows
// for. query, key: root mean squares of their elements. A score s = q k / sqrt(d) moves by d(s) = S e when q and k move
// by a relative e in a direction of their own, S = query x key; the output moves by sum p_j d(s_j) (v_j - out), at most
// S e of itself when the v_j are as unlike as their mean lets them be, and by e through the values: e sqrt(1 + S^2)
// together. The gain is that of S = 1 (sqrt 2) and a slack of 2.8 for heads that are sharper than others and for
// differences that point the same way in all keys; so the condition is sqrt((1 + S^2) / 2), at least 1.
double AttentionCondition(double query, double key);

// Unit roundoff of a value's history: the coarser of its dtype and its compute dtype. 0 for integers.
double RoundoffOf(DType dtype, DType compute_dtype);

// Relative rounding noise of one side: roundings at roundoff u, and the accumulator's walk over K products
// (accumulators hold at least f32, unless the whole run is f64).
double RoundingNoise(double u, double roundings, bool contracts, double k);

// By how much the difference of two of `cols` scores may change in a right run whose scores differ by `l2` (L2 norm).
// sqrt(2) l2 when all of it lies on the two; but rounding spreads over the columns like noise, of l2 / sqrt(cols) each,
// and among all pairs the largest change is then below sqrt(2) z l2 / sqrt(cols) but once in 1/p rows,
// z = sqrt(2 ln(cols^2 / 2p)) (Gaussian tail, union bound). Sums of `terms` scores change by sqrt(terms) more.
double PairChange(double l2, int64_t cols, int terms, double p);

// "1e-5,layers.*.q:1e-3": the last matching entry holds; an entry without a pattern holds for every site. Patterns are
// globs (base/glob.h) over the canonical name.
class Tolerance {
 public:
  static Result<Tolerance> Parse(std::string_view text);  // kUsage names the entry and what is wrong with it
  // The relative tolerance of the site, or -1: not given, the derived bound holds.
  double of(std::string_view site) const;
  // kUsage with the first entry whose pattern no site matches.
  Status CheckPatterns(const std::vector<std::string>& sites) const;

 private:
  struct Entry {
    std::string pattern;
    double value = 0;
  };
  std::vector<Entry> entries_;
};

}  // namespace assay
