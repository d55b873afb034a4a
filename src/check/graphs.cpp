// Captured graphs: the address that a launch reads an operand from (metadata bound.SITE on the result) against where
// the operand is in this step.
#include <algorithm>
#include <charconv>

#include "check/checks.h"
#include "check/helpers.h"

namespace assay::check {
namespace {

std::optional<uint64_t> Address(std::string_view text) {
  if (text.starts_with("0x")) text.remove_prefix(2);
  uint64_t value = 0;
  const auto r = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  if (r.ec != std::errc() || r.ptr != text.data() + text.size() || text.empty()) return std::nullopt;
  return value;
}

// Elements of less than a byte lie at whole bytes when an operand begins there.
uint64_t FirstElement(const Event& e) {
  return e.base_address + static_cast<uint64_t>(e.storage_offset * BitsOf(e.dtype) / 8);
}

// The bits of two events agree as far as is known: payloads, else digests.
bool SameContent(const Capture& capture, EventId a, EventId b) {
  auto x = capture.Load(a), y = capture.Load(b);
  if (x.ok() && y.ok()) return SameBits(**x, **y);
  const EventView v = capture.trace().event(a), w = capture.trace().event(b);
  if (v.n_segments() != w.n_segments()) return false;
  for (int32_t i = 0; i < v.n_segments(); ++i) {
    if (v.segment(i).sum_sq != w.segment(i).sum_sq || v.segment(i).sum != w.segment(i).sum) return false;
  }
  return true;
}

void JudgeBinding(const Capture& capture, const EventInfo& info, std::string_view site, std::string_view text,
                  CheckReport* report) {
  const std::optional<uint64_t> bound = Address(text);
  const std::optional<EventId> operand = capture.Operand(info, site);
  if (!bound || !operand) {
    return report->Missing(std::string(site) + " of the step was not recorded, " + info.name + " is bound to it",
                           "record " + std::string(site) + " in every step");
  }
  const auto now = capture.Info(*operand);
  if (FirstElement(now->event) == *bound) return report->Right(info.id);
  // What lies at the bound address: the operand of an earlier step, perhaps with the same values.
  std::optional<EventId> earlier;
  for (const EventId id : capture.Find(site, {.rank = info.event.rank, .before = *operand})) {
    if (FirstElement(capture.Info(id)->event) == *bound) earlier = id;
  }
  // Stale memory with equal values gives the right result: a wrong binding that did no harm here, and not to be told
  // from a buffer that the engine copies to.
  if (earlier && SameContent(capture, *earlier, *operand)) return report->Right(info.id);
  Suspicion s = At(info, fault_class::kGraph, 3);
  for (const Segment& segment : info.event.segments) {
    if (segment.padding || segment.n_rows == 0) continue;
    s.bad.request = segment.request;
    s.bad.positions = {{segment.first_position, segment.first_position + segment.n_rows - 1}};
    break;
  }
  // Without an earlier event at that address, it may be a copy that was not recorded.
  s.bad.confidence = earlier ? 0.95 : 0.8;
  s.bad.bound_basis = "exact: addresses";
  char line[160];
  std::snprintf(line, sizeof line, "the launch reads 0x%llx, %.*s of the step begins at 0x%llx",
                static_cast<unsigned long long>(*bound), static_cast<int>(site.size()), site.data(),
                static_cast<unsigned long long>(FirstElement(now->event)));
  s.bad.evidence.push_back(line);
  if (earlier) {
    s.bad.evidence.push_back("it was there in step " + std::to_string(capture.Info(*earlier)->event.step) +
                             ", with other values");
  }
  report->Found(std::move(s));
}

}  // namespace

void CheckGraphs(const Capture& capture, CheckReport* report) {
  for (const std::string& name : capture.Names()) {
    for (const EventId id : RealEvents(capture, name)) {
      const EventView view = capture.trace().event(id);
      if (!(view.flags() & kEventInGraph)) continue;
      const auto info = capture.Info(id);
      for (const auto& [key, value] : info->event.meta) {
        if (key.starts_with("bound.")) JudgeBinding(capture, *info, std::string_view(key).substr(6), value, report);
      }
    }
  }
}

}  // namespace assay::check
