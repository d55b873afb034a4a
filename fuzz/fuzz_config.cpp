// Any bytes as config.json. What is accepted holds the promises of model/config.h, so that the runtime may divide,
// index and allocate by it.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "model/config.h"

namespace {
void Require(bool condition) {
  if (!condition) std::abort();
}
}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const assay::Result<assay::ModelConfig> parsed = assay::ParseModelConfig(text, "input");
  if (!parsed.ok()) {
    Require(parsed.status().message().compare(0, 5, "input") == 0);
    return 0;
  }
  const assay::ModelConfig& c = *parsed;
  const size_t layers = static_cast<size_t>(c.n_layers);
  Require(c.hidden_size > 0 && c.n_layers > 0 && c.vocab_size > 0 && c.intermediate_size > 0 && c.n_heads > 0);
  Require(c.n_kv_heads > 0 && c.n_heads % c.n_kv_heads == 0 && c.qk_head_dim() > 0 && c.value_head_dim() > 0);
  Require(c.moe_layer.empty() || c.moe_layer.size() == layers);
  Require(c.layer_windowed.empty() || c.layer_windowed.size() == layers);
  for (int64_t l = 0; l < c.n_layers; ++l) {
    if (!c.is_moe(l)) continue;
    Require(c.n_routed_experts > 0 && c.moe_intermediate_size > 0);
    Require(c.n_experts_per_tok > 0 && c.n_experts_per_tok <= c.n_routed_experts);
    Require(c.n_routed_experts % c.n_group == 0 && c.topk_group <= c.n_group);
  }
  const assay::RopeTable table = assay::MakeRopeTable(c);
  Require(table.rotary_dim >= 2 && table.rotary_dim % 2 == 0 && table.rotary_dim <= c.qk_head_dim());
  Require(table.inv_freq.size() == static_cast<size_t>(table.rotary_dim / 2));
  for (const double f : table.inv_freq) Require(std::isfinite(f));
  Require(std::isfinite(table.scaling) && std::isfinite(assay::SoftmaxScale(c)));
  return 0;
}
