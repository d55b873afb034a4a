// Embedding of a vocabulary that ranks share: each rank's part is the row of the token where it holds it, else zeros.
#include "check/op_embed_partial.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "check/helpers.h"
#include "check/op_explain.h"
#include "check/op_fitted.h"
#include "check/op_row_shards.h"

namespace assay::check {
namespace {

using namespace op;
using oracle::Array;

constexpr int64_t kMostShift = 256;  // rows by which a rank's part may begin elsewhere: paddings of a vocabulary

// First token of this rank's rows: those of the ranks before it lie in front. -1: one of them was not recorded.
int64_t FirstToken(const Subject& s, const Tensor& table) {
  const Shard& mine = table.info->event.shard;
  int64_t first = 0;
  for (int32_t index = 0; index < mine.index; ++index) {
    int64_t rows = -1;
    for (EventId id : s.capture().EventsOf(table.info->name)) {
      const auto info = s.capture().Info(id);
      if (info->event.shard.index == index && info->event.shard.count == mine.count && !info->event.shape.empty())
        rows = info->event.shape[0];
    }
    if (rows < 0) return -1;
    first += rows;
  }
  return first;
}

// Row r of the result is row `token` of the table times scale; beyond the table and below 0: zeros.
bool IsRow(const Subject& s, const Array& table, double scale, int64_t r, int64_t token) {
  const int64_t width = table.cols();
  const bool zeros = token < 0 || token >= table.rows();
  const double room = 4 * s.precision().store;
  for (int64_t c = 0; c < width; ++c) {
    const double x = zeros ? 0 : scale * table[token * width + c];
    if (!(std::abs(s.actual()[r * width + c] - x) <= room * std::abs(x))) return false;
  }
  return true;
}

// Each wrong row as that of another token of all ranks, or as zeros.
std::optional<Explanation> OtherTokens(const Subject& s, const Difference& d, const RowShards& shards,
                                       const std::vector<int64_t>& tokens, double scale) {
  std::set<int64_t> shifts, at_end;
  int64_t zeros = 0, foreign = 0, unmasked = 0;
  for (const int64_t r : d.rows) {
    const int64_t token = tokens[static_cast<size_t>(r)];
    if (IsRow(s, shards.whole, scale, r, -1)) {
      ++zeros;
      continue;
    }
    int64_t found = -1;
    for (int64_t v = 0; v < shards.whole.rows() && found < 0; ++v)
      if (IsRow(s, shards.whole, scale, r, v)) found = v;
    if (found < 0) return std::nullopt;
    const auto mine = [&](int64_t t) { return t >= shards.first && t < shards.first + shards.rows; };
    foreign += !mine(found);
    unmasked += !mine(token);
    // An index beyond the table is cut to its end: such rows do not tell the offset.
    const bool end = found == shards.whole.rows() - 1 || found == shards.first + shards.rows - 1;
    (end ? at_end : shifts).insert(found - token);
  }
  if (shifts.empty()) shifts = at_end;
  Explanation why{fault_class::kTpShard, ""};
  if (shifts.empty()) {
    why.text = "rows of " + std::to_string(zeros) + " tokens that this rank holds are zeros";
  } else if (unmasked == std::ssize(d.rows)) {
    why.text = "rows of tokens that other ranks hold are not zeros";
  } else if (foreign > 0 || unmasked > 0 || shifts.size() == 1) {
    why.text = "fits embedding rows at another offset in the vocabulary";
  } else {
    return Explanation{fault_class::kLoad, "fits the embedding rows of other tokens"};
  }
  if (shifts.size() == 1) {
    why.text += ", each " + std::to_string(*shifts.begin()) + " further in the table";
    why.constant = static_cast<double>(*shifts.begin());
    why.meaning = "row of the table used - token";
  }
  return why;
}

void JudgePart(Subject& s) {
  const TensorPtr table = s.Weight("embed_tokens.weight");
  if (table == nullptr) return Missing(s, "embed_tokens.weight");
  const Shard& shard = table->info->event.shard;
  if (shard.count <= 1 || table->row_size() != s.actual().cols() || s.tensor()->rows.empty()) return;
  const int64_t first = FirstToken(s, *table);
  if (first < 0) return Missing(s, "embed_tokens.weight of every rank");
  double scale = 1;
  std::vector<int64_t> tokens;
  int64_t known = 0;
  // Tokens of prompts alone: what was chosen may not be what was fed.
  for (size_t r = 0; r < s.tensor()->rows.size(); ++r) {
    const RowId& id = s.tensor()->rows[r];
    const RequestInfo* request = id.real() ? s.capture().Request(id.request) : nullptr;
    const bool prompt =
        request != nullptr && id.position >= 0 && id.position < static_cast<int64_t>(request->tokens.size());
    tokens.push_back(prompt ? request->tokens[static_cast<size_t>(id.position)] : -1);
    if (!prompt) s.LeaveOut(static_cast<int64_t>(r));
    known += prompt;
  }
  if (known == 0)
    return s.report().Missing(s.info().name + ": the tokens of its rows are not known",
                              "record tokens of the requests (ASSAY_TOKENS=on)");
  const int64_t width = table->row_size();
  // shift: tokens that this rank's part begins too late. masked: which tokens are its own is told right all the same,
  // and only their rows are others, the first or last one where there is none.
  const auto look = [&](std::span<const double> values, int64_t shift, bool masked) {
    oracle::Computed y;
    y.value = Array::Filled(s.actual().shape);
    for (size_t r = 0; r < tokens.size(); ++r) {
      const int64_t own = tokens[r] - first, last = table->n_rows() - 1;
      const int64_t row = masked ? std::clamp<int64_t>(own - shift, 0, last) : own - shift;
      if (tokens[r] < 0 || row < 0 || row > last || (masked && (own < 0 || own > last))) continue;
      for (int64_t c = 0; c < width; ++c)
        y.value[static_cast<int64_t>(r) * width + c] = scale * values[static_cast<size_t>(row * width + c)];
    }
    y.scale = y.value;
    for (double& x : y.scale.values) x = std::abs(x);
    return y;
  };
  // The factor of the embedding may stand before the sum over ranks or behind it.
  if (!Fits(s, look(table->values, 0, false), 1)) scale = s.Number("embed_scale", 1);
  Operation embed;
  embed.inputs = {{"embed_tokens.weight", table}};
  embed.run = [&](std::span<const Array> in) -> Result<oracle::Computed> { return look(in[0].values, 0, false); };
  JudgeOperation(s, embed, [&](const Difference& d, const oracle::Computed& right) -> std::optional<Explanation> {
    for (int64_t by = 1; by <= kMostShift; ++by) {
      for (const auto& [shift, masked] : {std::pair{by, false}, {-by, false}, {by, true}, {-by, true}}) {
        const oracle::Computed y = look(table->values, shift, masked);
        // A part that none of the tokens falls into explains zeros of any cause.
        if (std::all_of(y.value.values.begin(), y.value.values.end(), [](double x) { return x == 0; })) continue;
        if (!FitsBetter(s, right, y)) continue;
        return Weighed(s, right, y,
                       {fault_class::kTpShard,
                        "fits rows of this rank that begin at token " + std::to_string(first + shift) + ", " +
                            std::to_string(first) + " is due",
                        static_cast<double>(shift), "first token used - due"});
      }
    }
    const double c = ConstantRatio(s.actual(), right.value, s.judged(), std::max(1e-4, 8 * s.precision().store));
    if (!std::isnan(c))
      return Explanation{fault_class::kScale, "embedding rows are one constant off", c, "embedding used / expected"};
    const auto shards = StitchRows(s, "embed_tokens.weight");
    return shards ? OtherTokens(s, d, *shards, tokens, scale) : std::nullopt;
  });
}

}  // namespace

void JudgeEmbedParts(const Capture& capture, CheckReport* report) {
  constexpr std::string_view kParts[] = {"embed.partial"};
  JudgeStems(capture, report, kParts, JudgePart);
}

}  // namespace assay::check
