// Values that are not finite, at their source: the first result that has them in real rows while its operands do not.
// When padding rows, the tail of a buffer or slots that nobody owns are not finite there, they have been read: PADREAD.
//
// Statistics suffice; the tails of buffers need payloads. Minus infinity is a value of masked scores, logits and of a
// log-sum-exp over no key; NaN and plus infinity never are.
#include <cmath>
#include <map>

#include "check/checks.h"
#include "check/helpers.h"
#include "check/operands.h"
#include "check/slots.h"

namespace assay::check {
namespace {

bool MayBeMinusInfinity(std::string_view stem) {
  return stem.ends_with(".lse") || stem == "attn.scores" || stem == "attn.mask" || stem == "logprobs" ||
         stem == "moe.router_logits" || stem == "logits";
}

// Rows sorted by expert belong to tokens although they do not say to which. Other tensors without token rows may have
// tails that nobody reads.
bool HasRowsInUse(const SegmentSummary& s, std::string_view stem) {
  return s.n_rows > 0 || stem == "moe.dispatched" || stem == "moe.gate_up" || stem == "moe.act" ||
         stem == "moe.expert_out";
}

bool IsWeight(std::string_view name) {
  return name.ends_with(".weight") || name.ends_with(".bias") || name.ends_with("W_UK_T") || name.ends_with("W_UV");
}

struct Counts {
  uint64_t real = 0, padding = 0;
};

// Of one event, real and padding rows apart.
Counts NotFinite(const EventView& view) {
  Counts c;
  for (int32_t i = 0; i < view.n_segments(); ++i) {
    const SegmentSummary s = view.segment(i);
    (s.padding ? c.padding : c.real) += s.nonfinite;
  }
  return c;
}

class Nonfinite final : public ScanCheck {
 public:
  bool Wants(const SiteName& site, std::string_view) override {
    return !site.stem.ends_with("_cache") && !site.stem.ends_with(".storage");
  }

  void Segment(const Item& item) override {
    last_ = item.id;
    ++segments_;
    const SegmentSummary& s = *item.segment;
    if (s.nonfinite == 0 || s.padding) return;
    std::vector<Hit>& hits = hits_[item.site];
    if (hits.size() < kHitsKept) hits.push_back({item.id, s});
  }

  // One finding a site: the first hit that no operand explains.
  void Finish(const Capture& capture, CheckReport* report) override {
    bool found = false;
    for (const auto& [site, hits] : hits_) {
      for (const Hit& hit : hits) {
        if (Judge(capture, hit, report)) {
          found = true;
          break;
        }
      }
    }
    found = WeightsAreFound(capture, report) || found;
    if (segments_ == 0 && !found)
      return report->Missing("no statistics were recorded", "record with ASSAY_LEVEL=stats");
    if (!found) report->Right(last_);
    report->Note(std::to_string(segments_) + " segments looked at");
  }

 private:
  // Whatever of a weight is not finite was not loaded, or not from the right place: padding of weights is zeros.
  static bool WeightsAreFound(const Capture& capture, CheckReport* report) {
    bool found = false;
    for (const std::string& name : capture.Names()) {
      if (!IsWeight(name)) continue;
      for (const EventId id : RealEvents(capture, name, true)) {
        const EventView view = capture.trace().event(id);
        if (view.phase() != Phase::kLoad || NotFinite(view).real == 0) continue;
        for (int32_t i = 0; i < view.n_segments(); ++i) {
          if (view.segment(i).nonfinite == 0) continue;
          Found(*capture.Info(id), {id, view.segment(i)}, fault_class::kLoad,
                "weights are finite numbers; these are of another memory", report);
          break;
        }
        found = true;
        break;
      }
    }
    return found;
  }

  struct Hit {
    EventId event;
    SegmentSummary segment;
  };
  static constexpr size_t kHitsKept = 8;  // a site: the first may follow from its operands, a later one not

  // False when the values follow from an operand, or are right.
  static bool Judge(const Capture& capture, const Hit& hit, CheckReport* report) {
    const auto info = capture.Info(hit.event);
    const std::string_view stem = info->site.stem;
    if (MayBeMinusInfinity(stem) && OnlyMinusInfinity(*info)) return false;
    if (!HasRowsInUse(hit.segment, stem) || info->axes.find('C') != std::string::npos) return false;
    const std::vector<EventId> operands = RecordedOperands(capture, *info);
    bool tail = false;
    for (const EventId id : operands) {
      const auto operand = capture.Info(id);
      const Counts c = NotFinite(capture.trace().event(id));
      if (c.real == 0 && c.padding == 0) continue;
      if (MayBeMinusInfinity(operand->site.stem) && OnlyMinusInfinity(*operand)) continue;
      if (c.real == 0) {
        // Padding that came in like that is allowed; what made it of finite operands is the source.
        const auto source = PaddingIsFinite(capture, *operand) ? operand : info;
        Found(*source, hit, fault_class::kPadRead, operand->name + " is not finite in padding rows, in real rows it is",
              report);
        return true;
      }
      if (operand->event.row_axis >= 0 || HasRowsInUse({}, operand->site.stem)) return false;  // a consequence
      if (operand->site.stem.ends_with("_cache")) continue;                                    // below
      if (!TailOnly(capture, id, info->n_rows() > 0 ? info->n_rows() : FirstExtent(*info))) return false;
      tail = true;
      Found(*info, hit, fault_class::kPadRead, operand->name + " is not finite in its tail, in the part in use it is",
            report);
    }
    if (tail) return true;
    if (const std::string pool = UnownedPool(capture, *info); !pool.empty()) {
      Found(*info, hit, fault_class::kPadRead,
            "slots of " + pool + " that nobody owns are not finite, the owned ones are", report);
      return true;
    }
    Found(*info, hit, fault_class::kRange,
          operands.empty() ? "no operand was recorded"
                           : "all " + std::to_string(operands.size()) + " recorded operands are finite",
          report, !operands.empty());
    return true;
  }

  static bool OnlyMinusInfinity(const EventInfo& info) {
    for (const ::assay::Segment& s : info.event.segments) {
      if (!s.padding && s.stats.nan + s.stats.pos_inf > 0) return false;
    }
    return true;
  }

  static bool PaddingIsFinite(const Capture& capture, const EventInfo& info) {
    for (const EventId id : RecordedOperands(capture, info)) {
      if (NotFinite(capture.trace().event(id)).padding > 0) return false;
    }
    return true;
  }

  static int64_t FirstExtent(const EventInfo& info) { return info.event.shape.empty() ? 0 : info.event.shape[0]; }

  // The operand has more rows than the result, and those in use are finite. Needs its payload.
  static bool TailOnly(const Capture& capture, EventId id, int64_t rows) {
    auto t = capture.Load(id);
    if (!t.ok() || (*t)->n_rows() <= rows) return false;
    for (int64_t r = 0; r < rows; ++r) {
      for (const double v : (*t)->row(r)) {
        if (!std::isfinite(v)) return false;
      }
    }
    return true;
  }

  // Name of a pool of the layer whose owned slots are finite while others are not; empty: none.
  static std::string UnownedPool(const Capture& capture, const EventInfo& info) {
    if (!info.site.stem.starts_with("attn.")) return {};
    for (const char* stem : {"attn.k_cache", "attn.v_cache", "attn.kv_cache"}) {
      const auto id = capture.Operand(info, info.prefix + stem);
      if (!id) continue;
      auto pool = capture.Load(*id);
      if (!pool.ok() || NotFinite(capture.trace().event(*id)).real == 0) continue;
      const SlotOwners owners(capture, info.event.step, info.event.rank);
      bool owned_finite = !owners.all().empty();
      for (const auto& [slot, owner] : owners.all()) {
        if (slot >= (*pool)->n_rows()) continue;
        for (const double v : (*pool)->row(slot)) owned_finite = owned_finite && std::isfinite(v);
      }
      if (owned_finite) return info.prefix + stem;
    }
    return {};
  }

  static void Found(const EventInfo& where, const Hit& hit, std::string_view cls, std::string why, CheckReport* report,
                    bool local = true) {
    Suspicion s = At(where, cls, cls == fault_class::kPadRead ? 3 : 1);
    s.local = local;
    if (cls == fault_class::kPadRead) s.hypothesis = hypothesis::kPadding;
    if (where.id == hit.event) {
      s.bad.request = hit.segment.request;
      if (hit.segment.n_rows > 0) {
        s.bad.positions = {{hit.segment.first_position, hit.segment.first_position + hit.segment.n_rows - 1}};
      }
    }
    s.bad.measured = static_cast<double>(hit.segment.nonfinite);
    s.bad.bound_basis = "values that are not finite in real rows; none are allowed";
    s.bad.confidence = local ? 0.9 : 0.6;
    s.bad.evidence.push_back(std::to_string(hit.segment.nonfinite) + " of " + std::to_string(hit.segment.count) +
                             " values are not finite (" + std::to_string(hit.segment.nan) + " NaN)" +
                             (where.id == hit.event ? "" : " in the result that reads it"));
    s.bad.evidence.push_back(std::move(why));
    report->Found(std::move(s));
  }

  std::map<uint32_t, std::vector<Hit>> hits_;
  uint64_t segments_ = 0;
  EventId last_ = kNoEvent;
};

}  // namespace

std::unique_ptr<ScanCheck> MakeNonfinite() { return std::make_unique<Nonfinite>(); }

}  // namespace assay::check
