#include "compare/step_rows.h"

#include <algorithm>

namespace assay {
namespace {

using RowsByKey = std::map<int64_t, std::vector<uint32_t>>;

void SortUnique(std::vector<uint32_t>* rows) {
  std::sort(rows->begin(), rows->end());
  rows->erase(std::unique(rows->begin(), rows->end()), rows->end());
}

// Calls f(step, row) for each row of the side's pieces of the site.
template <class F>
void ForEachRow(const JointIndex& index, int side, const JointSite& site, F f) {
  size_t hint = 0;
  for (size_t i = site.begin[side]; i < site.end[side]; ++i) {
    const Piece& piece = index.pieces[side][i];
    const int64_t step = index.trace[side]->event(piece.event).step();
    for (uint32_t k = 0; k < piece.rows(); ++k) {
      const int64_t row = index.row(piece.request, piece.position + static_cast<int32_t>(k), &hint);
      if (row >= 0) f(step, static_cast<uint32_t>(row));
    }
  }
}

}  // namespace

JointStepRows::JointStepRows(const JointIndex& index, uint32_t without_rows, uint32_t with_rows) {
  std::map<uint32_t, std::vector<uint32_t>> of_side[2];
  for (int side : {kA, kB}) {
    RowsByKey by_step;
    ForEachRow(index, side, index.sites[with_rows], [&](int64_t step, uint32_t row) { by_step[step].push_back(row); });
    for (auto& [step, rows] : by_step) SortUnique(&rows);
    ForEachRow(index, side, index.sites[without_rows], [&](int64_t step, uint32_t row) {
      std::vector<uint32_t>& rows = of_side[side][row];  // several ranks' recordings of one step say the same
      const std::vector<uint32_t>& more = by_step[step];
      if (rows != more) rows.insert(rows.end(), more.begin(), more.end());
    });
  }
  for (auto& [row, rows] : of_side[kA]) {
    const auto other = of_side[kB].find(row);
    if (other == of_side[kB].end() || rows.empty() || other->second != rows) continue;
    for (uint32_t token : rows) recordings_[token].push_back(row);
    tokens_.emplace(row, std::move(rows));
  }
}

const std::vector<uint32_t>* JointStepRows::TokensOf(uint32_t row) const {
  const auto it = tokens_.find(row);
  return it == tokens_.end() ? nullptr : &it->second;
}

const std::vector<uint32_t>* JointStepRows::RecordingsOf(uint32_t token_row) const {
  const auto it = recordings_.find(token_row);
  return it == recordings_.end() ? nullptr : &it->second;
}

}  // namespace assay
