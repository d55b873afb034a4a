#include "model/sampler.h"

#include <cmath>
#include <limits>

#include "base/hash.h"

namespace assay {
namespace {

// The next number of a SplitMix64 sequence whose state is x.
uint64_t Mix(uint64_t x) { return Mix64(x + kGolden64); }

}  // namespace

// Inverse transform: the first token at which the running sum passes uniform * total. Two passes over the logits
// instead of a buffer of probabilities. When rounding leaves nothing over, the largest logit is the answer.
template <class T>
Choice ChooseToken(const T* logits, int64_t vocab, double temperature, uint64_t seed, uint64_t request,
                   int64_t position) {
  Choice choice;
  double best = -std::numeric_limits<double>::infinity(), second = best;
  for (int64_t i = 0; i < vocab; ++i) {
    const double v = static_cast<double>(logits[i]);
    if (!(v < std::numeric_limits<double>::infinity())) ++choice.nonsense;
    if (v > best) {
      second = best;
      best = v;
      choice.token = i;
    } else if (v > second) {
      second = v;
    }
  }
  choice.margin = best - second;
  if (!(temperature > 0) || !std::isfinite(best)) return choice;

  // 53 random bits; request and position enter one after the other, so no two rows share a number.
  const double uniform =
      static_cast<double>(Mix(Mix(Mix(seed) ^ request) ^ static_cast<uint64_t>(position)) >> 11) * 0x1p-53;
  double total = 0;
  for (int64_t i = 0; i < vocab; ++i) {
    const double p = std::exp((static_cast<double>(logits[i]) - best) / temperature);
    if (!std::isnan(p)) total += p;
  }
  double left = uniform * total;
  for (int64_t i = 0; i < vocab; ++i) {
    const double p = std::exp((static_cast<double>(logits[i]) - best) / temperature);
    if (std::isnan(p)) continue;
    left -= p;
    if (left < 0) {
      choice.token = i;
      break;
    }
  }
  return choice;
}

template Choice ChooseToken<float>(const float*, int64_t, double, uint64_t, uint64_t, int64_t);
template Choice ChooseToken<double>(const double*, int64_t, double, uint64_t, uint64_t, int64_t);

}  // namespace assay
