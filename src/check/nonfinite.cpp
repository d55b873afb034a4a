// The first value that is not finite, and whether it came from a real row or from padding.
//
// Statistics suffice. Minus infinity is a value of masked scores and of a log-sum-exp over no key; NaN and plus
// infinity never are.
#include <map>
#include <set>

#include "check/checks.h"

namespace assay::check {
namespace {

// -inf stands for "no key" there.
bool MayBeMinusInfinity(std::string_view stem) {
  return stem.ends_with(".lse") || stem == "attn.scores" || stem == "attn.mask" || stem == "logprobs" ||
         stem == "moe.router_logits" || stem == "logits";
}
// Memory that holds whatever was there before, judged by its own checks.
bool IsPool(std::string_view stem) { return stem.ends_with("_cache") || stem.ends_with(".storage"); }

class Nonfinite final : public ScanCheck {
 public:
  bool Wants(const SiteName& site, std::string_view) override { return !IsPool(site.stem); }

  void Segment(const Item& item) override {
    last_ = item.id;
    ++segments_;
    const SegmentSummary& s = *item.segment;
    if (s.nonfinite == 0 || s.padding) return;
    State& state = states_[item.site];
    if (state.first != kNoEvent) return;
    state.first = item.id;
    state.segment = s;
  }

  void Finish(const Capture& capture, CheckReport* report) override {
    for (const auto& [site, state] : states_) {
      const auto info = capture.Info(state.first);
      const Stats& stats = StatsOf(*info, state.segment);
      if (MayBeMinusInfinity(info->site.stem) && stats.nan == 0 && stats.pos_inf == 0) continue;
      ::assay::Suspicion s;
      s.event = state.first;
      s.local = false;
      s.rank = 0;
      s.bad.cls = fault_class::kRange;
      s.bad.request = state.segment.request;
      if (state.segment.n_rows > 0) {
        s.bad.positions = {{state.segment.first_position, state.segment.first_position + state.segment.n_rows - 1}};
      }
      s.bad.measured = static_cast<double>(state.segment.nonfinite);
      s.bad.bound = 0;
      s.bad.bound_basis = "number of values that are not finite; none are allowed";
      s.bad.confidence = 0.6;
      s.bad.evidence.push_back(std::to_string(stats.nan) + " NaN, " + std::to_string(stats.pos_inf) + " +Inf, " +
                               std::to_string(stats.neg_inf) + " -Inf of " + std::to_string(stats.count) +
                               " values of real rows");
      report->Found(std::move(s));
    }
    if (states_.empty() && segments_ > 0) report->Right(last_);
    if (segments_ > 0) report->Note(std::to_string(segments_) + " segments are finite");
  }

 private:
  struct State {
    EventId first = kNoEvent;
    SegmentSummary segment;
  };

  static const Stats& StatsOf(const EventInfo& info, const SegmentSummary& s) {
    for (const ::assay::Segment& x : info.event.segments) {
      if (x.request == s.request && x.first_position == s.first_position && x.padding == s.padding) return x.stats;
    }
    return info.event.segments[0].stats;
  }

  std::map<uint32_t, State> states_;
  uint64_t segments_ = 0;
  EventId last_ = kNoEvent;
};

}  // namespace

std::unique_ptr<ScanCheck> MakeNonfinite() { return std::make_unique<Nonfinite>(); }

}  // namespace assay::check
