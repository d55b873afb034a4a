#include "compare/row_values.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "compare/bounds.h"

namespace assay {
namespace {

// Blocks of 64 positions: the default size of a segment.
constexpr int32_t kBlockBits = 6;

// Part of a row value that one rank holds.
struct Part {
  RowValue value;
  int32_t rank;
  int32_t shard;        // parts of one row and shard are replicas of each other, unless they are partial sums
  int32_t shard_count;  // 1: whole
  uint32_t order;       // of recording
  uint32_t sketch;      // index of its wide sketch, by blocks
};

double SketchDistance(const double* a, const double* b, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}

// From pieces to rows: parts first, put together only where more than one rank, chunk or shard is in the way.
class RowReader {
 public:
  RowReader(const JointIndex& index, int side, bool by_rows, int32_t only_rank, SideRows* out)
      : index_(index), side_(side), by_rows_(by_rows), only_rank_(only_rank), out_(out) {}

  // Pieces [begin, end) of one site and request, in order of position and recording.
  void Run(size_t begin, size_t end) {
    out_->clear();
    if (begin == end) return;
    partial_ = index_.sites[index_.pieces[side_][begin].site].parsed.partial;
    bool simple = true;  // one rank, ascending: nothing to put together
    for (size_t i = begin; i < end; ++i) {
      const Piece& piece = index_.pieces[side_][i];
      const EventView event = index_.trace[side_]->event(piece.event);
      const int32_t rank = event.rank();
      if (only_rank_ >= 0 && rank != only_rank_) continue;
      const Shard shard = event.shard();
      const size_t before = parts_.size();
      out_->roundoff = std::max(out_->roundoff, RoundoffOf(event.dtype(), event.compute_dtype()));
      if (by_rows_) {
        AddGrid(event, piece, i);
      } else {
        AddSegment(event, piece, i);
      }
      for (size_t j = before; j < parts_.size(); ++j) {
        Part& part = parts_[j];
        part.rank = rank;
        part.shard = shard.count > 1 ? shard.index : 0;
        part.shard_count = std::max(shard.count, 1);
        part.order = static_cast<uint32_t>(i - begin);
        const Part& last = parts_[j == 0 ? 0 : j - 1];
        simple &= j == 0 || (last.rank == rank && last.value.position < part.value.position);
        simple &= only_rank_ >= 0 || partial_ || shard.count <= 1;
      }
    }
    if (!simple || (!by_rows_ && parts_.size() > 1)) PutTogether();
    out_->rows.reserve(parts_.size());
    for (const Part& part : parts_) {
      out_->rows.push_back(part.value);
      if (!by_rows_) {
        const double* sketch = wide_.data() + size_t{part.sketch} * kSketchSize;
        out_->sketches.insert(out_->sketches.end(), sketch, sketch + kSketchSize);
      }
    }
  }

 private:
  // A part for each row cell.
  void AddGrid(const EventView& event, const Piece& piece, size_t number) {
    const auto segment = static_cast<int32_t>(piece.segment);
    const SegmentSummary summary = event.segment(segment);
    RowCell cell;
    for (int32_t r = 0; r < summary.n_row_cells; ++r) {
      event.row_cell(segment, r, &cell);
      Part part{};
      RowValue& value = part.value;
      value.position = piece.position + r;
      value.piece = static_cast<uint32_t>(number);
      value.nonfinite = cell.nonfinite;
      value.digest = cell.digest;
      value.digest_whole = !summary.digest_split;
      value.sum_sq = cell.sum_sq;
      for (int i = 0; i < kRowSketchSize; ++i) {
        value.sketch[i] = cell.sketch[static_cast<size_t>(i)];
        out_->has_sketch |= value.sketch[i] != 0;
      }
      parts_.push_back(part);
    }
  }

  // One part for the whole segment, with its wide sketch.
  void AddSegment(const EventView& event, const Piece& piece, size_t number) {
    const auto segment = static_cast<int32_t>(piece.segment);
    const SegmentSummary summary = event.segment(segment);
    Part part{};
    RowValue& value = part.value;
    value.position = piece.position;
    value.n_rows = piece.rows();
    value.piece = static_cast<uint32_t>(number);
    value.nonfinite = static_cast<uint32_t>(std::min<uint64_t>(summary.nonfinite, ~uint32_t{0}));
    value.digest = summary.digest;
    value.digest_whole = !summary.digest_split;
    value.sum_sq = summary.sum_sq;
    part.sketch = static_cast<uint32_t>(wide_.size() / kSketchSize);
    wide_.resize(wide_.size() + kSketchSize);
    double* sketch = wide_.data() + size_t{part.sketch} * kSketchSize;
    event.sketch(segment, sketch);
    for (int i = 0; i < kSketchSize; ++i) out_->has_sketch |= sketch[i] != 0;
    parts_.push_back(part);
  }

  double* Sketch(Part& part) { return by_rows_ ? part.value.sketch : wide_.data() + size_t{part.sketch} * kSketchSize; }
  int SketchSize() const { return by_rows_ ? kRowSketchSize : kSketchSize; }

  // Adds part to sum: disjoint columns, partial sums, or (by blocks) disjoint rows.
  void AddTo(Part* sum, Part& part) {
    sum->value.sum_sq += part.value.sum_sq;
    sum->value.nonfinite += part.value.nonfinite;
    sum->value.digest += part.value.digest;
    sum->value.digest_whole &= part.value.digest_whole;
    if (part.value.deviation > sum->value.deviation) {
      sum->value.deviation = part.value.deviation;
      sum->value.deviating_rank = part.value.deviating_rank;
    }
    double *to = Sketch(*sum), *from = Sketch(part);
    for (int i = 0; i < SketchSize(); ++i) to[i] += from[i];
  }

  void PutTogether() {
    // The same rank's later recording of the same rows replaces the earlier one.
    auto key = [](const Part& p) { return std::tuple(p.rank, p.shard, p.value.position, p.order); };
    std::sort(parts_.begin(), parts_.end(), [&](const Part& a, const Part& b) { return key(a) < key(b); });
    size_t kept = 0;
    for (size_t i = 0; i < parts_.size(); ++i) {
      Part* last = kept == 0 ? nullptr : &parts_[kept - 1];
      if (last != nullptr && last->rank == parts_[i].rank && last->shard == parts_[i].shard &&
          parts_[i].value.position - int64_t{last->value.position} < last->value.n_rows) {
        ++out_->repeated;
        *last = parts_[i];
      } else {
        parts_[kept++] = parts_[i];
      }
    }
    parts_.resize(kept);
    if (!by_rows_) JoinBlocks();
    JoinRanks();
  }

  // Segments of one rank inside one block of positions become one value.
  void JoinBlocks() {
    size_t kept = 0;
    for (size_t i = 0; i < parts_.size(); ++i) {
      Part* last = kept == 0 ? nullptr : &parts_[kept - 1];
      if (last != nullptr && last->rank == parts_[i].rank && last->shard == parts_[i].shard &&
          (last->value.position >> kBlockBits) == (parts_[i].value.position >> kBlockBits)) {
        AddTo(last, parts_[i]);
        last->value.n_rows += parts_[i].value.n_rows;
      } else {
        parts_[kept++] = parts_[i];
      }
    }
    parts_.resize(kept);
  }

  void JoinRanks() {
    std::stable_sort(parts_.begin(), parts_.end(),
                     [](const Part& a, const Part& b) { return a.value.position < b.value.position; });
    // Only the trace itself tells how many ranks took part; rows with fewer have lost one.
    // A partial sum is whole when as many ranks gave one as for any other row.
    size_t kept = 0;
    size_t ranks_needed = 0;
    if (partial_ && only_rank_ < 0) {
      for (size_t i = 0; i < parts_.size();) {
        const size_t group = GroupEnd(i) - i;
        ranks_needed = std::max(ranks_needed, group);
        i += group;
      }
    }
    for (size_t i = 0; i < parts_.size();) {
      const size_t end = GroupEnd(i);
      bool complete = true;
      if (only_rank_ < 0 && !partial_) complete = JoinShards(i, end);
      Part sum = parts_[i];
      if (only_rank_ < 0 && partial_) {
        complete = end - i == ranks_needed;
        for (size_t j = i + 1; j < end; ++j) AddTo(&sum, parts_[j]);
        if (end - i > 1) {
          // Squares of a sum do not add; the sketch gives an unbiased estimate, which reads far too low now and then.
          // The parts' own squares are what each part's rounding is relative to.
          const double* sketch = Sketch(sum);
          double estimate = 0;
          for (int k = 0; k < SketchSize(); ++k) estimate += sketch[k] * sketch[k];
          sum.value.sum_sq = std::max(sum.value.sum_sq, estimate);
          sum.value.estimated = true;
          sum.value.digest_whole = false;
        }
      }
      if (complete) {
        parts_[kept++] = sum;
      } else {
        out_->incomplete += sum.value.n_rows;
      }
      i = end;
    }
    parts_.resize(kept);
  }

  // Adds the shards among parts [begin, end) of one row to the first. A shard that several ranks hold (fewer key heads
  // than ranks; a replicated tensor is one shard) counts once, and its copies are compared. False: a shard is missing.
  bool JoinShards(size_t begin, size_t end) {
    firsts_.assign(1, begin);
    for (size_t j = begin + 1; j < end; ++j) {
      const auto same = std::find_if(firsts_.begin(), firsts_.end(),
                                     [&](size_t first) { return parts_[first].shard == parts_[j].shard; });
      if (same == firsts_.end()) {
        firsts_.push_back(j);
      } else {
        CompareReplica(&parts_[*same], parts_[j]);
      }
    }
    for (size_t k = 1; k < firsts_.size(); ++k) AddTo(&parts_[begin], parts_[firsts_[k]]);
    return firsts_.size() == static_cast<size_t>(parts_[begin].shard_count);
  }

  // Behind the parts of one position.
  size_t GroupEnd(size_t i) const {
    size_t end = i;
    while (end < parts_.size() && parts_[end].value.position == parts_[i].value.position) ++end;
    return end;
  }

  // Digests first; sketches tell how far apart.
  void CompareReplica(Part* first, Part& other) {
    RowValue &a = first->value, &b = other.value;
    if (a.n_rows != b.n_rows) return;  // by blocks: a rank that recorded other rows of the block
    if (a.digest_whole && b.digest_whole && a.digest == b.digest) return;
    const auto distance = static_cast<float>(SketchDistance(Sketch(*first), Sketch(other), SketchSize()));
    if (a.nonfinite != b.nonfinite) a.nonfinite = std::max(a.nonfinite, b.nonfinite);
    if (distance > a.deviation) {
      a.deviation = distance;
      a.deviating_rank = static_cast<int16_t>(other.rank);
    }
  }

  const JointIndex& index_;
  const int side_;
  const bool by_rows_;
  const int32_t only_rank_;
  SideRows* out_;
  bool partial_ = false;
  std::vector<Part> parts_;
  std::vector<double> wide_;
  std::vector<size_t> firsts_;  // of JoinShards; kept for its memory
};

}  // namespace

void SideRows::clear() {
  rows.clear();
  sketches.clear();
  roundoff = 0;
  repeated = incomplete = 0;
  has_sketch = false;
}

SideFormat FormatOf(const JointIndex& index, int side, const JointSite& site) {
  SideFormat out;
  const size_t begin = site.begin[side], end = site.end[side];
  for (size_t i = begin; i < end; ++i) {
    const Piece& piece = index.pieces[side][i];
    const EventView event = index.trace[side]->event(piece.event);
    const SegmentSummary segment = event.segment(static_cast<int32_t>(piece.segment));
    // One segment without row cells turns the site to comparison by blocks on both sides.
    out.row_grid &= segment.n_row_cells == static_cast<int64_t>(piece.rows());
    if (i == begin) {
      const Shard shard = event.shard();
      out.dtype = event.dtype();
      out.compute_dtype = event.compute_dtype();
      out.cols = shard.full_cols > 0 ? shard.full_cols
                                     : static_cast<int64_t>(segment.count / std::max<uint64_t>(piece.n_rows, 1));
    }
    if (!out.row_grid) break;
  }
  return out;
}

void ReadRows(const JointIndex& index, int side, size_t begin, size_t end, bool by_rows, int32_t only_rank,
              SideRows* out) {
  RowReader(index, side, by_rows, only_rank, out).Run(begin, end);
}

}  // namespace assay
