// Attention recomputed with one thing changed, as often as there are causes: which of them fits best.
#pragma once

#include <cmath>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "check/op_attention.h"

namespace assay::op {

// Candidates that fit, best first by residual with a bonus for the earlier one.
class Trial {
 public:
  Trial(const Subject& out, const Difference& declared) : out_(out), declared_(declared) {}

  // True when it fits; `why` is kept if it is the best so far.
  bool Try(const AttentionCall& call, Explanation why) {
    auto values = Recompute(call);
    return values.ok() && TryValues(values->out, std::move(why));
  }
  bool TryValues(const oracle::Computed& out, Explanation why) {
    const Difference d = Differ(out_.actual(), out, out_.precision(), out_.judged(), 4);
    if (!d.ok || d.measured > declared_.measured / 2) return false;
    if (!best_ || d.measured < residual_ / 2) {
      best_ = std::move(why);
      values_ = out;
      residual_ = d.measured;
    }
    return true;
  }
  // Relative distance of the result from this call's output.
  double Miss(const AttentionCall& call) const {
    auto values = Recompute(call);
    return values.ok() ? Differ(out_.actual(), values->out, out_.precision(), out_.judged(), 4).measured : HUGE_VAL;
  }
  std::optional<Explanation> best() const { return best_; }
  const oracle::Computed& values() const { return values_; }  // that the best one predicts

 private:
  const Subject& out_;
  const Difference& declared_;
  std::optional<Explanation> best_;
  oracle::Computed values_;
  double residual_ = 0;
};

// Where a miss is least: by steps over -reach to reach, then by ever smaller ones around the best, down to 1e-9.
double LeastAt(const std::function<double(double)>& miss, double reach, double step);
// The call with at most sixteen of its queries, those that see the most keys: what is searched for by many trials.
AttentionCall FewQueries(const AttentionCall& call);
// Whether the result is about as far from the right one as attention whose sums are kept in this type.
bool ErrsLike(const Subject& out, const AttentionCall& call, const AttentionValues& right, DType sums);
// Slots a block: as recorded, else what engines use.
std::vector<int64_t> BlockSizes(const Subject& out, int64_t recorded);

// Slopes and sinks of another rank's heads.
void TryOtherRanks(const Subject& out, const AttentionCall& call, Trial* trial);
// Families of causes, one file each: what a softmax has beside its scores (slopes, sinks, keys of no position); which
// keys a query sees by mask, window or cap; keys that every query lacks.
void TryTerms(const Subject& out, const AttentionCall& call, const AttentionValues& right, Trial* trial);
void TryMasks(const AttentionCall& call, Trial* trial);
void TryMissingKeys(const AttentionCall& call, Trial* trial);

}  // namespace assay::op
