#include "oracle/linear_attention.h"

#include <algorithm>
#include <cmath>

namespace assay::oracle {

// The given state enters with its own magnitude: roundings of the sum count for it too.
Result<Computed> UpdateState(const Array& state, const Array& k, const Array& v, int64_t n_rows) {
  const auto shape_fault = [&] {
    return Status::BadInput("a state of shape " + ShapeText(state.shape) + " does not fit keys " + ShapeText(k.shape) +
                            " and values " + ShapeText(v.shape));
  };
  if (k.rank() != 3 || v.rank() != 3 || k.shape[0] != v.shape[0] || k.shape[1] == 0 || v.shape[1] % k.shape[1] != 0) {
    return shape_fault();
  }
  const int64_t heads = v.shape[1], d = k.shape[2], dv = v.shape[2], group = heads / k.shape[1];
  const std::vector<int64_t> shape{heads, d, dv};
  if (!state.values.empty() && state.shape != shape) return shape_fault();
  if (n_rows < 0) n_rows = k.shape[0];
  if (n_rows > k.shape[0]) {
    return Status::BadInput(std::to_string(n_rows) + " rows of keys asked for, of " + std::to_string(k.shape[0]));
  }
  Computed c{state.values.empty() ? Array::Filled(shape) : state, Array::Filled(shape), {}, 0, 0, 1};
  c.k = static_cast<double>(n_rows + 1);
  c.stores = std::max(1.0, static_cast<double>(n_rows));
  for (int64_t i = 0; i < c.value.size(); ++i) c.scale[i] = std::abs(c.value[i]);
  for (int64_t t = 0; t < n_rows; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      const double* key = k.values.data() + (t * k.shape[1] + h / group) * d;
      const double* value = v.values.data() + (t * heads + h) * dv;
      for (int64_t i = 0; i < d * dv; ++i) {
        const double term = key[i / dv] * value[i % dv];
        c.value[h * d * dv + i] += term;
        c.scale[h * d * dv + i] += std::abs(term);
      }
    }
  }
  return c;
}

}  // namespace assay::oracle
