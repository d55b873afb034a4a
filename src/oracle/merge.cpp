#include "oracle/merge.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "oracle/softmax.h"

namespace assay::oracle {

// w_j = exp(lse_j - lse), out = sum of w_j out_j (model/attention.cpp has the papers). scale and inner:
// docs/numerics.md, "Oracles".
Result<MergeResult> MergeChunks(std::span<const Chunk> chunks) {
  if (chunks.empty()) return Status::BadInput("a merge of no chunks");
  const Array& first = *chunks[0].out;
  const int64_t width = first.cols();
  for (const Chunk& chunk : chunks) {
    if (chunk.out->shape != first.shape || chunk.lse->shape != chunks[0].lse->shape ||
        (width > 0 && chunk.lse->size() != chunk.out->size() / width)) {
      return Status::BadInput("a chunk's output of shape " + ShapeText(chunk.out->shape) + " and its lse of shape " +
                              ShapeText(chunk.lse->shape) + " do not fit an output of shape " + ShapeText(first.shape));
    }
  }
  const double n = static_cast<double>(chunks.size());
  const std::vector<int64_t>& lse_shape = chunks[0].lse->shape;
  MergeResult m;
  // Chunk by chunk engines round the accumulated output to the storing type each time, and the running lse, which the
  // next weights are taken against.
  m.out = {Array::Filled(first.shape), Array::Filled(first.shape), Array::Filled(first.shape), 6 * n + 2, n + 2,
           std::max(1.0, n - 1)};
  m.lse = {Array::Filled(lse_shape), Array::Filled(lse_shape), Array::Filled(lse_shape), 2, n + 6,
           std::max(1.0, n - 1)};
  std::vector<double> lses(chunks.size());
  for (int64_t r = 0; r < m.lse.value.size(); ++r) {
    for (size_t j = 0; j < chunks.size(); ++j) lses[j] = (*chunks[j].lse)[r];
    const LogSum s = LogSumExp(lses);
    m.lse.value[r] = s.lse;
    if (s.max == -HUGE_VAL) continue;  // no keys in any chunk
    m.lse.scale[r] = std::abs(s.lse);
    // The maximum's own size, what the exponents' arguments add up to, and the logarithm.
    m.lse.inner[r] = std::abs(s.max) + s.drift + 1;
    double spread = 0;  // Σ w (|lse_j| + |max|): relative error of the weights, in roundoffs
    for (const double lse : lses) {
      if (lse != -HUGE_VAL) spread += std::exp(lse - s.lse) * (std::abs(lse) + std::abs(s.max));
    }
    for (size_t j = 0; j < chunks.size(); ++j) {
      // Weight 0: the chunk's output was never written and may hold NaN, which 0 times would keep.
      if (lses[j] == -HUGE_VAL) continue;
      const double w = std::exp(lses[j] - s.lse);
      for (int64_t i = r * width; i < (r + 1) * width; ++i) {
        const double term = w * (*chunks[j].out)[i];
        m.out.value[i] += term;
        m.out.scale[i] += std::abs(term);
        m.out.inner[i] += std::abs(term) * (std::abs(lses[j]) + std::abs(s.max) + spread);
      }
    }
  }
  return m;
}

}  // namespace assay::oracle
