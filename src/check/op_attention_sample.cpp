// Calls of attention that are too large to be recomputed for every query.
#include <algorithm>

#include "check/op_attention.h"
#include "check/op_sample.h"

namespace assay::op {
namespace {

constexpr int64_t kMaxWork = int64_t{1} << 32;  // products of a whole recomputation
constexpr int64_t kLeastQueries = 4;            // whatever one of them costs

}  // namespace

// places: numbers of rows of the batch, ascending. Keys stay: every query that is left sees what it saw.
void KeepQueries(AttentionBatch* batch, const std::vector<int64_t>& places) {
  std::vector<int64_t> rows, positions;
  for (int64_t i : places) {
    rows.push_back(batch->rows[static_cast<size_t>(i)]);
    positions.push_back(batch->query_positions[static_cast<size_t>(i)]);
  }
  batch->rows = std::move(rows);
  batch->query_positions = std::move(positions);
  if (auto q = oracle::TakeRows(batch->q, places); q.ok()) batch->q = std::move(*q);
  if (batch->mask.values.empty()) return;
  if (auto mask = oracle::TakeRows(batch->mask, places); mask.ok()) batch->mask = std::move(*mask);
}

// The price of a call is counted as if every query saw every key; a causal one costs half of it.
void SampleQueries(Subject* out, AttentionCall* call) {
  double work = 0, queries = 0;
  for (const AttentionBatch& b : call->batches) {
    const auto n = static_cast<double>(b.rows.size());
    const double width = static_cast<double>(b.q.cols() + call->value_dim) * static_cast<double>(call->heads);
    work += n * static_cast<double>(b.key_positions.size()) * width;
    queries += n;
  }
  if (work <= static_cast<double>(kMaxWork)) return;
  const double affordable = static_cast<double>(kMaxWork) / (work / queries);
  const int64_t most = std::clamp<int64_t>(static_cast<int64_t>(affordable), kLeastQueries, kSampledRows);
  const std::vector<int64_t> sample = SampleRows(out->judged(), most);
  out->sample = SampleText(sample.size(), out->judged()) + " of " + out->info().name;
  const auto taken = [&](int64_t r) { return std::binary_search(sample.begin(), sample.end(), r); };
  for (size_t r = 0; r < out->judged().size(); ++r) {
    if (!taken(static_cast<int64_t>(r))) out->LeaveOut(static_cast<int64_t>(r));
  }
  for (AttentionBatch& b : call->batches) {
    std::vector<int64_t> places;
    for (size_t i = 0; i < b.rows.size(); ++i) {
      if (taken(b.rows[i])) places.push_back(static_cast<int64_t>(i));
    }
    KeepQueries(&b, places);
  }
  std::erase_if(call->batches, [](const AttentionBatch& b) { return b.rows.empty(); });
}

}  // namespace assay::op
