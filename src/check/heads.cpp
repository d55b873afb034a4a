// Heads that are all zero, or all equal, in the output of an attention whose query heads are neither. The head grid of
// the statistics suffices. A symptom: a pruned model has zero heads by right, but then in the query as well.
#include <algorithm>
#include <map>

#include "check/checks.h"
#include "check/helpers.h"

namespace assay::check {
namespace {

constexpr int32_t kMaxHeads = 1024;

class Heads final : public ScanCheck {
 public:
  bool Wants(const SiteName& site, std::string_view) override {
    return site.stem == "attn.out" || site.stem == "attn.latent_out";
  }

  void Segment(const Item& item) override {
    const SegmentSummary& s = *item.segment;
    // One key is the output of every head of its group: a segment of position 0 alone says nothing. One head is equal
    // to itself.
    const bool one_key = s.first_position < 1 && s.n_rows < 2;
    // The last condition: heads of fewer than four columns may have equal sums by chance.
    if (s.padding || s.n_head_cells < 2 || s.n_head_cells > kMaxHeads || one_key || s.sum_sq == 0 || s.nonfinite > 0 ||
        s.n_rows * static_cast<int64_t>(s.n_head_cells) * 4 > static_cast<int64_t>(s.count)) {
      return;
    }
    Site& site = sites_[{item.site, item.view->rank()}];
    if (site.zero.empty()) {
      site.zero.assign(static_cast<size_t>(s.n_head_cells), true);
      site.first = item.id;
      site.request = s.request;
    }
    if (site.zero.size() != static_cast<size_t>(s.n_head_cells)) return;
    ++site.segments;
    HeadCell cell;
    double first = 0;
    for (int32_t h = 0; h < s.n_head_cells; ++h) {
      item.view->head_cell(item.index, h, &cell);
      if (cell.sum_sq != 0) site.zero[static_cast<size_t>(h)] = false;
      if (h == 0) first = cell.sum_sq;
      site.equal = site.equal && cell.sum_sq == first;
    }
  }

  void Finish(const Capture& capture, CheckReport* report) override {
    for (const auto& [key, site] : sites_) {
      const auto info = capture.Info(site.first);
      std::vector<int32_t> zero;
      for (size_t h = 0; h < site.zero.size(); ++h) {
        if (site.zero[h]) zero.push_back(static_cast<int32_t>(h));
      }
      // One pair of equal sums may be chance in few bits; two segments of two heads are not.
      const bool equal = site.equal && site.segments > 1;
      if ((zero.empty() && !equal) || !QueryHeadsDiffer(capture, *info, zero) ||
          (equal && zero.empty() && KeysAreEqual(capture, *info, site.request))) {
        report->Right(site.first);
        continue;
      }
      Suspicion s = At(*info, equal && zero.empty() ? fault_class::kStride : fault_class::kUnknown, 0);
      s.local = false;
      for (const int32_t h : zero) s.bad.heads.push_back(h + FirstHead(*info));
      s.bad.measured = static_cast<double>(equal ? site.zero.size() : zero.size());
      s.bad.bound_basis = "heads, over " + std::to_string(site.segments) + " segments; none may be zero or all equal";
      s.bad.confidence = 0.6;
      s.bad.evidence.push_back(zero.empty() ? "all " + std::to_string(site.zero.size()) +
                                                  " heads have the same norm in every segment"
                                            : std::to_string(zero.size()) + " of " + std::to_string(site.zero.size()) +
                                                  " heads are zero in every segment");
      report->Found(std::move(s));
    }
  }

 private:
  struct Site {
    std::vector<bool> zero;
    bool equal = true;
    uint64_t segments = 0;
    EventId first = kNoEvent;
    uint64_t request = 0;  // of its first segment
  };

  // Global number of the rank's first head, by the columns of its shard.
  static int32_t FirstHead(const EventInfo& info) {
    const Event& e = info.event;
    if (e.shard.count <= 1 || e.head_axis < 0 || static_cast<size_t>(e.head_axis) >= e.shape.size()) return 0;
    int64_t head = 1;
    for (size_t a = static_cast<size_t>(e.head_axis) + 1; a < e.shape.size(); ++a)
      head *= std::max<int64_t>(e.shape[a], 1);
    return static_cast<int32_t>(e.shard.col_offset / head);
  }

  // The query's heads are neither zero where the output's are, nor all equal. true when the query was not recorded.
  static bool QueryHeadsDiffer(const Capture& capture, const EventInfo& out, const std::vector<int32_t>& zero) {
    const auto q = capture.Operand(out, out.prefix + "attn.q");
    if (!q) return true;
    const EventView view = capture.trace().event(*q);
    std::vector<double> sums;
    for (int32_t i = 0; i < view.n_segments(); ++i) {
      const SegmentSummary s = view.segment(i);
      sums.resize(std::max<size_t>(sums.size(), static_cast<size_t>(std::max(s.n_head_cells, 0))));
      for (int32_t h = 0; h < s.n_head_cells; ++h) {
        HeadCell cell;
        view.head_cell(i, h, &cell);
        sums[static_cast<size_t>(h)] += cell.sum_sq;
      }
    }
    for (const int32_t h : zero) {
      if (static_cast<size_t>(h) < sums.size() && sums[static_cast<size_t>(h)] == 0) return false;
    }
    return sums.size() < 2 || std::any_of(sums.begin(), sums.end(), [&](double s) { return s != sums[0]; });
  }

  std::map<std::pair<uint32_t, int32_t>, Site> sites_;
};

}  // namespace

std::unique_ptr<ScanCheck> MakeHeads() { return std::make_unique<Heads>(); }

}  // namespace assay::check
