// Operands of an attention call out of the recording.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "check/helpers.h"
#include "check/op_attention.h"
#include "oracle/rope.h"

namespace assay::op {
namespace {

using oracle::Array;

// A tensor [rows, H, d]: rank 2 has one head.
Array WithHeads(Array a) {
  if (a.rank() == 2) a.shape = {a.shape[0], 1, a.shape[1]};
  return a;
}

// Rows of `from` in the order of those of `like`; padding is zero. kBadInput: a row is not there.
// [rows of like, ...] with values' other axes.
Result<Array> RowsLike(const Tensor& like, const Tensor& from, const Array& values) {
  std::map<std::pair<uint64_t, int64_t>, int64_t> place;
  for (size_t r = 0; r < from.rows.size(); ++r) {
    if (from.rows[r].real()) place[{from.rows[r].request, from.rows[r].position}] = static_cast<int64_t>(r);
  }
  std::vector<int64_t> shape = values.shape;
  shape[0] = like.n_rows();
  Array out = Array::Filled(shape);
  const int64_t width = values.size() / std::max<int64_t>(values.shape[0], 1);
  for (size_t r = 0; r < like.rows.size(); ++r) {
    if (!like.rows[r].real()) continue;
    const auto at = place.find({like.rows[r].request, like.rows[r].position});
    if (at == place.end()) return Status::BadInput(like.info->name + " has other rows than its queries");
    std::copy_n(values.values.begin() + at->second * width, width,
                out.values.begin() + static_cast<int64_t>(r) * width);
  }
  return out;
}

// The check then says "not testable" and what to record.
// Rows of one request in order of position, from every event so far.
struct Keys {
  std::vector<int64_t> positions;
  Array values;  // [n, Hkv, d]
};

// this_event_alone: keys gathered for one call; otherwise every row of the request that was recorded up to this event,
// by position, the last recording of each.
Result<Keys> KeysOf(const Subject& s, const std::string& name, uint64_t request, bool this_event_alone) {
  Keys out;
  if (this_event_alone) {
    const TensorPtr t = s.Operand(name);
    if (t == nullptr) return NotRecorded(name);
    std::vector<std::pair<int64_t, int64_t>> order;
    for (int64_t r = 0; r < t->n_rows(); ++r) {
      const RowId& id = t->rows.empty() ? RowId{} : t->rows[static_cast<size_t>(r)];
      if (id.real() && id.request == request) order.emplace_back(id.position, r);
    }
    // The oracle takes keys in any order; binary searches here and in the masks want them ascending.
    std::sort(order.begin(), order.end());
    out.values.shape = t->shape;
    for (auto [p, r] : order) {
      out.positions.push_back(p);
      const auto row = t->row(r);
      out.values.values.insert(out.values.values.end(), row.begin(), row.end());
    }
    out.values.shape[0] = static_cast<int64_t>(order.size());
  } else {
    ASSAY_ASSIGN_OR_RETURN(RequestRows rows, s.capture().RowsOf(name, request, s.info().id, s.info().event.rank));
    out.positions = rows.positions;
    out.values.shape = rows.row_shape;
    out.values.shape.insert(out.values.shape.begin(), static_cast<int64_t>(rows.positions.size()));
    out.values.values = std::move(rows.values);
  }
  out.values = WithHeads(std::move(out.values));
  return out;
}

// Splits [n, H, a + b] into its first `first` columns and the rest.
Result<std::pair<Array, Array>> Split(const Array& both, int64_t first) {
  ASSAY_ASSIGN_OR_RETURN(Array a, oracle::TakeColumns(both, 0, first));
  ASSAY_ASSIGN_OR_RETURN(Array b, oracle::TakeColumns(both, first, both.cols()));
  return std::pair{std::move(a), std::move(b)};
}

// Rows of attn.kv_write, [n, Hkv, d + dv]; engines record heads on an axis of their own or flat.
Result<Keys> WrittenRows(const Subject& s, uint64_t request, int64_t kv_heads) {
  ASSAY_ASSIGN_OR_RETURN(Keys k, KeysOf(s, s.Sibling("attn.kv_write"), request, false));
  std::vector<int64_t>& shape = k.values.shape;
  if (kv_heads > 1 && shape[1] == 1 && shape[2] % kv_heads == 0) shape = {shape[0], kv_heads, shape[2] / kv_heads};
  return k;
}

// Whether what a kernel reads back of earlier steps has been rounded once more than the keys of this step.
// An fp8 or bf16 cache under a finer compute type: the kernel then reads other numbers than attn.k has.
bool CacheRounds(const Subject& s, const std::string& keys) {
  const auto written = s.capture().Operand(s.info(), s.Sibling("attn.kv_write")),
             fresh = s.capture().Operand(s.info(), keys);
  if (!written || !fresh) return false;
  const auto info = s.capture().Info(*written);
  const Event& event = s.capture().Info(*fresh)->event;
  const DType own = event.compute_dtype == DType::kInvalid ? event.dtype : event.compute_dtype;
  const DType cache = check::CacheDType(s.capture(), *info).value_or(info->event.dtype);
  return IsFloat(cache) && UnitRoundoff(cache) > UnitRoundoff(IsFloat(own) ? own : DType::kF32);
}

// Keys (and values, null: part of the keys) of earlier steps as the cache gives them back; those of this step stay.
Status TakeEarlierFromCache(const Subject& s, const std::string& fresh, uint64_t request, Keys* k, Keys* v) {
  ASSAY_ASSIGN_OR_RETURN(const Keys own, KeysOf(s, fresh, request, true));
  std::vector<size_t> earlier;
  for (size_t i = 0; i < k->positions.size(); ++i) {
    if (!std::binary_search(own.positions.begin(), own.positions.end(), k->positions[i])) earlier.push_back(i);
  }
  if (earlier.empty()) return {};
  const int64_t heads = k->values.shape[1], d = k->values.cols(), dv = v == nullptr ? 0 : v->values.cols();
  ASSAY_ASSIGN_OR_RETURN(const Keys cache, WrittenRows(s, request, heads));
  const bool fits = cache.values.shape[1] == heads && cache.values.cols() == d + dv;
  for (size_t i : earlier) {
    const auto at = std::lower_bound(cache.positions.begin(), cache.positions.end(), k->positions[i]);
    if (!fits || at == cache.positions.end() || *at != k->positions[i]) {
      return Status::BadInput(s.info().name + ": keys of earlier steps went through a cache that rounds, and " +
                              s.Sibling("attn.k_read") + " and v_read were not recorded as payload");
    }
    for (int64_t h = 0; h < heads; ++h) {
      const double* row = cache.values.values.data() + ((at - cache.positions.begin()) * heads + h) * (d + dv);
      std::copy_n(row, d, k->values.values.begin() + (static_cast<int64_t>(i) * heads + h) * d);
      if (v != nullptr) std::copy_n(row + d, dv, v->values.values.begin() + (static_cast<int64_t>(i) * heads + h) * dv);
    }
  }
  return {};
}

// By the recording alone: whether it has a payload is another question.
bool Has(const Subject& s, std::string_view stem) { return s.capture().Operand(s.info(), s.Sibling(stem)).has_value(); }

// Positions chosen by a sparse indexer, as a mask over the keys of a batch.
void MaskChosen(const Tensor& topk, AttentionBatch* batch) {
  batch->mask =
      Array::Filled({static_cast<int64_t>(batch->rows.size()), static_cast<int64_t>(batch->key_positions.size())});
  for (size_t t = 0; t < batch->rows.size(); ++t) {
    if (batch->rows[t] >= topk.n_rows()) continue;
    for (double p : topk.row(batch->rows[t])) {
      const int64_t key = check::IntegerOf(p);
      const auto at = std::lower_bound(batch->key_positions.begin(), batch->key_positions.end(), key);
      if (at == batch->key_positions.end() || *at != key) continue;
      batch->mask[static_cast<int64_t>(t) * batch->mask.cols() + (at - batch->key_positions.begin())] = 1;
    }
  }
}

// One number a head of this rank, recorded in the step or at load, for its heads or for those of all ranks; no values:
// none was recorded. kBadInput: it was, on other ranks alone or for another number of heads.
Result<Array> PerHead(const Subject& s, std::string_view stem, const AttentionCall& call) {
  const std::string name = s.Sibling(stem);
  TensorPtr t = s.Operand(name);
  if (t == nullptr) t = s.Weight(name);
  if (t == nullptr) {
    if (s.capture().HasSite(name)) return NotRecorded(name + " of this rank");
    return Array{{0}, {}};
  }
  if (t->n() == call.heads) return ToArray({call.heads}, t->values);
  const Shard& shard = s.info().event.shard;
  const int64_t first = call.value_dim > 0 ? shard.col_offset / call.value_dim : shard.index * call.heads;
  if (shard.count <= 1 || first < 0 || first > t->n() - call.heads)
    return Status::BadInput(name + " has " + std::to_string(t->n()) + " numbers for " + std::to_string(call.heads) +
                            " heads");
  return ToArray({call.heads},
                 std::span(t->values).subspan(static_cast<size_t>(first), static_cast<size_t>(call.heads)));
}

// Whether the mask keeps a query from a later key that a later query sees: then it has the causal bound in it, as masks
// of whole models have, and may lift it (an image's patches see each other). A mask of padding alone has none.
bool HasOrder(const AttentionBatch& b) {
  if (b.mask.values.empty()) return false;
  const size_t queries = b.query_positions.size(), keys = b.key_positions.size();
  for (size_t j = 0; j < keys; ++j) {
    bool kept = false, seen = false;
    for (size_t q = 0; q < queries; ++q) {
      const bool sees = b.mask[static_cast<int64_t>(q * keys + j)] != 0,
                 later = b.query_positions[q] >= b.key_positions[j];
      kept = kept || (!sees && !later);
      seen = seen || (sees && later);
    }
    if (kept && seen) return true;
  }
  return false;
}

// A kernel that expands the latents of earlier steps again sums in another order than what was recorded of them: c
// roundings of partial sums, taken to be no larger than the column's largest value, at 8 sigma and on both sides. Sums
// of a step's own rows are the recorded ones; of keys the bound of the scores has room for it.
void AllowExpansion(const AttentionBatch& b, oracle::Computed* out) {
  if (b.expanded_from == 0 || b.v.values.empty() || out->k_inner <= 0) return;
  const int64_t group = out->value.shape[1] / b.v.shape[1], dv = b.v.cols(), width = b.v.shape[1] * dv;
  std::vector<double> largest(static_cast<size_t>(width), 0);
  for (int64_t i = 0; i < b.v.size(); ++i) {
    double& top = largest[static_cast<size_t>(i % width)];
    top = std::max(top, std::abs(b.v[i]));
  }
  // In units of k_inner, which multiplies `inner` in the bound.
  const double growth = 16 * std::sqrt(static_cast<double>(b.expanded_from)) / out->k_inner;
  for (int64_t i = 0; i < out->inner.size(); ++i) {
    const int64_t head = i / dv % out->value.shape[1];
    out->inner[i] += growth * largest[static_cast<size_t>(head / group * dv + i % dv)];
  }
}

}  // namespace

double DefaultSoftmaxScale(const Capture& capture, const EventInfo& info, int64_t d) {
  double scale = 1 / std::sqrt(static_cast<double>(d));
  const auto factor = capture.Number(info, "rope.factor");
  const auto all_dim = capture.Number(info, "rope.mscale_all_dim");
  if (factor && all_dim && *factor > 1 && *all_dim != 0) {
    const double m = oracle::YarnMagnitude(*factor, *all_dim);
    scale *= m * m;
  }
  return scale;
}

// "0:64,64:128": one range of key positions a request, as the metadata `keys` of a chunk's result has them. Empty for
// anything else.
std::vector<oracle::KeyRange> ParseRanges(const std::string& text) {
  std::vector<oracle::KeyRange> out;
  const char* at = text.c_str();
  while (*at != '\0') {
    char* end = nullptr;
    oracle::KeyRange range;
    range.begin = std::strtoll(at, &end, 10);
    if (end == at || *end != ':') return {};
    at = end + 1;
    range.end = std::strtoll(at, &end, 10);
    if (end == at) return {};
    out.push_back(range);
    at = *end == ',' ? end + 1 : end;
    if (*end != ',' && *end != '\0') return {};
  }
  return out;
}

// One batch a request: its query rows and all keys that they may see. `inputs` names q, k and v where a check judges a
// tensor by other names than the canonical ones. An operand that was not recorded ends it with kBadInput; the message
// says which, and nothing is guessed.
Result<AttentionCall> GatherAttention(const Subject& s, std::span<const std::string> inputs) {
  AttentionCall call;
  const EventInfo& info = s.info();
  if (s.tensor()->rows.empty()) return Status::BadInput(info.name + " has no rows with requests and positions");
  const bool named = inputs.size() >= 3;
  const TensorPtr q = s.Operand(named ? inputs[0] : s.Sibling("attn.q"));
  const TensorPtr q_latent = named ? nullptr : s.Operand(s.Sibling("attn.q_latent")),
                  q_pe = named ? nullptr : s.Operand(s.Sibling("attn.q_pe"));
  const bool scores = info.name.ends_with("attn.scores");
  const bool sums = info.name.ends_with("lse");
  Array query;
  // On the absorbed path the query that meets the cache is [q_latent, q_pe]; both paths may be recorded in one step,
  // then the width of the result tells which one made it.
  if (q_latent != nullptr && q_pe != nullptr &&
      (scores || sums || q == nullptr || s.tensor()->dim(-1) == q_latent->dim(-1))) {
    ASSAY_ASSIGN_OR_RETURN(query, oracle::Concat(WithHeads(ToArray(*q_latent)), WithHeads(ToArray(*q_pe))));
    call.absorbed = true;
    call.value_dim = q_latent->dim(-1);
  } else if (q != nullptr) {
    query = WithHeads(ToArray(*q));
  } else {
    return NotRecorded(named ? inputs[0] : s.Sibling("attn.q"));
  }
  const TensorPtr& source = call.absorbed ? q_latent : q;
  if (!SameRows(*source, *s.tensor())) {  // one request of the step, in an event of its own
    ASSAY_ASSIGN_OR_RETURN(query, RowsLike(*s.tensor(), *source, query));
  }
  call.n_rows = query.shape[0];
  call.heads = query.shape[1];

  // Where keys come from: as gathered from the cache, as read back after the write, or as computed.
  const std::string reads = s.Sibling(call.absorbed ? "attn.kv_read" : "attn.k_read");
  const bool gathered = !named && s.capture().Operand(info, reads).has_value();
  const bool cached = !gathered && !named && s.Text("kv_source", "fresh") == "cache" && Has(s, "attn.kv_write");
  const TensorPtr topk = s.Operand(s.Sibling("attn.indexer.topk"));
  const TensorPtr mask = s.Operand(s.Sibling("attn.mask"));
  std::map<uint64_t, size_t> index;
  for (int64_t r = 0; r < call.n_rows; ++r) {
    const RowId& id = s.tensor()->rows[static_cast<size_t>(r)];
    if (!id.real()) continue;
    auto [at, fresh] = index.try_emplace(id.request, call.batches.size());
    if (fresh) {
      call.batches.emplace_back();
      call.step.push_back({.first = id.position});
    }
    AttentionBatch& batch = call.batches[at->second];
    batch.request = id.request;
    batch.number = at->second;
    ++call.step[at->second].n_rows;
    call.step[at->second].last = id.position;
    batch.rows.push_back(r);
    batch.query_positions.push_back(id.position);
  }
  const auto ranges = ParseRanges(Capture::OwnText(info, "keys").value_or(""));
  if (!ranges.empty() && ranges.size() != call.batches.size()) {
    return Status::BadInput(info.name + ": metadata keys has " + std::to_string(ranges.size()) + " ranges for " +
                            std::to_string(call.batches.size()) + " requests");
  }
  for (size_t b = 0; b < call.batches.size(); ++b) {
    AttentionBatch& batch = call.batches[b];
    ASSAY_ASSIGN_OR_RETURN(batch.q, oracle::TakeRows(query, batch.rows));
    if (!ranges.empty()) batch.range = ranges[b];
    Keys k;
    if (call.absorbed) {
      if (gathered || cached) {
        const std::string name = gathered ? reads : s.Sibling("attn.kv_write");
        ASSAY_ASSIGN_OR_RETURN(k, KeysOf(s, name, batch.request, gathered));
        call.key_names = {name};
      } else {
        call.key_names = {s.Sibling("attn.kv_c_normed"), s.Sibling("attn.k_pe")};
        ASSAY_ASSIGN_OR_RETURN(k, KeysOf(s, call.key_names[0], batch.request, false));
        ASSAY_ASSIGN_OR_RETURN(Keys pe, KeysOf(s, call.key_names[1], batch.request, false));
        if (pe.positions != k.positions) return NotRecorded(call.key_names[1] + " of all rows");
        ASSAY_ASSIGN_OR_RETURN(k.values, oracle::Concat(k.values, pe.values));
        if (CacheRounds(s, call.key_names[0]))
          ASSAY_RETURN_IF_ERROR(TakeEarlierFromCache(s, call.key_names[0], batch.request, &k, nullptr));
      }
      batch.k = std::move(k.values);
    } else if (cached) {
      call.key_names = {s.Sibling("attn.kv_write")};
      const TensorPtr fresh = s.Operand(s.Sibling("attn.k"));
      ASSAY_ASSIGN_OR_RETURN(
          k, WrittenRows(s, batch.request, fresh != nullptr && fresh->shape.size() == 3 ? fresh->shape[1] : 1));
      ASSAY_ASSIGN_OR_RETURN(auto parts, Split(k.values, query.cols()));
      batch.k = std::move(parts.first);
      batch.v = std::move(parts.second);
    } else {
      call.key_names = {gathered ? reads : s.Sibling("attn.k"), s.Sibling(gathered ? "attn.v_read" : "attn.v")};
      if (named) call.key_names = {inputs[1], inputs[2]};
      ASSAY_ASSIGN_OR_RETURN(k, KeysOf(s, call.key_names[0], batch.request, gathered));
      Keys v = k;  // scores need none
      auto values = KeysOf(s, call.key_names[1], batch.request, gathered);
      if (values.ok() && values->positions == k.positions) {
        v = std::move(*values);
      } else if (!scores) {
        return values.ok() ? NotRecorded(call.key_names[1] + " of all rows") : values.status();
      }
      if (!gathered && !named && CacheRounds(s, call.key_names[0]))
        ASSAY_RETURN_IF_ERROR(TakeEarlierFromCache(s, call.key_names[0], batch.request, &k, &v));
      batch.k = std::move(k.values);
      batch.v = std::move(v.values);
      call.value_dim = batch.v.cols();
    }
    if (!batch.v.values.empty()) call.value_dim = batch.v.cols();
    batch.key_positions = std::move(k.positions);
    if (const TensorPtr latent = s.Operand(s.Sibling("attn.kv_c_normed"));
        latent != nullptr && !call.absorbed && !gathered && !batch.key_positions.empty() &&
        batch.key_positions.front() < batch.query_positions.front()) {
      batch.expanded_from = latent->row_size();
    }
    if (topk != nullptr && SameRows(*topk, *s.tensor())) MaskChosen(*topk, &batch);
    // [T, positions], as engines keep them; taken to [T, keys] of this request.
    if (mask != nullptr && mask->shape.size() == 2) {
      batch.mask =
          Array::Filled({static_cast<int64_t>(batch.rows.size()), static_cast<int64_t>(batch.key_positions.size())});
      for (size_t t = 0; t < batch.rows.size(); ++t) {
        if (batch.rows[t] >= mask->shape[0]) continue;
        for (size_t j = 0; j < batch.key_positions.size(); ++j) {
          const int64_t p = batch.key_positions[j];
          if (p < 0 || p >= mask->shape[1]) continue;
          batch.mask[static_cast<int64_t>(t * batch.key_positions.size() + j)] =
              mask->row(batch.rows[t])[static_cast<size_t>(p)];
        }
      }
    }
  }

  call.spec.scale =
      s.Number("softmax_scale", DefaultSoftmaxScale(s.capture(), info, q != nullptr ? q->dim(-1) : query.cols()));
  call.spec.causal = s.Flag("causal", std::none_of(call.batches.begin(), call.batches.end(), HasOrder));
  // Beyond all positions is one place: legal ("all rows are seen"), and numbers near it are formed later.
  const auto reach = [&](std::string_view key) { return std::clamp<int64_t>(s.Integer(key, 0), -1, int64_t{1} << 40); };
  call.spec.window = reach("window");
  call.spec.chunk = reach("attention_chunk");
  call.spec.prefix_len = reach("prefix_len");
  call.spec.soft_cap = s.Number("soft_cap", 0);
  ASSAY_ASSIGN_OR_RETURN(call.sinks, PerHead(s, "attn.sinks", call));
  ASSAY_ASSIGN_OR_RETURN(call.slopes, PerHead(s, "attn.alibi_slopes", call));

  // Keys that a query should see must be there.
  if (!gathered) {
    for (const AttentionBatch& batch : call.batches) {
      const int64_t last = *std::max_element(batch.query_positions.begin(), batch.query_positions.end());
      const int64_t first_query = *std::min_element(batch.query_positions.begin(), batch.query_positions.end());
      // The oldest key that some query of the batch must see.
      int64_t first = call.spec.window > 0 ? std::max<int64_t>(0, first_query - call.spec.window + 1) : 0;
      first = std::max(first, batch.range.begin);
      const int64_t end = std::min(last + 1, batch.range.end);
      const auto from = std::lower_bound(batch.key_positions.begin(), batch.key_positions.end(), first);
      const auto to = std::lower_bound(batch.key_positions.begin(), batch.key_positions.end(), end);
      if (to - from < end - first) {
        return Status::BadInput(info.name + ": keys of earlier positions were not recorded (" + call.key_names[0] +
                                ")");
      }
    }
  }
  return call;
}

// Borrows from both; they must outlive the call of the oracle.
oracle::AttentionInput InputOf(const AttentionBatch& batch, const AttentionCall& call) {
  oracle::AttentionInput in;
  in.q = &batch.q;
  in.k = &batch.k;
  in.v = batch.v.values.empty() ? nullptr : &batch.v;
  in.value_dim = call.value_dim;
  in.query_positions = batch.query_positions;
  in.key_positions = batch.key_positions;
  in.mask = batch.mask.values.empty() ? nullptr : &batch.mask;
  in.alibi_slopes = call.slopes.values.empty() ? nullptr : &call.slopes;
  return in;
}

// Rows of requests that are not computed (`only`) keep zeros and -inf: the caller looks at its own rows.
Result<AttentionValues> Recompute(const AttentionCall& call, int only) {
  AttentionValues all;
  const auto fill = [&](oracle::Computed* c, std::vector<int64_t> shape, double value) {
    c->value = Array::Filled(shape, value);
    c->scale = Array::Filled(shape);
    c->inner = Array::Filled(shape);
  };
  fill(&all.out, {call.n_rows, call.heads, call.value_dim}, 0);
  fill(&all.lse, {call.n_rows, call.heads}, -std::numeric_limits<double>::infinity());
  all.max_score = all.lse.value;
  all.lse_of_keys = all.lse.value;
  for (size_t b = 0; b < call.batches.size(); ++b) {
    if (only >= 0 && static_cast<size_t>(only) != b) continue;
    const AttentionBatch& batch = call.batches[b];
    oracle::AttentionInput in = InputOf(batch, call);
    const std::vector<oracle::KeyRange> ranges(batch.rows.size(), batch.range);
    in.ranges = ranges;
    in.sinks = call.sinks.values.empty() ? nullptr : &call.sinks;
    if (batch.key_positions.empty()) {
      if (in.sinks == nullptr) continue;
    }
    ASSAY_ASSIGN_OR_RETURN(oracle::AttentionResult r, oracle::Attend(in, call.spec));
    AllowExpansion(batch, &r.out);
    const auto put = [&](const Array& from, Array* to, int64_t width) {
      if (from.values.empty()) return;
      for (size_t t = 0; t < batch.rows.size(); ++t) {
        std::copy_n(from.values.begin() + static_cast<int64_t>(t) * width, width,
                    to->values.begin() + batch.rows[t] * width);
      }
    };
    const int64_t out_width = call.heads * call.value_dim;
    put(r.out.value, &all.out.value, out_width);
    put(r.out.scale, &all.out.scale, out_width);
    put(r.out.inner, &all.out.inner, out_width);
    put(r.lse.value, &all.lse.value, call.heads);
    put(r.lse.scale, &all.lse.scale, call.heads);
    put(r.lse.inner, &all.lse.inner, call.heads);
    put(r.max_score, &all.max_score, call.heads);
    put(r.lse_of_keys, &all.lse_of_keys, call.heads);
    // The longest sum of all batches bounds each.
    const auto widest = [](oracle::Computed* to, const oracle::Computed& from) {
      to->k = std::max(to->k, from.k);
      to->k_inner = std::max(to->k_inner, from.k_inner);
      to->stores = std::max(to->stores, from.stores);
    };
    widest(&all.out, r.out);
    widest(&all.lse, r.lse);
  }
  return all;
}

}  // namespace assay::op
