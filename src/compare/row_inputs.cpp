#include "compare/row_inputs.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "compare/bounds.h"

namespace assay {
namespace {

// Root mean square of a rounding error uniform in [-u, u], of a value in the middle of its binade: u / sqrt(3) * 0.7.
constexpr double kCacheRms = 0.41;

// Inputs' differences are independent, so they add in quadrature; norms that a sum is held against add up plainly.
void AddDifference(double relative, double typical, double norm, double gain, InputState* state) {
  state->relative = std::hypot(state->relative, gain * relative);
  state->typical = std::hypot(state->typical, gain * typical);
  state->absolute += relative * norm;
  state->measured = std::max(state->measured, relative);
  state->norm = std::max(state->norm, norm);
}

// Root mean square of the row's elements, 0 where it is not known row by row.
double Rms(const JudgedSite& site, uint32_t row) {
  if (site.cells.empty() || site.cols <= 0) return 0;
  const Cell& cell = site.cells[row];
  return cell.state != CellState::kAbsent && cell.grid ? cell.norm / std::sqrt(static_cast<double>(site.cols)) : 0;
}

}  // namespace

RowInputs::RowInputs(const JointIndex& index, const SiteGraph& graph, const std::vector<JudgedSite>& judged)
    : index_(index), graph_(graph), judged_(judged), same_reading_(SameReading()) {}

void RowInputs::BeginSite(uint32_t site) {
  site_ = site;
  cache_site_ = CacheReadBy(site);
  bad_by_position_.clear();
  steps_.clear();
  for (const GraphEdge& edge : graph_.nodes[site].edges) {
    std::optional<JointStepRows>& step = steps_.emplace_back();
    const bool rows = index_.sites[site].has_rows;
    if (rows == index_.sites[edge.site].has_rows || judged_[edge.site].cells.empty()) continue;
    step.emplace(index_, rows ? edge.site : site, rows ? site : edge.site);
  }
  BeginRequest();
}

void RowInputs::BeginRequest() { contexts_.assign(graph_.nodes[site_].edges.size(), Context()); }

// Context edges grow with every row of the request, recorded at the site or not.
void RowInputs::Pass(uint32_t row, int64_t position) {
  const GraphNode& node = graph_.nodes[site_];
  for (size_t e = 0; e < node.edges.size(); ++e) {
    const GraphEdge& edge = node.edges[e];
    if (!edge.context || steps_[e] || judged_[edge.site].cells.empty()) continue;
    AddToContext(edge.site, position, judged_[edge.site].cells[row], &contexts_[e]);
    contexts_[e].rms = std::max(contexts_[e].rms, Rms(judged_[edge.site], row));
  }
}

InputState RowInputs::Of(uint32_t row, const Cell& out) const {
  const GraphNode& node = graph_.nodes[site_];
  InputState in;
  for (size_t e = 0; e < node.edges.size(); ++e) {
    const GraphEdge& edge = node.edges[e];
    if (steps_[e]) {
      AddStep(edge, *steps_[e], row, &in);
      continue;
    }
    if (!edge.context) {
      AddSameRow(edge, row, out, 0, &in);
      continue;
    }
    const Context& context = contexts_[e];
    in.bad |= context.bad;
    // The mean and not the sum: probabilities add up to 1, so attention averages its keys' errors.
    const double mean = context.rows > 0 ? std::sqrt(context.sum_sq / static_cast<double>(context.rows)) : 0;
    const double typical = judged_[edge.site].noise;
    AddDifference(std::max({mean, context.aside, typical}), typical, 0, edge.gain, &in);
    if (edge.site == cache_site_ && !(same_reading_ && out.same_cut)) {
      const double rounding = kCacheRms * judged_[edge.site].roundoff;
      AddDifference(rounding, rounding, 0, edge.gain, &in);
    }
  }
  SetCondition(row, &in);
  return in;
}

// The queries are an input of the same row, the keys of all earlier rows; bridged operations keep both. 1 when one of
// them is not known.
void RowInputs::SetCondition(uint32_t row, InputState* in) const {
  const GraphNode& node = graph_.nodes[site_];
  bool context = false;
  double query = 0, key = 0;
  for (size_t e = 0; e < node.edges.size(); ++e) {
    const GraphEdge& edge = node.edges[e];
    const std::string_view stem = index_.sites[edge.site].parsed.stem;
    context |= edge.context;
    if (edge.context && stem.substr(0, 6) == "attn.k") key = std::max(key, contexts_[e].rms);
    if (!edge.context && stem.substr(0, 6) == "attn.q") query = std::max(query, Rms(judged_[edge.site], row));
  }
  in->condition = AttentionCondition(query, key);
  in->condition_known = !context || (query > 0 && key > 0);
}

// Rows that one side read back from a rounded cache and the other had at hand differ by the cache's rounding.
bool RowInputs::SameReading() const {
  for (const char* key : {"path", "chunk", "prefix_cache"}) {
    if (MetaOf(*index_.trace[kA], key) != MetaOf(*index_.trace[kB], key)) return false;
  }
  // Traces that do not say it show it by their sites.
  bool absorbed[2] = {false, false};
  for (const JointSite& site : index_.sites) {
    if (site.parsed.def == nullptr || site.parsed.def->paths != "absorbed") continue;
    for (int side : {kA, kB}) absorbed[side] |= site.recorded[side];
  }
  return absorbed[kA] == absorbed[kB];
}

// The cache site that an attention reads, or -1. Whether a row was attended as it was computed or as it came back from
// the cache, rounded, depends on the path and on where the prefill was cut; then kv_write agrees on both sides and what
// the attention read does not.
int64_t RowInputs::CacheReadBy(uint32_t site) const {
  for (const GraphEdge& edge : graph_.nodes[site].edges) {
    if (edge.context && index_.sites[edge.site].parsed.stem == "attn.kv_write") return edge.site;
  }
  return -1;
}

// Bad rows by position over all requests: what a row cached from another request may hold.
const std::vector<uint8_t>& RowInputs::BadByPosition(uint32_t site) {
  auto [it, is_new] = bad_by_position_.try_emplace(site);
  if (!is_new) return it->second;
  for (const RowInterval& interval : index_.intervals) {
    for (uint32_t k = 0; k < interval.count; ++k) {
      const Cell& cell = judged_[site].cells[interval.base + k];
      const int64_t position = int64_t{interval.first} + k;
      if (!IsBad(cell.state) || position < 0) continue;
      if (it->second.size() <= static_cast<size_t>(position)) it->second.resize(static_cast<size_t>(position) + 1, 0);
      it->second[static_cast<size_t>(position)] = 1;
    }
  }
  return it->second;
}

void RowInputs::AddToContext(uint32_t site, int64_t position, const Cell& cell, Context* context) {
  if (cell.state == CellState::kAbsent) return;
  // A gap: rows that this request read from the cache of another one (a shared prefix).
  if (position > context->next) {
    const std::vector<uint8_t>& bad = BadByPosition(site);
    for (int64_t p = std::max<int64_t>(context->next, 0); p < position && p < static_cast<int64_t>(bad.size()); ++p) {
      context->bad |= bad[static_cast<size_t>(p)] != 0;
    }
  }
  context->next = position + 1;
  if (IsBad(cell.state)) {
    context->bad = true;
  } else if (cell.state == CellState::kAside) {
    context->aside = std::max(context->aside, cell.relative());
  } else {
    context->sum_sq += cell.relative() * cell.relative();
    ++context->rows;
  }
}

// All rows of the step: which of them an element comes from, or goes to, is not known.
void RowInputs::AddStep(const GraphEdge& edge, const JointStepRows& step, uint32_t row, InputState* state) const {
  const JudgedSite& input = judged_[edge.site];
  const bool to_tokens = index_.sites[site_].has_rows;
  const std::vector<uint32_t>* rows = to_tokens ? step.RecordingsOf(row) : step.TokensOf(row);
  if (rows == nullptr) {
    state->aside |= graph_.nodes[site_].by_step && !to_tokens;
    return;
  }
  const SiteOp op = graph_.nodes[edge.site].op;
  double sum_sq = 0;
  uint64_t count = 0;
  for (uint32_t other : *rows) {
    const Cell& cell = input.cells[other];
    state->bad |= IsBad(cell.state);
    if (cell.state == CellState::kAside) {
      // A row whose choice went the other way by right stands elsewhere among the sorted ones.
      state->aside |= !to_tokens;
      continue;
    }
    if (cell.state == CellState::kAbsent || op == SiteOp::kSelect) continue;
    sum_sq += cell.relative() * cell.relative();
    ++count;
  }
  if (to_tokens || count == 0) return;  // what a token's row owes to the others' is not known
  const double mean = std::sqrt(sum_sq / static_cast<double>(count));
  AddDifference(std::max(mean, input.noise), input.noise, 0, edge.gain, state);
  state->cols = std::max(state->cols, input.cols);
}

// Where the row was not recorded at the edge's site: what that site is computed from.
void RowInputs::AddSameRow(const GraphEdge& edge, uint32_t row, const Cell& out, int depth, InputState* state) const {
  // Bounds the walk over sites that lack the row; chains of the site table are shorter.
  constexpr int kMaxDepth = 8;
  const JudgedSite& input = judged_[edge.site];
  if (input.cells.empty()) return;
  const Cell& cell = input.cells[row];
  if (cell.state == CellState::kAbsent) {
    if (depth > kMaxDepth) return;
    for (const GraphEdge& behind : graph_.nodes[edge.site].edges) AddSameRow(behind, row, out, depth + 1, state);
    return;
  }
  state->bad |= IsBad(cell.state);
  state->aside |= graph_.nodes[site_].by_step && cell.state == CellState::kAside;
  double relative = std::max(cell.relative(), input.noise);
  // A part of a larger tensor (q_nope of q_proj) may hold all of its difference.
  const SiteOp op = graph_.nodes[site_].op;
  if ((op == SiteOp::kCopy || op == SiteOp::kRope) && out.norm > 0) {
    relative *= std::max(1.0, double{cell.norm} / out.norm);
  }
  AddDifference(relative, input.noise, cell.norm, edge.gain, state);
  state->cols = std::max(state->cols, input.cols);
}

}  // namespace assay
