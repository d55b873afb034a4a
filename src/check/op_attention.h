// One attention call as recorded: queries, the keys and values of each request, and what the model asks for. It can be
// recomputed as declared or with any of it changed, which is how causes are tried.
#pragma once

#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "check/op_common.h"
#include "check/op_explain.h"
#include "oracle/attention.h"

namespace assay::op {

// The rows of one request in the step, all of them: what a kernel counts from, whichever queries are recomputed.
struct StepRows {
  int64_t n_rows = 0;
  int64_t first = 0, last = 0;  // positions of its first and its last row
};

// The queries of one request and what they see. Keys in order of position.
struct AttentionBatch {
  uint64_t request = 0;
  size_t number = 0;          // of the request in the step, into AttentionCall::step
  std::vector<int64_t> rows;  // of the result
  std::vector<int64_t> query_positions, key_positions;
  oracle::Array q, k, v;  // v without values: the first value_dim columns of k
  oracle::Array mask;     // [queries, keys]; without values: none
  oracle::KeyRange range;
  // MLA: width of the latents that keys of earlier steps were expanded from once more, 0 if none were.
  int64_t expanded_from = 0;
};

struct AttentionCall {
  std::vector<AttentionBatch> batches;  // requests of which a query is left
  std::vector<StepRows> step;           // every request, in order of rows
  oracle::AttentionSpec spec;
  oracle::Array sinks, slopes;  // [H]; without values: none
  int64_t n_rows = 0, heads = 0, value_dim = 0;
  bool absorbed = false;
  std::vector<std::string> key_names;  // sites that keys and values came from, full names
  const StepRows& rows_of(const AttentionBatch& batch) const { return step[batch.number]; }
};

struct AttentionValues {
  oracle::Computed out;  // [rows, H, dv]
  oracle::Computed lse;  // [rows, H]
  oracle::Array max_score, lse_of_keys;
};

// kBadInput says which operand was not recorded. `result` is attn.out, attn.latent_out, attn.chunk.J.out, attn.scores
// or the lse of one of these.
// `inputs`: full names of queries, keys and values, for a result at a name of its own.
Result<AttentionCall> GatherAttention(const Subject& result, std::span<const std::string> inputs = {});
// 1 / sqrt(d), with YaRN's m^2 where the metadata ask for it (DeepSeek's softmax scale). softmax_scale of the event
// goes before it.
double DefaultSoftmaxScale(const Capture& capture, const EventInfo& info, int64_t d);
// What scores depend on, without sinks and ranges: points into the batch and the call.
oracle::AttentionInput InputOf(const AttentionBatch& batch, const AttentionCall& call);
// Rows of requests are computed, all others are 0 and -inf. `only`: that batch alone.
Result<AttentionValues> Recompute(const AttentionCall& call, int only = -1);
// Leaves the batch these of its queries, by their place in it.
void KeepQueries(AttentionBatch* batch, const std::vector<int64_t>& places);
// Of a call too large to be recomputed whole: leaves it, and the rows that count of its result, a sample of the
// queries. What was left stands in out->sample.
void SampleQueries(Subject* out, AttentionCall* call);
// The cause of a wrong output of this call.
std::optional<Explanation> ExplainAttention(const Subject& out, const AttentionCall& call, const AttentionValues& right,
                                            const Difference& d);
// Parts of it. Results that belong to other heads; query heads that read other key heads than their own; a running
// maximum or sum that a float16 accumulator cannot hold.
std::optional<Explanation> ExplainHeads(const Subject& out, const AttentionCall& call, const AttentionValues& right);
std::optional<Explanation> ExplainKeyHeads(const Subject& out, const AttentionCall& call, const AttentionValues& right);
std::optional<Explanation> LeavesRange(const Subject& out, const AttentionCall& call);
// The cause of a wrong log-sum-exp whose output is right: LSE, with the constant where there is one, or PRECISION.
Explanation ExplainLse(const Subject& lse, const AttentionValues& right);

// The whole pool of the layer (attn.*_cache): keys with values, or latents alone.
struct Pool {
  TensorPtr k, v;     // v null: part of k
  int64_t slots = 0;  // 0: it was not recorded
  // A slot is as wide as a key, and as a value, of the batch.
  bool holds_rows_of(const AttentionBatch& batch) const;
};
Pool PoolOf(const Subject& out, const AttentionCall& call);
// Adds to a batch the keys and values that the pool (attn.*_cache) holds behind the request's newest one, to the end of
// the block that block_table gives it, as seen by all of its queries or by the newest alone. False: nothing was added.
bool AddPoolTail(const Subject& out, const AttentionCall& call, bool newest_alone, AttentionBatch* batch);

// Ranges of `keys` metadata ("0:8,0:4"), one a request; empty when it is damaged.
std::vector<oracle::KeyRange> ParseRanges(const std::string& text);

}  // namespace assay::op

namespace assay::check {

// Judges a whole call, and its log-sum-exp where there is one. `inputs` as for GatherAttention.
void JudgeCall(op::Subject& out, std::span<const std::string> inputs = {});
// Judges a result that joins partial ones: out, lse, out, lse … over disjoint keys.
void JudgeMerged(op::Subject& out, const std::vector<op::Input>& chunks);

}  // namespace assay::check
