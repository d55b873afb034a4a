#include "check/weights_ranks.h"

#include <cstring>
#include <map>

namespace assay {
namespace {

uint64_t SizeOf(const MemoryTensor& t) {
  uint64_t bits = static_cast<uint64_t>(BitsOf(t.event.dtype));
  for (const int64_t d : t.event.shape) bits *= static_cast<uint64_t>(d);
  return (bits + 7) / 8;
}

bool SameBits(const MemoryTensor& a, const MemoryTensor& b) {
  return a.event.shape == b.event.shape && a.event.dtype == b.event.dtype &&
         std::memcmp(a.data, b.data, SizeOf(a)) == 0;
}

// One repeated element says nothing about whose it is.
bool IsConstant(const MemoryTensor& t) {
  const uint64_t size = SizeOf(t), element = static_cast<uint64_t>(BitsOf(t.event.dtype)) / 8;
  return element == 0 || size <= element || std::memcmp(t.data, t.data + element, size - element) == 0;
}

// The columns too: a tensor may be cut along either axis.
bool SameShard(const Shard& a, const Shard& b) {
  return a.index == b.index && a.count == b.count && a.col_offset == b.col_offset && a.full_cols == b.full_cols;
}

}  // namespace

void CheckRanks(const std::vector<MemoryTensor>& tensors, std::vector<WeightFinding>* found) {
  std::map<std::string, std::vector<const MemoryTensor*>> by_name;
  for (const MemoryTensor& t : tensors) by_name[t.name].push_back(&t);
  for (const auto& [name, ranks] : by_name) {
    const MemoryTensor* bad = nullptr;
    std::string what;
    for (size_t i = 1; i < ranks.size() && bad == nullptr; ++i) {
      for (size_t j = 0; j < i && bad == nullptr; ++j) {
        const MemoryTensor &a = *ranks[j], &b = *ranks[i];
        const bool same = SameShard(a.event.shard, b.event.shard), equal = SameBits(a, b);
        // Right: the same shard and equal, or different shards and different. One rank with two tensors of a name says
        // nothing.
        if (same == equal || a.event.rank == b.event.rank || (equal && IsConstant(b))) continue;
        bad = &b;
        what = "rank " + std::to_string(b.event.rank) + (equal ? " holds the bits of rank " : " differs from rank ") +
               std::to_string(a.event.rank) +
               (equal ? ", and they claim different shards" : ", and both claim the same shard");
      }
    }
    if (bad == nullptr) continue;
    FirstBad finding = WeightBad(name, fault_class::kTpShard, "weights: across ranks", 0.95, {what});
    finding.ranks = {bad->event.rank};
    found->push_back({bad->sequence, std::move(finding)});
  }
}

}  // namespace assay
