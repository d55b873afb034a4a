// attn.W_UK_T and attn.W_UV beside attn.kv_b_proj.weight, or its codes and scales, of the same recording. Products over
// a wrong cut follow from it and are right by themselves: only this names it.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "check/absorbed_heads.h"
#include "check/helpers.h"
#include "check/op_checks.h"
#include "check/op_dequant.h"
#include "check/op_fitted.h"
#include "tensor/dtype.h"

namespace assay::check {
namespace {

using namespace op;

constexpr std::string_view kSource = "attn.kv_b_proj.weight";

// Rows of the latent's columns, not yet taken as heads.
struct Source {
  std::string name;
  Shard shard;
  double roundoff = 0;
  KvHeads heads;  // count 0
};

// Unit roundoff of what the event has been through, float32 at best.
double RoundoffOf(const EventInfo& info) {
  const auto own = [](DType d) { return IsFloat(d) && d != DType::kF64 ? UnitRoundoff(d) : 0; };
  return std::max({own(info.event.dtype), own(info.event.compute_dtype), UnitRoundoff(DType::kF32)});
}

// A wide recording may hold a narrow weight: the unit roundoff of bf16 or f16 where all values are on its grid, else 0.
double GridOf(const std::vector<double>& values) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const double steps = 1 / UnitRoundoff(dtype);
    const bool on_grid = std::all_of(values.begin(), values.end(), [&](double x) {
      int exponent = 0;
      const double scaled = std::frexp(x, &exponent) * steps;
      return scaled == std::nearbyint(scaled);
    });
    if (on_grid) return UnitRoundoff(dtype);
  }
  return 0;
}

std::optional<Source> Plain(const Tensor& w) {
  if (w.shape.size() < 2 || w.sampled) return std::nullopt;
  Source source{w.info->name, w.info->event.shard, RoundoffOf(*w.info), {}};
  source.heads.c = w.dim(-1);
  source.heads.values = w.values;
  return source;
}

// Of codes and scales.
std::optional<Source> OfCodes(const Subject& s, const std::string& name) {
  const TensorPtr codes = s.Weight(name + ".codes");
  if (codes == nullptr || !HasCodes(s, name + ".", false)) return std::nullopt;
  const auto parts = TakeApart(s, name + ".", false);
  if (!parts.ok()) return std::nullopt;
  Source source{name, codes->info->event.shard, UnitRoundoff(DType::kF32), {}};
  KvHeads& h = source.heads;
  h.c = parts->cols;
  h.values = parts->Values().values;
  h.code.assign(parts->code.begin(), parts->code.end());
  h.zero.assign(parts->zero.begin(), parts->zero.end());
  h.zero.resize(h.code.size(), 0);
  h.group = parts->group;
  for (int64_t i = 0; i < std::ssize(h.code); ++i) h.scale.push_back(parts->ScaleOf(i) * parts->global);
  return source;
}

// Takes the rows of `source` as heads of those that `a` is a cut of: the extent of `a` that is not the latent's gives
// the rows of one half, the number of heads those of both. False: they do not fit each other.
bool TakeAsHeads(const Shard& shard, AbsorbedHeads* a, Source* source, bool whole) {
  KvHeads& h = source->heads;
  if (a->shape.size() != 3 || h.c <= 0) return false;
  const int64_t n = a->shape[0], d = a->shape[1] == h.c ? a->shape[2] : a->shape[1];
  const int64_t rows = std::ssize(h.values) / h.c;
  a->first_head = whole ? shard.index * n : 0;
  h.count = whole ? n * shard.count : n;
  if (n <= 0 || d <= 0 || h.count <= 0 || rows % h.count != 0 || rows / h.count < d) return false;
  (a->key() ? h.dn : h.dv) = d;
  (a->key() ? h.dv : h.dn) = rows / h.count - d;
  return WhyIncomparable(h, *a).empty();
}

// Every element within what eight bits leave: half a step of e4m3 or of 127 steps to the largest one.
bool IsEightBit(const WeightSlab& slab) {
  double top = 0;
  for (const double x : slab.expect) top = std::max(top, std::fabs(x));
  for (size_t i = 0; i < slab.actual.size(); ++i) {
    if (!(std::fabs(slab.actual[i] - slab.expect[i]) <= 0x1p-4 * std::fabs(slab.expect[i]) + top / 250)) return false;
  }
  return true;
}

// Of another rank or layer.
MaybeExplained OtherSource(const Subject& s, const AbsorbedHeads& a, const std::string& own) {
  if (SearchedEnough(s)) return std::nullopt;
  for (const std::string& name : s.capture().NamesOfStem(kSource)) {
    for (const EventId id : s.capture().EventsOf(name)) {
      const auto info = s.capture().Info(id);
      const bool of_rank = name == own;
      if (info->audit == "before" || (of_rank == (info->event.rank == s.info().event.rank))) continue;
      const auto tensor = s.capture().Load(id);
      std::optional<Source> source = tensor.ok() ? Plain(**tensor) : std::nullopt;
      AbsorbedHeads cut = a;
      if (!source) continue;
      const bool whole = info->event.shard.count <= 1 && s.info().event.shard.count > 1;
      if (!TakeAsHeads(s.info().event.shard, &cut, &*source, whole) || !IsCutOf(source->heads, cut)) continue;
      if (of_rank)
        return Explained(fault_class::kTpShard, {}, {"it holds the heads of rank " + NumberText(info->event.rank)});
      return Explained(fault_class::kLoad, {}, {"it is cut out of " + name + " in place of " + own});
    }
  }
  return std::nullopt;
}

void Report(const Subject& s, const WeightSlab& slab, int64_t head_rows, WeightExplanation why) {
  Suspicion found = At(s.info(), why.cls, 2);
  double off = 0, size = 0;
  for (int64_t i = 0; i < slab.size(); ++i) {
    const auto at = static_cast<size_t>(i);
    const double distance = slab.actual[at] - slab.expect[at];
    off += distance * distance, size += slab.expect[at] * slab.expect[at];
    const auto head = static_cast<int32_t>(i / (slab.cols * head_rows));
    if (!(std::fabs(distance) <= slab.Allowed(i)) && (found.bad.heads.empty() || found.bad.heads.back() != head))
      found.bad.heads.push_back(head);
  }
  found.bad.measured = std::sqrt(size > 0 ? off / size : off);
  found.bad.bound = 4 * slab.roundoff;
  found.bad.bound_basis = "four roundings of each element to the type of the weight";
  found.bad.constant = why.constant.meaning;
  found.bad.constant_value = why.constant.value;
  found.bad.confidence = why.confidence;
  for (std::string& line : why.evidence) found.bad.evidence.push_back(std::move(line));
  found.hypothesis = hypothesis::kAbsorption;
  s.report().Found(std::move(found));
}

void JudgeCut(Subject& s) {
  const std::string name = s.Sibling(kSource);
  const TensorPtr weight = s.Weight(name);
  std::vector<Source> sources;
  // Codes first: they tell more of a wrong cut. A cut of either is right; that the two differ is for decoded-weights.
  if (auto source = OfCodes(s, name)) sources.push_back(*std::move(source));
  if (weight != nullptr) {
    if (auto source = Plain(*weight)) sources.push_back(*std::move(source));
  }
  if (sources.empty()) return Missing(s, name);
  if (BitsOf(s.info().event.dtype) <= 8) {
    return s.report().Missing(s.info().name + " was recorded as codes", Capture::RecordHint(s.info().name));
  }
  const auto finite = [](double x) { return std::isfinite(x); };
  if (!std::all_of(s.actual().values.begin(), s.actual().values.end(), finite)) {
    return s.report().Missing(s.info().name + " has numbers that are not finite", "see what nonfinite says of it");
  }
  AbsorbedHeads cut{s.info().name, s.info().axes, s.tensor()->shape, s.actual().values, 0, 0};
  const Shard& shard = s.info().event.shard;
  Source* judged = nullptr;
  for (Source& source : sources) {
    cut.roundoff = std::max({RoundoffOf(s.info()), source.roundoff, GridOf(cut.values)});
    // A whole weight on a rank that has some of the heads; engines also record each rank's own without saying so.
    const bool whole = shard.count > 1 && source.shard.count <= 1;
    if (whole && TakeAsHeads(shard, &cut, &source, false) && IsCutOf(source.heads, cut))
      return s.report().Right(s.info().id, 0, 4 * cut.roundoff);
    if (!TakeAsHeads(shard, &cut, &source, whole)) continue;
    if (IsCutOf(source.heads, cut)) return s.report().Right(s.info().id, 0, 4 * cut.roundoff);
    if (judged == nullptr) judged = &source;
  }
  if (judged == nullptr) {
    return s.report().Missing(s.info().name + " has other heads than " + name, Capture::RecordHint(name));
  }
  TakeAsHeads(shard, &cut, judged, shard.count > 1 && judged->shard.count <= 1);
  MaybeExplained why = ExplainAbsorbed(judged->heads, cut);
  const WeightSlab slab = SlabOf(judged->heads, cut);
  if (!why) why = OtherSource(s, cut, name);
  // Requantised for its product: no fault by itself, and not to be judged without its own scales.
  if (why ? why->cls == fault_class::kPrecision : IsEightBit(slab)) {
    return s.report().Missing(s.info().name + " is " + name + " in eight bits or fewer",
                              Capture::RecordHint(s.info().name));
  }
  Report(s, slab, slab.head_dim, why ? *std::move(why) : UnexplainedAbsorbed(slab));
}

}  // namespace

void JudgeAbsorbedWeights(const Capture& capture, CheckReport* report) {
  constexpr std::string_view kCuts[] = {"attn.W_UK_T", "attn.W_UV"};
  JudgeStems(capture, report, kCuts, JudgeCut, true);
}

}  // namespace assay::check
