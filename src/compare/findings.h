// From the rows that are wrong to findings: one a site, in causal order, with the rows, heads and ranks that differ and
// what the grids can say about the kind of fault (rows that repeat other rows, zeros, a constant factor, an input added
// too often). Reads the wrong sites of both traces once more; everything else was decided by the judge.
#pragma once

#include <vector>

#include "compare/diff.h"
#include "compare/joint_index.h"
#include "compare/judge.h"

namespace assay {

// Only the first few findings are explained: what comes behind them is mostly their consequence, over other rows.
std::vector<FirstBad> MakeFindings(const JointIndex& index, const SiteGraph& graph, const Judgement& judgement);

}  // namespace assay
