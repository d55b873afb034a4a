// Typed access to the weights of a checkpoint: which tensors a layer has, their shapes checked against the config, and
// their values decoded to float or double, one layer at a time, so that a model larger than memory can be run. How they
// are stored (plain, quantised, GGUF) is the business of src/quant.
//
// Every weight matrix is [out, in], row-major, as the checkpoint stores it: y = x W^T (model/gemm.h, Linear).
// Nothing is cached here: LoadLayer copies out of the mapped file and the caller drops the layer when done.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "io/safetensors.h"
#include "model/config.h"
#include "quant/weight_source.h"

namespace assay {

// Row-major, contiguous: element (r, c) is data[r * cols + c]. Absent: rows = cols = 0.
template <class T>
struct Matrix {
  int64_t rows = 0, cols = 0;
  std::vector<T> data;

  bool empty() const { return data.empty(); }
  const T* row(int64_t r) const { return data.data() + r * cols; }
  T* row(int64_t r) { return data.data() + r * cols; }
};

// Gated FFN: down(silu(gate x) * up x).
template <class T>
struct MlpWeights {
  Matrix<T> gate, up;  // [f, h]
  Matrix<T> down;      // [h, f]
};

// One decoder layer. h hidden, H heads, K kv heads, d head_dim, c kv_lora_rank, dn/dr/dv nope/rope/value head sizes.
// What the family or the layer does not have is empty.
template <class T>
struct LayerWeights {
  int64_t layer = -1;
  std::vector<T> input_norm, post_norm;        // [h]: before attention, before the FFN
  std::vector<T> attn_out_norm, mlp_out_norm;  // [h]: glm4 alone (sandwich_norm)

  // MLA. With a query latent q_a and q_b, otherwise q.
  Matrix<T> q_a;                      // [q_lora, h]
  std::vector<T> q_a_bias, q_a_norm;  // [q_lora]
  Matrix<T> q_b;                      // [H (dn + dr), q_lora]
  Matrix<T> kv_a;                     // [c + dr, h]
  std::vector<T> kv_a_bias;           // [c + dr]
  std::vector<T> kv_a_norm;           // [c]
  Matrix<T> kv_b;                     // [H (dn + dv), c], head by head: dn rows of W_UK, dv rows of W_UV

  // MHA and GQA; q also MLA without a query latent ([H (dn + dr), h]).
  Matrix<T> q, k, v;                      // [H d, h], [K d, h], [K d, h]
  std::vector<T> q_bias, k_bias, v_bias;  // [H d], [K d], [K d]
  std::vector<T> q_norm, k_norm;          // [d]
  Matrix<T> o;                            // [h, H d] (MLA: [h, H dv])
  std::vector<T> o_bias;                  // [h]

  MlpWeights<T> mlp;                   // dense layers
  Matrix<T> router;                    // [E, h]
  std::vector<T> router_bias;          // [E]: correction bias of the selection
  std::vector<MlpWeights<T>> experts;  // E, or empty when not asked for (then LoadExpert)
  MlpWeights<T> shared;                // all shared experts as one FFN
  Matrix<T> shared_gate;               // [1, h]: qwen2_moe
};

template <class T>
// What stands behind the last layer.
struct EndWeights {
  std::vector<T> final_norm;  // [h]
  Matrix<T> lm_head;          // [vocab, h]; tied models: the embedding again
};

// The tensors of one checkpoint under one config. Immutable; may be used from several threads.
class WeightStore {
 public:
  // Checks every tensor that the config asks for (presence, shape, dtype) and that no other tensor is there which
  // would have to take part. kBadInput names tensor, file and offset.
  static Result<std::shared_ptr<const WeightStore>> Open(std::shared_ptr<const WeightSource> source,
                                                         const ModelConfig& config);
  // Safetensors whose quantised weights, if any, say all about themselves (no quantization_config).
  static Result<std::shared_ptr<const WeightStore>> Open(std::shared_ptr<const Checkpoint> checkpoint,
                                                         const ModelConfig& config);
  ~WeightStore();

  // T is float or double. 0 <= layer < n_layers (kUsage otherwise). with_experts false leaves experts empty.
  template <class T>
  Result<LayerWeights<T>> LoadLayer(int64_t layer, bool with_experts = true) const;
  // The routed expert of a MoE layer, 0 <= expert < n_routed_experts.
  template <class T>
  Result<MlpWeights<T>> LoadExpert(int64_t layer, int64_t expert) const;
  template <class T>
  Result<EndWeights<T>> LoadEnd() const;
  // Rows of the embedding for the given token ids: [ids, h]. kUsage: an id outside the vocabulary.
  template <class T>
  Result<Matrix<T>> LoadEmbedding(const std::vector<int64_t>& ids) const;

  const ModelConfig& config() const;
  const WeightSource& source() const;
  // Tensors left out on purpose (draft layers, indexer, a stored copy of a tied head), one sentence each.
  const std::vector<std::string>& notes() const;
  // Bytes that LoadLayer<float>(layer) allocates, experts included; callers decide with it what to keep.
  int64_t layer_bytes_f32(int64_t layer) const;

 private:
  WeightStore();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

extern template Result<LayerWeights<float>> WeightStore::LoadLayer<float>(int64_t, bool) const;
extern template Result<LayerWeights<double>> WeightStore::LoadLayer<double>(int64_t, bool) const;
extern template Result<MlpWeights<float>> WeightStore::LoadExpert<float>(int64_t, int64_t) const;
extern template Result<MlpWeights<double>> WeightStore::LoadExpert<double>(int64_t, int64_t) const;
extern template Result<EndWeights<float>> WeightStore::LoadEnd<float>() const;
extern template Result<EndWeights<double>> WeightStore::LoadEnd<double>() const;
extern template Result<Matrix<float>> WeightStore::LoadEmbedding<float>(const std::vector<int64_t>&) const;
extern template Result<Matrix<double>> WeightStore::LoadEmbedding<double>(const std::vector<int64_t>&) const;

}  // namespace assay
