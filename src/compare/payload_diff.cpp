#include "compare/payload_diff.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <span>
#include <tuple>

#include "tensor/decode.h"
#include "tensor/float_range.h"

namespace assay {
namespace {

// Of payloads read, both sides together.
constexpr uint64_t kBudgetBytes = uint64_t{4} << 30;
constexpr int64_t kBlock = 1024;  // elements decoded at a time

// One row of a stored tensor, or a whole tensor without token rows.
struct StoredRow {
  uint32_t request;
  int32_t position;
  int64_t col_offset;
  int32_t rank;
  const std::byte* data;  // of the payload; the row begins at element first
  int64_t first;
  int64_t cols;
  int64_t head_size;  // columns of a head; 0: no heads
  DType dtype;
  auto key() const { return std::tuple(request, position, col_offset, cols); }
};

// 0 finite, 1 NaN, 2 and 3 the infinities: two elements of one class other than 0 are taken as equal.
int ClassOf(double x) { return std::isnan(x) ? 1 : std::isinf(x) ? (x > 0 ? 2 : 3) : 0; }

// Distance of a dtype's neighbours at this size, as large as it is below the smallest normal number; 0 for integers.
double GapAt(double size, DType dtype) {
  return std::ldexp(2 * UnitRoundoff(dtype), std::max(std::ilogb(size), MinExponent(dtype)));
}

// Figures of one site, element by element, in double.
class Accumulator {
 public:
  explicit Accumulator(bool has_rows) : has_rows_(has_rows) {}

  void Add(const StoredRow& a, const StoredRow& b) {
    double x[kBlock], y[kBlock];
    for (int64_t at = 0; at < a.cols; at += kBlock) {
      const int64_t n = std::min(kBlock, a.cols - at);
      DecodeTo(a.data, a.first + at, n, a.dtype, x);
      DecodeTo(b.data, b.first + at, n, b.dtype, y);
      for (int64_t i = 0; i < n; ++i) AddElement(x[i], y[i], a, b.dtype, at + i);
    }
  }

  PayloadDifference Result() {
    const double norm = std::sqrt(std::max(aa_, bb_));
    out_.rel_l2 = norm > 0 ? std::sqrt(dd_) / norm : 0;
    out_.cosine = aa_ > 0 && bb_ > 0 ? ab_ / std::sqrt(aa_) / std::sqrt(bb_) : (aa_ == bb_ ? 1 : 0);
    out_.ulp_p50 = Quantile(0.5);
    out_.ulp_p99 = Quantile(0.99);
    return out_;
  }

 private:
  // Non-finite elements are counted and enter no sum: one NaN would hide what all others say.
  void AddElement(double x, double y, const StoredRow& row, DType other, int64_t col) {
    ++out_.elements;
    const int class_x = ClassOf(x), class_y = ClassOf(y);
    if (class_x != 0 || class_y != 0) {
      out_.nonfinite_differ += class_x != class_y;
      return;
    }
    const double d = std::fabs(x - y);
    aa_ += x * x;
    bb_ += y * y;
    ab_ += x * y;
    dd_ += d * d;
    double ulp = 0;
    if (d > 0) {
      const double size = std::max(std::fabs(x), std::fabs(y));
      // Counted in the coarser of both types; two integers in ones.
      const double gap = std::max(GapAt(size, row.dtype), GapAt(size, other));
      ulp = gap > 0 ? d / gap : d;
    }
    out_.ulp_max = std::max(out_.ulp_max, ulp);
    ++out_.ulp_histogram[BinOf(ulp)];
    if (d > out_.max_abs || out_.channel < 0) {
      out_.max_abs = d;
      out_.value_a = x;
      out_.value_b = y;
      out_.position = has_rows_ ? row.position : -1;
      const int64_t whole = row.col_offset + col;
      out_.head = row.head_size > 0 ? whole / row.head_size : -1;
      out_.channel = row.head_size > 0 ? whole % row.head_size : whole;
    }
  }

  // 0: equal; b: up to 2^(b-1) ulp; the last bin holds the rest, a difference beyond the largest double too.
  static size_t BinOf(double ulp) {
    if (ulp == 0) return 0;
    if (!(ulp < std::ldexp(1.0, PayloadDifference::kUlpBins))) return PayloadDifference::kUlpBins - 1;
    const int b = ulp <= 1 ? 1 : 1 + static_cast<int>(std::ceil(std::log2(ulp)));
    return static_cast<size_t>(std::min<int>(b, PayloadDifference::kUlpBins - 1));
  }

  // Upper edge of the bin that holds the quantile.
  double Quantile(double q) const {
    uint64_t total = 0, sum = 0;
    for (uint64_t n : out_.ulp_histogram) total += n;
    for (size_t b = 0; b < out_.ulp_histogram.size(); ++b) {
      sum += out_.ulp_histogram[b];
      if (static_cast<double>(sum) >= q * static_cast<double>(total)) {
        return b == 0 ? 0 : std::min(std::ldexp(1.0, static_cast<int>(b) - 1), out_.ulp_max);
      }
    }
    return out_.ulp_max;
  }

  bool has_rows_;
  PayloadDifference out_;
  double aa_ = 0, bb_ = 0, ab_ = 0, dd_ = 0;
};

// Goes through the sites one after the other; rows of the site at hand are in rows_.
class Comparer {
 public:
  Comparer(const JointIndex& index, const std::vector<uint32_t>& aside_from, std::vector<std::string>* notes)
      : index_(index), aside_from_(aside_from), notes_(notes) {}

  void Compare(SiteOutcome* outcome) {
    const JointSite& site = index_.sites[outcome->site];
    for (int side : {kA, kB}) {
      rows_[side].clear();
      if (!Collect(side, site)) return;
      std::stable_sort(rows_[side].begin(), rows_[side].end(), [](const StoredRow& a, const StoredRow& b) {
        return std::pair(a.key(), a.rank) < std::pair(b.key(), b.rank);
      });
    }
    Accumulator sum(site.has_rows);
    size_t hint = 0;
    for (size_t i = 0, j = 0; i < rows_[kA].size();) {
      const std::span<const StoredRow> a = CopiesFrom(rows_[kA], i);
      i += a.size();
      while (j < rows_[kB].size() && rows_[kB][j].key() < a[0].key()) ++j;
      if (j == rows_[kB].size() || rows_[kB][j].key() != a[0].key()) continue;
      const int64_t number = index_.row(a[0].request, a[0].position, &hint);
      if (number >= 0 && aside_from_[static_cast<size_t>(number)] <= outcome->site) continue;
      AddCopies(a, CopiesFrom(rows_[kB], j), site.parsed.partial, &sum);
    }
    const PayloadDifference result = sum.Result();
    if (result.elements == 0) return;
    outcome->comparison.payload = result;
    outcome->comparison.max_abs = result.max_abs;
    outcome->comparison.cosine = result.cosine;
  }

  bool spent() const { return bytes_ > kBudgetBytes; }

 private:
  // The rows from i on that have its key: one a rank, ascending, and more where a rank recorded it again.
  static std::span<const StoredRow> CopiesFrom(const std::vector<StoredRow>& rows, size_t i) {
    size_t end = i + 1;
    while (end < rows.size() && rows[end].key() == rows[i].key()) ++end;
    return std::span(rows).subspan(i, end - i);
  }

  // A rank's last recording, or null.
  static const StoredRow* OfRank(std::span<const StoredRow> copies, int32_t rank) {
    for (size_t i = copies.size(); i-- > 0;) {
      if (copies[i].rank == rank) return &copies[i];
    }
    return nullptr;
  }

  // How many ranks recorded the row.
  static int64_t Ranks(std::span<const StoredRow> copies) {
    return std::count_if(copies.begin(), copies.end(),
                         [&](const StoredRow& own) { return OfRank(copies, own.rank) == &own; });
  }

  // Rank by rank; a rank that one side lacks is held against the other side's first. Partial sums of other ranks are
  // other quantities, and so are those of a run over another number of ranks.
  static void AddCopies(std::span<const StoredRow> a, std::span<const StoredRow> b, bool partial, Accumulator* sum) {
    if (partial && Ranks(a) != Ranks(b)) return;
    for (const StoredRow& own : b) {
      if (OfRank(b, own.rank) != &own) continue;
      const StoredRow* other = OfRank(a, own.rank);
      if (other != nullptr || !partial) sum->Add(other != nullptr ? *other : a[0], own);
    }
    for (const StoredRow& own : a) {
      if (OfRank(a, own.rank) == &own && OfRank(b, own.rank) == nullptr && !partial) sum->Add(own, b[0]);
    }
  }

  // False: no payload at the site's first event, so none is looked for.
  bool Collect(int side, const JointSite& site) {
    const std::vector<Piece>& pieces = index_.pieces[side];
    pieces_.clear();
    for (size_t i = site.begin[side]; i < site.end[side]; ++i) pieces_.push_back(&pieces[i]);
    std::stable_sort(pieces_.begin(), pieces_.end(),
                     [](const Piece* a, const Piece* b) { return a->event < b->event; });
    for (size_t i = 0, end = 0; i < pieces_.size(); i = end) {
      const uint32_t number = pieces_[i]->event;
      while (end < pieces_.size() && pieces_[end]->event == number) ++end;
      const Event event = index_.trace[side]->event(number).Decode();
      if (!event.payload.sha256.empty()) {
        AddEvent(side, site, std::span(pieces_).subspan(i, end - i), event);
      } else if (i == 0) {
        return false;
      }
    }
    return !rows_[side].empty();
  }

  // pieces: of this event, in order of their requests and positions.
  void AddEvent(int side, const JointSite& site, std::span<const Piece* const> pieces, const Event& event) {
    const uint32_t number = pieces[0]->event;
    const auto payload = index_.trace[side]->payload(event.payload);
    if (!payload.ok()) {
      notes_->push_back(site.name + ": payload of event " + std::to_string(number) +
                        " left out: " + payload.status().message());
      return;
    }
    bytes_ += payload->size();
    int64_t elements = 1;
    for (int64_t n : event.shape) {
      if (n < 0 || (n > 0 && elements > (int64_t{1} << 48) / n)) return;
      elements *= n;
    }
    const bool by_rows = event.row_axis == 0 && !event.shape.empty() && event.shape[0] > 0;
    if (site.has_rows && !by_rows) return;  // rows that do not lie together: not matched
    const int64_t cols = by_rows ? elements / event.shape[0] : elements;
    const int64_t stored =
        event.payload.rows.empty() ? (by_rows ? event.shape[0] : 1) : static_cast<int64_t>(event.payload.rows.size());
    const int bits = BitsOf(event.dtype);
    if (cols <= 0 || bits == 0 || stored <= 0 || stored > static_cast<int64_t>(payload->size()) * 8 / bits / cols) {
      return;  // the bytes are fewer than the shape says
    }
    StoredRow row{};
    row.col_offset = event.shard.count > 1 ? event.shard.col_offset : 0;
    row.rank = event.rank;
    row.data = payload->data();
    row.cols = cols;
    row.dtype = event.dtype;
    // Heads lie together when only one axis is behind theirs.
    if (event.head_axis >= 0 && event.head_axis == static_cast<int32_t>(event.shape.size()) - 2) {
      row.head_size = event.shape.back();
    }
    for (const auto& [place, request, position] : RowsOf(pieces, event, by_rows)) {
      if (place >= stored) continue;
      row.first = place * cols;
      row.request = request;
      row.position = position;
      rows_[side].push_back(row);
    }
  }

  struct Place {
    int64_t stored;  // number of the row in the payload
    uint32_t request;
    int32_t position;
  };

  // Which stored row is which position of which request. Pieces know the request's common number.
  static std::vector<Place> RowsOf(std::span<const Piece* const> pieces, const Event& event, bool by_rows) {
    std::vector<Place> out;
    for (const Piece* of_event : pieces) {
      const Piece& piece = *of_event;
      if (piece.segment >= event.segments.size()) continue;
      if (!by_rows) {
        out.push_back({0, piece.request, piece.position});
        continue;
      }
      const int64_t first = event.segments[piece.segment].first_row;
      for (uint32_t r = 0; r < piece.n_rows; ++r) {
        int64_t stored = first + r;
        if (!event.payload.rows.empty()) {
          const auto& sampled = event.payload.rows;
          const auto it = std::find(sampled.begin(), sampled.end(), stored);
          if (it == sampled.end()) continue;
          stored = it - sampled.begin();
        }
        if (stored >= 0) out.push_back({stored, piece.request, piece.position + static_cast<int32_t>(r)});
      }
    }
    return out;
  }

  const JointIndex& index_;
  const std::vector<uint32_t>& aside_from_;
  std::vector<std::string>* notes_;
  std::vector<StoredRow> rows_[2];
  std::vector<const Piece*> pieces_;  // of the site and side at hand, by event
  uint64_t bytes_ = 0;
};

// Looked for on disk first: without the folder no event has to be decoded to find that it stored nothing.
bool HasPayloads(const Trace& trace) {
  std::error_code error;
  const std::filesystem::path path(trace.path());
  const std::filesystem::path folder = std::filesystem::is_directory(path, error) ? path : path.parent_path();
  return std::filesystem::exists(folder / "payloads", error);
}

}  // namespace

void ComparePayloads(const JointIndex& index, Judgement* judgement, std::vector<std::string>* notes) {
  if (!HasPayloads(*index.trace[kA]) || !HasPayloads(*index.trace[kB])) return;
  Comparer comparer(index, judgement->aside_from, notes);
  std::vector<SiteOutcome>& sites = judgement->sites;
  for (size_t i = 0; i < sites.size(); ++i) {
    if (comparer.spent()) {
      notes->push_back("payloads of " + std::to_string(sites.size() - i) + " sites not read: 4 GiB were");
      return;
    }
    comparer.Compare(&sites[i]);
  }
}

}  // namespace assay
