// The figures that a team once printed from a patched forward_mha to find this fault, recomputed from a trace: shapes
// and norms of q, k, v and kv_c_normed, the kind, shape and norm of kv_b_proj, and has_context. `assay demo` shows that
// they are all healthy while the output is garbage.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "io/safetensors.h"
#include "trace/reader.h"

namespace assay::cli {

struct Figure {
  std::string name;            // "q"
  std::vector<int64_t> shape;  // empty: not formed on this path
  double norm = 0;             // Frobenius, over all ranks
  uint64_t nonfinite = 0;
  std::string note;  // kind of kv_b_proj, value of has_context; empty for tensors

  // "[1, 4, 256]  norm 15.81", with four significant digits as the patch printed them.
  std::string text() const;
};

struct HandPatch {
  int32_t layer = 0;            // an MLA layer
  int64_t step = 0;             // engine step
  std::string phase;            // "prefill" or "decode"
  std::vector<Figure> figures;  // q, k, v, kv_c_normed, kv_b_proj, has_context

  bool healthy() const;  // every tensor is there, finite and not all zero
};

// Of one MLA layer in one engine step. On the absorbed path the heads' keys and values are not formed: k is then what
// attention reads instead, the latent and k_pe side by side, and v the latent alone. kBadInput: the trace lacks the
// layer or step, or the checkpoint lacks kv_b_proj.
Result<HandPatch> ReadHandPatch(const Trace& trace, const Checkpoint& checkpoint, int32_t layer, int64_t step);

}  // namespace assay::cli
