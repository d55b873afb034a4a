// What all attention variants share: the order of the stages, the cache write, and one sequence's attention, whole or
// in chunks merged by log-sum-exp.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "model/runner.h"

namespace assay {
namespace {

// Accumulates in bf16, as a kernel does that keeps its partial sums in the storage type.
template <class T>
void LinearBf16Accumulate(const T* x, int64_t ldx, const T* w, int64_t ldw, T* y, int64_t ldy, int64_t m, int64_t n,
                          int64_t k) {
  for (int64_t r = 0; r < m; ++r) {
    for (int64_t j = 0; j < n; ++j) {
      float sum = 0;
      for (int64_t i = 0; i < k; ++i) {
        sum = RoundToBf16(sum + static_cast<float>(x[r * ldx + i]) * static_cast<float>(w[j * ldw + i]));
      }
      y[r * ldy + j] = static_cast<T>(sum);
    }
  }
}

}  // namespace

// Scale, window and mask of a layer. The scale is 1 / sqrt(head size), times the square of YaRN's mscale where the
// family asks for it (model/config.h); the planted faults of scale and mask act here.
template <class T>
AttentionShape Runner<T>::ShapeOf(int64_t layer, int64_t qk_dim, int64_t v_dim) const {
  AttentionShape shape;
  shape.qk_dim = qk_dim;
  shape.v_dim = v_dim;
  shape.scale = softmax_scale_;
  if (config_.windowed(layer)) shape.window = config_.sliding_window;
  if (fault_.at(FaultId::kYarnMscaleDropped, layer)) {
    shape.scale = 1.0 / std::sqrt(static_cast<double>(config_.qk_head_dim()));
  }
  if (fault_.at(FaultId::kScaleNopeDim, layer)) {
    shape.scale *=
        std::sqrt(static_cast<double>(config_.qk_head_dim()) / static_cast<double>(config_.qk_nope_head_dim));
  }
  if (fault_.at(FaultId::kWindowOffByOne, layer)) shape.window += 1;
  if (fault_.at(FaultId::kWindowDropped, layer)) shape.window = 0;
  if (fault_.at(FaultId::kCausalOffByOne, layer)) shape.causal_shift = 1;
  return shape;
}

// normed [T, h] to part [T, h]: projections, cache write, attention, output projection, sum over ranks. Each stage is
// done by all ranks before the next that needs it; W_O is cut by its columns, so that the ranks' results are parts of a
// sum.
template <class T>
void Runner<T>::AttentionPart(const StepRows& step, int64_t layer, const Weights& w) {
  const int64_t h = config_.hidden_size, dv = config_.value_head_dim(), rows = step.rows;
  for (Rank<T>& rank : ranks_) {
    if (config_.mla()) {
      MlaProject(step, layer, w, rank);
    } else {
      GqaProject(step, layer, w, rank);
    }
  }
  if (kv_dtype_ == DType::kF8E4M3FN && !scale_set_[static_cast<size_t>(layer)]) {
    // One scale a layer from the first rows that it sees, over all ranks.
    double top = 0;
    for (const Rank<T>& rank : ranks_) {
      const int64_t n = rows * rank.kv[static_cast<size_t>(layer)].row_width();
      for (int64_t i = 0; i < n; ++i)
        top = std::max(top, std::fabs(static_cast<double>(rank.kv_rows[static_cast<size_t>(i)])));
    }
    for (Rank<T>& rank : ranks_) rank.kv[static_cast<size_t>(layer)].set_scale(top > 0 ? top / 448.0 : 1.0);
    scale_set_[static_cast<size_t>(layer)] = true;
  }
  for (Rank<T>& rank : ranks_) {
    WriteCache(step, layer, rank);
    if (!config_.mla()) {
      GqaAttention(step, layer, rank);
    } else if (options_.path == AttentionPath::kAbsorbed) {
      AbsorbedAttention(step, layer, w, rank);
    } else {
      MaterialisedAttention(step, layer, w, rank);
    }
    const int64_t local = rank.heads.size();
    T* out = rank.attn_out[static_cast<size_t>(layer)].data();
    if (tap_->on()) {
      const std::string window = WindowText(layer);
      const std::pair<std::string_view, std::string_view> meta[] = {{"window", window}};
      tap_->Record("attn.out", "T H dv", DenseView(out, {rows, local, dv}),
                   {.layer = layer,
                    .rank = rank.index,
                    .shard = HeadShard(rank, dv),
                    .compute = attention_compute_,
                    .meta = TapMeta(meta, window.empty() ? 0 : 1)});
    }
    const T* o = w.o.data.data() + rank.heads.begin * dv;
    int64_t k = local * dv;
    if (fault_.at(FaultId::kGemmKTail, layer)) k -= 8;  // the last, partial tile of the inner dimension is left out
    T* part = Fit(&rank.part, rows * h);
    if (fault_.at(FaultId::kBf16Accumulate, layer)) {
      LinearBf16Accumulate(out, local * dv, o, config_.n_heads * dv, part, h, rows, h, k);
    } else {
      Project(out, local * dv, o, config_.n_heads * dv, nullptr, part, h, rows, h, k);
    }
    if (!w.o_bias.empty() && rank.index == 0) {  // once, not once a rank: the parts are summed
      for (int64_t i = 0; i < rows * h; ++i) part[i] += w.o_bias[static_cast<size_t>(i % h)];
      numerics_.Round(part, rows * h);
    }
  }
  AllReduce(step, layer, "attn.o_proj", &Rank<T>::part, fault_.at(FaultId::kOProjNotReduced, layer));
}

// Puts the step's rows into their slots, and records them as they come back: attn.kv_write is what the cache holds,
// read through the block table and dequantised, not what was given to it.
template <class T>
void Runner<T>::WriteCache(const StepRows& step, int64_t layer, Rank<T>& rank) {
  KvLayer<T>& kv = rank.kv[static_cast<size_t>(layer)];
  const int64_t width = kv.row_width(), bs = options_.block_size;
  const double scale = kv.scale();
  if (fault_.at(FaultId::kKvScaleNotWritten, layer)) kv.set_scale(1.0);
  if (fault_.at(FaultId::kKvScaleSaturates, layer)) kv.set_scale(scale / 16.0);
  for (size_t s = 0; s < step.sequences.size(); ++s) {
    const StepSequence& seq = step.sequences[s];
    for (int64_t i = 0; i < seq.n_rows; ++i) {
      int64_t slot = SlotOf(step, s, seq.first_position + i);
      if (fault_.at(FaultId::kKvSlotOffByOne, layer)) slot = slot / bs * bs + (slot + 1) % bs;
      kv.Write(slot, rank.kv_rows.data() + (seq.first_row + i) * width);
    }
    if (fault_.at(FaultId::kPadRowOverwritesSlot, layer) && seq.decode) {
      // The batch is padded to a captured size; the padding row's slot id -1, clamped, is the request's first slot.
      kv.Write(SlotOf(step, s, 0), rank.kv_rows.data() + seq.first_row * width);
    }
  }
  if (fault_.at(FaultId::kKvScaleNotWritten, layer)) kv.set_scale(scale);
  if (!tap_->on()) return;

  T* back = Fit(&record_, step.rows * width);
  std::string slots;
  for (size_t s = 0; s < step.sequences.size(); ++s) {
    const StepSequence& seq = step.sequences[s];
    const std::vector<int32_t> table = ReadTable(step, s, layer);
    for (int64_t i = 0; i < seq.n_rows; ++i) {
      const int64_t p = seq.first_position + i;
      kv.Read(table[static_cast<size_t>(p / bs)] * bs + p % bs, back + (seq.first_row + i) * width,
              ReadScale(layer, kv));
    }
    if (s > 0) slots.push_back(';');
    // At most some 200 characters of block numbers: metadata of every event, for people.
    for (size_t b = 0; b < table.size() && slots.size() < 200; ++b) {
      if (b > 0) slots.push_back(',');
      slots.append(std::to_string(table[b]));
    }
  }
  char scale_text[32];
  std::snprintf(scale_text, sizeof scale_text, "%.9g", kv.scale());
  const std::pair<std::string_view, std::string_view> meta[] = {
      {"kv_cache_dtype", NameOf(kv.dtype())}, {"kv_scale", scale_text}, {"block_table", slots}};
  const Tap::Where where{.layer = layer,
                         .rank = rank.index,
                         .shard = config_.mla() ? Shard{} : KvHeadShard(rank, 2 * config_.head_dim),
                         .compute = attention_compute_,
                         .meta = meta};
  // MLA: latent, then k_pe. Otherwise, for each kv head, its key and its value.
  if (config_.mla()) {
    tap_->Record("attn.kv_write", "T c+dr", DenseView(back, {step.rows, width}), where);
  } else {
    const int64_t heads = rank.kv_heads.size();
    tap_->Record("attn.kv_write", "T Hkv d+dv", DenseView(back, {step.rows, heads, width / heads}), where);
  }
}

// The block table as attention reads it.
template <class T>
std::vector<int32_t> Runner<T>::ReadTable(const StepRows& step, size_t sequence, int64_t layer) const {
  std::vector<int32_t> table = *step.tables[sequence];
  const StepSequence& seq = step.sequences[sequence];
  const int64_t bs = options_.block_size;
  if (fault_.at(FaultId::kKvOtherRequest, layer) && seq.decode && seq.first_position >= bs) {
    for (size_t other = 0; other < step.tables.size(); ++other) {
      if (other != sequence) {
        table[0] = step.tables[other]->front();
        break;
      }
    }
  }
  if (fault_.at(FaultId::kKvStaleBlockTable, layer)) {
    // The upload stops one entry short: the last one is what the table's row held before, a block of request 0.
    table[static_cast<size_t>((seq.first_position + seq.n_rows - 1) / bs)] = step.tables[0]->front();
  }
  return table;
}

// The factor of a stored code on the way back; the fp8 faults leave it out or apply it twice.
template <class T>
double Runner<T>::ReadScale(int64_t layer, const KvLayer<T>& kv) const {
  if (fault_.at(FaultId::kKvScaleTwice, layer)) return kv.scale() * kv.scale();
  if (fault_.at(FaultId::kKvScaleNotRead, layer)) return 1.0;
  return kv.scale();
}

// Metadata of a layer that does not have the model's window, as models have whose layers take turns.
template <class T>
std::string Runner<T>::WindowText(int64_t layer) const {
  return config_.sliding_window > 0 && !config_.windowed(layer) ? "0" : "";
}

// Whole, or over context chunks of --chunk keys and the suffix [start, end), each with its own log-sum-exp, merged
// after (MergePartials). Only the suffix is masked: every key of the context lies before every query.
template <class T>
void Runner<T>::AttendSequence(const StepRows& step, size_t sequence, int64_t layer, Rank<T>& rank,
                               const QueryView<T>& query, KvView<T> kv, AttentionShape shape, const RunSource& source,
                               T* out, int64_t out_row, T* lse) {
  const StepSequence& seq = step.sequences[sequence];
  const int64_t start = seq.first_position, end = start + seq.n_rows, heads = rank.heads.size();
  std::vector<KvRun<T>> runs;
  if (options_.chunk == 0 || seq.decode) {
    int64_t read_end = end;
    if (fault_.at(FaultId::kPadRead, layer) && seq.decode) {  // whole blocks, whatever the request's length
      read_end = (end + options_.block_size - 1) / options_.block_size * options_.block_size;
      shape.causal_shift = read_end - end;
    }
    source(0, read_end, &runs);
    kv.runs = runs;
    Attend(query, kv, shape, out, out_row, lse, &scores_);
    return;
  }

  // Context in chunks, then the suffix. Requests of one step are padded to the same number of chunks, as a batched
  // kernel does: an exhausted request has empty chunks, which must be written too (zeros, -infinity).
  const int64_t chunk = options_.chunk, contexts = (start + chunk - 1) / chunk;
  int64_t widest = contexts;
  for (const StepSequence& s : step.sequences) {
    if (!s.decode) widest = std::max(widest, (s.first_position + chunk - 1) / chunk);
  }
  const int64_t n = seq.n_rows * heads;
  if (static_cast<int64_t>(partials_.size()) < widest + 1) partials_.resize(static_cast<size_t>(widest) + 1);
  std::vector<const PartialResult<T>*> parts;
  for (int64_t j = 0; j <= widest; ++j) {
    const bool suffix = j == widest;
    PartialResult<T>& part = partials_[static_cast<size_t>(j)];
    part.first_key = suffix ? start : std::min(j * chunk, start);
    part.last_key = suffix ? end : std::min((j + 1) * chunk, start);
    part.out.resize(static_cast<size_t>(n * shape.v_dim));
    part.lse.resize(static_cast<size_t>(n));
    parts.push_back(&part);
    const bool empty = part.first_key == part.last_key;
    if (empty && fault_.at(FaultId::kEmptyChunkUnwritten, layer)) continue;
    runs.clear();
    if (!empty) source(part.first_key, part.last_key, &runs);
    kv.runs = runs;
    Attend(query, kv, shape, part.out.data(), heads * shape.v_dim, part.lse.data(), &scores_);
    if (!suffix && fault_.at(FaultId::kLseBase2, layer)) {
      for (T& v : part.lse) v *= static_cast<T>(1.4426950408889634);
    }
    if (!suffix && fault_.at(FaultId::kLseMaxOnly, layer)) LargestScore(query, kv, shape, &part.lse);
    if (empty) continue;
    RecordPartial(step, sequence, layer, rank, suffix ? contexts : j, part, shape.v_dim);
  }
  int64_t last_stride = shape.v_dim;
  if (fault_.at(FaultId::kMergeSuffixStride, layer)) last_stride = shape.v_dim + shape.v_dim / 2;
  MergePartials<T>(parts, seq.n_rows, heads, shape.v_dim, last_stride, out, out_row, lse);
}

// A log-sum-exp that is only the largest score: the reduction over the tile was skipped.
template <class T>
void Runner<T>::LargestScore(const QueryView<T>& query, const KvView<T>& kv, const AttentionShape& shape,
                             std::vector<T>* lse) const {
  for (int64_t t = 0; t < query.n_rows; ++t) {
    for (int64_t h = 0; h < query.n_heads; ++h) {
      const T* q = query.data + t * query.row_stride + h * query.head_stride;
      T top = -std::numeric_limits<T>::infinity();
      for (const KvRun<T>& run : kv.runs) {
        for (int64_t s = 0; s < run.n; ++s) {
          const T* k = run.rows + s * kv.row_stride + h / kv.group * kv.head_stride + kv.k_offset;
          T dot = 0;
          for (int64_t i = 0; i < shape.qk_dim; ++i) dot += q[i] * k[i];
          top = std::max(top, dot * static_cast<T>(shape.scale));
        }
      }
      (*lse)[static_cast<size_t>(t * query.n_heads + h)] = top;
    }
  }
}

// The part's keys [first, last) stand in the metadata: chunks of two runs are one quantity only where they agree.
template <class T>
void Runner<T>::RecordPartial(const StepRows& step, size_t sequence, int64_t layer, const Rank<T>& rank, int64_t j,
                              const PartialResult<T>& part, int64_t v_dim) {
  if (!tap_->on()) return;
  const StepSequence& seq = step.sequences[sequence];
  const int64_t heads = rank.heads.size();
  const RowRun run{step.keys[sequence], 0, seq.n_rows, seq.first_position, false};
  char keys[48], name[48];
  std::snprintf(keys, sizeof keys, "%lld:%lld", static_cast<long long>(part.first_key),
                static_cast<long long>(part.last_key));
  const std::string window = WindowText(layer);
  const std::pair<std::string_view, std::string_view> both[] = {{"keys", keys}, {"window", window}};
  const TapMeta meta(both, window.empty() ? 1 : 2);
  std::snprintf(name, sizeof name, "attn.chunk.%lld.out", static_cast<long long>(j));
  const bool latent = config_.mla() && options_.path == AttentionPath::kAbsorbed;
  tap_->Record(name, latent ? "T H c" : "T H dv", DenseView(part.out.data(), {seq.n_rows, heads, v_dim}),
               {.layer = layer,
                .rank = rank.index,
                .shard = HeadShard(rank, v_dim),
                .runs = {&run, 1},
                .compute = attention_compute_,
                .meta = meta});
  std::snprintf(name, sizeof name, "attn.chunk.%lld.lse", static_cast<long long>(j));
  tap_->Record(name, "T H", DenseView(part.lse.data(), {seq.n_rows, heads}),
               {.layer = layer,
                .rank = rank.index,
                .shard = HeadShard(rank, 1),
                .runs = {&run, 1},
                .compute = attention_compute_,
                .meta = meta});
}

// Merged over chunks, natural logarithm.
template <class T>
void Runner<T>::RecordLse(const StepRows& step, int64_t layer, const Rank<T>& rank) {
  if (!tap_->on()) return;
  tap_->Record("attn.lse", "T H", DenseView(rank.lse.data(), {step.rows, rank.heads.size()}),
               {.layer = layer, .rank = rank.index, .shard = HeadShard(rank, 1), .compute = attention_compute_});
}

// Rows of a sequence whose output goes nowhere: the kernel returns a fresh buffer and the caller keeps its own, or the
// kernel's tiles of four query rows stop one short of the end.
template <class T>
int64_t Runner<T>::RowsWritten(const StepSequence& seq, int64_t layer) const {
  if (fault_.at(FaultId::kDecodeOutputUnwritten, layer) && seq.decode) return 0;
  if (fault_.at(FaultId::kAttentionTail, layer) && !seq.decode) return (seq.n_rows - 1) / 4 * 4;
  return seq.n_rows;
}

template class Runner<float>;
template class Runner<double>;

}  // namespace assay
