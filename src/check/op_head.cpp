// Ends of the model: embedding rows, log-probabilities, the chosen token.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "base/number_text.h"
#include "check/helpers.h"
#include "check/op_checks.h"
#include "check/op_embed_partial.h"
#include "check/op_explain.h"
#include "check/op_fitted.h"
#include "check/op_other_weight.h"
#include "oracle/embedding.h"
#include "oracle/sampling.h"
#include "oracle/softmax.h"

namespace assay::check {
namespace {

using namespace op;
using oracle::Array;

// Token by request and position of the row that is fed with it: what was chosen one position before. By recorded
// choices; a run may have been fed others.
using Chosen = std::map<std::pair<uint64_t, int64_t>, int64_t>;
Chosen ChosenTokens(const Capture& capture) {
  Chosen out;
  for (EventId id : capture.EventsOf("next_token")) {
    const auto chosen = capture.Load(id);
    if (!chosen.ok()) continue;
    const Tensor& t = **chosen;
    for (size_t r = 0; r < t.rows.size() && r < t.values.size(); ++r) {
      if (t.rows[r].real()) out[{t.rows[r].request, t.rows[r].position + 1}] = IntegerOf(t.values[r]);
    }
  }
  return out;
}

// Row r is the embedding of the token.
bool IsRowOf(const Subject& s, const Tensor& table, double scale, int64_t r, int64_t token) {
  const int64_t width = table.row_size();
  const double room = 4 * s.precision().store;
  const auto row = table.row(token);
  for (int64_t c = 0; c < width; ++c) {
    const double x = scale * row[static_cast<size_t>(c)];
    if (!(std::abs(s.actual()[r * width + c] - x) <= room * std::abs(x))) return false;
  }
  return true;
}

// The token of which row r is the embedding, or -1.
int64_t TokenOfRow(const Subject& s, const Tensor& table, double scale, int64_t r) {
  for (int64_t v = 0; v < table.n_rows(); ++v) {
    if (IsRowOf(s, table, scale, r, v)) return v;
  }
  return -1;
}

// Each wrong row as that of another token, the first one of the whole table. One shift for all of them is said as a
// constant: a table that was cut or padded at its beginning.
std::optional<Explanation> OtherRows(const Subject& s, const Difference& d, const Tensor& table,
                                     const std::vector<int64_t>& tokens, double scale, const oracle::Computed& right) {
  std::vector<int64_t> used = tokens;
  std::set<int64_t> shifts;
  for (int64_t r : d.rows) {
    const int64_t found = TokenOfRow(s, table, scale, r);
    if (found < 0) return std::nullopt;
    used[static_cast<size_t>(r)] = found;
    shifts.insert(found - tokens[static_cast<size_t>(r)]);
  }
  const auto y = oracle::Embed(used, {{table.n_rows(), table.row_size()}, table.values}, scale);
  if (!FitsBetter(s, right, y)) return std::nullopt;
  Explanation why{fault_class::kLoad, "fits the embedding rows of other tokens"};
  if (shifts.size() == 1) {
    why.text += ", each " + std::to_string(*shifts.begin()) + " further in the table";
    why.constant = static_cast<double>(*shifts.begin());
    why.meaning = "row of the table used - token";
  }
  return Weighed(s, right, *y, why);
}

// A generated token was fed as it was chosen, or another in its place (runs that follow given tokens): a row that is
// another token's is neither right nor wrong, and one that is none's is judged as the chosen one's.
void JudgeEmbed(Subject& s, const Chosen& chosen) {
  const TensorPtr table = s.Weight("embed_tokens.weight");
  if (table == nullptr) return Missing(s, "embed_tokens.weight");
  const double scale = s.Number("embed_scale", 1);
  const bool comparable = table->row_size() == s.actual().cols();
  std::vector<int64_t> tokens;
  int64_t known = 0, fed_others = 0;
  for (size_t r = 0; r < s.tensor()->rows.size(); ++r) {
    const RowId& id = s.tensor()->rows[r];
    const RequestInfo* request = id.real() ? s.capture().Request(id.request) : nullptr;
    const bool prompt =
        request != nullptr && id.position >= 0 && id.position < static_cast<int64_t>(request->tokens.size());
    int64_t token = prompt ? request->tokens[static_cast<size_t>(id.position)] : -1;
    if (const auto it = chosen.find({id.request, id.position});
        !prompt && request != nullptr && comparable && it != chosen.end()) {
      if (it->second >= 0 && it->second < table->n_rows()) token = it->second;
      const auto row = static_cast<int64_t>(r);
      if (token >= 0 && !IsRowOf(s, *table, scale, row, token) && TokenOfRow(s, *table, scale, row) >= 0) {
        token = -1;
        ++fed_others;
      }
    }
    if (token < 0) s.LeaveOut(static_cast<int64_t>(r));
    known += token >= 0;
    tokens.push_back(std::max<int64_t>(token, 0));
  }
  if (fed_others > 0) {
    s.report().Missing(s.info().name + ": rows were fed other tokens than were chosen before them",
                       "record the tokens that a run follows as its prompt");
    if (known == 0) return;
  }
  if (known == 0)
    return s.report().Missing(s.info().name + ": the tokens of its rows are not known",
                              "record tokens of the requests (ASSAY_TOKENS=on)");
  Operation look;
  look.inputs = {{"embed_tokens.weight", table}};
  look.run = [&](std::span<const Array> in) {
    return oracle::Embed(tokens, {{table->n_rows(), table->row_size()}, in[0].values}, scale);
  };
  JudgeOperation(s, look, [&](const Difference& d, const oracle::Computed& right) -> std::optional<Explanation> {
    if (auto why = OtherRows(s, d, *table, tokens, scale, right)) return why;
    if (auto why = ForOtherWeights(s, "embed_tokens.weight", ToArray(*table),
                                   [&](const OtherWeight& w) -> std::optional<Explanation> {
                                     const auto y = oracle::Embed(tokens, w.value, scale);
                                     if (!FitsBetter(s, right, y)) return std::nullopt;
                                     return Weighed(s, right, *y, w.why);
                                   }))
      return why;
    const double c = ConstantRatio(s.actual(), right.value, s.judged(), std::max(1e-4, 8 * s.precision().store));
    if (!std::isnan(c))
      return Explanation{fault_class::kScale, "embedding rows are one constant off", c, "embedding used / expected"};
    return std::nullopt;
  });
}

// From the recorded logits, so that wrong logits are not counted twice. Where ranks share the vocabulary, a row is
// normalised over all of it.
void JudgeLogProbs(Subject& s) {
  const TensorPtr own = s.Operand("logits");
  if (own == nullptr) return Missing(s, "logits");
  if (own->n() != s.tensor()->n()) return;
  const Shard& shard = own->info->event.shard;
  TensorPtr logits = own;
  if (shard.count > 1) {
    auto whole = s.capture().Stitched(*own->info);
    if (!whole.ok()) return s.report().Missing(whole.status().message(), Capture::RecordHint("logits"));
    logits = *whole;
  }
  const int64_t begin = shard.count > 1 ? shard.col_offset : 0, end = begin + own->row_size();
  if (logits->n_rows() != own->n_rows() || begin < 0 || end > logits->row_size())
    return s.report().Missing("the shards of logits do not make up whole rows", Capture::RecordHint("logits"));
  Operation take;
  take.inputs = {{"logits", logits}};
  take.run = [&](std::span<const Array> in) -> Result<oracle::Computed> {
    ASSAY_ASSIGN_OR_RETURN(oracle::Computed y, oracle::LogSoftmax(in[0]));
    if (shard.count <= 1) return y;
    for (Array* a : {&y.value, &y.scale, &y.inner}) {
      if (a->values.empty()) continue;
      ASSAY_ASSIGN_OR_RETURN(*a, oracle::TakeColumns(*a, begin, end));
    }
    return y;
  };
  JudgeOperation(s, take, [&](const Difference&, const oracle::Computed& right) -> std::optional<Explanation> {
    if (shard.count <= 1) return std::nullopt;
    const auto alone = oracle::LogSoftmax(ToArray(*own));
    if (!FitsBetter(s, right, alone)) return std::nullopt;
    return Weighed(s, right, *alone,
                   {fault_class::kReduce, "fits rows normalised over the columns of this rank alone"});
  });
}

// How the tokens of a result were chosen. Metadata of the event, else of the run.
// temperature 0 is greedy; none: nothing can be said of a token that is not the largest, but that it is in the
// vocabulary.
struct Sampler {
  std::optional<double> temperature;  // none: not recorded, neither greedy nor sampling may be assumed
  oracle::SamplingSpec spec;
  bool greedy() const { return temperature && *temperature == 0; }
  bool sampled() const { return temperature && *temperature > 0; }
};

// Engines put the sampler's settings on the event or, when it is the same for a run, on the process.
Sampler SamplerOf(const Subject& s) {
  const auto number = [&](std::string_view key) -> std::optional<double> {
    if (const auto own = s.capture().Number(s.info(), key)) return own;
    const std::optional<std::string> of_run = s.capture().ProcessText(s.info(), key);
    return of_run ? std::optional(std::strtod(of_run->c_str(), nullptr)) : std::nullopt;
  };
  Sampler sampler;
  sampler.temperature = number("temperature");
  sampler.spec.temperature = sampler.temperature.value_or(1);
  sampler.spec.top_k = IntegerOf(std::clamp(number("top_k").value_or(0), 0.0, 1e15));  // engines: -1 is all
  sampler.spec.top_p = number("top_p").value_or(1);
  sampler.spec.min_p = number("min_p").value_or(0);
  return sampler;
}

// "temperature 0.7, top_k 2".
std::string SamplerText(const oracle::SamplingSpec& spec) {
  std::string text = "temperature " + NumberText(spec.temperature);
  if (spec.top_k > 0) text += ", top_k " + std::to_string(spec.top_k);
  if (spec.top_p < 1) text += ", top_p " + NumberText(spec.top_p);
  if (spec.min_p > 0) text += ", min_p " + NumberText(spec.min_p);
  return text;
}

// Engines part in the order of temperature and filters, and in whether a filter sees what another left. A token is
// excluded by one filter alone, over all tokens, with the temperature before it and behind it: then in every order.
bool Excluded(std::span<const double> logits, int64_t token, const oracle::SamplingSpec& spec) {
  const auto excluded = [&](oracle::SamplingSpec filter) {
    for (double temperature : {spec.temperature, 1.0}) {
      filter.temperature = temperature;
      const auto p = oracle::TokenProbability(logits, token, filter);
      if (!p.ok() || *p != 0) return false;
    }
    return true;
  };
  // The exact ends of top-p and min-p are a matter of rounding.
  constexpr double kEnd = 1e-4;
  return excluded({.top_k = spec.top_k}) || excluded({.top_p = std::min(1.0, spec.top_p + kEnd)}) ||
         excluded({.min_p = spec.min_p * (1 - kEnd)});
}

// Verdicts from the surest on: no such token; not the largest where greedy was said; probability 0 under every order of
// the filters. Sharded logits are left out: the largest may lie on another rank.
void JudgeToken(Subject& s) {
  const TensorPtr logits = s.Operand("logits");
  if (logits == nullptr) return Missing(s, "logits");
  if (logits->n_rows() != s.tensor()->n_rows() || logits->row_size() < 2) return;
  if (logits->info->event.shard.count > 1) return;
  auto greedy = oracle::Greedy(ToArray(*logits));
  if (!greedy.ok()) return;
  const Sampler sampler = SamplerOf(s);
  int64_t off = 0, judged = 0;
  std::vector<int64_t> rows, outside, impossible;
  for (int64_t r = 0; r < s.tensor()->n_rows(); ++r) {
    if (!s.judged()[static_cast<size_t>(r)]) continue;
    ++judged;
    const int64_t token = IntegerOf(s.actual()[r]);
    const oracle::GreedyChoice& best = (*greedy)[static_cast<size_t>(r)];
    if (token < 0 || token >= logits->row_size()) {
      outside.push_back(r);
      rows.push_back(r);
      continue;
    }
    if (best.token < 0) continue;
    const double gap = logits->row(r)[static_cast<size_t>(best.token)] - logits->row(r)[static_cast<size_t>(token)];
    if (!(gap <= 0)) {
      ++off;
      rows.push_back(r);
    }
    if (sampler.sampled() && Excluded(logits->row(r), token, sampler.spec)) impossible.push_back(r);
  }
  const auto found = [&](const std::string& text, const std::vector<int64_t>& where) {
    ReportRule(s.capture(), s.report(), s.info(), {fault_class::kKernel, text}, where);
  };
  // Sampled tokens need not be the largest: only what no sampler may return counts.
  if (!outside.empty()) return found(std::to_string(outside.size()) + " tokens are outside of the vocabulary", outside);
  if (sampler.greedy() && off > 0)
    return found(std::to_string(off) + " tokens are not the largest logit of their row", rows);
  if (!impossible.empty()) {
    return found(std::to_string(impossible.size()) + " of " + std::to_string(judged) +
                     " tokens have probability 0 by their logits: " + SamplerText(sampler.spec),
                 impossible);
  }
  if (off == 0 || sampler.sampled()) return s.report().Right(s.info().id);
  s.report().Missing(s.info().name + ": " + std::to_string(off) + " of " + std::to_string(judged) +
                         " tokens are not the largest logit, and the temperature was not recorded",
                     "record next_token with temperature");
}

}  // namespace

void JudgeHead(const Capture& capture, CheckReport* report) {
  constexpr std::string_view kEmbed[] = {"embed"}, kLogProbs[] = {"logprobs"};
  JudgeEmbedParts(capture, report);
  const Chosen chosen = ChosenTokens(capture);
  JudgeStems(capture, report, kEmbed, [&](Subject& s) { JudgeEmbed(s, chosen); });
  JudgeStems(capture, report, kLogProbs, JudgeLogProbs);
}

void JudgeSampling(const Capture& capture, CheckReport* report) {
  constexpr std::string_view kToken[] = {"next_token"};
  JudgeStems(capture, report, kToken, JudgeToken);
}

}  // namespace assay::check
