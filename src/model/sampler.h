// The choice of the next token from one row of logits.
#pragma once

#include <cstdint>

namespace assay {

struct Choice {
  int64_t token = 0;
  double margin = 0;     // largest logit minus the second largest
  int64_t nonsense = 0;  // logits that are NaN or +inf; -inf is how a token is masked
};

// temperature 0: the largest logit, lowest id among equals. Otherwise a draw from softmax(logits / temperature) with a
// uniform number made from (seed, request, position) alone: a request's text does not depend on what it was batched
// with. NaN logits are never chosen unless all are NaN (then token 0).
template <class T>
Choice ChooseToken(const T* logits, int64_t vocab, double temperature, uint64_t seed, uint64_t request,
                   int64_t position);

extern template Choice ChooseToken<float>(const float*, int64_t, double, uint64_t, uint64_t, int64_t);
extern template Choice ChooseToken<double>(const double*, int64_t, double, uint64_t, uint64_t, int64_t);

}  // namespace assay
