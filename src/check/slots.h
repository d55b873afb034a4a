// Who owns which slot of a paged cache, from /slot_mapping of every step so far (and /block_table, which says when a
// block changed hands).
#pragma once

#include <map>
#include <set>

#include "capture/capture.h"

namespace assay::check {

// The row that a slot was last mapped to; `position` counts from 0 in its request.
struct SlotOwner {
  uint64_t request = 0;
  int64_t position = 0;
  int64_t step = -1;  // of the mapping
};

class SlotOwners {
 public:
  // What `slot_mapping` events of real rows up to and including `last_step` on this rank say; later wins.
  SlotOwners(const Capture& capture, int64_t last_step, int32_t rank);
  // nullptr: nobody up to last_step. Valid as long as this object.
  const SlotOwner* Of(int64_t slot) const;
  const std::map<int64_t, SlotOwner>& all() const { return owners_; }
  // Whether this row was ever mapped to a slot.
  bool known(uint64_t request, int64_t position) const { return mapped_.contains({request, position}); }
  // Slots that real rows map in exactly this step.
  std::set<int64_t> MappedIn(int64_t step) const;

 private:
  std::map<int64_t, SlotOwner> owners_;
  std::set<std::pair<uint64_t, int64_t>> mapped_;
};

// Whether two requests have the same tokens up to and including a position: then the rows may be shared. nullopt: the
// tokens of one of them are not known.
std::optional<bool> SamePrefix(const Capture& capture, uint64_t a, uint64_t b, int64_t position);

}  // namespace assay::check
