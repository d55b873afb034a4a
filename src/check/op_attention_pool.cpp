// What the pool of a paged cache holds behind the keys of a request.
#include <algorithm>
#include <utility>

#include "check/op_attention.h"

namespace assay::op {

// Appends the slots behind the newest key up to the end of its block, which a kernel reads that goes by whole blocks.
// newest_alone: only the last query sees them. False: nothing to append, or the pool was not recorded.
bool AddPoolTail(const Subject& out, bool absorbed, bool newest_alone, AttentionBatch* batch) {
  const TensorPtr table = out.Operand("block_table");
  const TensorPtr k = out.Operand(out.Sibling(absorbed ? "attn.kv_cache" : "attn.k_cache"));
  const TensorPtr v = absorbed ? nullptr : out.Operand(out.Sibling("attn.v_cache"));
  if (table == nullptr || k == nullptr || (!absorbed && v == nullptr) || batch->key_positions.empty()) return false;
  const auto own = std::find_if(table->rows.begin(), table->rows.end(),
                                [&](const RowId& row) { return row.request == batch->request; });
  if (own == table->rows.end()) return false;
  const auto entries = table->row(own - table->rows.begin());
  const int64_t block = out.capture().Integer(*table->info, "block_size").value_or(1);
  const int64_t newest = batch->key_positions.back();
  if (block < 1 || newest < 0 || newest / block >= static_cast<int64_t>(entries.size())) return false;
  const double entry = entries[static_cast<size_t>(newest / block)];
  const int64_t slots = absorbed ? k->n_rows() : std::min(k->n_rows(), v->n_rows());
  if (!(entry >= 0 && entry < static_cast<double>(slots / block))) return false;
  const int64_t first = static_cast<int64_t>(entry) * block, used = newest % block + 1;
  // The block is full: there is nothing behind the newest key.
  if (used == block) return false;
  const auto fits = [](const Tensor& pool, const oracle::Array& rows) {
    return !rows.values.empty() && pool.row_size() == rows.size() / rows.shape[0];
  };
  if (!fits(*k, batch->k) || (v != nullptr && !fits(*v, batch->v))) return false;
  for (auto [pool, to] : {std::pair{k.get(), &batch->k}, std::pair{v.get(), &batch->v}}) {
    if (pool == nullptr) continue;
    for (int64_t slot = first + used; slot < first + block; ++slot) {
      const auto row = pool->row(slot);
      to->values.insert(to->values.end(), row.begin(), row.end());
    }
    to->shape[0] += block - used;
  }
  // Seen from the position that stands here on, whatever their own would be.
  const int64_t seen_from = newest_alone ? batch->query_positions.back() : batch->query_positions.front();
  batch->key_positions.insert(batch->key_positions.end(), static_cast<size_t>(block - used), seen_from);
  batch->mask = {};
  return true;
}

}  // namespace assay::op
