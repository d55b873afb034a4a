// Which tensors a decoder layer has in a checkpoint, by family and config: one walk over names, shapes and the members
// of LayerWeights that they fill. Checking, loading and counting are three visitors of this walk, so that they cannot
// disagree.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "model/config.h"
#include "model/weights.h"
#include "quant/weight_source.h"

namespace assay {

// A row-major block of `rows` x `cols` elements, `offset_elems` into the tensor `name` of shape `shape`.
struct TensorPart {
  std::string name;
  std::vector<int64_t> shape;
  int64_t offset_elems = 0;
  int64_t rows = 0, cols = 0;  // vectors: one row
};

inline TensorPart WholeMatrix(std::string name, int64_t rows, int64_t cols) {
  return {std::move(name), {rows, cols}, 0, rows, cols};
}
inline TensorPart WholeVector(std::string name, int64_t size) { return {std::move(name), {size}, 0, 1, size}; }

// Names as transformers writes them; a GGUF source is renamed before (quant/assemble_gguf.cpp).
inline std::string LayerPrefix(int64_t layer) { return "model.layers." + std::to_string(layer) + "."; }

// Experts on disk: one tensor an expert and projection, or transformers' in-memory form, gate_up_proj [E, 2f, h] (gate
// rows first) and down_proj [E, h, f].
inline bool HasFusedExperts(const WeightSource& source, int64_t layer) {
  return source.find(LayerPrefix(layer) + "mlp.experts.gate_up_proj") != nullptr;
}

// Shapes, as a checkpoint has them ([out, in] for matrices): h hidden, f FFN channels, E experts, H heads, K kv heads,
// d head size, dn / dr / dv MLA head sizes, c latent.
//   MLP     gate, up [f, h]; down [h, f]
//   MLA     q_a [q_lora, h] and q_b [H (dn + dr), q_lora], or q [H (dn + dr), h]; kv_a [c + dr, h];
//           kv_b [H (dn + dv), c], for each head W_UK [dn, c], then W_UV [dv, c]; o [h, H dv]
//   GQA     q [H d, h]; k, v [K d, h]; o [h, H d]; q_norm, k_norm [d], shared by the heads
//   MoE     router [E, h]; correction bias [E]; experts and the shared expert as MLPs; shared_gate [1, h]
// All visits stop at the first error, which names the tensor.

// Visitor: Status Visit(const TensorPart&, Matrix<T>*) and Status Visit(const TensorPart&, std::vector<T>*).
template <class T, class Visitor>
Status VisitMlp(const std::string& prefix, int64_t f, int64_t h, MlpWeights<T>* mlp, Visitor& v) {
  ASSAY_RETURN_IF_ERROR(v.Visit(WholeMatrix(prefix + "gate_proj.weight", f, h), &mlp->gate));
  ASSAY_RETURN_IF_ERROR(v.Visit(WholeMatrix(prefix + "up_proj.weight", f, h), &mlp->up));
  return v.Visit(WholeMatrix(prefix + "down_proj.weight", h, f), &mlp->down);
}

// Gate and up in one tensor of `count` blocks [2f, h]; this is block `index`.
template <class T, class Visitor>
Status VisitFusedMlp(const std::string& gate_up, const std::string& down, std::vector<int64_t> leading, int64_t index,
                     int64_t f, int64_t h, MlpWeights<T>* mlp, Visitor& v) {
  std::vector<int64_t> gate_up_shape = leading, down_shape = std::move(leading);
  gate_up_shape.insert(gate_up_shape.end(), {2 * f, h});
  down_shape.insert(down_shape.end(), {h, f});
  ASSAY_RETURN_IF_ERROR(v.Visit(TensorPart{gate_up, gate_up_shape, index * 2 * f * h, f, h}, &mlp->gate));
  ASSAY_RETURN_IF_ERROR(v.Visit(TensorPart{gate_up, gate_up_shape, (index * 2 + 1) * f * h, f, h}, &mlp->up));
  return v.Visit(TensorPart{down, down_shape, index * h * f, h, f}, &mlp->down);
}

// One routed expert, from its own tensors or (fused) from block `expert` of the layer's.
template <class T, class Visitor>
Status VisitExpert(const ModelConfig& c, int64_t layer, bool fused, int64_t expert, MlpWeights<T>* mlp, Visitor& v) {
  const std::string prefix = LayerPrefix(layer) + "mlp.experts.";
  const int64_t f = c.moe_intermediate_size, h = c.hidden_size;
  if (fused) {
    return VisitFusedMlp(prefix + "gate_up_proj", prefix + "down_proj", {c.n_routed_experts}, expert, f, h, mlp, v);
  }
  return VisitMlp(prefix + std::to_string(expert) + ".", f, h, mlp, v);
}

// prefix: with "self_attn." at its end. Biases and norms only where the config has them.
template <class T, class Visitor>
Status VisitAttention(const ModelConfig& c, const std::string& prefix, LayerWeights<T>* w, Visitor& v) {
  const int64_t h = c.hidden_size, heads = c.n_heads;
  if (c.mla()) {
    const int64_t q_rows = heads * c.qk_head_dim(), kv_rows = c.kv_lora_rank + c.qk_rope_head_dim;
    if (c.q_lora_rank > 0) {
      ASSAY_RETURN_IF_ERROR(v.Visit(WholeMatrix(prefix + "q_a_proj.weight", c.q_lora_rank, h), &w->q_a));
      if (c.attention_bias) {
        ASSAY_RETURN_IF_ERROR(v.Visit(WholeVector(prefix + "q_a_proj.bias", c.q_lora_rank), &w->q_a_bias));
      }
      ASSAY_RETURN_IF_ERROR(v.Visit(WholeVector(prefix + "q_a_layernorm.weight", c.q_lora_rank), &w->q_a_norm));
      ASSAY_RETURN_IF_ERROR(v.Visit(WholeMatrix(prefix + "q_b_proj.weight", q_rows, c.q_lora_rank), &w->q_b));
    } else {
      ASSAY_RETURN_IF_ERROR(v.Visit(WholeMatrix(prefix + "q_proj.weight", q_rows, h), &w->q));
    }
    ASSAY_RETURN_IF_ERROR(v.Visit(WholeMatrix(prefix + "kv_a_proj_with_mqa.weight", kv_rows, h), &w->kv_a));
    if (c.attention_bias) {
      ASSAY_RETURN_IF_ERROR(v.Visit(WholeVector(prefix + "kv_a_proj_with_mqa.bias", kv_rows), &w->kv_a_bias));
    }
    ASSAY_RETURN_IF_ERROR(v.Visit(WholeVector(prefix + "kv_a_layernorm.weight", c.kv_lora_rank), &w->kv_a_norm));
    const int64_t b_rows = heads * (c.qk_nope_head_dim + c.v_head_dim);
    ASSAY_RETURN_IF_ERROR(v.Visit(WholeMatrix(prefix + "kv_b_proj.weight", b_rows, c.kv_lora_rank), &w->kv_b));
  } else {
    const int64_t q_rows = heads * c.head_dim, kv_rows = c.n_kv_heads * c.head_dim;
    ASSAY_RETURN_IF_ERROR(v.Visit(WholeMatrix(prefix + "q_proj.weight", q_rows, h), &w->q));
    ASSAY_RETURN_IF_ERROR(v.Visit(WholeMatrix(prefix + "k_proj.weight", kv_rows, h), &w->k));
    ASSAY_RETURN_IF_ERROR(v.Visit(WholeMatrix(prefix + "v_proj.weight", kv_rows, h), &w->v));
    if (c.attention_bias) {
      ASSAY_RETURN_IF_ERROR(v.Visit(WholeVector(prefix + "q_proj.bias", q_rows), &w->q_bias));
      ASSAY_RETURN_IF_ERROR(v.Visit(WholeVector(prefix + "k_proj.bias", kv_rows), &w->k_bias));
      ASSAY_RETURN_IF_ERROR(v.Visit(WholeVector(prefix + "v_proj.bias", kv_rows), &w->v_bias));
    }
    if (c.qk_norm) {
      ASSAY_RETURN_IF_ERROR(v.Visit(WholeVector(prefix + "q_norm.weight", c.head_dim), &w->q_norm));
      ASSAY_RETURN_IF_ERROR(v.Visit(WholeVector(prefix + "k_norm.weight", c.head_dim), &w->k_norm));
    }
  }
  ASSAY_RETURN_IF_ERROR(v.Visit(WholeMatrix(prefix + "o_proj.weight", h, heads * c.value_head_dim()), &w->o));
  return c.o_bias ? v.Visit(WholeVector(prefix + "o_proj.bias", h), &w->o_bias) : Status();
}

// fused: HasFusedExperts of this layer. Sizes w->experts when with_experts.
template <class T, class Visitor>
Status VisitMoe(const ModelConfig& c, int64_t layer, bool fused, bool with_experts, LayerWeights<T>* w, Visitor& v) {
  const std::string prefix = LayerPrefix(layer) + "mlp.";
  const int64_t h = c.hidden_size, experts = c.n_routed_experts;
  ASSAY_RETURN_IF_ERROR(v.Visit(WholeMatrix(prefix + "gate.weight", experts, h), &w->router));
  if (c.correction_bias) {
    ASSAY_RETURN_IF_ERROR(v.Visit(WholeVector(prefix + "gate.e_score_correction_bias", experts), &w->router_bias));
  }
  if (with_experts) {
    w->experts.resize(static_cast<size_t>(experts));
    for (int64_t e = 0; e < experts; ++e) {
      ASSAY_RETURN_IF_ERROR(VisitExpert(c, layer, fused, e, &w->experts[static_cast<size_t>(e)], v));
    }
  }
  if (c.n_shared_experts > 0) {
    const std::string shared = prefix + (c.shared_expert_gate ? "shared_expert." : "shared_experts.");
    ASSAY_RETURN_IF_ERROR(VisitMlp(shared, c.shared_intermediate_size, h, &w->shared, v));
  }
  return c.shared_expert_gate ? v.Visit(WholeMatrix(prefix + "shared_expert_gate.weight", 1, h), &w->shared_gate)
                              : Status();
}

// Everything of one layer. with_experts false leaves the routed experts out, for callers that load them one by one.
template <class T, class Visitor>
Status VisitLayer(const ModelConfig& c, int64_t layer, bool fused, bool with_experts, LayerWeights<T>* w, Visitor& v) {
  const std::string prefix = LayerPrefix(layer);
  const int64_t h = c.hidden_size, f = c.intermediate_size;
  w->layer = layer;
  ASSAY_RETURN_IF_ERROR(v.Visit(WholeVector(prefix + "input_layernorm.weight", h), &w->input_norm));
  ASSAY_RETURN_IF_ERROR(v.Visit(WholeVector(prefix + "post_attention_layernorm.weight", h), &w->post_norm));
  if (c.sandwich_norm) {
    ASSAY_RETURN_IF_ERROR(v.Visit(WholeVector(prefix + "post_self_attn_layernorm.weight", h), &w->attn_out_norm));
    ASSAY_RETURN_IF_ERROR(v.Visit(WholeVector(prefix + "post_mlp_layernorm.weight", h), &w->mlp_out_norm));
  }
  ASSAY_RETURN_IF_ERROR(VisitAttention(c, prefix + "self_attn.", w, v));
  if (c.is_moe(layer)) return VisitMoe(c, layer, fused, with_experts, w, v);
  if (c.family == Family::kGlm4) {
    return VisitFusedMlp(prefix + "mlp.gate_up_proj.weight", prefix + "mlp.down_proj.weight", {}, 0, f, h, &w->mlp, v);
  }
  return VisitMlp(prefix + "mlp.", f, h, &w->mlp, v);
}

}  // namespace assay
