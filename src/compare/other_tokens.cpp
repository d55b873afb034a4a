#include "compare/other_tokens.h"

#include "compare/site_cells.h"

namespace assay {
namespace {

// Embeddings of equal tokens differ by rounding at most, of different tokens by about their own size.
constexpr double kOtherToken = 0.01;

}  // namespace

std::vector<uint8_t> RowsBehindOtherTokens(const JointIndex& index) {
  std::vector<uint8_t> out(index.n_rows, 0);
  int64_t token_site = -1, embed_site = -1;
  for (uint32_t s = 0; s < index.sites.size(); ++s) {
    const JointSite& site = index.sites[s];
    if (site.begin[kA] == site.end[kA] || site.begin[kB] == site.end[kB]) continue;
    if (site.name == "next_token") token_site = s;
    if (site.name == "embed") embed_site = s;
  }
  // Level stats without next_token: nothing says that the runs parted.
  if (token_site < 0) return out;
  CellReader reader(index);
  Coverage not_counted;
  const std::vector<Cell> tokens = reader.Read(static_cast<uint32_t>(token_site), &not_counted).cells;
  std::vector<Cell> embeds;  // empty: not recorded
  if (embed_site >= 0) embeds = reader.Read(static_cast<uint32_t>(embed_site), &not_counted).cells;
  uint32_t request = ~uint32_t{0};
  bool behind = false;
  for (const RowInterval& interval : index.intervals) {
    if (interval.request != request) behind = false;
    request = interval.request;
    const int64_t prompt = index.requests[request].prompt_tokens;
    for (uint32_t k = 0; k < interval.count; ++k) {
      const uint32_t row = interval.base + k;
      out[row] = behind;
      if (behind || tokens[row].state == CellState::kAbsent || tokens[row].diff == 0) continue;
      if (interval.first + int64_t{k} < prompt - 1) continue;  // the next input is the prompt's, not this choice
      // The next row's embedding tells what the run was really fed: equal in spite of another choice when tokens were
      // given.
      const bool fed = k + 1 < interval.count && !embeds.empty() && embeds[row + 1].state != CellState::kAbsent;
      behind = !fed || embeds[row + 1].relative() > kOtherToken;
    }
  }
  return out;
}

}  // namespace assay
