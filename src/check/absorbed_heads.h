// The absorbed forms of MLA beside kv_b_proj, head by head: whether attn.W_UK_T or attn.W_UV is what it was cut out of,
// and what it is when it is not.
//
// DeepSeek-V2, section 2.1.2: W_UK goes into the query and W_UV behind the attention, so that the cache holds latents
// alone. Both are rows of kv_b_proj [H (dn + dv), c]. Where that weight comes from, a checkpoint or the same recording,
// is for the caller: weights_absorption.cpp and op_absorbed_weights.cpp.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "check/weights_slab.h"

namespace assay {

// kv_b_proj as heads of dn key rows, then dv value rows, over c latent columns.
struct KvHeads {
  int64_t count = 0, dn = 0, dv = 0, c = 0;
  std::vector<double> values;  // [count, dn + dv, c]
  // Of a quantised weight, an entry an element each, values = (code - zero) * scale; otherwise empty.
  std::vector<double> code, zero, scale;
  std::vector<int32_t> group;  // elements that share a scale

  int64_t own() const { return dn + dv; }
  bool quantised() const { return !code.empty(); }
  size_t At(bool key, int64_t head, int64_t row, int64_t column) const {
    return static_cast<size_t>((head * own() + (key ? 0 : dn) + row) * c + column);
  }
};

// W_UK_T or W_UV as it lies in memory.
struct AbsorbedHeads {
  std::string name;            // "layers.0.attn.W_UV"
  std::string axes;            // as recorded; may be empty
  std::vector<int64_t> shape;  // [n, d, c] or [n, c, d], n the heads of this rank
  std::vector<double> values;  // row-major
  int64_t first_head = 0;      // of kv_b_proj's heads
  double roundoff = 0;         // u of the type that it was rounded to

  bool key() const { return name.ends_with("W_UK_T"); }
};

// Why the two cannot be held against each other; empty: they can. To be asked before the others.
std::string WhyIncomparable(const KvHeads& heads, const AbsorbedHeads& absorbed);
// Four roundings are allowed for an element: engines dequantise and transpose in the model's type. Either order of the
// inner axes is right where they differ; where they are equal, the axes decide, and without them either order will do.
bool IsCutOf(const KvHeads& heads, const AbsorbedHeads& absorbed);
// The smallest explanation of one that is not.
MaybeExplained ExplainAbsorbed(const KvHeads& heads, const AbsorbedHeads& absorbed);
// What is said of one that nothing explains: LOAD, and how like the right one it is.
WeightExplanation UnexplainedAbsorbed(const WeightSlab& slab);
// Both as [n d, c], for the numbers of a verdict.
WeightSlab SlabOf(const KvHeads& heads, const AbsorbedHeads& absorbed);

}  // namespace assay
