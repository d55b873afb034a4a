// What is known about the inputs of one row of a site: whether one of them is already wrong, and how far the two sides'
// inputs are apart, grown by what the operations may make of it. The same row of most inputs, all earlier rows of the
// request for attention (context edges). Nothing is judged here.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "compare/joint_index.h"
#include "compare/site_cells.h"
#include "compare/site_graph.h"
#include "compare/step_rows.h"

namespace assay {

// A judged site whose rows later sites may still ask for.
struct JudgedSite {
  std::vector<Cell> cells;  // by row number; freed after the last use
  double noise = 0;         // relative difference that 90 % of the rows within their bounds stay below
  int64_t cols = 0;         // logical columns of the whole row
  double roundoff = 0;      // coarsest of both sides
};

inline bool IsBad(CellState state) { return state == CellState::kRoot || state == CellState::kConsequence; }

struct InputState {
  bool bad = false;             // some input is already wrong
  bool aside = false;           // the sides' rows do not correspond: other rows in the step, or other choices
  double relative = 0;          // growth-weighted relative difference, combined in quadrature
  double typical = 0;           // the same from what 90 % of the inputs' good rows stay below
  double absolute = 0;          // sum of the inputs' differences (L2)
  double measured = 0;          // largest relative difference of an input, without gain
  double norm = 0;              // of the largest input
  int64_t cols = 0;             // of the widest input of the same row
  double condition = 1;         // of attention: how much more than usual it makes of a difference (bounds.h)
  bool condition_known = true;  // false: it reads earlier rows, and its queries or keys are not known row by row
};

// Goes along the rows of one site after another. Everything is borrowed and must outlive it.
class RowInputs {
 public:
  RowInputs(const JointIndex& index, const SiteGraph& graph, const std::vector<JudgedSite>& judged);

  // BeginSite, then for each request BeginRequest and its rows in ascending order: contexts grow on the way and are
  // never walked again.
  void BeginSite(uint32_t site);
  void BeginRequest();
  // Each row of the request, ascending, whether the site has it or not.
  void Pass(uint32_t row, int64_t position);
  // Of the row passed last. out: its value at the site.
  InputState Of(uint32_t row, const Cell& out) const;

 private:
  // Running state of one context edge along a request.
  struct Context {
    bool bad = false;
    double sum_sq = 0;  // of relative differences of rows that were judged
    uint64_t rows = 0;
    double aside = 0;  // largest relative difference of a row set aside
    double rms = 0;    // of an element, in the largest row
    int64_t next = 0;  // position expected next; a gap was cached from another request
  };

  bool SameReading() const;
  int64_t CacheReadBy(uint32_t site) const;
  void SetCondition(uint32_t row, InputState* in) const;
  const std::vector<uint8_t>& BadByPosition(uint32_t site);
  void AddToContext(uint32_t site, int64_t position, const Cell& cell, Context* context);
  void AddStep(const GraphEdge& edge, const JointStepRows& step, uint32_t row, InputState* state) const;
  void AddSameRow(const GraphEdge& edge, uint32_t row, const Cell& out, int depth, InputState* state) const;

  const JointIndex& index_;
  const SiteGraph& graph_;
  const std::vector<JudgedSite>& judged_;
  bool same_reading_;  // both sides take the same attention path and cut the prefill alike, as far as they say
  uint32_t site_ = 0;
  int64_t cache_site_ = -1;
  std::vector<Context> contexts_;  // one an edge of the site
  // One an edge; where one of its ends has token rows and the other has not.
  std::vector<std::optional<JointStepRows>> steps_;
  std::map<uint32_t, std::vector<uint8_t>> bad_by_position_;
};

}  // namespace assay
