// Slots, blocks, lengths and positions as integers: /slot_mapping, /block_table, /seq_lens and /positions against the
// rows' own identity.
#include <algorithm>

#include "check/checks.h"
#include "check/helpers.h"
#include "check/slots.h"

namespace assay::check {
namespace {

std::string Text(int64_t value) { return std::to_string(value); }

// Rules on integers: nothing is rounded, so the verdict is the sharpest there is.
Suspicion Exact(const EventInfo& info, std::string_view cls) {
  Suspicion s = At(info, cls, 3);
  s.bad.confidence = 0.99;
  s.bad.bound_basis = "exact: integers";
  return s;
}

// No slot twice in a step, none behind the end of the pool.
void JudgeMapping(const Capture& capture, const Tensor& t, CheckReport* report) {
  int64_t pool = -1;
  // The size of the pool, where one was recorded; else any number may be a slot.
  for (const char* stem : {"attn.k_cache", "attn.kv_cache", "attn.v_cache"}) {
    for (const std::string& name : capture.NamesOfStem(stem)) {
      const auto ids = capture.EventsOf(name);
      if (const auto info = capture.Info(ids[0]); !info->event.shape.empty())
        pool = std::max(pool, info->event.shape[0]);
    }
  }
  std::map<int64_t, RowId> seen;
  for (int64_t r = 0; r < t.n(); ++r) {
    const RowId row = static_cast<size_t>(r) < t.rows.size() ? t.rows[static_cast<size_t>(r)] : RowId{};
    const double value = t.values[static_cast<size_t>(r)];
    // Beyond 2^53 a number is no slot of any pool, and not one that was left out either.
    const int64_t slot = value > 0x1p53 ? INT64_MAX : IntegerOf(value);
    if (slot < 0 || !row.real()) continue;
    const auto [at, fresh] = seen.emplace(slot, row);
    const bool outside = pool >= 0 && slot >= pool;
    if (!outside && (fresh || (at->second.request == row.request && at->second.position == row.position))) continue;
    Suspicion s = Exact(*t.info, fault_class::kKvIdent);
    s.bad.request = row.request;
    s.bad.positions = {{row.position, row.position}};
    s.bad.evidence.push_back(outside ? "slot " + Text(slot) + " of a pool of " + Text(pool)
                                     : "slot " + Text(slot) + " is given to two rows of the step");
    return report->Found(std::move(s));
  }
  report->Right(t.info->id);
}

// First position of a request that some query of the step sees.
int64_t FirstSeen(const Capture& capture, const EventInfo& table, uint64_t request, int64_t newest) {
  for (const std::string& name : capture.NamesOfStem("attn.out")) {
    for (const EventId id : capture.Find(name, {.step = table.event.step, .rank = table.event.rank})) {
      const auto out = capture.Info(id);
      const int64_t window = capture.Integer(*out, "window").value_or(0);
      if (window <= 0) return 0;
      for (const Segment& s : out->event.segments) {
        if (s.request == request && !s.padding) return std::max<int64_t>(0, s.first_position - window + 1);
      }
    }
  }
  const int64_t window = capture.Integer(table, "window").value_or(0);
  return window <= 0 ? 0 : std::max<int64_t>(0, newest - window + 1);
}

// Position p of a request lies in slot table[p / block] * block + p % block; its owner is who was mapped to that slot
// last. Positions that no query sees any more may have been freed.
void JudgeTable(const Capture& capture, const Tensor& t, CheckReport* report) {
  const EventInfo& info = *t.info;
  const int64_t block = capture.Integer(info, "block_size").value_or(1);
  if (!capture.HasSite("slot_mapping") || block <= 0) {
    return report->Missing("no slot_mapping was recorded", Capture::RecordHint("slot_mapping") + ", in every step");
  }
  const SlotOwners owners(capture, info.event.step, info.event.rank);
  // Longer contexts than any; positions and sizes of blocks come from the file.
  constexpr int64_t kMostPositions = 1 << 24;
  int64_t looked_at = 0;
  bool judged = false;
  for (size_t r = 0; r < t.rows.size(); ++r) {
    if (!t.rows[r].real()) continue;
    const uint64_t request = t.rows[r].request;
    const std::span<const double> entries = t.row(static_cast<int64_t>(r));
    for (int64_t p = FirstSeen(capture, info, request, t.rows[r].position); p <= t.rows[r].position; ++p) {
      if (p / block >= static_cast<int64_t>(entries.size())) break;
      if (++looked_at > kMostPositions)
        return report->Missing(info.name + ": more than 2^24 positions to look up", Capture::RecordHint(info.name));
      const int64_t entry = IntegerOf(entries[static_cast<size_t>(p / block)]);
      int64_t slot = -1;  // of an entry that is negative, or leads beyond what a number can say
      if (entry < 0 || __builtin_mul_overflow(entry, block, &slot) || __builtin_add_overflow(slot, p % block, &slot))
        slot = -1;
      const SlotOwner* owner = slot < 0 ? nullptr : owners.Of(slot);
      if (owner != nullptr && owner->request == request && owner->position == p) {
        judged = true;
        continue;
      }
      if (owner == nullptr && !owners.known(request, p)) continue;  // written before the recording began
      // Blocks are shared by requests that begin with the same tokens.
      if (owner != nullptr && owner->position == p && SamePrefix(capture, request, owner->request, p).value_or(true))
        continue;
      Suspicion s = Exact(info, fault_class::kKvIdent);
      s.bad.request = request;
      s.bad.positions = {{p, p}};
      s.bad.evidence.push_back(
          "entry " + Text(p / block) + " of the request leads position " + Text(p) + " to slot " + Text(slot) +
          (owner == nullptr ? ", which nobody was mapped to"
                            : ", which holds position " + Text(owner->position) + " of " +
                                  (owner->request == request ? "the same" : "another") + " request"));
      return report->Found(std::move(s));
    }
  }
  if (judged) report->Right(info.id);
}

// seq_lens counts the newest token: its position + 1.
void JudgeLengths(const Tensor& t, CheckReport* report) {
  std::vector<bool> bad(t.rows.size());
  for (size_t r = 0; r < bad.size() && r < t.values.size(); ++r) {
    bad[r] = t.rows[r].real() && t.values[r] != static_cast<double>(t.rows[r].position + 1);
  }
  const auto first = std::find(bad.begin(), bad.end(), true);
  if (first == bad.end()) return report->Right(t.info->id);
  Suspicion s = Exact(*t.info, fault_class::kKvIdent);
  AddRows(t, bad, &s.bad);
  const size_t r = static_cast<size_t>(first - bad.begin());
  s.bad.evidence.push_back("length " + NumberText(t.values[r]) + " where the newest token is at position " +
                           Text(t.rows[r].position));
  report->Found(std::move(s));
}

// Positions advanced by all drafts of the step before, where only some were accepted.
// Speculative decoding: after a step with n drafts of which a were accepted, positions go on by a + 1; an engine that
// counts all n is off by n - a.
bool FollowsDrafts(const Capture& capture, const Tensor& t) {
  const auto accepted = capture.Find("spec.accepted", {.step = t.info->event.step - 1});
  if (accepted.empty()) return false;
  auto took = capture.Load(accepted.back());
  if (!took.ok()) return false;
  // The step that verified knows how many there were; a later one may draft another number.
  std::optional<int64_t> drafts = capture.Integer(*(*took)->info, "drafts");
  if (!drafts) drafts = capture.Integer(*t.info, "drafts");
  if (!drafts) return false;
  std::map<uint64_t, double> off;
  for (size_t r = 0; r < t.rows.size(); ++r) {
    if (t.rows[r].real()) off.emplace(t.rows[r].request, t.values[r] - static_cast<double>(t.rows[r].position));
  }
  for (size_t r = 0; r < (*took)->rows.size(); ++r) {
    const auto found = off.find((*took)->rows[r].request);
    if (found != off.end() && found->second != static_cast<double>(*drafts) - (*took)->values[r]) return false;
  }
  return true;
}

// Of the rows that are off, one common offset is told as the constant.
void JudgePositions(const Capture& capture, const Tensor& t, CheckReport* report) {
  std::vector<bool> bad(t.rows.size());
  double offset = 0;
  bool same = true, any = false;
  for (size_t r = 0; r < bad.size() && r < t.values.size(); ++r) {
    const double off = t.values[r] - static_cast<double>(t.rows[r].position);
    bad[r] = t.rows[r].real() && off != 0;
    if (!bad[r]) continue;
    same = same && (!any || off == offset);
    offset = off;
    any = true;
  }
  if (!any) return report->Right(t.info->id);
  const bool drafts = FollowsDrafts(capture, t);
  Suspicion s = Exact(*t.info, drafts ? fault_class::kSpec : fault_class::kRopePos);
  s.hypothesis = drafts ? hypothesis::kSpeculation : hypothesis::kRope;
  AddRows(t, bad, &s.bad);
  if (same && !drafts) {
    s.bad.constant_value = offset;
    s.bad.constant = "position given - position of the row";
  }
  s.bad.evidence.push_back(drafts ? "positions were advanced by the drafts, not by what was accepted"
                                  : "positions differ from the rows' own, by " + NumberText(offset) +
                                        (same ? "" : " and others"));
  report->Found(std::move(s));
}

}  // namespace

void CheckIds(const Capture& capture, CheckReport* report) {
  for (const char* name : {"slot_mapping", "block_table", "seq_lens", "positions"}) {
    const std::string_view site = name;
    for (const EventId id : RealEvents(capture, site)) {
      auto tensor = capture.Load(id);
      if (!tensor.ok()) {
        report->Missing(tensor.status().message(), Capture::RecordHint(name));
        continue;
      }
      if ((*tensor)->rows.empty()) continue;
      if (site == "slot_mapping") JudgeMapping(capture, **tensor, report);
      if (site == "block_table") JudgeTable(capture, **tensor, report);
      if (site == "seq_lens") JudgeLengths(**tensor, report);
      if (site == "positions") JudgePositions(capture, **tensor, report);
    }
  }
}

}  // namespace assay::check
