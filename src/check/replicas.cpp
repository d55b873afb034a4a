// Ranks that hold the same rows of a replicated tensor hold the same bits; shards that claim different parts do not
// hold the same values. Statistics suffice: digests, and for shards sums and extremes.
#include <cmath>
#include <map>
#include <set>

#include "check/checks.h"
#include "check/helpers.h"
#include "check/op_attention.h"

namespace assay::check {
namespace {

enum class Relation { kUnrelated, kSame, kDiffer };

// Whether the segment's rows see one key alone: then every head of a latent is that key's, on all ranks.
// Then ranks with different query heads have equal outputs by right.
bool SeesOneKey(std::string_view stem, const EventView& view, const SegmentSummary& s) {
  if (stem == "attn.latent_out" || stem == "attn.out") return s.n_rows == 1 && s.first_position == 0;
  if (!stem.starts_with("attn.chunk.")) return false;
  for (const oracle::KeyRange& r : op::ParseRanges(std::string(view.meta("keys")))) {
    if (r.end - r.begin == 1) return true;
  }
  return false;
}

// Real segments of two events: the same rows, and then the same values or not. by_digest: bits of one logical place;
// otherwise sums and extremes, for parts that lie at different columns.
Relation Relate(std::string_view stem, const EventView& a, const EventView& b, bool by_digest) {
  // Different batches on two ranks (data parallelism) say nothing about each other.
  if (a.n_segments() != b.n_segments() || a.dtype() != b.dtype()) return Relation::kUnrelated;
  bool same = true, any = false;
  for (int32_t i = 0; i < a.n_segments(); ++i) {
    const SegmentSummary x = a.segment(i), y = b.segment(i);
    if (x.request != y.request || x.first_position != y.first_position || x.n_rows != y.n_rows || x.count != y.count ||
        x.padding != y.padding) {
      return Relation::kUnrelated;
    }
    if (x.padding || x.count == 0) continue;
    // Constant parts (norm weights of 1, biases of 0) are equal by right, short ones may be.
    if (!by_digest && (x.min == x.max || x.count < 8 || x.nonfinite > 0)) continue;
    if (!by_digest && SeesOneKey(stem, a, x)) continue;
    any = true;
    same = same && (by_digest ? x.digest == y.digest
                              : x.sum == y.sum && x.sum_sq == y.sum_sq && x.min == y.min && x.max == y.max);
  }
  return !any ? Relation::kUnrelated : same ? Relation::kSame : Relation::kDiffer;
}

void Report(const Capture& capture, EventId a, EventId b, bool equal, CheckReport* report) {
  const auto x = capture.Info(a), y = capture.Info(b);
  // Each rank holds its own partial sum: the reduction did not happen.
  const bool partial = !equal && y->event.phase != Phase::kLoad && capture.HasSite(y->name + ".partial");
  Suspicion s = At(*y, partial ? fault_class::kReduce : fault_class::kTpShard, 2);
  if (!y->event.segments.empty()) {
    const Segment& first = y->event.segments[0];
    s.bad.request = first.request;
    if (first.n_rows > 0) s.bad.positions = {{first.first_position, first.first_position + first.n_rows - 1}};
  }
  s.bad.bound_basis = "exact: the same bits on each rank that has the part, other ones where the parts differ";
  s.bad.confidence = 0.95;
  const std::string ranks = "ranks " + std::to_string(x->event.rank) + " and " + std::to_string(y->event.rank);
  s.bad.evidence.push_back(ranks + (equal ? " claim different parts and hold the same values"
                                          : " claim the same part and hold different values"));
  report->Found(std::move(s));
}

}  // namespace

void CheckReplicas(const Capture& capture, CheckReport* report) {
  if (capture.n_ranks() < 2) {
    return report->Missing("one rank was recorded", "record every rank (ASSAY_RANKS unset)");
  }
  const Trace& trace = capture.trace();
  for (const std::string& name : capture.Names()) {
    const SiteName site = ParseSiteName(name);
    // What each rank holds for itself.
    if (site.partial || site.stem.ends_with("_cache") || site.stem.ends_with(".storage") ||
        site.stem == "slot_mapping" || site.stem == "block_table" || name.ends_with(".margin")) {
      continue;
    }
    // The n-th event of each rank in a step, by (step, n).
    std::map<std::pair<int64_t, int64_t>, std::vector<EventId>> groups;
    std::map<std::pair<int64_t, int32_t>, int64_t> counts;
    for (const EventId id : RealEvents(capture, name, true)) {
      const EventView view = trace.event(id);
      groups[{view.step(), counts[{view.step(), view.rank()}]++}].push_back(id);
    }
    std::set<bool> said;
    for (const auto& [key, ids] : groups) {
      for (size_t j = 1; j < ids.size(); ++j) {
        const EventView b = trace.event(ids[j]);
        bool compared_part = false;
        for (size_t i = 0; i < j; ++i) {
          const EventView a = trace.event(ids[i]);
          if (a.rank() == b.rank() || a.shard().count != b.shard().count) continue;
          // Shards of different counts are not compared: the columns of one are a part of those of the other.
          const bool same_part = b.shard().count <= 1 || a.shard().index == b.shard().index;
          if (same_part && compared_part) continue;  // with one holder of the part is enough
          const Relation relation = Relate(site.stem, a, b, same_part);
          if (relation == Relation::kUnrelated) continue;
          compared_part = compared_part || same_part;
          const bool wrong = same_part ? relation == Relation::kDiffer : relation == Relation::kSame;
          if (!wrong) {
            report->Right(ids[j]);
            // Once a site and kind: the next steps would say the same.
          } else if (said.insert(same_part).second) {
            Report(capture, ids[i], ids[j], !same_part, report);
          }
        }
      }
    }
  }
}

}  // namespace assay::check
