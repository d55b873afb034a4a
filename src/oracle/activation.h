// Activations, and the gated product of the two halves of an FFN.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "oracle/bound.h"

namespace assay::oracle {

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
std::span<const Activation> AllActivations();
std::string_view NameOf(Activation kind);  // "gelu_tanh": the word of the metadata
std::optional<Activation> ParseActivation(std::string_view word);

enum class GateUpLayout : uint8_t { kHalves, kInterleaved };  // gate then up; gate, up, gate, up, ...

struct ActivationSpec {
  Activation kind = Activation::kSilu;
  // kSwigluOai: (clamp(up, ±limit) + 1) · g · sigmoid(alpha g), g = min(gate, limit). limit 0: no clamp.
  double alpha = 1.702;
  double limit = 7;
};

// The activation alone, element by element. kSwigluOai: its gate part.
Computed Activate(const Array& x, const ActivationSpec& spec);
// act(gate) · up. Roundings to the storing type: the activation, the product (and the sum up + 1).
Result<Computed> Gate(const Array& gate, const Array& up, const ActivationSpec& spec);
// The same from one array [.., 2 f]; the result is [.., f].
Result<Computed> GateFused(const Array& gate_up, GateUpLayout layout, const ActivationSpec& spec);

}  // namespace assay::oracle
