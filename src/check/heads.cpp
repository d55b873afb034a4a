// Heads that are zero or constant, or all equal, in the output of an attention whose query heads are neither. The head
// grid of the statistics suffices for zero and equal ones; stored values tell the others. A symptom: a pruned model has
// zero heads by right, but then in the query as well.
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "check/checks.h"
#include "check/helpers.h"
#include "check/stuck_heads.h"

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
      std::vector<int32_t> zero, constant;
      for (size_t h = 0; h < site.zero.size(); ++h) {
        if (site.zero[h]) zero.push_back(static_cast<int32_t>(h));
      }
      if (zero.empty()) {
        StuckHeads stuck = FindStuckHeads(capture, EventsOf(capture, *info));
        zero = std::move(stuck.zero);
        constant = std::move(stuck.constant);
      }
      std::vector<int32_t> bad = zero;
      bad.insert(bad.end(), constant.begin(), constant.end());
      // One pair of equal sums may be chance in few bits; two segments of two heads are not.
      const bool equal = bad.empty() && site.equal && site.segments > 1;
      if ((bad.empty() && !equal) || !QueryHeadsDiffer(capture, *info, bad) ||
          (equal && KeysAreEqual(capture, *info, site.request))) {
        report->Right(site.first);
        continue;
      }
      Suspicion s = At(*info, equal ? fault_class::kStride : fault_class::kUnknown, 0);
      s.local = false;
      std::sort(bad.begin(), bad.end());
      for (const int32_t h : bad) s.bad.heads.push_back(h + FirstHead(*info));
      s.bad.measured = static_cast<double>(equal ? site.zero.size() : bad.size());
      s.bad.bound_basis =
          "heads, over " + std::to_string(site.segments) + " segments; none may be zero or constant, nor all equal";
      s.bad.confidence = 0.6;
      const std::string of = " of " + std::to_string(site.zero.size()) + " heads ";
      if (equal)
        s.bad.evidence.push_back("all " + std::to_string(site.zero.size()) +
                                 " heads have the same norm in every segment");
      if (!zero.empty()) s.bad.evidence.push_back(std::to_string(zero.size()) + of + "are zero behind position 0");
      if (!constant.empty())
        s.bad.evidence.push_back(std::to_string(constant.size()) + of +
                                 "hold one and the same row at every position behind 0, which is no row of the values");
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

  static std::vector<EventId> EventsOf(const Capture& capture, const EventInfo& info) {
    std::vector<EventId> events = RealEvents(capture, info.name);
    std::erase_if(events, [&](EventId id) { return capture.trace().event(id).rank() != info.event.rank; });
    return events;
  }

  // Global number of the rank's first head, by the columns of its shard.
  static int32_t FirstHead(const EventInfo& info) {
    const Event& e = info.event;
    if (e.shard.count <= 1 || e.head_axis < 0 || static_cast<size_t>(e.head_axis) >= e.shape.size()) return 0;
    int64_t head = 1;
    for (size_t a = static_cast<size_t>(e.head_axis) + 1; a < e.shape.size(); ++a)
      head *= std::max<int64_t>(e.shape[a], 1);
    return static_cast<int32_t>(e.shard.col_offset / head);
  }

  // The query's heads are neither zero where the output's are stuck, nor all equal. true when the query was not
  // recorded.
  static bool QueryHeadsDiffer(const Capture& capture, const EventInfo& out, const std::vector<int32_t>& stuck) {
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
    for (const int32_t h : stuck) {
      if (static_cast<size_t>(h) < sums.size() && sums[static_cast<size_t>(h)] == 0) return false;
    }
    return sums.size() < 2 || std::any_of(sums.begin(), sums.end(), [&](double s) { return s != sums[0]; });
  }

  std::map<std::pair<uint32_t, int32_t>, Site> sites_;
};

}  // namespace

std::unique_ptr<ScanCheck> MakeHeads() { return std::make_unique<Heads>(); }

}  // namespace assay::check
