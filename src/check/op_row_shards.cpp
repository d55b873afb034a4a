#include "check/op_row_shards.h"

#include <algorithm>
#include <map>

namespace assay::op {

std::optional<RowShards> StitchRows(const Subject& subject, const std::string& name) {
  const Capture& capture = subject.capture();
  const TensorPtr own = subject.Weight(name);
  if (own == nullptr || own->shape.empty() || own->info->event.shard.count < 2) return std::nullopt;
  const Shard& shard = own->info->event.shard;
  std::map<int32_t, TensorPtr> parts;  // by index; replicas of a part are one
  for (const EventId id : capture.EventsOf(name)) {
    const auto info = capture.Info(id);
    if (info->audit == "before" || info->event.shard.count != shard.count) continue;
    auto tensor = capture.Load(id);
    if (!tensor.ok() || (*tensor)->sampled || (*tensor)->row_size() != own->row_size()) return std::nullopt;
    parts.emplace(info->event.shard.index, *tensor);
  }
  if (std::ssize(parts) != shard.count || !parts.contains(shard.index)) return std::nullopt;
  RowShards out;
  out.rows = own->n_rows();
  for (const auto& [index, part] : parts) {
    const int64_t at = out.whole.size() / std::max<int64_t>(own->row_size(), 1);
    if (index == shard.index) out.first = at;
    out.whole.values.insert(out.whole.values.end(), part->values.begin(), part->values.end());
  }
  out.whole.shape = {out.whole.size() / std::max<int64_t>(own->row_size(), 1), own->row_size()};
  return out;
}

}  // namespace assay::op
