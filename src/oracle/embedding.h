// The first and the last matrix of a model: rows of tokens, and logits (the same matrix when tied).
#pragma once

#include <cstdint>
#include <span>

#include "oracle/bound.h"

namespace assay::oracle {

// Rows of table [vocab, h] times scale. A token outside of the table is kBadInput and named.
Result<Computed> Embed(std::span<const int64_t> tokens, const Array& table, double scale = 1);

// soft_cap tanh(logit_scale (x wᵀ + bias) / soft_cap), without the cap where soft_cap is 0. bias may be empty.
Result<Computed> Head(const Array& x, const Array& w, const Array& bias, double logit_scale = 1, double soft_cap = 0);

}  // namespace assay::oracle
