// Numbers that became zeros because they are small: a type whose range ends above them, or a mode that flushes what is
// below the smallest normal number.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "check/op_explain.h"

namespace assay::op {

// Every judged element is right or such a zero; the smallest number kept is no smaller than the largest lost. At least
// eight are lost, and as many are kept within a factor of 64: otherwise zeros of another cause look alike.
std::optional<Explanation> ExplainFlushed(const Subject& subject, const oracle::Computed& right) {
  constexpr int64_t kLeast = 8;
  constexpr double kNear = 64;
  const oracle::Array& have = subject.actual();
  const oracle::Precision p = subject.precision();
  const auto n_rows = std::max<int64_t>(static_cast<int64_t>(subject.judged().size()), 1);
  const int64_t width = have.size() / n_rows;
  double largest_lost = 0, smallest_kept = HUGE_VAL;
  int64_t lost = 0;
  for (int64_t i = 0; i < have.size(); ++i) {
    if (!subject.judged().empty() && !subject.judged()[static_cast<size_t>(i / width)]) continue;
    const double want = std::abs(right.value[i]);
    if (have[i] == 0 && want > 0) {
      largest_lost = std::max(largest_lost, want);
      ++lost;
    } else if (!(std::abs(have[i] - right.value[i]) <= 4 * Allowed(right, i, p, subject.one_store))) {
      return std::nullopt;
    } else if (have[i] != 0) {
      smallest_kept = std::min(smallest_kept, std::abs(have[i]));
    }
  }
  if (lost < kLeast || smallest_kept < largest_lost) return std::nullopt;
  int64_t near = 0;
  for (int64_t i = 0; i < have.size(); ++i) near += have[i] != 0 && std::abs(have[i]) <= kNear * largest_lost;
  if (near < kLeast) return std::nullopt;
  char text[160];
  std::snprintf(text, sizeof text,
                "%lld numbers up to %.3g are zeros and none above is: below what the type or mode used holds",
                static_cast<long long>(lost), largest_lost);
  return Explanation{fault_class::kRange, text};
}

}  // namespace assay::op
