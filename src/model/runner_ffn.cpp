// Feed-forward layers: the gated MLP and the mixture of experts. FFN channels of every expert are cut over the ranks;
// routing is computed by every rank. Routed and shared experts are reduced each by itself, then added.
#include <algorithm>
#include <cmath>

#include "model/gemm.h"
#include "model/runner.h"

namespace assay {
namespace {

// exp(-x) may overflow to infinity for large negative x; the result is then 0, as it should be.
template <class T>
T Sigmoid(T x) {
  return T{1} / (T{1} + std::exp(-x));
}

// act = silu(gate) * up.
template <class T>
void GatedProduct(const T* gate, const T* up, int64_t n, const Numerics& numerics, T* act) {
  for (int64_t i = 0; i < n; ++i) act[i] = gate[i] * Sigmoid(gate[i]);
  numerics.Round(act, n);
  for (int64_t i = 0; i < n; ++i) act[i] *= up[i];
  numerics.Round(act, n);
}

}  // namespace

// SwiGLU (Shazeer, arXiv 2002.05202): down(silu(gate x) * up x). gate and up [f, h] are cut by rows, down [h, f] by
// columns, so that each rank's result is a part of a sum over ranks.
template <class T>
void Runner<T>::DenseFfn(const StepRows& step, int64_t layer, const Weights& w) {
  const int64_t h = config_.hidden_size, rows = step.rows, total = config_.intermediate_size;
  for (Rank<T>& rank : ranks_) {
    const Slice f = SliceOf(total, rank.index, options_.shards);
    const int64_t n = f.size();
    T* gate = Fit(&rank.gate, rows * n);
    T* up = Fit(&rank.up, rows * n);
    T* act = Fit(&rank.act, rows * n);
    Project(rank.normed.data(), h, w.mlp.gate.row(f.begin), h, nullptr, gate, n, rows, n, h);
    Project(rank.normed.data(), h, w.mlp.up.row(f.begin), h, nullptr, up, n, rows, n, h);
    const bool swapped = fault_.at(FaultId::kMlpGateUpSwapped, layer);
    GatedProduct(swapped ? up : gate, swapped ? gate : up, rows * n, numerics_, act);
    Project(act, n, w.mlp.down.data.data() + f.begin, total, nullptr, Fit(&rank.part, rows * h), h, rows, h, n);
    if (!tap_->on()) continue;
    const Tap::Where where{.layer = layer, .rank = rank.index, .shard = ColumnShard(rank, f, total)};
    tap_->Record("mlp.gate", "T f", DenseView(gate, {rows, n}), where);
    tap_->Record("mlp.up", "T f", DenseView(up, {rows, n}), where);
    tap_->Record("mlp.act", "T f", DenseView(act, {rows, n}), where);
  }
  AllReduce(step, layer, "mlp.down", &Rank<T>::part, false, fault_.at(FaultId::kMlpReducedTwice, layer));
}

// out [rows, h] = the share of FFN channels f in down(silu(gate x) * up x). layout: how gate and up are told apart.
template <class T>
void Runner<T>::GatedMlp(const MlpWeights<T>& w, Slice f, const T* x, int64_t rows, GateLayout layout, Rank<T>& rank,
                         T* out) {
  const int64_t h = w.gate.cols, n = f.size();
  T* gate = Fit(&rank.gate, rows * n);
  T* up = Fit(&rank.up, rows * n);
  T* act = Fit(&rank.act, rows * n);
  Project(x, h, w.gate.row(f.begin), h, nullptr, gate, n, rows, n, h);
  Project(x, h, w.up.row(f.begin), h, nullptr, up, n, rows, n, h);
  if (layout == GateLayout::kSwapped) std::swap_ranges(gate, gate + rows * n, up);
  if (layout == GateLayout::kInterleaved) {
    // The fused product comes out as [gate | up] and is read as pairs (gate, up).
    std::vector<T> joint(static_cast<size_t>(2 * n));
    for (int64_t t = 0; t < rows; ++t) {
      std::copy_n(gate + t * n, n, joint.data());
      std::copy_n(up + t * n, n, joint.data() + n);
      for (int64_t i = 0; i < n; ++i) {
        gate[t * n + i] = joint[static_cast<size_t>(2 * i)];
        up[t * n + i] = joint[static_cast<size_t>(2 * i + 1)];
      }
    }
  }
  GatedProduct(gate, up, rows * n, numerics_, act);
  Project(act, n, w.down.data.data() + f.begin, w.down.cols, nullptr, out, h, rows, h, n);
}

// Rows of one expert are gathered, go through it together, and are added to their sums, scaled by their weights. Each
// product is rounded and each partial sum, as eager code does that adds expert by expert.
template <class T>
Status Runner<T>::RoutedExperts(const StepRows& step, int64_t layer, const Weights& w, Rank<T>& rank) {
  const int64_t h = config_.hidden_size, rows = step.rows, k = config_.n_experts_per_tok, n = config_.n_routed_experts;
  const Slice f = SliceOf(config_.moe_intermediate_size, rank.index, options_.shards);
  GateLayout layout = GateLayout::kRight;
  if (fault_.at(FaultId::kMoeGateUpSwapped, layer)) layout = GateLayout::kSwapped;
  if (fault_.at(FaultId::kMoeGateUpInterleaved, layer)) layout = GateLayout::kInterleaved;
  T* routed = Fit(&rank.routed, rows * h);
  // Sums begin at 0, the workspace does not.
  std::fill_n(routed, rows * h, T{0});
  for (int64_t e = 0; e < n; ++e) {  // ascending experts: the order in which a row's parts are added
    expert_rows_.clear();
    for (int64_t i = 0; i < rows * k; ++i) {
      if (rank.routing.ids[static_cast<size_t>(i)] == e) expert_rows_.push_back(i);
    }
    const auto m = static_cast<int64_t>(expert_rows_.size());
    if (m == 0) continue;
    T* in = Fit(&gather_, m * h);
    T* out = Fit(&spare_, m * h);
    for (int64_t i = 0; i < m; ++i) {
      std::copy_n(rank.normed.data() + expert_rows_[static_cast<size_t>(i)] / k * h, h, in + i * h);
    }
    const int64_t used = fault_.at(FaultId::kMoeExpertOffByOne, layer) ? (e + 1) % n : e;
    MlpWeights<T> loaded;
    // Only experts that some row goes to are read from the file.
    const bool streamed = w.experts.empty();
    if (streamed) {
      ASSAY_ASSIGN_OR_RETURN(loaded, store_->template LoadExpert<T>(layer, used));
    }
    GatedMlp(streamed ? loaded : w.experts[static_cast<size_t>(used)], f, in, m, layout, rank, out);
    for (int64_t i = 0; i < m; ++i) {
      const int64_t choice = expert_rows_[static_cast<size_t>(i)];
      const T weight = static_cast<T>(rank.routing.weights[static_cast<size_t>(choice)]);
      T* sum = routed + choice / k * h;
      for (int64_t j = 0; j < h; ++j) out[i * h + j] *= weight;
      numerics_.Round(out + i * h, h);
      for (int64_t j = 0; j < h; ++j) sum[j] += out[i * h + j];
      numerics_.Round(sum, h);
    }
  }
  return {};
}

// routed + shared to part [T, h]. Every rank routes for itself, from the same logits.
template <class T>
Status Runner<T>::MoeFfn(const StepRows& step, int64_t layer, const Weights& w) {
  const int64_t h = config_.hidden_size, rows = step.rows, n = config_.n_routed_experts, k = config_.n_experts_per_tok;
  const bool has_shared = !w.shared.gate.empty();
  // For one planted fault and its clean twin the shared experts are replicated: every rank computes all channels.
  const bool replicated = fault_.def != nullptr && fault_.def->id == FaultId::kSharedPerRank;
  const bool bf16_router = fault_.at(FaultId::kRouterBf16, layer);
  RoutingFaults faults;
  faults.skip_renormalise = fault_.at(FaultId::kMoeNoRenorm, layer);
  faults.bias_in_weights = fault_.at(FaultId::kMoeBiasInWeights, layer);
  faults.skip_scaling = fault_.at(FaultId::kMoeScalingDropped, layer);
  for (Rank<T>& rank : ranks_) {
    T* logits = Fit(&rank.router, rows * n);
    // The sigmoid families keep the router in float whatever the run's type; the others round it like any linear.
    Linear(rank.normed.data(), h, w.router.data.data(), h, logits, n, rows, n, h);
    if (!config_.scoring_sigmoid) numerics_.Round(logits, rows * n);
    if (bf16_router) Numerics{true}.Round(logits, rows * n);
    Route(config_, logits, w.router_bias.empty() ? nullptr : w.router_bias.data(), rows, faults, &rank.routing);
    if (tap_->on()) {
      const Tap::Where where{.layer = layer, .rank = rank.index};
      // Routing is in double; what is recorded has the run's type, as RoutedExperts uses it.
      T* weights = Fit(&record_, rows * k);
      for (int64_t i = 0; i < rows * k; ++i) weights[i] = static_cast<T>(rank.routing.weights[static_cast<size_t>(i)]);
      tap_->Record("moe.router_logits", "T E", DenseView(logits, {rows, n}), where);
      tap_->Record("moe.topk_ids.margin", "T", DenseView(rank.routing.margins.data(), {rows}), where);
      tap_->Record("moe.topk_ids", "T k", DenseView(rank.routing.ids.data(), {rows, k}), where);
      tap_->Record("moe.topk_weights", "T k", DenseView(weights, {rows, k}), where);
    }
    ASSAY_RETURN_IF_ERROR(RoutedExperts(step, layer, w, rank));
    if (!has_shared) continue;
    T* shared = Fit(&rank.shared, rows * h);
    const Slice f = replicated ? Slice{0, config_.shared_intermediate_size}
                               : SliceOf(config_.shared_intermediate_size, rank.index, options_.shards);
    GatedMlp(w.shared, f, rank.normed.data(), rows, GateLayout::kRight, rank, shared);
    for (int64_t t = 0; !w.shared_gate.empty() && t < rows; ++t) {
      T gate = 0;
      Project(rank.normed.data() + t * h, h, w.shared_gate.data.data(), h, nullptr, &gate, 1, 1, 1, h);
      gate = Sigmoid(gate);
      numerics_.Round(&gate, 1);
      for (int64_t j = 0; j < h; ++j) shared[t * h + j] *= gate;
      numerics_.Round(shared + t * h, h);
    }
  }
  AllReduce(step, layer, "moe.routed", &Rank<T>::routed, fault_.at(FaultId::kRoutedNotReduced, layer));
  if (has_shared && replicated) {
    for (Rank<T>& rank : ranks_) {
      if (!tap_->on()) break;
      tap_->Record("moe.shared", "T h", DenseView(rank.shared.data(), {rows, h}), {.layer = layer, .rank = rank.index});
    }
    // Each rank holds the whole; added on every rank before the sum over ranks, it is counted once a rank.
    if (fault_.at(FaultId::kSharedPerRank, layer)) SumOverRanks(&Rank<T>::shared, rows * h);
  } else if (has_shared) {
    AllReduce(step, layer, "moe.shared", &Rank<T>::shared, false, fault_.at(FaultId::kSharedReducedTwice, layer));
  }
  for (Rank<T>& rank : ranks_) {
    T* part = Fit(&rank.part, rows * h);
    for (int64_t i = 0; i < rows * h; ++i) {
      part[i] = rank.routed[static_cast<size_t>(i)] + (has_shared ? rank.shared[static_cast<size_t>(i)] : T{0});
    }
    numerics_.Round(part, rows * h);
    if (tap_->on()) {
      tap_->Record("moe.out", "T h", DenseView(part, {rows, h}), {.layer = layer, .rank = rank.index});
    }
  }
  return {};
}

template class Runner<float>;
template class Runner<double>;

}  // namespace assay
