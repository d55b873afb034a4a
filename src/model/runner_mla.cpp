// Multi-head latent attention, both ways: keys and values materialised from the latent, or queries and outputs taken
// into the latent space (absorbed). H heads, c latent, dn / dr / dv head sizes; local heads of a rank throughout.
#include <algorithm>
#include <cmath>
#include <limits>

#include "model/gemm.h"
#include "model/norm.h"
#include "model/runner.h"

namespace assay {
namespace {

// n rows of d values, stride apart, through IEEE half precision and back: beyond 65504 they become infinite.
template <class T>
void StoreValuesAsF16(T* values, int64_t n, int64_t stride, int64_t d) {
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t j = 0; j < d; ++j) {
      T& v = values[r * stride + j];
      if (!(std::fabs(v) > 0)) continue;
      // f16 has 10 bits behind the leading one and no normal exponent below -14.
      const int exponent = std::max(std::ilogb(v), -14);
      const T rounded = static_cast<T>(std::ldexp(std::nearbyint(std::ldexp(v, 10 - exponent)), exponent - 10));
      v = std::fabs(rounded) > T{65504} ? std::copysign(std::numeric_limits<T>::infinity(), v) : rounded;
    }
  }
}

// Faults that show in what comes back from the cache: rows must come from there with them.
bool ActsOnCache(const FaultDef* fault) {
  return fault != nullptr && (fault->cls == "KV-IDENT" || fault->cls == "KV-SCALE" || fault->cls == "PADREAD");
}

}  // namespace

// DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C: the latent c_t = norm(W_DKV x_t) [T, c] and one rotary
// key a row, shared by all heads, k_pe [T, dr]; queries [T, Hl, dn + dr], through a low-rank latent of their own or
// not. Ranks repeat the latents and own their heads' rows of the up-projections. Fills rank.q and rank.kv_rows.
template <class T>
void Runner<T>::MlaProject(const StepRows& step, int64_t layer, const Weights& w, Rank<T>& rank) {
  const int64_t h = config_.hidden_size, rows = step.rows, local = rank.heads.size();
  const int64_t c = config_.kv_lora_rank, dn = config_.qk_nope_head_dim, dr = config_.qk_rope_head_dim, dq = dn + dr;
  const Tap::Where replicated{.layer = layer, .rank = rank.index};
  const auto sharded = [&](int64_t width) {
    return Tap::Where{.layer = layer, .rank = rank.index, .shard = HeadShard(rank, width)};
  };
  const bool tap = tap_->on();

  // Query.
  const T* q_in = rank.normed.data();
  int64_t q_in_dim = h;
  const Matrix<T>* q_weight = &w.q;
  if (!w.q_a.empty()) {
    q_in_dim = w.q_a.rows;
    T* q_a = Fit(&rank.q_a, rows * q_in_dim);
    Project(q_in, h, w.q_a.data.data(), h, w.q_a_bias.empty() ? nullptr : w.q_a_bias.data(), q_a, q_in_dim, rows,
            q_in_dim, h);
    if (tap) tap_->Record("attn.q_a", "T q_lora", DenseView(q_a, {rows, q_in_dim}), replicated);
    RmsNorm(q_a, q_in_dim, w.q_a_norm.data(), config_.latent_norm_eps, q_a, q_in_dim, rows, q_in_dim, numerics_);
    if (tap) tap_->Record("attn.q_a_normed", "T q_lora", DenseView(q_a, {rows, q_in_dim}), replicated);
    q_in = q_a;
    q_weight = &w.q_b;
  }
  int64_t first_head = rank.heads.begin;
  if (fault_.at(FaultId::kRankLoadsShard0, layer)) first_head = 0;
  T* q = Fit(&rank.q, rows * local * dq);
  Project(q_in, q_in_dim, q_weight->row(first_head * dq), q_in_dim, nullptr, q, local * dq, rows, local * dq, q_in_dim);
  if (tap) tap_->Record("attn.q_proj", "T H d", DenseView(q, {rows, local, dq}), sharded(dq));

  // Latent and shared rotary key.
  T* kv_a = Fit(&rank.kv_a, rows * (c + dr));
  Project(rank.normed.data(), h, w.kv_a.data.data(), h, w.kv_a_bias.empty() ? nullptr : w.kv_a_bias.data(), kv_a,
          c + dr, rows, c + dr, h);
  if (tap) tap_->Record("attn.kv_a", "T c+dr", DenseView(kv_a, {rows, c + dr}), replicated);
  T* kv_rows = Fit(&rank.kv_rows, rows * (c + dr));
  RmsNorm(kv_a, c + dr, w.kv_a_norm.data(), config_.latent_norm_eps, kv_rows, c + dr, rows, c, numerics_);
  if (tap) tap_->Record("attn.kv_c_normed", "T c", StridedView(kv_rows, {rows, c}, {c + dr, 1}), replicated);

  // Rotation of q_pe and k_pe.
  const bool both = fault_.at(FaultId::kDecodePositionZero, layer) || fault_.at(FaultId::kPrefixGap, layer) ||
                    fault_.at(FaultId::kGraphStalePositions, layer) ||
                    fault_.at(FaultId::kYarnAttentionFactorDropped, layer);
  const RopeRows<T>& k_rope = both ? fault_rope_ : rope_;
  const RopeRows<T>& q_rope = both || fault_.at(FaultId::kRopeQueryOffByOne, layer) ? fault_rope_ : rope_;
  const bool pairing = config_.rope.interleaved;
  const bool k_pairing = pairing != fault_.at(FaultId::kRopePairing, layer);
  const bool q_pairing =
      pairing != (fault_.at(FaultId::kRopePairing, layer) || fault_.at(FaultId::kRopeQueryPairing, layer));
  for (int64_t t = 0; t < rows; ++t) {
    T* k_pe = kv_rows + t * (c + dr) + c;
    std::copy_n(kv_a + t * (c + dr) + c, dr, k_pe);
    if (!fault_.at(FaultId::kKPeUnrotated, layer)) k_rope.Rotate(k_pe, t, k_pairing);
    numerics_.Round(k_pe, dr);
    for (int64_t i = 0; i < local; ++i) {
      T* q_pe = q + (t * local + i) * dq + dn;
      q_rope.Rotate(q_pe, t, q_pairing);
      numerics_.Round(q_pe, dr);
    }
  }
  if (!tap) return;
  tap_->Record("attn.k_pe", "T 1 dr", StridedView(kv_rows + c, {rows, 1, dr}, {c + dr, dr, 1}), replicated);
  tap_->Record("attn.q_nope", "T H dn", StridedView(q, {rows, local, dn}, {local * dq, dq, 1}), sharded(dn));
  tap_->Record("attn.q_pe", "T H dr", StridedView(q + dn, {rows, local, dr}, {local * dq, dq, 1}), sharded(dr));
  tap_->Record("attn.q", "T H d", DenseView(q, {rows, local, dq}), sharded(dq));
}

// n latent rows [., c + dr], row_stride apart, to keys and values per head: [n, Hl, dn + dr + dv].
template <class T>
void Runner<T>::ExpandRows(const Weights& w, const Rank<T>& rank, const T* rows, int64_t row_stride, int64_t n,
                           T* out) const {
  const int64_t c = config_.kv_lora_rank, dn = config_.qk_nope_head_dim, dr = config_.qk_rope_head_dim,
                dv = config_.v_head_dim, local = rank.heads.size(), width = dn + dr + dv;
  for (int64_t i = 0; i < local; ++i) {
    const T* weight = w.kv_b.row((rank.heads.begin + i) * (dn + dv));
    T* head = out + i * width;
    Project(rows, row_stride, weight, c, nullptr, head, local * width, n, dn, c);
    Project(rows, row_stride, weight + dn * c, c, nullptr, head + dn + dr, local * width, n, dv, c);
    for (int64_t t = 0; t < n; ++t) std::copy_n(rows + t * row_stride + c, dr, head + t * local * width + dn);
  }
}

// Keys k_i = [W_UK,i c_s ; k_pe,s] and values v_i = W_UV,i c_s of every position are made from the latent, and
// attention is multi-head attention with head sizes dn + dr and dv. Expanding a position costs 2 c (dn + dv) Hl
// operations, so earlier positions are kept expanded where that gives the cache's own bits (memo).
template <class T>
void Runner<T>::MaterialisedAttention(const StepRows& step, int64_t layer, const Weights& w, Rank<T>& rank) {
  const int64_t rows = step.rows, local = rank.heads.size(), c = config_.kv_lora_rank, dn = config_.qk_nope_head_dim,
                dr = config_.qk_rope_head_dim, dv = config_.v_head_dim, dq = dn + dr, width = dq + dv;
  KvLayer<T>& kv = rank.kv[static_cast<size_t>(layer)];
  T* expand = Fit(&rank.expand, rows * local * width);
  ExpandRows(w, rank, rank.kv_rows.data(), c + dr, rows, expand);
  if (fault_.at(FaultId::kKPeBroadcast, layer)) {
    // k_pe [T, 1, dr] is read as [T, H, dr]: head i of row t takes the row t + i of a denser layout.
    for (int64_t t = 0; t < rows; ++t) {
      for (int64_t i = 0; i < local; ++i) {
        std::copy_n(rank.kv_rows.data() + (t + i) % rows * (c + dr) + c, dr, expand + (t * local + i) * width + dn);
      }
    }
  }
  if (fault_.at(FaultId::kFp16Overflow, layer)) StoreValuesAsF16(expand + dq, rows * local, width, dv);
  if (tap_->on()) {
    const auto where = [&](int64_t d) {
      return Tap::Where{.layer = layer, .rank = rank.index, .shard = HeadShard(rank, d)};
    };
    tap_->Record("attn.k_nope", "T H dn", StridedView(expand, {rows, local, dn}, {local * width, width, 1}), where(dn));
    tap_->Record("attn.k", "T H d", StridedView(expand, {rows, local, dq}, {local * width, width, 1}), where(dq));
    tap_->Record("attn.v", "T H dv", StridedView(expand + dq, {rows, local, dv}, {local * width, width, 1}), where(dv));
  }

  T* out = Fit(&rank.attn_out[static_cast<size_t>(layer)], rows * local * dv);
  T* lse = Fit(&rank.lse, rows * local);
  const AttentionShape shape = ShapeOf(layer, dq, dv);
  // A cache that rounds, or a fault that acts on it, must be read: the memo would hide both.
  const bool keep = kv_dtype_ == (sizeof(T) == 8 ? DType::kF64 : DType::kF32) && !ActsOnCache(fault_.def);
  std::vector<KvRun<T>> latent, all;
  for (size_t s = 0; s < step.sequences.size(); ++s) {
    const StepSequence& seq = step.sequences[s];
    const int64_t start = seq.first_position, end = start + seq.n_rows;
    const T* own = expand + seq.first_row * local * width;
    all.clear();
    // Rows of the cache, dequantised and expanded, appended to *out.
    const auto from_cache = [&](int64_t begin, int64_t stop, std::vector<T>* target) {
      const size_t before = target->size();
      kv.Gather(ReadTable(step, s, layer), begin, stop, ReadScale(layer, kv), &gather_, &latent);
      target->resize(before + static_cast<size_t>((stop - begin) * local * width));
      for (const KvRun<T>& run : latent) {
        ExpandRows(w, rank, run.rows, c + dr, run.n,
                   target->data() + before + static_cast<size_t>((run.first_position - begin) * local * width));
      }
    };
    if (keep) {
      std::vector<T>& memo = rank.memo[static_cast<size_t>(layer)][seq.request];
      const auto have = static_cast<int64_t>(memo.size()) / (local * width);
      if (have < start) from_cache(have, start, &memo);
      memo.insert(memo.end(), own, own + seq.n_rows * local * width);
      all.push_back({memo.data(), end, 0});
    } else {
      gather_expand_.clear();
      const int64_t block_end = (end + options_.block_size - 1) / options_.block_size * options_.block_size;
      const bool pad = fault_.at(FaultId::kPadRead, layer) && seq.decode;
      from_cache(0, start, &gather_expand_);
      if (pad) from_cache(end, block_end, &gather_expand_);
      if (start > 0) all.push_back({gather_expand_.data(), start, 0});
      all.push_back({own, seq.n_rows, start});
      if (pad && block_end > end) all.push_back({gather_expand_.data() + start * local * width, block_end - end, end});
    }
    const RunSource source = [&](int64_t begin, int64_t stop, std::vector<KvRun<T>>* runs) {
      SliceRuns(all, local * width, begin, stop, runs);
    };
    QueryView<T> query{rank.q.data() + seq.first_row * local * dq, local * dq, dq, seq.n_rows, local, start};
    if (fault_.at(FaultId::kQueryHeadStride, layer)) query.head_stride = 0;
    const KvView<T> view{{}, local * width, width, 0, dq, 1};
    const int64_t written = RowsWritten(seq, layer);
    T* target = out + seq.first_row * local * dv;
    T* result = written == seq.n_rows ? target : Fit(&spare_, seq.n_rows * local * dv);
    AttendSequence(step, s, layer, rank, query, view, shape, source, result, local * dv, lse + seq.first_row * local);
    numerics_.Round(result, seq.n_rows * local * dv);
    if (result != target) std::copy_n(result, written * local * dv, target);
  }
  RecordLse(step, layer, rank);
}

// The same by associativity: q_nope (W_UK c) = (W_UK^T q_nope) c and sum p W_UV c = W_UV (sum p c). Queries are taken
// into the latent space, q_latent [T, Hl, c + dr]; all heads read the one cache row [c + dr] of a position as key and
// its first c elements as value; the output [T, Hl, c] goes through W_UV. No position is expanded.
template <class T>
void Runner<T>::AbsorbedAttention(const StepRows& step, int64_t layer, const Weights& w, Rank<T>& rank) {
  const int64_t rows = step.rows, local = rank.heads.size(), c = config_.kv_lora_rank, dn = config_.qk_nope_head_dim,
                dr = config_.qk_rope_head_dim, dv = config_.v_head_dim, dq = dn + dr, wide = c + dr;
  KvLayer<T>& kv = rank.kv[static_cast<size_t>(layer)];
  const auto where = [&](int64_t d) {
    return Tap::Where{.layer = layer, .rank = rank.index, .shard = HeadShard(rank, d)};
  };
  const auto head_of = [&](FaultId fault, int64_t i) {  // the weight that head i uses
    const int64_t head = rank.heads.begin + i;
    return fault_.at(fault, layer) ? (head + 1) % config_.n_heads : head;
  };

  T* q_latent = Fit(&rank.q_latent, rows * local * wide);
  for (int64_t i = 0; i < local; ++i) {
    const T* q = rank.q.data() + i * dq;
    T* out = q_latent + i * wide;
    const T* wuk_t = wuk_t_[static_cast<size_t>(layer)].data() + head_of(FaultId::kWukWrongHead, i) * c * dn;
    if (fault_.at(FaultId::kWukTransposed, layer)) {
      // The memory of W_UK [dn, c] taken for [c, dn]: right size, wrong order.
      wuk_t = w.kv_b.row((rank.heads.begin + i) * (dn + dv));
    }
    Project(q, local * dq, wuk_t, dn, nullptr, out, local * wide, rows, c, dn);
    for (int64_t t = 0; t < rows; ++t) std::copy_n(q + t * local * dq + dn, dr, out + t * local * wide + c);
  }
  if (tap_->on()) {
    tap_->Record("attn.q_latent", "T H c", StridedView(q_latent, {rows, local, c}, {local * wide, wide, 1}), where(c));
  }

  T* latent_out = Fit(&rank.latent_out, rows * local * c);
  T* lse = Fit(&rank.lse, rows * local);
  const AttentionShape shape = ShapeOf(layer, wide, c);
  for (size_t s = 0; s < step.sequences.size(); ++s) {
    const StepSequence& seq = step.sequences[s];
    const std::vector<int32_t> table = ReadTable(step, s, layer);
    const RunSource source = [&](int64_t begin, int64_t end, std::vector<KvRun<T>>* runs) {
      kv.Gather(table, begin, end, ReadScale(layer, kv), &gather_, runs);
    };
    QueryView<T> query{
        q_latent + seq.first_row * local * wide, local * wide, wide, seq.n_rows, local, seq.first_position};
    if (fault_.at(FaultId::kQueryHeadStride, layer)) query.head_stride = 0;
    // One kv head for all (head stride 0), the key at the row's start and the value the first c elements of the same.
    const KvView<T> view{{}, wide, 0, 0, 0, local};
    AttendSequence(step, s, layer, rank, query, view, shape, source, latent_out + seq.first_row * local * c, local * c,
                   lse + seq.first_row * local);
  }
  numerics_.Round(latent_out, rows * local * c);
  RecordLse(step, layer, rank);
  if (tap_->on()) {
    Tap::Where latent_where = where(c);
    latent_where.compute = attention_compute_;
    tap_->Record("attn.latent_out", "T H c", DenseView(latent_out, {rows, local, c}), latent_where);
  }

  T* out = Fit(&rank.attn_out[static_cast<size_t>(layer)], rows * local * dv);
  // A fault that leaves rows unwritten needs the result aside: W_UV's product writes all rows of a head at once.
  bool lost = false;
  for (const StepSequence& seq : step.sequences) lost = lost || RowsWritten(seq, layer) != seq.n_rows;
  T* result = lost ? Fit(&spare_, rows * local * dv) : out;
  for (int64_t i = 0; i < local; ++i) {
    const T* wuv = w.kv_b.row(head_of(FaultId::kWuvWrongHead, i) * (dn + dv) + dn);
    Project(latent_out + i * c, local * c, wuv, c, nullptr, result + i * dv, local * dv, rows, dv, c);
  }
  for (const StepSequence& seq : step.sequences) {
    const int64_t at = seq.first_row * local * dv;
    if (lost) std::copy_n(result + at, RowsWritten(seq, layer) * local * dv, out + at);
  }
}

template class Runner<float>;
template class Runner<double>;

}  // namespace assay
