// What a reduction gives is the sum of what the ranks put in, by the sketches: they are linear, so the sketch of the
// sum is the sum of the sketches, and no values are needed. Where values were stored, `reductions` judges them instead.
#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <optional>
#include <utility>

#include "check/checks.h"
#include "check/helpers.h"
#include "stats/sketch_math.h"

namespace assay::check {
namespace {

using Sketch = std::array<double, kSketchSize>;

// A norm that a sketch estimates may come out this much too high: more than five standard deviations of 10 %, which is
// the largest that was measured (docs/numerics.md, "The sketch").
constexpr double kSpread = 1.54;

constexpr std::string_view kSuffix = ".partial";

// The n-th event of a site in a step, by (step, n), and by rank in it.
using Groups = std::map<std::pair<int64_t, int64_t>, std::map<int32_t, EventId>>;

Groups ByPlace(const Capture& capture, std::string_view name) {
  Groups groups;
  std::map<std::pair<int64_t, int32_t>, int64_t> counts;
  for (const EventId id : RealEvents(capture, name)) {
    const EventView view = capture.trace().event(id);
    groups[{view.step(), counts[{view.step(), view.rank()}]++}][view.rank()] = id;
  }
  return groups;
}

// Only equal cuts of the rows can be added up segment by segment.
bool SameRows(const SegmentSummary& a, const SegmentSummary& b) {
  return a.request == b.request && a.first_position == b.first_position && a.n_rows == b.n_rows && a.count == b.count &&
         a.padding == b.padding;
}

// Ranks that the group of a reduction has, as its result or a part declares; nullopt: nobody says.
std::optional<int64_t> DeclaredSize(const std::map<int32_t, EventId>& results, const std::map<int32_t, EventId>& parts,
                                    const Capture& capture) {
  for (const auto* events : {&results, &parts}) {
    for (const auto& [rank, id] : *events) {
      const auto info = capture.Info(id);
      if (!Capture::OwnText(*info, "world_size")) continue;
      if (const auto size = capture.Integer(*info, "world_size"); size && *size > 0) return size;
    }
  }
  return std::nullopt;
}

// Whether these parts are all that went in. A layer of a pipeline's stage is on some ranks only, so without a
// declaration that is known where every rank of the recording took part. Reports what is missing.
bool IsWhole(const Capture& capture, const std::string& name, const std::map<int32_t, EventId>& results,
             const std::map<int32_t, EventId>& parts, CheckReport* report) {
  const auto have = static_cast<int64_t>(parts.size());
  const std::string partial = name + std::string(kSuffix);
  if (const auto size = DeclaredSize(results, parts, capture)) {
    if (have < *size) {
      report->Missing(partial + " was recorded by " + std::to_string(have) + " of the " + std::to_string(*size) +
                          " ranks of its group",
                      "record every rank (ASSAY_RANKS unset)");
    } else if (have > *size) {
      report->Missing(partial + " was recorded by " + std::to_string(have) + " ranks in groups of " +
                          std::to_string(*size) + ", and which ranks are a group is not recorded",
                      "record the ranks of one group (ASSAY_RANKS)");
    }
    return have == *size;
  }
  const int64_t all = std::max({capture.world_size(), capture.n_ranks(), 2});
  if (have == all) return true;
  report->Missing(
      partial + " was recorded by " + std::to_string(have) + " of " + std::to_string(all) +
          " ranks, and how many the group of this reduction has is not declared",
      "declare world_size (ranks of the reduction) on " + name + ", and record every rank (ASSAY_RANKS unset)");
  return false;
}

// One segment of a result against those of its parts.
struct Sum {
  double measured = 0, bound = 0;  // relative to the norm of the result
  double factor = 1;               // of the sum that comes nearest to the result
  int32_t alone = -1;              // rank whose part by itself is the result
};

// nothing: the rows do not match, or hold nothing that can be told.
std::optional<Sum> Judge(const EventView& result, int32_t i, const std::map<int32_t, EventView>& parts) {
  const SegmentSummary own = result.segment(i);
  if (own.padding || own.count == 0 || own.nonfinite > 0) return std::nullopt;
  Sketch sum{}, got{};
  result.sketch(i, got.data());
  double input = 0;  // sum of the parts' norms
  std::map<int32_t, Sketch> each;
  for (const auto& [rank, part] : parts) {
    if (i >= part.n_segments()) return std::nullopt;
    const SegmentSummary segment = part.segment(i);
    if (!SameRows(own, segment) || segment.nonfinite > 0) return std::nullopt;
    part.sketch(i, each[rank].data());
    AddSketch(each[rank], sum);
    input += std::sqrt(segment.sum_sq);
  }
  const double norm = std::sqrt(own.sum_sq);
  if (!(norm > 0) || !(input > 0) || !(SketchNorm(got) > 0)) return std::nullopt;
  Sum out;
  out.measured = SketchDistance(got, sum) / norm;
  // A rounding an addition, and the sketches' own storage in float32.
  const auto n = static_cast<double>(parts.size());
  const double unit =
      std::max({UnitRoundoff(result.dtype()), UnitRoundoff(result.compute_dtype()), UnitRoundoff(DType::kF32)});
  out.bound = kSpread * (unit * n + 0x1p-22) * input / norm;
  if (out.measured <= out.bound) return out;
  double xx = 0, xy = 0;
  for (size_t k = 0; k < kSketchSize; ++k) xx += sum[k] * sum[k], xy += sum[k] * got[k];
  // Least squares in the sketches' space: 2 for a sum taken twice, 1/n for a mean.
  out.factor = xx > 0 ? xy / xx : 0;
  for (const auto& [rank, sketch] : each) {
    if (SketchDistance(got, sketch) / norm <= out.bound) out.alone = rank;
  }
  return out;
}

void Report(const Capture& capture, EventId id, const SegmentSummary& rows, const Sum& sum, CheckReport* report) {
  Suspicion s = At(*capture.Info(id), fault_class::kReduce, 2);
  s.bad.request = rows.request;
  if (rows.n_rows > 0) s.bad.positions = {{rows.first_position, rows.first_position + rows.n_rows - 1}};
  s.bad.measured = sum.measured;
  s.bad.bound = sum.bound;
  s.bad.bound_basis =
      "relative L2 from sketches; a rounding an addition of what the ranks put in, x sketch spread 1.54";
  s.bad.confidence = 0.95;
  if (sum.alone >= 0) {
    s.bad.evidence.push_back("it equals what rank " + std::to_string(sum.alone) + " put in alone");
  } else {
    s.bad.evidence.push_back("it is not the sum of what the ranks put in; " + NumberText(sum.factor) +
                             " x the sum is nearest");
  }
  report->Found(std::move(s));
}

}  // namespace

// One finding a site: a reduction that is wrong is so in every step.
void CheckPartialSums(const Capture& capture, CheckReport* report) {
  const Trace& trace = capture.trace();
  bool any = false;
  for (const std::string& partial : capture.Names()) {
    if (!partial.ends_with(kSuffix)) continue;
    const std::string name = partial.substr(0, partial.size() - kSuffix.size());
    const Groups results = ByPlace(capture, name);
    bool said = false;
    for (const auto& [place, ranks] : ByPlace(capture, partial)) {
      const auto found = results.find(place);
      if (found == results.end()) continue;
      any = true;
      if (!IsWhole(capture, name, found->second, ranks, report)) continue;
      std::map<int32_t, EventView> parts;
      for (const auto& [rank, id] : ranks) parts[rank] = trace.event(id);
      for (const auto& [rank, id] : found->second) {
        const EventView result = trace.event(id);
        // Values tell more than sketches; a shard is not yet the whole.
        if (result.has_payload() || result.shard().count > 1) continue;
        for (int32_t i = 0; i < result.n_segments(); ++i) {
          const std::optional<Sum> sum = Judge(result, i, parts);
          if (!sum) continue;
          if (sum->measured <= sum->bound) {
            report->Right(id, sum->measured, sum->bound);
          } else if (!std::exchange(said, true)) {
            Report(capture, id, result.segment(i), *sum, report);
          }
        }
      }
    }
  }
  if (!any) report->Missing("no result of a reduction was recorded with what went in", "NAME and NAME.partial");
}

}  // namespace assay::check
