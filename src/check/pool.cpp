// The pool of a paged cache before and after a write: what changed must be mapped to a real row in this step, or have
// had no owner and not be reserved.
#include <algorithm>

#include "check/checks.h"
#include "check/helpers.h"
#include "check/slots.h"

namespace assay::check {
namespace {

// Slots that no request may own, "0,1,2" (the null block of an engine).
std::set<int64_t> ReservedSlots(const EventInfo& info) {
  std::set<int64_t> out;
  std::string text = Capture::OwnText(info, "reserved_slots").value_or("");
  for (size_t at = 0; at < text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    if (comma > at) out.insert(std::strtoll(text.substr(at, comma - at).c_str(), nullptr, 10));
    at = comma + 1;
  }
  return out;
}

// A block of which a request maps a slot in this step belongs to it: what another request had there is void.
void DropBlocksThatChangedHands(const SlotOwners& now, int64_t step, int64_t block,
                                std::map<int64_t, SlotOwner>* owners) {
  std::map<int64_t, uint64_t> taken;
  for (const auto& [slot, owner] : now.all()) {
    if (owner.step == step) taken[slot / block] = owner.request;
  }
  std::erase_if(*owners, [&](const auto& entry) {
    const auto found = taken.find(entry.first / block);
    return found != taken.end() && found->second != entry.second.request;
  });
}

// before, after: [S, …] with S slots, the same shape. Compared by bits, so that a write of an equal value is not seen,
// and a NaN that stays is no change.
void JudgePool(const Capture& capture, const Tensor& before, const Tensor& after, CheckReport* report) {
  const EventInfo& info = *after.info;
  const int64_t slots = after.info->event.shape.empty() ? 0 : after.info->event.shape[0];
  if (slots == 0) return;
  const int64_t row = after.n() / slots;
  // Owners as of the step before: this step's own writes are in `mapped`.
  const SlotOwners earlier(capture, info.event.step - 1, info.event.rank),
      now(capture, info.event.step, info.event.rank);
  std::map<int64_t, SlotOwner> owners = earlier.all();
  DropBlocksThatChangedHands(now, info.event.step,
                             std::max<int64_t>(capture.Integer(info, "block_size").value_or(1), 1), &owners);
  const std::set<int64_t> mapped = now.MappedIn(info.event.step), reserved = ReservedSlots(info);

  std::vector<int64_t> wrong;
  bool hits_reserved = false;
  int64_t zeros = 0;
  bool all_zero = true;
  for (int64_t s = 0; s < slots; ++s) {
    bool changed = false, zero = true;
    for (int64_t i = s * row; i < (s + 1) * row; ++i) {
      changed = changed || BitsAt(before, i) != BitsAt(after, i);
      zero = zero && BitsAt(after, i) == 0;
    }
    if (!changed || mapped.contains(s)) continue;
    // Free slots may be scribbled on: engines park padding there.
    if (!owners.contains(s) && !reserved.contains(s)) continue;
    wrong.push_back(s);
    hits_reserved = hits_reserved || reserved.contains(s);
    all_zero = all_zero && zero;
    if (zero) zeros += row;
  }
  if (wrong.empty()) return report->Right(info.id);
  // A reserved slot is what padding rows write to or read from; an owned one belongs to another request.
  Suspicion found = At(info, hits_reserved ? fault_class::kPadRead : fault_class::kKvIdent, 3);
  if (hits_reserved) found.hypothesis = hypothesis::kPadding;
  const auto owner = owners.find(wrong[0]);
  found.bad.evidence.push_back(std::to_string(wrong.size()) +
                               " slots changed that no real row of the step is mapped to, the first " +
                               std::to_string(wrong[0]));
  if (owner != owners.end()) {
    found.bad.request = owner->second.request;
    found.bad.positions = {{owner->second.position, owner->second.position}};
    found.bad.evidence.push_back("it holds position " + std::to_string(owner->second.position) +
                                 " of a request since step " + std::to_string(owner->second.step));
  } else {
    found.bad.evidence.push_back("it is reserved");
  }
  if (all_zero && zeros > 0) {
    found.bad.constant_value = static_cast<double>(zeros);
    found.bad.constant = "elements of owned slots that became zero";
  }
  found.bad.measured = static_cast<double>(wrong.size());
  found.bad.bound_basis = "slots changed that nobody mapped; none are allowed";
  found.bad.confidence = 0.99;
  report->Found(std::move(found));
}

}  // namespace

void CheckPool(const Capture& capture, CheckReport* report) {
  for (const std::string& name : capture.Names()) {
    if (!ParseSiteName(name).stem.ends_with("_cache")) continue;
    for (const EventId id : capture.Find(name, {.audit = "after"})) {
      const auto info = capture.Info(id);
      auto after = capture.Load(id);
      // The last look before the write of the same step and rank.
      const auto looks =
          capture.Find(name, {.step = info->event.step, .rank = info->event.rank, .audit = "before", .before = id});
      if (!after.ok() || looks.empty()) {
        report->Missing(
            after.ok() ? name + " has no look before the write" : after.status().message(),
            "record " + name + " with audit=before and audit=after around the write, with ASSAY_LEVEL=payload");
        continue;
      }
      auto before = capture.Load(looks.back());
      if (before.ok() && (*before)->shape == (*after)->shape) {
        JudgePool(capture, **before, **after, report);
      } else {
        report->Missing(before.ok() ? name + " changes its shape" : before.status().message(),
                        Capture::RecordHint(name));
      }
    }
  }
}

}  // namespace assay::check
