// The forward pass: one step of rows through the layers, on every tensor-parallel rank, with every canonical site
// tapped. The engine (engine.cpp) decides what runs; this decides what is computed.
//
// Ranks run in lock-step in one thread: each stage is done by every rank in turn, up to the next reduction. A rank owns
// its replica of the residual stream, its cache and its slice of the weights (heads, FFN channels, vocabulary); what
// ranks exchange goes through AllReduce alone, in rank order. Matrix products inside a stage use --threads.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "model/attention.h"
#include "model/config.h"
#include "model/engine.h"
#include "model/faults.h"
#include "model/kv_cache.h"
#include "model/moe.h"
#include "model/numerics.h"
#include "model/rope.h"
#include "model/scheduler.h"
#include "model/tap.h"
#include "model/weights.h"

namespace assay {

// A buffer that only grows. What an earlier use left in it stays, as in an engine's workspace.
template <class T>
T* Fit(std::vector<T>* buffer, int64_t n) {
  if (static_cast<int64_t>(buffer->size()) < n) buffer->resize(static_cast<size_t>(n));
  return buffer->data();
}

// Half-open part r of n of a range of `total`.
struct Slice {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};
inline Slice SliceOf(int64_t total, int r, int n) { return {total * r / n, total * (r + 1) / n}; }

// One tensor-parallel rank. Shapes: T rows of the step, h hidden, Hl local heads.
template <class T>
struct Rank {
  int index = 0;
  Slice heads, kv_heads;                  // global numbers
  std::vector<T> x;                       // [T, h] residual stream
  std::vector<T> normed;                  // [T, h] input of attention or FFN
  std::vector<T> part;                    // [T, h] this rank's share of a sum, then the sum
  std::vector<T> q_a, q;                  // [T, q_lora], [T, Hl, dq]
  std::vector<T> k, v;                    // [T, Kl, d] GQA
  std::vector<T> kv_a, kv_rows;           // [T, c + dr]; rows for the cache [T, row width]
  std::vector<T> expand;                  // [T, Hl, dq + dv] materialised keys and values of the step's rows
  std::vector<T> q_latent, latent_out;    // [T, Hl, c + dr], [T, Hl, c]
  std::vector<std::vector<T>> attn_out;   // a layer: [T, Hl, dv], kept from step to step as a graph's buffer is
  std::vector<T> lse;                     // [T, Hl]
  std::vector<T> gate, up, act;           // [T, f local]
  std::vector<T> router, routed, shared;  // [T, E], [T, h], [T, h]
  Routing routing;
  std::vector<KvLayer<T>> kv;  // a layer
  // Materialised keys and values of earlier positions, [layer][request] -> rows; only what the cache would give back
  // bit for bit is kept here (lossless cache, no planted fault).
  std::vector<std::map<int64_t, std::vector<T>>> memo;
};

// Rows of one step with everything that a layer needs to know about them.
// Filled by the engine for each step; everything is borrowed for the calls of that step.
struct StepRows {
  int64_t step = 0;
  int64_t rows = 0;
  std::vector<StepSequence> sequences;
  std::vector<const std::vector<int32_t>*> tables;  // a sequence
  std::vector<uint64_t> keys;                       // a sequence: request key
  std::vector<int64_t> ids, positions;              // a row
  std::vector<RowRun> runs;                         // a sequence
};

template <class T>
class Runner {
 public:
  Runner(std::shared_ptr<const WeightStore> store, const ModelConfig& config, const EngineOptions& options,
         const FaultPlan& fault);

  // Before the first step, and again for a fresh run: empties the cache and forgets the workspace.
  void Reset(Tap* tap);
  // The embedding of the step's ids, or (first_layer > 0) the rows given, into every rank's residual stream.
  Status Embed(const StepRows& step, const T* given);
  // The layers [first_layer, last_layer).
  Status Layers(const StepRows& step, int64_t cache_blocks);
  // Final norm, and logits of the given rows (runs: whose they are): [rows.size(), vocab], valid until the next call.
  Result<const T*> Logits(const StepRows& step, std::span<const int64_t> rows, std::span<const RowRun> runs);
  // Frees what is kept of a finished request beside the cache.
  void Forget(int64_t request);

 private:
  using Weights = LayerWeights<T>;

  // Weights of a layer, from memory or the file; valid until the next call when they are streamed.
  Result<const Weights*> Load(int64_t layer);
  // In phase load, once a run: what the checks recompute from.
  void RecordWeights(int64_t layer, const Weights& w);
  // normed -> part, with cache and reduction (runner_attention.cpp). MLA in runner_mla.cpp, GQA in runner_gqa.cpp,
  // the feed-forward part in runner_ffn.cpp.
  void AttentionPart(const StepRows& step, int64_t layer, const Weights& w);
  // Queries, and the rows for the cache: of MLA, of grouped-query attention.
  void MlaProject(const StepRows& step, int64_t layer, const Weights& w, Rank<T>& rank);
  void GqaProject(const StepRows& step, int64_t layer, const Weights& w, Rank<T>& rank);
  void WriteCache(const StepRows& step, int64_t layer, Rank<T>& rank);
  void MaterialisedAttention(const StepRows& step, int64_t layer, const Weights& w, Rank<T>& rank);
  void AbsorbedAttention(const StepRows& step, int64_t layer, const Weights& w, Rank<T>& rank);
  void GqaAttention(const StepRows& step, int64_t layer, Rank<T>& rank);
  void ExpandRows(const Weights& w, const Rank<T>& rank, const T* rows, int64_t row_stride, int64_t n, T* out) const;
  void DenseFfn(const StepRows& step, int64_t layer, const Weights& w);
  Status MoeFfn(const StepRows& step, int64_t layer, const Weights& w);
  Status RoutedExperts(const StepRows& step, int64_t layer, const Weights& w, Rank<T>& rank);
  enum class GateLayout : uint8_t { kRight, kSwapped, kInterleaved };
  void GatedMlp(const MlpWeights<T>& w, Slice f, const T* x, int64_t rows, GateLayout layout, Rank<T>& rank, T* out);

  // Keys of positions [begin, end) of a sequence as runs.
  using RunSource = std::function<void(int64_t begin, int64_t end, std::vector<KvRun<T>>* runs)>;
  // One sequence's rows: whole, or context chunks and suffix merged. out, lse: first row of the sequence.
  void AttendSequence(const StepRows& step, size_t sequence, int64_t layer, Rank<T>& rank, const QueryView<T>& query,
                      KvView<T> kv, AttentionShape shape, const RunSource& source, T* out, int64_t out_row, T* lse);
  // j: number of the chunk in the site's name.
  void RecordPartial(const StepRows& step, size_t sequence, int64_t layer, const Rank<T>& rank, int64_t j,
                     const PartialResult<T>& part, int64_t v_dim);
  void RecordLse(const StepRows& step, int64_t layer, const Rank<T>& rank);
  AttentionShape ShapeOf(int64_t layer, int64_t qk_dim, int64_t v_dim) const;
  // Window of the layer as metadata has it.
  std::string WindowText(int64_t layer) const;

  // Where planted faults act on the way from and to the cache; without one, the plain table, scale and row count.
  std::vector<int32_t> ReadTable(const StepRows& step, size_t sequence, int64_t layer) const;
  double ReadScale(int64_t layer, const KvLayer<T>& kv) const;
  int64_t RowsWritten(const StepSequence& seq, int64_t layer) const;
  // A planted fault: the largest score in place of the log-sum-exp.
  void LargestScore(const QueryView<T>& query, const KvView<T>& kv, const AttentionShape& shape,
                    std::vector<T>* lse) const;

  // y [m, n] = x w^T (+ bias), rounded.
  void Project(const T* x, int64_t ldx, const T* w, int64_t ldw, const T* bias, T* y, int64_t ldy, int64_t m, int64_t n,
               int64_t k) const;
  // Sums a buffer of n elements over the ranks, in rank order, into every rank's copy.
  void SumOverRanks(std::vector<T> Rank<T>::*part, int64_t n);
  // The same for [T, h], recording NAME.partial before and NAME after.
  // skip: ranks keep what they have; twice: the sum is summed again.
  void AllReduce(const StepRows& step, int64_t layer, std::string_view name, std::vector<T> Rank<T>::*part,
                 bool skip = false, bool twice = false);
  // x += part on every rank; `norm` (empty: none) is applied to the part first.
  void AddResidual(const StepRows& step, const std::vector<T>& norm);

  // The columns that a rank's heads, kv heads or channels have in the whole tensor; not sharded when they are all of
  // it.
  Shard HeadShard(const Rank<T>& rank, int64_t width) const;
  Shard KvHeadShard(const Rank<T>& rank, int64_t width) const;
  Shard ColumnShard(const Rank<T>& rank, Slice columns, int64_t total) const;
  // Slot of a position of the sequence, by its block table.
  int64_t SlotOf(const StepRows& step, size_t sequence, int64_t position) const;

  std::shared_ptr<const WeightStore> store_;
  ModelConfig config_;
  EngineOptions options_;
  FaultPlan fault_;
  Numerics numerics_;
  DType compute_ = DType::kF32, kv_dtype_ = DType::kF32;
  DType attention_compute_ = DType::kF32;  // of what attention returns: it has been through the cache's rounding too
  double softmax_scale_ = 1;
  RopeTable rope_table_;
  RopeRows<T> rope_, fault_rope_;
  Tap* tap_ = nullptr;
  std::vector<Rank<T>> ranks_;
  // A layer: weights that stay in memory. streamed_: the one layer at hand when they do not.
  std::vector<std::unique_ptr<Weights>> kept_;
  std::unique_ptr<Weights> streamed_;
  std::vector<std::vector<T>> wuk_t_;  // a layer: [H, c, dn], absorbed path
  std::unique_ptr<EndWeights<T>> end_;
  std::vector<bool> scale_set_;  // a layer: fp8 scale chosen
  // Workspaces, shared by all ranks as these run one after the other.
  std::vector<T> scores_, gather_, gather_expand_, logits_, reduced_, spare_, record_;
  std::vector<int64_t> expert_rows_;        // choices (row * k + place) of one expert
  std::vector<PartialResult<T>> partials_;  // chunk workspace, reused by every request and layer
  std::vector<int64_t> graph_positions_;    // positions of the first decode step (a planted fault replays them)
};

extern template class Runner<float>;
extern template class Runner<double>;

}  // namespace assay
