// Attention against the oracle: whole calls, partial results over chunks of keys, their merge, scores and
// probabilities. A call whose output and log-sum-exp are both wrong counts once, at the output.
#include "check/op_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>

#include "check/op_checks.h"
#include "check/op_explain.h"
#include "oracle/merge.h"
#include "oracle/softmax.h"

namespace assay::check {
namespace {

using namespace op;
using oracle::Array;

// arrays: out and lse of each chunk in turn. lse_factor: times every log-sum-exp (another base).
Result<oracle::MergeResult> Merge(std::span<const Array> arrays, double lse_factor = 1) {
  std::vector<oracle::Chunk> chunks;
  std::vector<Array> scaled(arrays.begin(), arrays.end());
  for (size_t j = 0; j + 1 < scaled.size(); j += 2) {
    for (double& x : scaled[j + 1].values) x *= lse_factor;
    chunks.push_back({&scaled[j], &scaled[j + 1]});
  }
  return oracle::MergeChunks(chunks);
}

Result<oracle::Computed> MergedOut(std::span<const Array> arrays) {
  auto merged = Merge(arrays);
  if (!merged.ok()) return merged.status();
  return merged->out;
}

// Subjects of results of one call: the output, and its log-sum-exp where it was recorded. An operation of another name
// (op=merge, op=attention) has no log-sum-exp beside it.
TensorPtr LseOf(const Subject& out) {
  std::string name = out.info().name;
  if (out.info().name.ends_with("attn.latent_out")) {
    name = out.Sibling("attn.lse");
  } else if (name.ends_with(".out")) {
    name.replace(name.size() - 3, 3, "lse");
  } else {
    return nullptr;
  }
  // It may have been recorded just before or just behind the output.
  EventFilter filter;
  filter.step = out.info().event.step;
  filter.rank = out.info().event.rank;
  TensorPtr found;
  for (EventId id : out.capture().Find(name, filter)) {
    const auto info = out.capture().Info(id);
    if (info->audit == "before" || info->repeat != out.info().repeat) continue;
    if (auto t = out.capture().Load(id); t.ok() && SameRows(**t, *out.tensor())) found = *t;
  }
  return found;
}

// ---- merge ---------------------------------------------------------------------------------------------------------

// The rows of `result` out of all events of a chunk in its step: one for all requests, or one a request. Rows that no
// event has belong to requests without keys there: `absent`. Null when there is no event.
TensorPtr ChunkRows(const Subject& result, const std::string& name, double absent) {
  EventFilter filter;
  filter.step = result.info().event.step;
  filter.rank = result.info().event.rank;
  TensorPtr all;
  std::shared_ptr<Tensor> joined;
  std::map<std::pair<uint64_t, int64_t>, int64_t> place;
  for (EventId id : result.capture().Find(name, filter)) {
    auto part = result.capture().Load(id);
    if (!part.ok() || (*part)->info->audit == "before" || (*part)->info->repeat != result.info().repeat) continue;
    if (SameRows(**part, *result.tensor())) {
      all = *part;
      continue;
    }
    if (joined == nullptr) {
      joined = std::make_shared<Tensor>(**part);
      joined->rows = result.tensor()->rows;
      joined->shape[0] = result.tensor()->n_rows();
      joined->values.assign(static_cast<size_t>(joined->shape[0] * (*part)->row_size()), absent);
      joined->bytes = {};
      joined->row_numbers.clear();
      for (size_t r = 0; r < joined->rows.size(); ++r) {
        if (joined->rows[r].real())
          place[{joined->rows[r].request, joined->rows[r].position}] = static_cast<int64_t>(r);
      }
    }
    const int64_t width = (*part)->row_size();
    if (width * joined->shape[0] != static_cast<int64_t>(joined->values.size())) continue;
    for (size_t r = 0; r < (*part)->rows.size(); ++r) {
      const auto at = place.find({(*part)->rows[r].request, (*part)->rows[r].position});
      if (at == place.end()) continue;
      const auto row = (*part)->row(static_cast<int64_t>(r));
      std::copy(row.begin(), row.end(), joined->values.begin() + at->second * width);
    }
  }
  return all != nullptr ? all : joined;
}

// Chunks of the step, with the rows of the result; empty when there are none.
std::vector<Input> ChunksOf(const Subject& result) {
  std::vector<Input> inputs;
  for (int j = 0;; ++j) {
    const std::string name = result.Sibling("attn.chunk." + std::to_string(j) + ".");
    if (!result.capture().HasSite(name + "out")) break;
    const TensorPtr out = ChunkRows(result, name + "out", 0);
    const TensorPtr lse = ChunkRows(result, name + "lse", -std::numeric_limits<double>::infinity());
    if (out == nullptr || lse == nullptr) continue;  // not in this step
    inputs.push_back({name + "out", out});
    inputs.push_back({name + "lse", lse});
  }
  return inputs;
}

// Whether any chunk holds row r: others of the step were attended whole (decoded beside a chunked prefill).
bool IsChunked(const std::vector<Input>& chunks, int64_t r) {
  for (size_t j = 1; j < chunks.size(); j += 2) {
    const Tensor& lse = *chunks[j].tensor;
    if (r >= lse.n_rows()) continue;
    for (const double x : lse.row(r)) {
      if (!(std::isinf(x) && x < 0)) return true;
    }
  }
  return false;
}

// Leaves the rows of the step to judge that were merged from chunks, or those that were not; false: there are none.
bool KeepRows(Subject* out, const std::vector<Input>& chunks, bool merged) {
  bool any = false;
  for (size_t r = 0; r < out->judged().size(); ++r) {
    if (!out->judged()[r]) continue;
    const auto row = static_cast<int64_t>(r);
    if (IsChunked(chunks, row) == merged) {
      any = true;
    } else {
      out->LeaveOut(row);
    }
  }
  return any;
}

// The output of a step with latents is judged through W_UV, by the absorption.
bool IsBehindLatents(const Subject& out) {
  return out.info().name.ends_with("attn.out") && out.Operand(out.Sibling("attn.latent_out")) != nullptr;
}

// The log-sum-exp of a call, of the same rows as its output.
Subject LseSubject(const Subject& out, const TensorPtr& sums) {
  Subject lse(out.capture(), sums, out.report());
  for (size_t r = 0; r < out.judged().size(); ++r) {
    if (!out.judged()[r]) lse.LeaveOut(static_cast<int64_t>(r));
  }
  return lse;
}

// ---- scores and probabilities --------------------------------------------------------------------------------------

// [T, H, columns], -inf where a query does not see a key; column p is position p of the row's request.
Result<oracle::Computed> ScoresOf(const AttentionCall& call, int64_t columns) {
  oracle::Computed all;
  all.value = Array::Filled({call.n_rows, call.heads, columns}, -std::numeric_limits<double>::infinity());
  all.scale = Array::Filled(all.value.shape);
  for (const AttentionBatch& b : call.batches) {
    ASSAY_ASSIGN_OR_RETURN(oracle::Computed scores, oracle::Scores(InputOf(b, call), call.spec));
    all.k = std::max(all.k, scores.k);
    all.stores = std::max(all.stores, scores.stores);
    const auto n = static_cast<int64_t>(b.key_positions.size());
    for (size_t t = 0; t < b.rows.size(); ++t) {
      for (int64_t h = 0; h < call.heads; ++h) {
        for (int64_t j = 0; j < n; ++j) {
          const int64_t p = b.key_positions[static_cast<size_t>(j)];
          if (p < 0 || p >= columns) continue;
          const int64_t to = (b.rows[t] * call.heads + h) * columns + p;
          const int64_t from = (static_cast<int64_t>(t) * call.heads + h) * n + j;
          all.value[to] = scores.value[from];
          if (std::isfinite(scores.value[from])) all.scale[to] = scores.scale[from];
        }
      }
    }
  }
  return all;
}

// A softmax scale is fitted last: it is the only cause here with a free number.
void JudgeScores(Subject& scores) {
  auto call = GatherAttention(scores);
  if (!call.ok()) {
    scores.report().Missing(call.status().message(), Capture::RecordHint(scores.Sibling("attn.q, attn.k")));
    return;
  }
  SampleQueries(&scores, &*call);
  if (!scores.sample.empty()) scores.report().Sampled(scores.sample);
  const int64_t columns = scores.actual().cols();
  auto right = ScoresOf(*call, columns);
  if (!right.ok()) return scores.report().Missing(right.status().message(), "record operands of shapes that fit");
  if (!IsComparable(scores, *right)) return;
  // Some engines mask by a large negative number in place of minus infinity.
  Array actual = scores.actual();
  for (double& x : actual.values) {
    if (x <= -1e30) x = -std::numeric_limits<double>::infinity();
  }
  const Difference d = Differ(actual, *right, scores.precision(), scores.judged());
  if (d.ok) return ReportRight(scores, d);
  bool nan = false;
  for (double x : actual.values) nan = nan || std::isnan(x);
  std::optional<Explanation> why;
  if (nan) {
    Difference bad = d;
    bad.nonfinite = true;
    why = ExplainNonFinite(scores, Operation{}, bad, false);
  }
  const auto fits = [&](AttentionCall changed) {
    auto other = ScoresOf(changed, columns);
    return other.ok() && Differ(actual, *other, scores.precision(), scores.judged(), 4).ok;
  };
  if (!why) {
    for (int64_t by : {1, -1}) {
      AttentionCall c = *call;
      c.spec.causal_shift = by;
      if (!why && fits(c))
        why = Explanation{fault_class::kMask, "fits a causal bound that is off", static_cast<double>(by),
                          "causal bound used - declared"};
      c = *call;
      c.spec.window += by;
      if (!why && call->spec.window > 0 && fits(c))
        why = Explanation{fault_class::kMask, "fits another window", static_cast<double>(by),
                          "keys seen beyond the declared window"};
    }
    AttentionCall c = *call;
    c.spec.soft_cap = 0;
    if (!why && call->spec.soft_cap != 0 && fits(c)) why = Explanation{fault_class::kMask, "fits without the soft cap"};
    c = *call;
    c.spec.causal = false;
    if (!why && call->spec.causal && fits(c)) why = Explanation{fault_class::kMask, "fits without the causal bound"};
    c = *call;
    c.spec.window = 0;
    if (!why && call->spec.window > 0 && fits(c)) why = Explanation{fault_class::kMask, "fits without the window"};
    c = *call;
    c.slopes = {};
    if (!why && !call->slopes.values.empty() && fits(c))
      why = Explanation{fault_class::kMask, "fits without the ALiBi slopes"};
  }
  if (!why) {  // one constant on what is seen
    double cross = 0, square = 0;
    for (int64_t i = 0; i < actual.size(); ++i) {
      if (!std::isfinite(actual[i]) || !std::isfinite(right->value[i])) continue;
      cross += actual[i] * right->value[i];
      square += right->value[i] * right->value[i];
    }
    AttentionCall c = *call;
    c.spec.scale *= square > 0 ? cross / square : 1;
    if (fits(c))
      why = Explanation{fault_class::kScale, "fits another softmax scale", cross / square,
                        "softmax scale used / declared"};
  }
  if (!why) why = ExplainPrecision(scores, *right);
  if (!why)
    why = Explanation{fault_class::kKernel, "scores are wrong on the operands as recorded, and no other cause fits",
                      kNone, "", 1};
  ReportWrong(scores, d, *why);
}

// From the recorded scores alone, so that a wrong score is not counted twice.
void JudgeProbabilities(Subject& probs) {
  const TensorPtr scores = probs.Operand(probs.Sibling("attn.scores"));
  if (scores == nullptr) return Missing(probs, probs.Sibling("attn.scores"));
  if (scores->shape != probs.tensor()->shape) return;
  const auto run = [](std::span<const Array> in) { return oracle::Softmax(in[0]); };
  JudgeOperation(probs, {{{scores->info->name, scores}}, run}, nullptr);
}

}  // namespace

// The output decides; the log-sum-exp is judged only beside a right output, since most causes make both wrong.
void JudgeCall(Subject& out, std::span<const std::string> inputs) {
  auto call = GatherAttention(out, inputs);
  if (!call.ok()) {
    out.report().Missing(call.status().message(), Capture::RecordHint(out.Sibling("attn.q, attn.k, attn.v")));
    return;
  }
  // Requests of which no row is judged here.
  std::erase_if(call->batches, [&](const AttentionBatch& b) {
    return std::none_of(b.rows.begin(), b.rows.end(),
                        [&](int64_t r) { return out.judged()[static_cast<size_t>(r)] != 0; });
  });
  SampleQueries(&out, &*call);
  if (!out.sample.empty()) out.report().Sampled(out.sample);
  auto right = Recompute(*call);
  if (!right.ok()) {
    out.report().Missing(right.status().message(), "record operands of shapes that fit");
    return;
  }
  if (!IsComparable(out, right->out)) return;
  const Difference d = Differ(out.actual(), right->out, out.precision(), out.judged());
  if (!d.ok) {
    auto why = ExplainAttention(out, *call, *right, d);
    if (!why) {
      why =
          Explanation{fault_class::kKernel, "attention is wrong on the operands as recorded, and no other cause fits"};
      why->rank = 1;
    }
    ReportWrong(out, d, *why);
    return;
  }
  ReportRight(out, d);
  if (const TensorPtr sums = LseOf(out)) {
    const Subject lse = LseSubject(out, sums);
    if (!IsComparable(lse, right->lse)) return;
    const Difference e = Differ(lse.actual(), right->lse, lse.precision(), lse.judged());
    if (e.ok) {
      ReportRight(lse, e);
    } else {
      ReportWrong(lse, e, ExplainLse(lse, *right));
    }
  }
}

namespace {

// A chunk whose heads the merge reads further apart (or closer) than they lie, as of a padded buffer. Rows whose
// reading leaves the rows of their request are not judged: what lies there was not recorded.
std::optional<Explanation> ExplainHeadStride(const Subject& out, const Operation& merge, const Difference& d) {
  for (size_t j = 0; j + 1 < merge.inputs.size(); j += 2) {
    const Tensor& chunk = *merge.inputs[j].tensor;
    if (chunk.shape.size() != 3 || chunk.shape[1] < 2 || chunk.shape[2] % 8 != 0) continue;
    if (static_cast<int64_t>(chunk.rows.size()) != chunk.shape[0]) continue;  // whose rows these are is not known
    const int64_t rows = chunk.shape[0], heads = chunk.shape[1], dv = chunk.shape[2], width = heads * dv;
    // Half to twice the head size in eighths: paddings and packings that buffers have.
    for (int64_t stride = dv / 2; stride <= 2 * dv; stride += dv / 8) {
      if (stride == dv) continue;
      auto arrays = merge.arrays();
      std::vector<char> judged = out.judged();
      bool wrong_row = false;
      for (int64_t t = 0; t < rows; ++t) {
        int64_t end = t;  // behind the rows of the same request
        while (end < rows && chunk.rows[static_cast<size_t>(end)].request == chunk.rows[static_cast<size_t>(t)].request)
          ++end;
        if (t * width + (heads - 1) * stride + dv > end * width) {
          judged[static_cast<size_t>(t)] = 0;
          continue;
        }
        const bool counts = judged[static_cast<size_t>(t)] != 0;
        wrong_row = wrong_row || (counts && std::find(d.rows.begin(), d.rows.end(), t) != d.rows.end());
        for (int64_t h = 0; h < heads; ++h)
          std::copy_n(chunk.values.begin() + t * width + h * stride, dv, arrays[j].values.begin() + t * width + h * dv);
      }
      if (!wrong_row) continue;
      auto merged = MergedOut(arrays);
      if (!merged.ok() || !Differ(out.actual(), *merged, out.precision(), judged, 4).ok) continue;
      return Explanation{fault_class::kStride, "fits " + merge.inputs[j].name + " read with a head stride of " +
                                                   std::to_string(stride) + " elements in place of " +
                                                   std::to_string(dv)};
    }
  }
  return std::nullopt;
}

// A chunk more than the request has keys for: its part of the workspace was not written, and holds what another call
// left there, row by row. Every request with wrong rows must be explained, as far as the rows left there reach.
std::optional<Explanation> ExplainLeftChunk(const Subject& out, const Operation& merge, const Difference& d) {
  const std::vector<RowId>& rows = out.tensor()->rows;
  std::string text;
  std::vector<char> done(rows.size(), 0);
  for (int64_t wrong : d.rows) {
    if (wrong >= static_cast<int64_t>(rows.size()) || done[static_cast<size_t>(wrong)]) continue;
    const uint64_t request = rows[static_cast<size_t>(wrong)].request;
    std::vector<int64_t> own;
    for (size_t r = 0; r < rows.size(); ++r) {
      if (rows[r].real() && rows[r].request == request) own.push_back(static_cast<int64_t>(r)), done[r] = 1;
    }
    bool found = false;
    for (int j = 0; !found; ++j) {
      const std::string name = out.Sibling("attn.chunk." + std::to_string(j) + ".");
      if (!out.capture().HasSite(name + "out")) break;
      const auto outs = out.capture().EventsOf(name + "out"), sums = out.capture().EventsOf(name + "lse");
      for (size_t i = 0; i < outs.size() && i < sums.size() && !found; ++i) {
        if (!out.capture().Earlier(outs[i], out.info().id)) break;
        auto left = out.capture().Load(outs[i]), lse = out.capture().Load(sums[i]);
        if (!left.ok() || !lse.ok() || (*left)->info->event.rank != out.info().event.rank ||
            (*left)->row_size() != merge.inputs[0].tensor->row_size() ||
            (*lse)->row_size() != merge.inputs[1].tensor->row_size() || (*left)->n_rows() != (*lse)->n_rows() ||
            (*left)->rows.empty() || (*left)->rows[0].request == request)
          continue;
        auto arrays = merge.arrays();
        Array more = Array::Filled(arrays[0].shape),
              more_lse = Array::Filled(arrays[1].shape, -std::numeric_limits<double>::infinity());
        std::vector<char> judged(rows.size(), 0);
        bool covers = false;
        for (size_t r = 0; r < own.size() && static_cast<int64_t>(r) < (*left)->n_rows(); ++r) {
          const auto from = (*left)->row(static_cast<int64_t>(r)), sum = (*lse)->row(static_cast<int64_t>(r));
          std::copy(from.begin(), from.end(), more.values.begin() + own[r] * (*left)->row_size());
          std::copy(sum.begin(), sum.end(), more_lse.values.begin() + own[r] * (*lse)->row_size());
          judged[static_cast<size_t>(own[r])] = 1;
          covers = covers || own[r] == wrong;
        }
        if (!covers) continue;
        arrays.push_back(std::move(more));
        arrays.push_back(std::move(more_lse));
        auto merged = MergedOut(arrays);
        found = merged.ok() && Differ(out.actual(), *merged, out.precision(), judged, 4).ok;
        if (found)
          text = "fits one chunk more, with what another request left in " + name +
                 "out: a chunk without keys was not " + "written";
      }
    }
    if (!found) return std::nullopt;
  }
  if (text.empty()) return std::nullopt;
  return Explanation{fault_class::kUnwritten, text};
}

}  // namespace

// The merge alone, on the chunks as they were recorded: a wrong chunk is found at the chunk.
void JudgeMerged(Subject& out, const std::vector<Input>& chunks) {
  Operation merge{chunks, MergedOut};
  for (const Input& input : merge.inputs) {
    if (!SameRows(*input.tensor, *out.tensor())) {
      out.report().Missing(out.info().name + ": chunks hold other rows than the merged result",
                           "record every chunk with all rows of the step");
      return;
    }
  }
  const auto own = [&](const Difference& d, const oracle::Computed&) -> std::optional<Explanation> {
    // Kernels in base 2 give log2 sums; a merge in natural logarithms has to convert them, and the other way round.
    for (auto [factor, text] : {std::pair{1 / std::log(2.0), "fits weights of base 2 on natural log-sum-exps"},
                                std::pair{std::log(2.0), "fits natural weights where base 2 was taken for given"}}) {
      auto merged = Merge(merge.arrays(), 1 / factor);
      if (merged.ok() && Fits(out, merged->out))
        return Explanation{fault_class::kLse, text, factor, "base of the log-sum-exp used / declared"};
    }
    auto equal = merge.arrays();
    for (size_t j = 1; j < equal.size(); j += 2) {
      for (double& x : equal[j].values) x = std::isfinite(x) ? 0 : x;
    }
    if (Fits(out, MergedOut(equal)))
      return Explanation{fault_class::kLse, "fits the mean of the chunks: their log-sum-exps were left out"};
    for (size_t j = 0; j < merge.inputs.size(); j += 2) {
      auto arrays = merge.arrays();
      arrays.erase(arrays.begin() + static_cast<int64_t>(j), arrays.begin() + static_cast<int64_t>(j) + 2);
      if (!arrays.empty() && Fits(out, MergedOut(arrays))) {
        return Explanation{fault_class::kMask, "fits without chunk " + std::to_string(j / 2)};
      }
    }
    if (auto why = ExplainLeftChunk(out, merge, d)) return why;
    return ExplainHeadStride(out, merge, d);
  };
  JudgeOperation(out, merge, own);
  if (const TensorPtr sums = LseOf(out)) {
    const Subject lse = LseSubject(out, sums);
    auto merged = Merge(merge.arrays());
    if (!merged.ok() || !IsComparable(lse, merged->lse)) return;
    const Difference e = Differ(lse.actual(), merged->lse, lse.precision(), lse.judged());
    if (e.ok) {
      ReportRight(lse, e);
    } else {
      AttentionValues right;
      right.lse = merged->lse;
      right.max_score = right.lse_of_keys = Array::Filled(merged->lse.value.shape);
      ReportWrong(lse, e, ExplainLse(lse, right));
    }
  }
}

void JudgeAttention(const Capture& capture, CheckReport* report) {
  constexpr std::string_view kOut[] = {"attn.latent_out", "attn.out"};
  JudgeStems(capture, report, kOut, [](Subject& out) {
    if (IsBehindLatents(out)) return;
    const std::vector<Input> chunks = ChunksOf(out);
    if (chunks.empty() || KeepRows(&out, chunks, false)) JudgeCall(out);  // merged rows: judged with the chunks
  });
  constexpr std::string_view kScores[] = {"attn.scores"}, kProbs[] = {"attn.probs"};
  JudgeStems(capture, report, kScores, JudgeScores);
  JudgeStems(capture, report, kProbs, JudgeProbabilities);
}

void JudgeChunks(const Capture& capture, CheckReport* report) {
  std::vector<std::string> stems;
  for (int j = 0; j < 4096; ++j) {
    const std::string stem = "attn.chunk." + std::to_string(j) + ".out";
    if (capture.NamesOfStem(stem).empty()) break;
    stems.push_back(stem);
  }
  const std::vector<std::string_view> views(stems.begin(), stems.end());
  JudgeStems(capture, report, views, [](Subject& out) { JudgeCall(out); });
  if (stems.empty()) return;
  constexpr std::string_view kOut[] = {"attn.latent_out", "attn.out"};
  JudgeStems(capture, report, kOut, [](Subject& out) {
    if (IsBehindLatents(out)) return;
    const std::vector<Input> chunks = ChunksOf(out);
    if (!chunks.empty() && KeepRows(&out, chunks, true)) JudgeMerged(out, chunks);
  });
}

}  // namespace assay::check
