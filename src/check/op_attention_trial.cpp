#include "check/op_attention_trial.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace assay::op {

double LeastAt(const std::function<double(double)>& miss, double reach, double step) {
  double best = 0, least = HUGE_VAL;
  const auto take = [&](double x) {
    const double m = miss(x);
    if (m < least) least = m, best = x;
    return best == x;
  };
  for (double x = -reach; x <= reach + step / 2; x += step) take(x);
  for (step /= 2; step > 1e-9; step /= 2) {
    if (const double from = best; !take(from - step)) take(from + step);
  }
  return best;
}

std::vector<int64_t> BlockSizes(const Subject& out, int64_t recorded) {
  if (recorded <= 1) {
    if (const auto text = out.capture().ProcessText(out.info(), "block_size"))
      recorded = std::strtoll(text->c_str(), nullptr, 10);
  }
  constexpr int64_t kLargestBlock = 1 << 16;  // of a damaged trace's word a buffer would be made
  if (recorded > 1 && recorded <= kLargestBlock) return {recorded};
  return {16, 32, 64, 8, 4, 128};
}

AttentionCall FewQueries(const AttentionCall& call) {
  AttentionCall few = call;
  size_t kept = 0;
  for (AttentionBatch& b : few.batches) {
    std::vector<int64_t> take;
    for (size_t i = b.rows.size(); i-- > 0 && take.size() < 8;) take.push_back(static_cast<int64_t>(i));
    std::reverse(take.begin(), take.end());
    if (kept >= 16) take.clear();
    kept += take.size();
    KeepQueries(&b, take);
  }
  std::erase_if(few.batches, [](const AttentionBatch& b) { return b.rows.empty(); });
  return few;
}

}  // namespace assay::op
