// Rows that are those of an earlier step, of another request or of another position, bit for bit, although what they
// are computed from is not: an output buffer that was not written, or rows that were copied. Row digests suffice.
//
// Equal rows are right where the inputs are equal: equal tokens, equal prefixes, zero rows. So a row counts when the
// row of its own input differs, and the tokens of the two rows are not known to be equal.
#include <algorithm>
#include <deque>
#include <map>
#include <unordered_map>

#include "check/checks.h"
#include "check/helpers.h"

namespace assay::check {
namespace {

// Bounds of memory: a long trace has millions of rows, and a stale buffer repeats what is not long gone.
constexpr size_t kMaxRowsKept = 1 << 16;  // a site; older ones are forgotten
constexpr uint64_t kMinColumns = 16;      // shorter rows may be equal by chance

// The row-wise input of a result: what changes when the result must.
std::string_view InputOf(std::string_view stem) {
  if (stem == "attn.out" || stem == "attn.latent_out") return "attn.q";
  if (stem == "attn.o_proj") return "attn.out";
  if (stem == "mlp.down") return "mlp.act";
  if (stem == "moe.out" || stem == "moe.routed") return "post_norm";
  if (stem == "logits") return "final_norm";
  return {};
}

class StaleRows final : public ScanCheck {
 public:
  bool Wants(const SiteName& site, std::string_view) override { return !site.partial && !InputOf(site.stem).empty(); }

  void Segment(const Item& item) override {
    const SegmentSummary& s = *item.segment;
    // A segment of zeros repeats itself by right, and cells of rows may be missing although the segment has statistics.
    if (s.padding || s.n_row_cells == 0 || s.sum_sq == 0 || s.count < kMinColumns * static_cast<uint64_t>(s.n_rows))
      return;
    Site& site = sites_[{item.site, item.view->rank()}];
    for (int32_t r = 0; r < s.n_row_cells; ++r) {
      const Row row{item.id, item.index, r, s.request, s.first_position + r, item.view->step()};
      ++rows_;
      // The first row with these bits stays the one to compare with: where a buffer is never written again, all later
      // rows blame the step that last wrote it.
      const auto [at, fresh] = site.rows.emplace(item.view->row_digest(item.index, r), row);
      if (fresh) {
        site.order.push_back(at->first);
        if (site.order.size() > kMaxRowsKept) {
          site.rows.erase(site.order.front());
          site.order.pop_front();
        }
        continue;
      }
      const Row& earlier = at->second;
      if (earlier.event == item.id && earlier.segment == item.index && earlier.row == r) continue;
      // The same row computed again (a repeat, a request that was preempted) is equal by right.
      if (earlier.request == row.request && earlier.position == row.position) continue;
      // Only remembered here: the input's digests need other events, which one pass over the trace cannot jump to.
      if (pairs_.size() < kMaxPairs) pairs_.emplace_back(earlier, row);
    }
    last_ = item.id;
  }

  void Finish(const Capture& capture, CheckReport* report) override {
    uint64_t judged = 0, unknown = 0;
    for (const auto& [earlier, later] : pairs_) {
      const std::optional<bool> wrong = IsWrong(capture, earlier, later);
      if (!wrong) {
        ++unknown;
      } else if (*wrong) {
        Report(capture, earlier, later, report);
      } else {
        ++judged;
      }
    }
    if (unknown > 0) {
      return report->Missing(std::to_string(unknown) +
                                 " rows are bit for bit those of earlier ones, their inputs are "
                                 "not, and their tokens are not known",
                             "record embed, or the tokens (ASSAY_TOKENS=on)");
    }
    if (rows_ == 0)
      return report->Missing("no row digests of results were recorded",
                             "record with the row grid on (ASSAY_LEVEL=stats)");
    report->Right(last_);
    report->Note(std::to_string(rows_) + " rows, " + std::to_string(judged) +
                 " equal ones with equal inputs or tokens");
  }

 private:
  struct Row {
    EventId event;
    int32_t segment, row;
    uint64_t request;
    int64_t position, step;
  };
  struct Site {
    std::unordered_map<uint64_t, Row> rows;  // by digest
    std::deque<uint64_t> order;              // of `rows`, the oldest first
  };
  // So many coincidences are judged; a fault shows in the first of them.
  static constexpr size_t kMaxPairs = 4096;

  // Digest of the row of a request and position in an event; nullopt when it is not there.
  static std::optional<RowCell> RowOf(const Capture& capture, EventId id, uint64_t request, int64_t position) {
    const EventView view = capture.trace().event(id);
    for (int32_t i = 0; i < view.n_segments(); ++i) {
      const SegmentSummary s = view.segment(i);
      const int64_t r = position - s.first_position;
      if (s.padding || s.request != request || r < 0 || r >= s.n_row_cells) continue;
      RowCell cell;
      view.row_cell(i, static_cast<int32_t>(r), &cell);
      return cell;
    }
    return std::nullopt;
  }

  static std::optional<int64_t> TokenAt(const Capture& capture, uint64_t request, int64_t position) {
    const RequestInfo* info = capture.Request(request);
    if (info == nullptr || position < 0 || static_cast<size_t>(position) >= info->tokens.size()) return std::nullopt;
    return info->tokens[static_cast<size_t>(position)];
  }

  // Equal as far as the embedding's rows or the announced tokens tell; nullopt when neither does.
  static std::optional<bool> TokensAreEqual(const Capture& capture, const EventInfo& a, const Row& x,
                                            const EventInfo& b, const Row& y) {
    const auto s = TokenAt(capture, x.request, x.position), t = TokenAt(capture, y.request, y.position);
    if (s && t) return *s == *t;
    const auto e = capture.Operand(a, "embed"), f = capture.Operand(b, "embed");
    if (!e || !f) return std::nullopt;
    const auto p = RowOf(capture, *e, x.request, x.position), q = RowOf(capture, *f, y.request, y.position);
    if (!p || !q) return std::nullopt;
    return p->digest == q->digest;
  }

  // nullopt: it depends on the tokens, which are not known.
  static std::optional<bool> IsWrong(const Capture& capture, const Row& earlier, const Row& later) {
    RowCell cell;
    capture.trace().event(later.event).row_cell(later.segment, later.row, &cell);
    // Zeros and NaN have their own checks, and repeat without a stale buffer.
    if (cell.sum_sq == 0 || cell.nonfinite > 0) return false;
    const auto a = capture.Info(earlier.event), b = capture.Info(later.event);
    const std::string_view stem = b->site.stem;
    std::string input = b->prefix + std::string(InputOf(stem));
    // Absorbed MLA has no attn.q: its query is in two parts, of which the rotary one holds the position.
    if (stem == "attn.latent_out" || (stem == "attn.out" && !capture.HasSite(input))) input = b->prefix + "attn.q_pe";
    const auto x = capture.Operand(*a, input), y = capture.Operand(*b, input);
    if (!x || !y) return false;
    const auto p = RowOf(capture, *x, earlier.request, earlier.position),
               q = RowOf(capture, *y, later.request, later.position);
    // A single key (position 0) is the output whatever the query is. A later row is that of position 0 only where its
    // own token is, or its keys are all equal.
    if (!p || !q || p->digest == q->digest || later.position == 0) return false;
    // Equal keys make the softmax uniform whatever the query is.
    if (InputOf(stem) == "attn.q" && KeysAreEqual(capture, *b, later.request)) return false;
    const std::optional<bool> equal = TokensAreEqual(capture, *a, earlier, *b, later);
    return equal ? std::optional<bool>(!*equal) : std::nullopt;
  }

  static void Report(const Capture& capture, const Row& earlier, const Row& later, CheckReport* report) {
    const auto info = capture.Info(later.event);
    const bool old_step = earlier.step != later.step;
    Suspicion s = At(*info, old_step ? fault_class::kUnwritten : fault_class::kKernel, old_step ? 2 : 1);
    s.bad.request = later.request;
    s.bad.positions = {{later.position, later.position}};
    s.bad.measured = 1;
    s.bad.bound_basis = "exact: rows with different inputs have different bits, but for a digest's chance of 2^-32";
    s.bad.confidence = 0.9;
    s.bad.evidence.push_back(
        "the row at position " + std::to_string(later.position) + " is bit for bit that of position " +
        std::to_string(earlier.position) + (earlier.request == later.request ? "" : " of another request") +
        (old_step ? " in step " + std::to_string(earlier.step) : " in the same step") + ", its input is another one");
    report->Found(std::move(s));
  }

  std::map<std::pair<uint32_t, int32_t>, Site> sites_;
  std::vector<std::pair<Row, Row>> pairs_;
  uint64_t rows_ = 0;
  EventId last_ = kNoEvent;
};

}  // namespace

std::unique_ptr<ScanCheck> MakeStaleRows() { return std::make_unique<StaleRows>(); }

}  // namespace assay::check
