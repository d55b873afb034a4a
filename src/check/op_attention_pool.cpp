// What the pool of a paged cache holds behind the keys of a request.
#include <algorithm>
#include <utility>

#include "check/op_attention.h"

namespace assay::op {

bool Pool::holds_rows_of(const AttentionBatch& batch) const {
  const auto fits = [](const Tensor& pool, const oracle::Array& rows) {
    int64_t width = 1;
    for (size_t axis = 1; axis < rows.shape.size(); ++axis) width *= rows.shape[axis];
    return !rows.shape.empty() && pool.row_size() == width;
  };
  return slots > 0 && fits(*k, batch.k) && (v == nullptr || fits(*v, batch.v));
}

Pool PoolOf(const Subject& out, const AttentionCall& call) {
  const TensorPtr k = out.Operand(out.Sibling(call.absorbed ? "attn.kv_cache" : "attn.k_cache"));
  const TensorPtr v = call.absorbed ? nullptr : out.Operand(out.Sibling("attn.v_cache"));
  if (k == nullptr || (!call.absorbed && v == nullptr)) return {};
  return {k, v, v == nullptr ? k->n_rows() : std::min(k->n_rows(), v->n_rows())};
}

// Appends the slots behind the newest key up to the end of its block, which a kernel reads that goes by whole blocks.
// newest_alone: only the last query sees them. False: nothing to append, or the pool was not recorded.
bool AddPoolTail(const Subject& out, const AttentionCall& call, bool newest_alone, AttentionBatch* batch) {
  const TensorPtr table = out.Operand("block_table");
  const Pool pool = PoolOf(out, call);
  if (table == nullptr || !pool.holds_rows_of(*batch) || batch->key_positions.empty()) return false;
  const auto own = std::find_if(table->rows.begin(), table->rows.end(),
                                [&](const RowId& row) { return row.request == batch->request; });
  if (own == table->rows.end()) return false;
  const auto entries = table->row(own - table->rows.begin());
  const int64_t block = out.capture().Integer(*table->info, "block_size").value_or(1);
  const int64_t newest = batch->key_positions.back();
  if (block < 1 || newest < 0 || newest / block >= static_cast<int64_t>(entries.size())) return false;
  const double entry = entries[static_cast<size_t>(newest / block)];
  if (!(entry >= 0 && entry < static_cast<double>(pool.slots / block))) return false;
  const int64_t first = static_cast<int64_t>(entry) * block, used = newest % block + 1;
  // The block is full: there is nothing behind the newest key.
  if (used == block) return false;
  for (auto [from, to] : {std::pair{pool.k.get(), &batch->k}, std::pair{pool.v.get(), &batch->v}}) {
    if (from == nullptr) continue;
    for (int64_t slot = first + used; slot < first + block; ++slot) {
      const auto row = from->row(slot);
      to->values.insert(to->values.end(), row.begin(), row.end());
    }
    to->shape[0] += block - used;
  }
  // Seen from the position that stands here on, whatever their own would be.
  const int64_t seen_from = newest_alone ? call.rows_of(*batch).last : call.rows_of(*batch).first;
  batch->key_positions.insert(batch->key_positions.end(), static_cast<size_t>(block - used), seen_from);
  batch->mask = {};
  return true;
}

}  // namespace assay::op
