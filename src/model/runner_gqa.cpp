// Multi-head and grouped-query attention: projections, optional biases and q/k norm, rotation, cache, attention.
// Hl local query heads, Kl local kv heads, d head size.
#include <algorithm>

#include "model/norm.h"
#include "model/runner.h"

namespace assay {

// normed [T, h] to q [T, Hl, d], k and v [T, Kl, d], and kv_rows [T, Kl, 2 d]: for each kv head its key, then its
// value.
template <class T>
void Runner<T>::GqaProject(const StepRows& step, int64_t layer, const Weights& w, Rank<T>& rank) {
  const int64_t h = config_.hidden_size, rows = step.rows, d = config_.head_dim;
  const int64_t local = rank.heads.size(), kv_local = rank.kv_heads.size();
  const Tap::Where q_where{.layer = layer, .rank = rank.index, .shard = HeadShard(rank, d)};
  const Tap::Where kv_where{.layer = layer, .rank = rank.index, .shard = KvHeadShard(rank, d)};
  const bool tap = tap_->on();
  const auto project = [&](const Matrix<T>& weight, const std::vector<T>& bias, int64_t first, int64_t heads,
                           std::vector<T>* out) {
    Project(rank.normed.data(), h, weight.row(first * d), h, bias.empty() ? nullptr : bias.data() + first * d,
            Fit(out, rows * heads * d), heads * d, rows, heads * d, h);
    return out->data();
  };
  const int64_t q_first = fault_.at(FaultId::kRankLoadsShard0, layer) ? 0 : rank.heads.begin;
  T* q = project(w.q, w.q_bias, q_first, local, &rank.q);
  T* k = project(w.k, w.k_bias, rank.kv_heads.begin, kv_local, &rank.k);
  T* v = project(w.v, w.v_bias, rank.kv_heads.begin, kv_local, &rank.v);
  if (tap) {
    tap_->Record("attn.q_proj", "T H d", DenseView(q, {rows, local, d}), q_where);
    tap_->Record("attn.k_proj", "T H d", DenseView(k, {rows, kv_local, d}), kv_where);
    tap_->Record("attn.v_proj", "T H d", DenseView(v, {rows, kv_local, d}), kv_where);
  }
  if (config_.qk_norm) {
    RmsNorm(q, d, w.q_norm.data(), config_.rms_norm_eps, q, d, rows * local, d, numerics_);
    if (!fault_.at(FaultId::kKNormSkipped, layer)) {
      RmsNorm(k, d, w.k_norm.data(), config_.rms_norm_eps, k, d, rows * kv_local, d, numerics_);
    }
  }
  // Faults of positions and of the table turn queries and keys alike; kRopeQueryOffByOne the queries alone.
  const bool both = fault_.at(FaultId::kDecodePositionZero, layer) || fault_.at(FaultId::kPrefixGap, layer) ||
                    fault_.at(FaultId::kGraphStalePositions, layer) ||
                    fault_.at(FaultId::kYarnAttentionFactorDropped, layer);
  const RopeRows<T>& k_rope = both ? fault_rope_ : rope_;
  const RopeRows<T>& q_rope = both || fault_.at(FaultId::kRopeQueryOffByOne, layer) ? fault_rope_ : rope_;
  const bool pairing = config_.rope.interleaved != fault_.at(FaultId::kRopePairing, layer);
  T* kv_rows = Fit(&rank.kv_rows, rows * kv_local * 2 * d);
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t i = 0; i < local; ++i) q_rope.Rotate(q + (t * local + i) * d, t, pairing);
    for (int64_t i = 0; i < kv_local; ++i) {
      T* key = k + (t * kv_local + i) * d;
      k_rope.Rotate(key, t, pairing);
      numerics_.Round(key, d);
      std::copy_n(key, d, kv_rows + (t * kv_local + i) * 2 * d);
      std::copy_n(v + (t * kv_local + i) * d, d, kv_rows + (t * kv_local + i) * 2 * d + d);
    }
  }
  // Rounded after the loop, all heads at once; keys were rounded in it, before they went into the cache row.
  numerics_.Round(q, rows * local * d);
  if (!tap) return;
  tap_->Record("attn.q", "T H d", DenseView(q, {rows, local, d}), q_where);
  tap_->Record("attn.k", "T H d", DenseView(k, {rows, kv_local, d}), kv_where);
  tap_->Record("attn.v", "T H d", DenseView(v, {rows, kv_local, d}), kv_where);
}

// Everything is read from the cache, the step's own rows too: what attention sees has been through the cache's
// rounding.
template <class T>
void Runner<T>::GqaAttention(const StepRows& step, int64_t layer, Rank<T>& rank) {
  const int64_t rows = step.rows, d = config_.head_dim, local = rank.heads.size(), kv_local = rank.kv_heads.size();
  KvLayer<T>& kv = rank.kv[static_cast<size_t>(layer)];
  T* out = Fit(&rank.attn_out[static_cast<size_t>(layer)], rows * local * d);
  T* lse = Fit(&rank.lse, rows * local);
  const AttentionShape shape = ShapeOf(layer, d, d);
  for (size_t s = 0; s < step.sequences.size(); ++s) {
    const StepSequence& seq = step.sequences[s];
    const std::vector<int32_t> table = ReadTable(step, s, layer);
    const RunSource source = [&](int64_t begin, int64_t end, std::vector<KvRun<T>>* runs) {
      kv.Gather(table, begin, end, ReadScale(layer, kv), &gather_, runs);
    };
    QueryView<T> query{rank.q.data() + seq.first_row * local * d, local * d, d, seq.n_rows, local, seq.first_position};
    if (fault_.at(FaultId::kQueryHeadStride, layer)) query.head_stride = 0;
    KvView<T> view{{}, kv_local * 2 * d, 2 * d, 0, d, local / kv_local};
    if (fault_.at(FaultId::kGqaHeadMapping, layer)) view.interleaved = kv_local;  // h % K in place of h / group
    const int64_t written = RowsWritten(seq, layer);
    T* target = out + seq.first_row * local * d;
    T* result = written == seq.n_rows ? target : Fit(&spare_, seq.n_rows * local * d);
    AttendSequence(step, s, layer, rank, query, view, shape, source, result, local * d, lse + seq.first_row * local);
    numerics_.Round(result, seq.n_rows * local * d);
    if (result != target) std::copy_n(result, written * local * d, target);
  }
  RecordLse(step, layer, rank);
}

template class Runner<float>;
template class Runner<double>;

}  // namespace assay
