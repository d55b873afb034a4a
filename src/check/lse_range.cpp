// Log-sum-exps that no scores can give, from statistics alone. |q·k| is at most the product of the norms of the rows,
// so that with n keys and S = scale x largest |q| x largest |k| a log-sum-exp lies within ln n ± S. Base 2 is told
// apart where it leaves that range; scores that are large beside ln n allow both, and then the ledger says so.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numbers>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "check/checks.h"
#include "check/helpers.h"
#include "check/op_attention.h"

namespace assay::check {
namespace {

constexpr size_t kLooks = 64;  // events of a site: a wrong base or layout stays
// Roundings of operands that the statistics were taken before, and those of an 8-bit cache.
constexpr double kSlack = 1.02, kCacheSlack = 1.25;

// The largest squared norm of a row in one head, for each request. Bounded from above by that of whole rows and by
// that of heads over the rows of a segment; a segment of one row gives it exactly.
double LargestRow(const EventView& view, int32_t i, const SegmentSummary& s) {
  double row = 0, head = 0;
  for (int32_t r = 0; r < s.n_row_cells; ++r) {
    RowCell cell;
    view.row_cell(i, r, &cell);
    row = std::max(row, cell.sum_sq);
  }
  for (int32_t h = 0; h < s.n_head_cells; ++h) {
    HeadCell cell;
    view.head_cell(i, h, &cell);
    head = std::max(head, cell.sum_sq);
  }
  double largest = s.sum_sq;
  if (s.n_row_cells > 0) largest = std::min(largest, row);
  if (s.n_head_cells > 0) largest = std::min(largest, head);
  return s.nonfinite > 0 ? HUGE_VAL : largest;
}

// Rows of a request as they were recorded: of keys so far, of queries in one event.
struct SeenRows {
  double largest = 0;   // squared norm
  int64_t covered = 0;  // positions [0, covered) were seen
};
using RowsByRequest = std::map<uint64_t, SeenRows>;

void AddSeen(const EventView& view, RowsByRequest* rows) {
  for (int32_t i = 0; i < view.n_segments(); ++i) {
    const SegmentSummary s = view.segment(i);
    if (s.padding || s.count == 0) continue;
    SeenRows& k = (*rows)[s.request];
    k.largest = std::max(k.largest, LargestRow(view, i, s));
    if (s.first_position <= k.covered) k.covered = std::max(k.covered, s.first_position + s.n_rows);
  }
}

// Latents and rotated keys lie beside each other: squares add up. nullopt: a part has no row of the request, or there
// is no part.
std::optional<SeenRows> SeenOf(std::span<const RowsByRequest> parts, uint64_t request) {
  if (parts.empty()) return std::nullopt;
  SeenRows whole{.covered = std::numeric_limits<int64_t>::max()};
  for (const RowsByRequest& part : parts) {
    const auto of = part.find(request);
    if (of == part.end()) return std::nullopt;
    whole.largest += of->second.largest;
    whole.covered = std::min(whole.covered, of->second.covered);
  }
  return whole;
}

// The rows of a call's queries, of which the parts are these sites; empty: one of them was not recorded.
std::vector<RowsByRequest> QueriesOf(const Capture& capture, const EventInfo& result,
                                     const std::vector<std::string>& names) {
  std::vector<RowsByRequest> parts(names.size());
  for (size_t p = 0; p < names.size(); ++p) {
    const auto id = capture.Operand(result, names[p]);
    if (!id) return {};
    AddSeen(capture.trace().event(*id), &parts[p]);
  }
  return parts;
}

// Columns of a row; 1 for a scalar, which a wrong hook or a damaged trace has in the place of rows.
int64_t LastExtent(const Capture& capture, EventId id) {
  const std::vector<int64_t>& shape = capture.Info(id)->event.shape;
  return shape.empty() ? 1 : shape.back();
}

// What the metadata of the call say of its keys. They stand on the log-sum-exp itself, else on the call's output.
struct Call {
  double scale = 1, soft_cap = 0, sink = -HUGE_VAL;
  bool causal = true;
  bool all_keys = true;  // a row sees every key up to its own
  bool alibi = false;    // scores have no lower bound
  int64_t prefix_len = 0;
};

Call CallOf(const Capture& capture, const EventInfo& lse, bool latent) {
  Call call;
  EventFilter same{.step = lse.event.step, .rank = lse.event.rank};
  const std::vector<EventId> outs = capture.Find(lse.prefix + (latent ? "attn.latent_out" : "attn.out"), same);
  const auto out = outs.empty() ? nullptr : capture.Info(outs.back());
  const auto holder = [&](std::string_view key) -> const EventInfo& {
    return out == nullptr || Capture::OwnText(lse, key) ? lse : *out;
  };
  const auto number = [&](std::string_view key) { return capture.Number(holder(key), key); };
  const auto said = [&](std::string_view key) {
    return Capture::OwnText(lse, key) || (out != nullptr && Capture::OwnText(*out, key));
  };
  const auto q = capture.Operand(lse, lse.prefix + "attn.q");
  int64_t d = 0;
  for (const char* stem : {"attn.q_latent", "attn.q_pe"}) {
    const auto id = latent ? capture.Operand(lse, lse.prefix + stem) : std::nullopt;
    if (id) d += LastExtent(capture, *id);
  }
  if (q) d = LastExtent(capture, *q);
  call.scale =
      std::fabs(number("softmax_scale").value_or(op::DefaultSoftmaxScale(capture, lse, std::max<int64_t>(d, 1))));
  call.soft_cap = number("soft_cap").value_or(0);
  call.prefix_len = capture.Integer(holder("prefix_len"), "prefix_len").value_or(0);
  const auto causal = capture.Text(holder("causal"), "causal");
  call.causal = !causal || *causal == "1" || *causal == "true";
  const auto there = [&](const char* stem) {
    return capture.Operand(lse, lse.prefix + stem) || capture.Weight(lse, lse.prefix + stem);
  };
  call.all_keys = call.causal && number("window").value_or(0) == 0 && number("attention_chunk").value_or(0) == 0 &&
                  !said("keys") && !there("attn.mask") && !there("attn.indexer.topk") && capture.world_size() == 1;
  call.alibi = there("attn.alibi_slopes");
  for (const auto& id :
       {capture.Operand(lse, lse.prefix + "attn.sinks"), capture.Weight(lse, lse.prefix + "attn.sinks")}) {
    if (!id) continue;
    const EventView view = capture.trace().event(*id);
    for (int32_t i = 0; i < view.n_segments(); ++i) call.sink = std::max(call.sink, view.segment(i).max);
  }
  return call;
}

struct Range {
  double low, high;
  double low_of_last;  // of the last row alone, which sees the most keys
  bool holds(double min, double max) const { return min >= low && max <= high; }
};

Range RangeOf(const Call& call, const SegmentSummary& s, double square) {
  double size = call.scale * std::sqrt(square);
  if (call.soft_cap > 0) size = std::min(size, call.soft_cap);
  const int64_t last = std::max(s.first_position + s.n_rows, call.prefix_len);
  const double most = std::log(static_cast<double>(std::max<int64_t>(last, 1)));
  const double least = call.all_keys ? std::log(static_cast<double>(s.first_position + 1)) : 0;
  // The rounding of the result, and of a sum of so many exponentials.
  const double slack = 1e-2 * (1 + most + size);
  Range range{least - size - slack, most + size + slack, call.all_keys ? most - size - slack : -HUGE_VAL};
  if (call.alibi) range.low = range.low_of_last = -HUGE_VAL;
  if (std::isfinite(call.sink)) range.high = std::max(range.high, call.sink) + std::numbers::ln2;
  return range;
}

struct Tally {
  uint64_t n = 0, base_told = 0;  // segments judged; of these, those whose values in base 2 would leave the range
  EventId last = kNoEvent;
};

// true: a finding, which then stands for the site.
bool JudgeLse(const Capture& capture, const EventInfo& lse, std::span<const RowsByRequest> keys, bool latent,
              Tally* tally, CheckReport* report) {
  const Call call = CallOf(capture, lse, latent);
  if (!call.causal) {
    report->Missing(lse.name + ": how many keys the rows of a call without a causal bound see is not known",
                    "record operands as payload");
    return false;
  }
  const std::vector<RowsByRequest> queries =
      latent ? QueriesOf(capture, lse, {lse.prefix + "attn.q_latent", lse.prefix + "attn.q_pe"})
             : QueriesOf(capture, lse, {lse.prefix + "attn.q"});
  const bool rounded = capture.Operand(lse, lse.prefix + "attn.kv_write").has_value();
  const EventView view = capture.trace().event(lse.id);
  for (int32_t i = 0; i < view.n_segments(); ++i) {
    const SegmentSummary s = view.segment(i);
    if (s.padding || s.count == 0 || s.nonfinite == s.count || s.n_rows == 0 || s.first_position < 0) continue;
    const auto query = SeenOf(queries, s.request), key = SeenOf(keys, s.request);
    if (!query || !key || key->covered < s.first_position + s.n_rows) {
      report->Missing(lse.name + ": keys or queries of its rows were not recorded", "record attn.q and attn.k");
      continue;
    }
    const double slack = rounded ? kCacheSlack : kSlack;
    const double square = query->largest * key->largest * slack * slack;
    if (!std::isfinite(square) || !std::isfinite(s.min) || !std::isfinite(s.max)) continue;  // another check's finding
    const Range range = RangeOf(call, s, square);
    ++tally->n;
    tally->last = lse.id;
    constexpr double kBase = std::numbers::log2e;
    const bool told = !range.holds(s.min * kBase, s.max * kBase);
    tally->base_told += told ? 1 : 0;
    if (range.holds(s.min, s.max)) continue;
    Suspicion found = At(lse, fault_class::kLse, 1);
    found.bad.request = s.request;
    found.bad.positions = {{s.first_position, s.first_position + s.n_rows - 1}};
    const bool above = s.max > range.high;
    found.bad.measured = above ? s.max : s.min;
    found.bad.bound = above ? range.high : range.low;
    found.bad.bound_basis = "ln(keys) and scale x |q| x |k|, from the norms of the rows";
    found.bad.confidence = 0.9;
    found.bad.evidence.push_back(lse.name + " reaches from " + NumberText(s.min) + " to " + NumberText(s.max) +
                                 ", where its queries and keys give " + NumberText(range.low) + " to " +
                                 NumberText(range.high));
    Call uncapped = call;
    uncapped.soft_cap = 0;
    if (call.soft_cap > 0 && RangeOf(uncapped, s, square).holds(s.min, s.max)) {
      found.bad.cls = fault_class::kMask;
      found.bad.evidence.push_back("without the soft cap of " + NumberText(call.soft_cap) + " it is in range");
    }
    const Range base2{range.low * kBase, range.high * kBase, range.low_of_last * kBase};
    if (found.bad.cls == fault_class::kLse && base2.holds(s.min, s.max)) {
      found.bad.evidence.push_back("taken in base 2 it is in range");
      if (base2.low_of_last > range.high && s.max >= base2.low_of_last) {  // whatever the scores are
        found.bad.constant = "log-sum-exp returned / true (log2 e)";
        found.bad.constant_value = kBase;
      }
    }
    report->Found(std::move(found));
    return true;
  }
  return false;
}

// One rank's log-sum-exps, with the keys that it recorded before each.
void JudgeSite(const Capture& capture, const std::string& name, int32_t rank, Tally* tally, CheckReport* report) {
  const auto of_rank = [&](const std::string& site) {
    std::vector<EventId> ids = RealEvents(capture, site);
    std::erase_if(ids, [&](EventId id) { return capture.trace().event(id).rank() != rank; });
    return ids;
  };
  const std::vector<EventId> ids = of_rank(name);
  const std::string prefix = name.substr(0, name.size() - std::string_view("attn.lse").size());
  const bool latent = !capture.HasSite(prefix + "attn.k");
  std::vector<std::string> parts = {prefix + "attn.k"};
  if (latent) parts = {prefix + "attn.kv_c_normed", prefix + "attn.k_pe"};
  std::vector<std::vector<EventId>> events;
  for (const std::string& part : parts) events.push_back(of_rank(part));
  std::vector<RowsByRequest> keys(parts.size());
  std::vector<size_t> next(parts.size(), 0);
  const size_t stride = std::max<size_t>(1, ids.size() / kLooks);
  const uint64_t before = tally->n;
  for (size_t i = 0; i < ids.size(); i += stride) {
    for (size_t p = 0; p < parts.size(); ++p) {
      for (; next[p] < events[p].size() && capture.Earlier(events[p][next[p]], ids[i]); ++next[p])
        AddSeen(capture.trace().event(events[p][next[p]]), &keys[p]);
    }
    if (JudgeLse(capture, *capture.Info(ids[i]), keys, latent, tally, report)) return;
  }
  if (tally->n > before) report->Right(tally->last);
}

}  // namespace

void CheckLseRange(const Capture& capture, CheckReport* report) {
  Tally tally;
  for (const std::string& name : capture.NamesOfStem("attn.lse")) {
    std::set<int32_t> ranks;
    for (const EventId id : capture.EventsOf(name)) ranks.insert(capture.trace().event(id).rank());
    for (const int32_t rank : ranks) JudgeSite(capture, name, rank, &tally, report);
  }
  if (tally.n == 0) return;
  report->Note("base 2 would leave the range in " + std::to_string(tally.base_told) + " of " + std::to_string(tally.n) +
               " places" + (tally.base_told == 0 ? ", so that the base is not told by it" : ""));
}

}  // namespace assay::check
