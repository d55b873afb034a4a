#include "model/runner.h"

#include <algorithm>
#include <cmath>

#include "model/gemm.h"
#include "model/norm.h"
#include "model/variants.h"

namespace assay {

template <class T>
Runner<T>::Runner(std::shared_ptr<const WeightStore> store, const ModelConfig& config, const EngineOptions& options,
                  const FaultPlan& fault)
    : store_(std::move(store)), config_(config), options_(options), fault_(fault) {
  numerics_.bf16 = options.dtype == ComputeDType::kBF16;
  compute_ = numerics_.bf16 ? DType::kBF16 : sizeof(T) == 8 ? DType::kF64 : DType::kF32;
  switch (options.kv_dtype) {
    case KvDType::kAuto:
      kv_dtype_ = compute_;
      break;
    case KvDType::kF32:
      kv_dtype_ = DType::kF32;
      break;
    case KvDType::kBF16:
      kv_dtype_ = DType::kBF16;
      break;
    case KvDType::kFp8E4M3:
      kv_dtype_ = DType::kF8E4M3FN;
      break;
  }
  // The coarser of the two rounds what attention reads; events of attention say so, as bounds follow it.
  attention_compute_ = UnitRoundoff(kv_dtype_) > UnitRoundoff(compute_) ? kv_dtype_ : compute_;
  softmax_scale_ = SoftmaxScale(config);
  rope_table_ = MakeRopeTable(config);
  const int n = options.shards;
  ranks_.resize(static_cast<size_t>(n));
  for (int r = 0; r < n; ++r) {
    Rank<T>& rank = ranks_[static_cast<size_t>(r)];
    rank.index = r;
    rank.heads = SliceOf(config.n_heads, r, n);
    // Fewer kv heads than ranks: ranks share one, each with its own copy.
    rank.kv_heads = config.n_kv_heads >= n ? SliceOf(config.n_kv_heads, r, n)
                                           : Slice{r * config.n_kv_heads / n, r * config.n_kv_heads / n + 1};
  }
  kept_.resize(static_cast<size_t>(config.n_layers));
  wuk_t_.resize(static_cast<size_t>(config.n_layers));
}

// Weights stay: they do not depend on the run. Everything that a request could have left behind goes.
template <class T>
void Runner<T>::Reset(Tap* tap) {
  tap_ = tap;
  const auto layers = static_cast<size_t>(config_.n_layers);
  for (Rank<T>& rank : ranks_) {
    const Slice heads = rank.heads, kv_heads = rank.kv_heads;
    const int index = rank.index;
    // Buffers, caches and memos of the run before go with it.
    rank = Rank<T>();
    rank.index = index;
    rank.heads = heads;
    rank.kv_heads = kv_heads;
    rank.attn_out.resize(layers);
    rank.kv.resize(layers);
    rank.memo.resize(layers);
    // Elements of one row of the cache: latent and rotary key, or key and value of each kv head.
    const int64_t width =
        config_.mla() ? config_.kv_lora_rank + config_.qk_rope_head_dim : kv_heads.size() * 2 * config_.head_dim;
    for (KvLayer<T>& kv : rank.kv) {
      kv.Configure(kv_dtype_, width, options_.block_size);
      kv.set_scale(options_.kv_scale > 0 ? options_.kv_scale : 1.0);
    }
  }
  // A scale that was not given is found from the first rows written.
  scale_set_.assign(layers, options_.kv_scale > 0);
  partials_.clear();
  graph_positions_.clear();
  spare_.clear();
}

template <class T>
Result<const LayerWeights<T>*> Runner<T>::Load(int64_t layer) {
  auto& kept = kept_[static_cast<size_t>(layer)];
  if (kept) return kept.get();
  // Streaming also leaves the routed experts on disk until a row goes to one (RoutedExperts).
  const bool with_experts = !options_.stream;
  ASSAY_ASSIGN_OR_RETURN(Weights loaded, store_->LoadLayer<T>(layer, with_experts));
  auto weights = std::make_unique<Weights>(std::move(loaded));
  if (fault_.def != nullptr) ApplyVariant(config_, fault_, layer, weights.get());
  if (config_.mla() && options_.path == AttentionPath::kAbsorbed) {
    // W_UK as [H, c, dn]: q_nope (dn) through W_UK^T gives the latent query (c), as a linear layer.
    const int64_t c = config_.kv_lora_rank, dn = config_.qk_nope_head_dim, dv = config_.v_head_dim;
    std::vector<T>& out = wuk_t_[static_cast<size_t>(layer)];
    out.resize(static_cast<size_t>(config_.n_heads * c * dn));
    for (int64_t head = 0; head < config_.n_heads; ++head) {
      const T* w = weights->kv_b.row(head * (dn + dv));
      T* o = out.data() + head * c * dn;
      for (int64_t i = 0; i < dn; ++i) {
        // Transposed once a layer: the projection then reads rows.
        for (int64_t j = 0; j < c; ++j) o[j * dn + i] = w[i * c + j];
      }
    }
  }
  if (!options_.stream) {
    kept = std::move(weights);
    return kept.get();
  }
  // One layer in memory at a time, with what was derived from it.
  if (streamed_ && streamed_->layer != layer) wuk_t_[static_cast<size_t>(streamed_->layer)] = {};
  streamed_ = std::move(weights);
  return streamed_.get();
}

// Rotations are made here too, as they depend on the step's positions alone. Planted faults of positions get a table
// of their own, which only the faulty layers use.
template <class T>
Status Runner<T>::Embed(const StepRows& step, const T* given) {
  const int64_t h = config_.hidden_size, rows = step.rows;
  Matrix<T> embedding;
  if (given == nullptr) {
    std::vector<int64_t> ids = step.ids;
    if (fault_.is(FaultId::kEmbedRowOff)) {
      for (int64_t& id : ids) id = std::min(id + 1, config_.vocab_size - 1);
    }
    ASSAY_ASSIGN_OR_RETURN(embedding, store_->LoadEmbedding<T>(ids));
    numerics_.Round(embedding.data.data(), rows * h);
    given = embedding.data.data();
  }
  for (Rank<T>& rank : ranks_) {
    std::copy_n(given, rows * h, Fit(&rank.x, rows * h));
    if (tap_->on() && !embedding.empty()) {
      tap_->Record("embed", "T h", DenseView(rank.x.data(), {rows, h}), {.rank = rank.index});
    }
  }

  rope_.Build(rope_table_, step.positions);
  if (fault_.id != FaultId::kNone) {
    RopeTable table = rope_table_;
    std::vector<int64_t> positions = step.positions;
    if (fault_.is(FaultId::kYarnAttentionFactorDropped)) table.scaling = 1.0;
    for (const StepSequence& s : step.sequences) {
      for (int64_t i = 0; i < s.n_rows; ++i) {
        int64_t& p = positions[static_cast<size_t>(s.first_row + i)];
        if (fault_.is(FaultId::kRopeQueryOffByOne)) p += 1;
        if (fault_.is(FaultId::kDecodePositionZero) && s.decode) p = 0;
        if (fault_.is(FaultId::kPrefixGap) && s.prefix_hit) p -= 1;
        if (fault_.is(FaultId::kGraphStalePositions) && s.decode) {
          // The captured graph keeps the position tensor of its first replay, a place for each request.
          if (static_cast<int64_t>(graph_positions_.size()) <= s.request)
            graph_positions_.resize(static_cast<size_t>(s.request) + 1, -1);
          int64_t& captured = graph_positions_[static_cast<size_t>(s.request)];
          if (captured < 0) captured = p;
          p = captured;
        }
      }
    }
    fault_rope_.Build(table, positions);
  }
  return {};
}

// Pre-norm layers: x += attention(norm(x)); x += ffn(norm(x)).
template <class T>
Status Runner<T>::Layers(const StepRows& step, int64_t cache_blocks) {
  const int64_t h = config_.hidden_size, rows = step.rows;
  const int64_t last = options_.last_layer < 0 ? config_.n_layers : options_.last_layer;
  for (int64_t layer = options_.first_layer; layer < last; ++layer) {
    ASSAY_ASSIGN_OR_RETURN(const Weights* w, Load(layer));
    // Weights do not change: once a run is enough.
    if (step.step == 0) RecordWeights(layer, *w);
    for (Rank<T>& rank : ranks_) {
      rank.kv[static_cast<size_t>(layer)].Grow(cache_blocks);
      RmsNorm(rank.x.data(), h, w->input_norm.data(), config_.rms_norm_eps, Fit(&rank.normed, rows * h), h, rows, h,
              numerics_);
      if (fault_.at(FaultId::kNormOverShard, layer)) {
        // Statistics over this rank's own columns of the row, as if the sum of squares were never reduced.
        const Slice own = SliceOf(h, rank.index, options_.shards);
        for (int64_t t = 0; t < rows; ++t) {
          double sum_sq = 0;
          for (int64_t i = own.begin; i < own.end; ++i) {
            const double v = static_cast<double>(rank.x[static_cast<size_t>(t * h + i)]);
            sum_sq += v * v;
          }
          const T scale =
              static_cast<T>(1.0 / std::sqrt(sum_sq / static_cast<double>(own.size()) + config_.rms_norm_eps));
          for (int64_t i = 0; i < h; ++i) {
            rank.normed[static_cast<size_t>(t * h + i)] =
                rank.x[static_cast<size_t>(t * h + i)] * scale * w->input_norm[static_cast<size_t>(i)];
          }
        }
      }
      if (tap_->on()) {
        tap_->Record("input_norm", "T h", DenseView(rank.normed.data(), {rows, h}),
                     {.layer = layer, .rank = rank.index});
      }
    }
    AttentionPart(step, layer, *w);
    const bool stale = fault_.at(FaultId::kFusedStaleResidual, layer);
    const bool no_weight = fault_.at(FaultId::kPostNormWeightMissing, layer);
    for (Rank<T>& rank : ranks_) {
      Fit(&rank.normed, rows * h);
      if (stale) {  // the fused kernel reads the residual before the sum is in it
        RmsNorm(rank.x.data(), h, w->post_norm.data(), config_.rms_norm_eps, rank.normed.data(), h, rows, h, numerics_);
      }
    }
    AddResidual(step, w->attn_out_norm);
    for (Rank<T>& rank : ranks_) {
      if (!stale) {
        RmsNorm(rank.x.data(), h, no_weight ? nullptr : w->post_norm.data(), config_.rms_norm_eps, rank.normed.data(),
                h, rows, h, numerics_);
      }
      if (tap_->on()) {
        tap_->Record("post_norm", "T h", DenseView(rank.normed.data(), {rows, h}),
                     {.layer = layer, .rank = rank.index});
      }
    }
    if (config_.is_moe(layer)) {
      ASSAY_RETURN_IF_ERROR(MoeFfn(step, layer, *w));
    } else {
      DenseFfn(step, layer, *w);
    }
    AddResidual(step, w->mlp_out_norm);
    for (Rank<T>& rank : ranks_) {
      if (fault_.at(FaultId::kResidualBf16, layer)) Numerics{true}.Round(rank.x.data(), rows * h);
      if (tap_->on()) {
        tap_->Record("out", "T h", DenseView(rank.x.data(), {rows, h}), {.layer = layer, .rank = rank.index});
      }
    }
  }
  return tap_->status();
}

// Ranks own columns of the vocabulary and write side by side into one buffer: gathering is no sum.
template <class T>
Result<const T*> Runner<T>::Logits(const StepRows& step, std::span<const int64_t> rows, std::span<const RowRun> runs) {
  const int64_t h = config_.hidden_size, vocab = config_.vocab_size, n = static_cast<int64_t>(rows.size());
  if (!end_) {
    ASSAY_ASSIGN_OR_RETURN(EndWeights<T> end, store_->template LoadEnd<T>());
    end_ = std::make_unique<EndWeights<T>>(std::move(end));
    if (fault_.is(FaultId::kLmHeadTied)) {
      std::vector<int64_t> ids(static_cast<size_t>(vocab));
      for (int64_t i = 0; i < vocab; ++i) ids[static_cast<size_t>(i)] = i;
      ASSAY_ASSIGN_OR_RETURN(end_->lm_head, store_->template LoadEmbedding<T>(ids));
    }
    if (tap_->on()) tap_->Record("norm.weight", "d", DenseView(end_->final_norm.data(), {h}), Tap::Where{.load = true});
  }
  Fit(&logits_, n * vocab);
  for (Rank<T>& rank : ranks_) {
    RmsNorm(rank.x.data(), h, end_->final_norm.data(), config_.rms_norm_eps, Fit(&rank.normed, step.rows * h), h,
            step.rows, h, numerics_);
    if (tap_->on()) {
      tap_->Record("final_norm", "T h", DenseView(rank.normed.data(), {step.rows, h}), {.rank = rank.index});
    }
    // Only the rows that were asked for go through the head, the widest product of the model.
    T* picked = Fit(&rank.part, n * h);
    for (int64_t i = 0; i < n; ++i) {
      std::copy_n(rank.normed.data() + rows[static_cast<size_t>(i)] * h, h, picked + i * h);
    }
    const Slice columns = SliceOf(vocab, rank.index, options_.shards);
    Project(picked, h, end_->lm_head.row(columns.begin), h, nullptr, logits_.data() + columns.begin, vocab, n,
            columns.size(), h);
    if (tap_->on()) {
      tap_->Record("logits", "T vocab", StridedView(logits_.data() + columns.begin, {n, columns.size()}, {vocab, 1}),
                   {.rank = rank.index, .shard = ColumnShard(rank, columns, vocab), .runs = runs});
    }
  }
  return static_cast<const T*>(logits_.data());
}

template <class T>
void Runner<T>::Forget(int64_t request) {
  for (Rank<T>& rank : ranks_) {
    for (auto& layer : rank.memo) layer.erase(request);
  }
}

// Small weights, and those that attention derives, once a run, under the phase "load", whole (ranks see slices of the
// same memory, so rank 0 speaks for all). Checks judge norms, the router's choice and the absorbed path by them.
template <class T>
void Runner<T>::RecordWeights(int64_t layer, const Weights& w) {
  if (!tap_->on()) return;
  const Tap::Where loaded{.layer = layer, .load = true};
  const auto record = [&](const char* name, const std::vector<T>& v) {
    if (!v.empty()) tap_->Record(name, "d", DenseView(v.data(), {static_cast<int64_t>(v.size())}), loaded);
  };
  record("input_layernorm.weight", w.input_norm);
  record("post_attention_layernorm.weight", w.post_norm);
  record("attn.q_a_layernorm.weight", w.q_a_norm);
  record("attn.kv_a_layernorm.weight", w.kv_a_norm);
  record("attn.q_norm.weight", w.q_norm);
  record("attn.k_norm.weight", w.k_norm);
  record("mlp.gate.e_score_correction_bias", w.router_bias);
  if (w.router.rows > 0)
    tap_->Record("mlp.gate.weight", "E h", DenseView(w.router.row(0), {w.router.rows, w.router.cols}), loaded);
  if (!config_.mla()) return;
  const int64_t n = config_.n_heads, c = config_.kv_lora_rank, dn = config_.qk_nope_head_dim, dv = config_.v_head_dim;
  const Tap::Where where{.layer = layer, .load = true};
  tap_->Record("attn.kv_b_proj.weight", "o c", DenseView(w.kv_b.row(0), {n * (dn + dv), c}), where);
  if (options_.path != AttentionPath::kAbsorbed) return;
  tap_->Record("attn.W_UK_T", "H c dn", DenseView(wuk_t_[static_cast<size_t>(layer)].data(), {n, c, dn}), where);
  tap_->Record("attn.W_UV", "H dv c", StridedView(w.kv_b.row(dn), {n, dv, c}, {(dn + dv) * c, c, 1}), where);
}

// Rounded once, bias included, as eager code does that adds it inside the product.
template <class T>
void Runner<T>::Project(const T* x, int64_t ldx, const T* w, int64_t ldw, const T* bias, T* y, int64_t ldy, int64_t m,
                        int64_t n, int64_t k) const {
  Linear(x, ldx, w, ldw, y, ldy, m, n, k);
  if (bias == nullptr && !numerics_.bf16) return;
  for (int64_t r = 0; r < m; ++r) {
    T* row = y + r * ldy;
    for (int64_t i = 0; bias != nullptr && i < n; ++i) row[i] += bias[i];
    numerics_.Round(row, n);
  }
}

// A fixed order of addition: results do not depend on which rank is done first. In bf16 rounded once, at the end.
template <class T>
void Runner<T>::SumOverRanks(std::vector<T> Rank<T>::*part, int64_t n) {
  T* sum = Fit(&reduced_, n);
  std::copy_n((ranks_[0].*part).data(), n, sum);
  for (size_t r = 1; r < ranks_.size(); ++r) {
    const T* in = (ranks_[r].*part).data();
    for (int64_t i = 0; i < n; ++i) sum[i] += in[i];
  }
  numerics_.Round(sum, n);
  for (Rank<T>& rank : ranks_) std::copy_n(sum, n, (rank.*part).data());
}

template <class T>
void Runner<T>::AllReduce(const StepRows& step, int64_t layer, std::string_view name, std::vector<T> Rank<T>::*part,
                          bool skip, bool twice) {
  const int64_t h = config_.hidden_size;
  const auto record = [&](std::string_view stem) {
    for (const Rank<T>& rank : ranks_) {
      tap_->Record(stem, "T h", DenseView((rank.*part).data(), {step.rows, h}), {.layer = layer, .rank = rank.index});
    }
  };
  if (options_.shards > 1) {
    if (tap_->on()) record(std::string(name) + ".partial");
    if (!skip) SumOverRanks(part, step.rows * h);
    if (twice) SumOverRanks(part, step.rows * h);
  }
  if (tap_->on()) record(name);
}

// x += part, or part through a further norm where the family has one.
template <class T>
void Runner<T>::AddResidual(const StepRows& step, const std::vector<T>& norm) {
  const int64_t h = config_.hidden_size, n = step.rows * h;
  for (Rank<T>& rank : ranks_) {
    if (!norm.empty()) {
      RmsNorm(rank.part.data(), h, norm.data(), config_.rms_norm_eps, rank.part.data(), h, step.rows, h, numerics_);
    }
    for (int64_t i = 0; i < n; ++i) rank.x[static_cast<size_t>(i)] += rank.part[static_cast<size_t>(i)];
    numerics_.Round(rank.x.data(), n);
  }
}

template <class T>
Shard Runner<T>::HeadShard(const Rank<T>& rank, int64_t width) const {
  return ColumnShard(rank, {rank.heads.begin * width, rank.heads.end * width}, config_.n_heads * width);
}

template <class T>
Shard Runner<T>::KvHeadShard(const Rank<T>& rank, int64_t width) const {
  return ColumnShard(rank, {rank.kv_heads.begin * width, rank.kv_heads.end * width}, config_.n_kv_heads * width);
}

template <class T>
// The whole width is no shard: every rank then holds a copy.
Shard Runner<T>::ColumnShard(const Rank<T>& rank, Slice columns, int64_t total) const {
  if (columns.size() == total) return {};
  return {rank.index, options_.shards, columns.begin, total};
}

template <class T>
// Slots count through blocks as vLLM's slot_mapping does: block * block_size + offset.
int64_t Runner<T>::SlotOf(const StepRows& step, size_t sequence, int64_t position) const {
  const std::vector<int32_t>& table = *step.tables[sequence];
  return table[static_cast<size_t>(position / options_.block_size)] * options_.block_size +
         position % options_.block_size;
}

template class Runner<float>;
template class Runner<double>;

}  // namespace assay
