#include "compare/site_cells.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "compare/site_graph.h"

namespace assay {
namespace {

// L2, of sketches.
float Distance(const double* a, const double* b, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return static_cast<float>(std::sqrt(sum));
}

// "first:last" key of a chunk's partial result, from its metadata; empty: not said.
std::string KeysIn(const Trace& trace, uint32_t event) { return std::string(trace.event(event).meta("keys")); }

// By the site's first piece on the side. REQUIRES: it has one.
bool SaysKeys(const JointIndex& index, int side, const JointSite& site) {
  return !KeysIn(*index.trace[side], index.pieces[side][site.begin[side]].event).empty();
}

// Calls f(request, begin[2], end[2]) for each request that has pieces of the site on a side.
template <class F>
void ForEachRequest(const JointIndex& index, const JointSite& site, F f) {
  size_t at[2] = {site.begin[kA], site.begin[kB]};
  while (at[kA] < site.end[kA] || at[kB] < site.end[kB]) {
    uint32_t request = ~uint32_t{0};
    for (int side : {kA, kB}) {
      if (at[side] < site.end[side]) request = std::min(request, index.pieces[side][at[side]].request);
    }
    size_t begin[2], end[2];
    for (int side : {kA, kB}) {
      begin[side] = at[side];
      while (at[side] < site.end[side] && index.pieces[side][at[side]].request == request) ++at[side];
      end[side] = at[side];
    }
    f(request, begin, end);
  }
}

}  // namespace

SiteCells CellReader::Read(uint32_t number, Coverage* coverage) {
  const JointSite& site = index_.sites[number];
  SiteCells out;
  out.cells.assign(index_.n_rows, Cell());
  const SideFormat format[2] = {FormatOf(index_, kA, site), FormatOf(index_, kB, site)};
  out.cols = format[kA].cols;
  out.by_rows = site.has_rows && format[kA].row_grid && format[kB].row_grid;
  chunk_ = site.parsed.chunk >= 0;
  same_dtype_ = format[kA].dtype == format[kB].dtype;
  ForEachRequest(index_, site, [&](uint32_t request, const size_t* begin, const size_t* end) {
    for (int side : {kA, kB}) {
      ReadRows(index_, side, begin[side], end[side], out.by_rows, -1, &rows_[side]);
      out.roundoff[side] = std::max(out.roundoff[side], rows_[side].roundoff);
      repeated_[side] += rows_[side].repeated;
      incomplete_[side] += rows_[side].incomplete;
    }
    JoinRows(request, &out, coverage);
  });
  return out;
}

// Both lists ascend in position: one pass over each.
void CellReader::JoinRows(uint32_t request, SiteCells* out, Coverage* coverage) {
  const std::vector<RowValue>&a = rows_[kA].rows, &b = rows_[kB].rows;
  size_t i = 0, j = 0, hint = 0;
  while (i < a.size() || j < b.size()) {
    const bool only_a = j == b.size() || (i < a.size() && a[i].position < b[j].position);
    const bool only_b = !only_a && (i == a.size() || b[j].position < a[i].position);
    if (only_a) {
      coverage->rows_only_a += a[i++].n_rows;
    } else if (only_b) {
      coverage->rows_only_b += b[j++].n_rows;
    } else {
      if (a[i].n_rows != b[j].n_rows) {  // blocks of which the sides hold different rows
        coverage->rows_only_a += a[i].n_rows;
        coverage->rows_only_b += b[j].n_rows;
      } else {
        AddCell(request, i, j, &hint, out, coverage);
      }
      ++i;
      ++j;
    }
  }
}

// The last event asked for is remembered: its rows come one after the other.
const std::string& CellReader::KeysOf(int side, const RowValue& value) {
  const uint32_t event = index_.pieces[side][value.piece].event;
  if (event != keys_event_[side]) {
    keys_event_[side] = event;
    keys_[side] = KeysIn(*index_.trace[side], event);
  }
  return keys_[side];
}

// The event that was asked for last is remembered here too: masked scores ask for every row.
const CellReader::NonFinite& CellReader::NonFiniteOf(int side, const Piece& piece) {
  std::vector<NonFinite>& counts = nonfinite_[side];
  if (piece.event != nonfinite_event_[side]) {
    nonfinite_event_[side] = piece.event;
    counts.clear();
    for (const Segment& segment : index_.trace[side]->event(piece.event).Decode().segments) {
      counts.push_back({segment.stats.nan, segment.stats.pos_inf, segment.stats.neg_inf});
    }
  }
  return counts[piece.segment];
}

void CellReader::AddCell(uint32_t request, size_t i, size_t j, size_t* hint, SiteCells* out, Coverage* coverage) {
  const RowValue &a = rows_[kA].rows[i], &b = rows_[kB].rows[j];
  if (chunk_ && KeysOf(kA, a) != KeysOf(kB, b)) {  // attention over another range of keys: another quantity
    coverage->rows_only_a += a.n_rows;
    coverage->rows_only_b += b.n_rows;
    return;
  }
  Cell cell;
  // Where partial results of one rank, the whole, meet the sum of several ranks', only the former's norm is exact.
  const double norm_sq = a.estimated == b.estimated ? std::max(a.sum_sq, b.sum_sq) : a.estimated ? b.sum_sq : a.sum_sq;
  cell.norm = static_cast<float>(std::sqrt(norm_sq));
  cell.nonfinite_differs = a.nonfinite != b.nonfinite;
  cell.state = CellState::kOk;
  // Digests are of bits, so they only speak for equal types; a cut one does not speak for the whole row.
  const bool equal = same_dtype_ && a.digest_whole && b.digest_whole && a.digest == b.digest;
  if (out->by_rows) {
    cell.grid = true;
    for (int k = 0; k < kRowSketchSize; ++k) {
      cell.sketch_a[k] = static_cast<float>(a.sketch[k]);
      cell.delta[k] = equal ? 0.0f : static_cast<float>(b.sketch[k] - a.sketch[k]);
    }
    if (!equal) cell.diff = Distance(a.sketch, b.sketch, kRowSketchSize);
  } else if (!equal) {
    const double *x = &rows_[kA].sketches[i * kSketchSize], *y = &rows_[kB].sketches[j * kSketchSize];
    cell.diff = Distance(x, y, kSketchSize);
    for (int k = 0; k < kSketchSize; ++k) {
      out->dot += x[k] * y[k];
      out->norm_sq[kA] += x[k] * x[k];
      out->norm_sq[kB] += y[k] * y[k];
    }
  }
  if (!equal) {
    // The norms' difference is a lower bound, all there is without a sketch; a differing digest of equal figures
    // stays visible. Of sums over ranks the sketch alone speaks.
    if (!a.estimated && !b.estimated) {
      cell.diff = std::max(cell.diff, static_cast<float>(std::fabs(std::sqrt(a.sum_sq) - std::sqrt(b.sum_sq))));
    }
    if (cell.diff == 0 && same_dtype_ && a.digest != b.digest) cell.diff = std::numeric_limits<float>::min();
    if (cell.diff > 0) out->any_difference = true;
  }
  const Piece &piece_a = index_.pieces[kA][a.piece], &piece_b = index_.pieces[kB][b.piece];
  cell.same_cut = piece_a.position == piece_b.position && piece_a.n_rows == piece_b.n_rows;
  if (!equal && a.nonfinite > 0 && a.nonfinite == b.nonfinite && cell.same_cut) {
    cell.nonfinite_differs = NonFiniteOf(kA, piece_a) != NonFiniteOf(kB, piece_b);
  }
  for (int side : {kA, kB}) {
    const RowValue& value = side == kA ? a : b;
    if (value.deviating_rank < 0) continue;
    out->any_difference = true;
    // Nearly equal: it is the first rank that is wrong, against the other side and against its copies alike.
    cell.replicas_of = static_cast<int8_t>(value.deviation > 2 * cell.diff ? side : -1);
    cell.diff = std::max(cell.diff, value.deviation);
  }
  out->any_difference |= cell.nonfinite_differs;
  cell.decode = a.n_rows == 1 && (piece_a.n_rows == 1 || piece_b.n_rows == 1);
  for (uint32_t k = 0; k < a.n_rows; ++k) {
    const int64_t row = index_.row(request, a.position + static_cast<int32_t>(k), hint);
    if (row < 0) continue;
    out->cells[static_cast<size_t>(row)] = cell;
    ++out->rows;
  }
}

namespace {

// What stands behind the layers reads the last of them. Where one side has layers beyond the other's last, that may be
// another tensor: a run of the first layers alone, or a model with fewer. Only when both say that their models have
// equally many is it a matter of recording, and the layers in between are bridged.
void LeaveOutBehindOtherLayers(const JointIndex& index, std::vector<uint8_t>* comparable,
                               std::vector<std::string>* notes) {
  int32_t last[2] = {-1, -1};
  for (const JointSite& site : index.sites) {
    for (int side : {kA, kB}) {
      if (site.recorded[side]) last[side] = std::max(last[side], site.parsed.layer);
    }
  }
  if (last[kA] == last[kB] || last[kA] < 0 || last[kB] < 0) return;
  const std::string layers = MetaOf(*index.trace[kA], "model.n_layers");
  if (!layers.empty() && layers == MetaOf(*index.trace[kB], "model.n_layers")) return;
  std::string names;
  for (size_t i = 0; i < index.sites.size(); ++i) {
    const SiteName& site = index.sites[i].parsed;
    if ((*comparable)[i] == 0 || site.layer >= 0 || site.def == nullptr || site.def->op == SiteOp::kEmbed) continue;
    (*comparable)[i] = 0;
    names += (names.empty() ? "" : ", ") + index.sites[i].name;
  }
  if (names.empty()) return;
  notes->push_back(names + ": not compared, they follow layer " + std::to_string(last[kA]) + " in A and layer " +
                   std::to_string(last[kB]) + " in B");
}

}  // namespace

std::vector<uint8_t> ComparableSites(const JointIndex& index, std::vector<std::string>* notes) {
  std::vector<uint8_t> out(index.sites.size(), 0);
  const bool same_chunks = MetaOf(*index.trace[kA], "chunk") == MetaOf(*index.trace[kB], "chunk");
  for (size_t i = 0; i < index.sites.size(); ++i) {
    const JointSite& site = index.sites[i];
    if (site.begin[kA] == site.end[kA] || site.begin[kB] == site.end[kB]) continue;
    // Partial results say which keys they cover, or the runs must have been cut alike.
    if (site.parsed.chunk >= 0 && !same_chunks && !(SaysKeys(index, kA, site) && SaysKeys(index, kB, site))) {
      continue;
    }
    if (IsCachePool(site.parsed.stem)) {
      notes->push_back(site.name + ": not compared, where a pool holds a row is each run's own affair; its rows are " +
                       "compared as they are written and read");
      continue;
    }
    const SideFormat a = FormatOf(index, kA, site), b = FormatOf(index, kB, site);
    if (a.cols != b.cols) {
      if (site.parsed.chunk < 0)
        notes->push_back(site.name + ": not compared, " + std::to_string(a.cols) + " columns against " +
                         std::to_string(b.cols));
      continue;
    }
    out[i] = 1;
  }
  LeaveOutBehindOtherLayers(index, &out, notes);
  return out;
}

}  // namespace assay
