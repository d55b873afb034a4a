// Merge of attention over disjoint sets of keys (chunked prefill, split KV) by their log-sum-exps.
#pragma once

#include <span>

#include "oracle/bound.h"

namespace assay::oracle {

struct Chunk {
  const Array* out;  // [T, H, dv]
  const Array* lse;  // [T, H], natural logarithm; -inf: no keys, its `out` is not looked at, whatever it holds
};
// out [T, H, dv], lse [T, H].
struct MergeResult {
  Computed out;  // 0 where all chunks are empty
  Computed lse;  // -inf there
};
// NaN in one chunk's lse makes the row NaN, and so does +inf. kBadInput: no chunks, or shapes that differ.
Result<MergeResult> MergeChunks(std::span<const Chunk> chunks);

}  // namespace assay::oracle
