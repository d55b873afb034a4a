// Activations, and the gated product of the two halves of an FFN.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "oracle/bound.h"

namespace assay::oracle {

// The functions that configs name. GELU and its tanh form: Hendrycks and Gimpel 2016 (arXiv 1606.08415); SiLU: Elfwing
// et al. 2017 (arXiv 1702.03118); the gated products: Shazeer 2020 (arXiv 2002.05202).
enum class Activation : uint8_t {
  kSilu,
  kGelu,       // by erf
  kGeluTanh,   // its approximation by tanh
  kQuickGelu,  // x sigmoid(1.702 x)
  kSwigluOai,
  kRelu,
  kRelu2,  // squared
  kSigmoid,
  kTanh,
  kIdentity,
};
// All of them, in the order in which src/check tries them; static storage.
std::span<const Activation> AllActivations();
std::string_view NameOf(Activation kind);                     // "gelu_tanh": the word of the metadata
enum class GateUpLayout : uint8_t { kHalves, kInterleaved };  // gate then up; gate, up, gate, up, ...

struct ActivationSpec {
  Activation kind = Activation::kSilu;
  // kSwigluOai: (clamp(up, ±limit) + 1) · g · sigmoid(alpha g), g = min(gate, limit). limit 0: no clamp.
  double alpha = 1.702;
  double limit = 7;
  // kGeluTanh written out step by step on stored tensors, as `gelu_new` is; otherwise one kernel that rounds once.
  bool composed = false;
};
// Takes the names above, "swish", "gelu_new" and "gelu_pytorch_tanh"; nothing for any other word.
std::optional<ActivationSpec> ParseActivation(std::string_view word);

// The activation alone, element by element, in the shape of x. kSwigluOai: its gate part. NaN stays NaN.
Computed Activate(const Array& x, const ActivationSpec& spec);
// act(gate) · up, both [.., f]. Roundings to the storing type: the activation, the product (and the sum up + 1).
// kBadInput when the shapes differ.
Result<Computed> Gate(const Array& gate, const Array& up, const ActivationSpec& spec);
// The same from one array [.., 2 f]; the result is [.., f]. kBadInput: an odd last axis, or a scalar.
Result<Computed> GateFused(const Array& gate_up, GateUpLayout layout, const ActivationSpec& spec);

}  // namespace assay::oracle
