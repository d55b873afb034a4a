// The state of linear attention after more tokens: S ← S + Σ k vᵀ.
#pragma once

#include <cstdint>

#include "oracle/bound.h"

namespace assay::oracle {

// state [H, d, dv] (empty: zeros), k [T, Hk, d], v [T, H, dv]; head h reads key head h / (H / Hk). The first n_rows of
// the rows enter, all with n_rows -1: what a speculative step keeps is 1 + accepted rows. An engine that stores the
// state after every token rounds n_rows times to the storing type: stores = n_rows.
Result<Computed> UpdateState(const Array& state, const Array& k, const Array& v, int64_t n_rows = -1);

}  // namespace assay::oracle
