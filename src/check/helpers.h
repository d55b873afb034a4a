// Small things that several checks need.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/number_text.h"
#include "check/check.h"

namespace assay::check {

// A suspicion at an event, with name, rank and step filled in.
Suspicion At(const EventInfo& info, std::string_view cls, int rank);
// Puts rows of a tensor (bad[r] for row r of tensor.values) into the finding: the request of the first of them and its
// positions; how many rows of which others goes into the evidence.
void AddRows(const Tensor& tensor, const std::vector<bool>& bad, FirstBad* out);

// Values computed from real inputs: not warm-up, dummy, capture; `load` only when asked for.
bool IsRealPhase(Phase phase, bool with_load = false);
// Events of a site in real phases, looks before an operation left out.
std::vector<EventId> RealEvents(const Capture& capture, std::string_view name, bool with_load = false);

// A recorded id, slot or code. -1 for what no integer is: NaN, infinities, and beyond 2^53 in a damaged payload, where
// a plain cast is undefined.
int64_t IntegerOf(double x);

// Bits of element i of a stored tensor (its own order of axes).
uint64_t BitsAt(const Tensor& tensor, int64_t i);
// Both have the same dtype, shape and stored bytes. Bits rather than values: NaN equals itself, and -0 is not 0.
bool SameBits(const Tensor& a, const Tensor& b);

// The keys of a request are all equal, as far as row digests tell: then attention does not depend on the query.
bool KeysAreEqual(const Capture& capture, const EventInfo& out, uint64_t request);

// Largest magnitude of a quantised dtype's codes; 0: its values are plain floats.
double LargestCode(DType dtype);
// Metadata kv_cache_dtype, engines' short names (fp8, nvfp4, mxfp4) included; nothing when it was left out or is not
// known.
std::optional<DType> CacheDType(const Capture& capture, const EventInfo& info);

// Address range [first, last) of the event's elements in memory; empty when the address is not known.
// Half-open, in bytes.
struct AddressRange {
  uint64_t first = 0, last = 0;
  bool overlaps(const AddressRange& o) const { return first < o.last && o.first < last; }
};
AddressRange MemoryOf(const Event& event);

}  // namespace assay::check
