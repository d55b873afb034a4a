#include "check/slots.h"

#include <algorithm>

#include "check/helpers.h"

namespace assay::check {

SlotOwners::SlotOwners(const Capture& capture, int64_t last_step, int32_t rank) {
  for (const EventId id : RealEvents(capture, "slot_mapping")) {
    const EventView view = capture.trace().event(id);
    // Slots of rank 0 hold for all ranks where each rank has its own pool of the same layout: only one may be recorded.
    if (view.step() > last_step || (view.rank() != rank && view.rank() != 0)) continue;
    auto tensor = capture.Load(id);
    if (!tensor.ok()) continue;
    const Tensor& t = **tensor;
    for (size_t r = 0; r < t.rows.size() && static_cast<int64_t>(r) < t.n(); ++r) {
      const int64_t slot = IntegerOf(t.values[r]);
      if (slot < 0 || !t.rows[r].real()) continue;
      owners_[slot] = {t.rows[r].request, t.rows[r].position, view.step()};
      mapped_.insert({t.rows[r].request, t.rows[r].position});
    }
  }
}

const SlotOwner* SlotOwners::Of(int64_t slot) const {
  const auto found = owners_.find(slot);
  return found == owners_.end() ? nullptr : &found->second;
}

std::set<int64_t> SlotOwners::MappedIn(int64_t step) const {
  std::set<int64_t> out;
  for (const auto& [slot, owner] : owners_) {
    if (owner.step == step) out.insert(slot);
  }
  return out;
}

std::optional<bool> SamePrefix(const Capture& capture, uint64_t a, uint64_t b, int64_t position) {
  if (a == b) return true;
  const RequestInfo* x = capture.Request(a);
  const RequestInfo* y = capture.Request(b);
  const size_t n = static_cast<size_t>(std::max<int64_t>(position, 0)) + 1;
  if (x == nullptr || y == nullptr || x->tokens.empty() || y->tokens.empty()) return std::nullopt;
  // Tokens that were generated are not part of what was announced.
  // An early difference decides even so.
  if (x->tokens.size() < n || y->tokens.size() < n) {
    const size_t common = std::min({x->tokens.size(), y->tokens.size(), n});
    if (!std::equal(x->tokens.begin(), x->tokens.begin() + static_cast<int64_t>(common), y->tokens.begin()))
      return false;
    return std::nullopt;
  }
  return std::equal(x->tokens.begin(), x->tokens.begin() + static_cast<int64_t>(n), y->tokens.begin());
}

}  // namespace assay::check
