// Attention of one request: softmax(scale q k) v over the keys that each query sees, with everything that engines vary.
//
// MHA, GQA and MQA follow from the shapes: query head h reads key head h / (H / Hkv). Absorbed MLA is one key head
// whose value is the first part of the key (k = Concat(kv_c_normed, k_pe), no v, value_dim = c). Keys that a query does
// not see do not enter at all, not even when they are NaN. It does not look into pages or block tables: keys come as
// rows with positions, in any order.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "oracle/bound.h"

namespace assay::oracle {

struct KeyRange {
  int64_t begin = 0;  // key positions begin <= p < end
  int64_t end = std::numeric_limits<int64_t>::max();
};

// What the model asks for.
struct AttentionSpec {
  double scale = 1;          // factor of q·k
  bool causal = true;        // key positions <= the query's
  int64_t window = 0;        // keys a query sees by distance, itself included: q - p < window; 0: all
  int64_t chunk = 0;         // only keys of the query's own chunk of so many positions; 0: all
  int64_t prefix_len = 0;    // positions below are seen by all in spite of `causal`
  double soft_cap = 0;       // c tanh(s / c) on scaled scores; 0: none
  int64_t causal_shift = 0;  // added to the last visible position, for fitting faults
};

struct AttentionInput {
  const Array* q = nullptr;                  // [T, H, d]
  const Array* k = nullptr;                  // [S, Hkv, d]
  const Array* v = nullptr;                  // [S, Hkv, dv]; null: the first value_dim columns of k
  int64_t value_dim = 0;                     // with v null
  std::span<const int64_t> query_positions;  // T
  std::span<const int64_t> key_positions;    // S
  std::span<const KeyRange> ranges;          // T more bounds of what a query sees, or none
  const Array* mask = nullptr;               // [T, S], a key is seen where it is not 0 (and the spec allows it)
  const Array* sinks = nullptr;              // [H]: one more score, whose value is 0
  const Array* alibi_slopes = nullptr;       // [H]: adds slope (key position - query position), behind the soft cap
  std::span<const int64_t> rows;             // query rows to compute, none: all; results have one row each
};

// n = rows asked for. A row that sees no key and has no sink: out 0, lse and max -inf, entropy 0.
struct AttentionResult {
  Computed out;       // [n, H, dv]
  Computed lse;       // [n, H], natural logarithm of the softmax's denominator, sink included
  Array lse_of_keys;  // [n, H], without the sink
  Array max_score;    // [n, H], of the keys
  Array entropy;      // [n, H], -Σ p ln p in nats, sink included
  Array keys_seen;    // [n, H] number of keys
};
Result<AttentionResult> Attend(const AttentionInput& input, const AttentionSpec& spec);

// Whether a query at position q sees a key at position p, by the spec alone.
// Ranges and masks of an AttentionInput narrow it further. Positions are not negative.
bool Sees(const AttentionSpec& spec, int64_t q, int64_t p);

// [n, H, S], masked scaled scores before the softmax, -inf where a key is not seen. Small inputs only: it is what a
// recorded attn.scores is compared with.
Result<Computed> Scores(const AttentionInput& input, const AttentionSpec& spec);

}  // namespace assay::oracle
