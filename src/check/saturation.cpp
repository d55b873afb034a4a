// Values at an end of their dtype's range: float16 results that reached 65504 or lie below its normal numbers, and
// cache codes that stick at the largest one. Extremes and the exponent histogram suffice.
#include <cmath>
#include <map>

#include "check/checks.h"
#include "check/helpers.h"

namespace assay::check {
namespace {

// The largest finite magnitude of the formats of small range; 0 for others, which cannot saturate in practice.
double Largest(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return 65504;
    case DType::kF8E4M3FN:
      return 448;
    case DType::kF8E4M3FNUZ:
      return 240;
    case DType::kF8E5M2:
    case DType::kF8E5M2FNUZ:
      return 57344;
    default:
      return 0;
  }
}

// In the top binade of a tensor whose largest value is the end of the range. A scale that is taken from the tensor puts
// some there; a third of all values is beyond every bell-shaped distribution.
constexpr double kTopShare = 1.0 / 3;

// Below 2^-14 a float16 loses its bits one by one. Nearly all of a result there is a scale that is wrong; what a
// softmax has made is there by right, and a parameter was so in the checkpoint.
constexpr double kLowShare = 0.9;
constexpr int kLeastNormal = -14;
constexpr uint64_t kLeastSamples = 32;  // of values that are not 0 that say anything
bool MayBeSmall(std::string_view stem) {
  for (std::string_view end : {"probs", "topk_weights", "_scale", ".weight", ".bias"}) {
    if (stem.ends_with(end)) return true;
  }
  return false;
}

class Saturation final : public ScanCheck {
 public:
  bool Wants(const SiteName& site, std::string_view) override {
    return !site.stem.ends_with("_cache") && !site.stem.ends_with(".storage") && !site.stem.ends_with(".q");
  }

  void Segment(const Item& item) override {
    const SegmentSummary& s = *item.segment;
    if (s.padding || s.count == 0) return;
    const bool cache = !item.view->meta("kv_cache_dtype").empty();
    const DType dtype = cache                               ? ParseDType(item.view->meta("kv_cache_dtype"))
                        : item.view->dtype() == DType::kF16 ? DType::kF16
                                                            : item.view->compute_dtype();
    const double top = Largest(dtype);
    if (top == 0 || (!cache && dtype != DType::kF16)) return;
    ++judged_;
    last_ = item.id;
    if (!cache) {
      largest_ = std::max(largest_, s.abs_max);
      if (s.abs_max >= top) {
        found_.emplace(item.site, Hit{item.id, s, 1});
      } else if (const double low = LowShare(item); low > kLowShare) {
        low_.emplace(item.site, Hit{item.id, s, low});
      }
      return;
    }
    // The end of the range in the tensor's unit: code times scale, for whichever scale the rows were stored with.
    for (const char* key : {"k_scale", "v_scale", "kv_scale"}) {
      const std::string text(item.view->meta(key));
      const double scale =
          text.empty() ? (std::string_view(key) == "kv_scale" ? 0 : 1) : std::strtod(text.c_str(), nullptr);
      if (!(std::fabs(s.abs_max - top * scale) <= 1e-3 * top * scale)) continue;
      const double share = TopShare(item, s.abs_max);
      if (share > kTopShare) found_.emplace(item.site, Hit{item.id, s, share});
    }
  }

  void Finish(const Capture& capture, CheckReport* report) override {
    for (const auto& [site, hit] : found_) {
      const auto info = capture.Info(hit.event);
      const bool cache = Capture::OwnText(*info, "kv_cache_dtype").has_value();
      Suspicion s = At(*info, cache ? fault_class::kKvScale : fault_class::kRange, cache ? 1 : 0);
      if (cache) s.hypothesis = hypothesis::kCacheWrite;
      s.local = cache;
      FillSegment(hit, &s.bad);
      s.bad.measured = hit.share;
      s.bad.bound = cache ? kTopShare : 0;
      s.bad.bound_basis =
          cache ? "share of values in the top binade of the cache's range" : "largest magnitude below 65504";
      s.bad.confidence = cache ? 0.8 : 0.6;
      s.bad.evidence.push_back("the largest magnitude " + NumberText(hit.segment.abs_max) + " is the end of the range");
      report->Found(std::move(s));
    }
    const bool any_low = ReportLow(capture, report);
    if (judged_ == 0)
      return report->Missing("no value is kept in a dtype of small range",
                             "record compute_dtype, or kv_cache_dtype on attn.kv_write");
    if (found_.empty() && !any_low) report->Right(last_);
    report->Note(std::to_string(judged_) + " segments of small range" +
                 (largest_ > 0 ? ", largest float16 magnitude " + NumberText(largest_) : ""));
  }

 private:
  struct Hit {
    EventId event;
    SegmentSummary segment;
    double share;
  };

  static void FillSegment(const Hit& hit, FirstBad* bad) {
    bad->request = hit.segment.request;
    if (hit.segment.n_rows == 0) return;
    bad->positions = {{hit.segment.first_position, hit.segment.first_position + hit.segment.n_rows - 1}};
  }

  // Results at the lower end of float16; whether there are any.
  bool ReportLow(const Capture& capture, CheckReport* report) {
    bool any = false;
    for (const auto& [site, hit] : low_) {
      const auto info = capture.Info(hit.event);
      if (MayBeSmall(info->site.stem)) continue;
      Suspicion s = At(*info, fault_class::kRange, 0);
      s.local = false;
      FillSegment(hit, &s.bad);
      s.bad.measured = hit.share;
      s.bad.bound = kLowShare;
      s.bad.bound_basis = "share of values that are not 0 below 2^-14, the least normal float16";
      s.bad.confidence = 0.6;
      s.bad.evidence.push_back(NumberText(hit.share) +
                               " of the values lie below the normal numbers of float16, where bits are lost");
      report->Found(std::move(s));
      any = true;
    }
    return any;
  }

  // Of the sampled values that are not 0, those that float16 keeps without all of its bits.
  double LowShare(const Item& item) {
    item.view->histogram(item.index, &bins_);
    uint64_t nonzero = 0, low = 0;
    for (const ExponentBin& bin : bins_) {
      nonzero += bin.count;
      low += bin.exponent < kLeastNormal ? bin.count : 0;
    }
    return nonzero < kLeastSamples ? 0 : static_cast<double>(low) / static_cast<double>(nonzero);
  }

  // The share of the sampled values in the binade of abs_max.
  double TopShare(const Item& item, double abs_max) {
    const uint64_t samples = item.view->histogram(item.index, &bins_);
    if (samples == 0) return 0;
    const int top = std::ilogb(abs_max);
    uint64_t n = 0;
    for (const ExponentBin& bin : bins_) n += bin.exponent >= top ? bin.count : 0;
    return static_cast<double>(n) / static_cast<double>(samples);
  }

  std::map<uint32_t, Hit> found_, low_;  // by site, the first of each
  std::vector<ExponentBin> bins_;
  uint64_t judged_ = 0;
  double largest_ = 0;
  EventId last_ = kNoEvent;
};

}  // namespace

std::unique_ptr<ScanCheck> MakeSaturation() { return std::make_unique<Saturation>(); }

}  // namespace assay::check
