#include "fit/explain.h"

#include <algorithm>

#include "fit/evidence.h"
#include "fit/fits.h"

namespace assay::fit {
namespace {

// Each size is held against n before the product, so rows · heads · cols cannot overflow for arrays that fit memory.
Status Check(const Problem& p) {
  const int64_t n = static_cast<int64_t>(p.actual.size());
  const auto fault = [&](const std::string& what) {
    return Status::BadInput(what + " for " + std::to_string(n) + " actual elements");
  };
  if (p.rows < 0 || p.heads < 1 || p.cols < 1 || p.rows > n || p.heads > n + 1 || p.cols > n + 1 ||
      p.rows * (p.heads * p.cols) != n) {
    return fault(std::to_string(p.rows) + " rows of " + std::to_string(p.heads) + " heads of " +
                 std::to_string(p.cols) + " columns");
  }
  if (static_cast<int64_t>(p.expected.size()) != n) return fault(std::to_string(p.expected.size()) + " expected");
  if (p.bound.size() != 1 && static_cast<int64_t>(p.bound.size()) != n) {
    return fault(std::to_string(p.bound.size()) + " bounds");
  }
  for (const NamedArray& array : p.arrays) {
    const int64_t size = static_cast<int64_t>(array.values.size());
    const bool rows_alone = !array.as_candidate && !array.as_term;  // any number of them
    if ((!rows_alone && size != n) || (array.as_rows && size % (p.heads * p.cols) != 0) ||
        (!array.bound.empty() && array.bound.size() != array.values.size())) {
      return fault("array " + array.name + " of " + std::to_string(size) + " elements and " +
                   std::to_string(array.bound.size()) + " bounds");
    }
  }
  return {};
}

}  // namespace

std::string_view NameOf(Kind kind) {
  switch (kind) {
    case Kind::kCandidate:
      return "candidate";
    case Kind::kScale:
      return "scale";
    case Kind::kScaleOfSome:
      return "scale of some";
    case Kind::kScaleEach:
      return "scale of each";
    case Kind::kCombination:
      return "combination";
    case Kind::kAdded:
      return "added";
    case Kind::kOffset:
      return "offset";
    case Kind::kOffsetOfSome:
      return "offset of each";
    case Kind::kRowsMoved:
      return "rows moved";
    case Kind::kHeadsMoved:
      return "heads moved";
    case Kind::kColumnsMoved:
      return "columns moved";
    case Kind::kInterleaved:
      return "interleaved";
    case Kind::kTransposed:
      return "transposed";
    case Kind::kOtherStride:
      return "other stride";
    case Kind::kRowsOf:
      return "rows";
    case Kind::kZero:
      return "zero";
    case Kind::kConstantRows:
      return "constant rows";
    case Kind::kCoarser:
      return "coarser";
    case Kind::kSaturated:
      return "saturated";
  }
  return "?";
}

std::string_view NameOf(Axis axis) {
  switch (axis) {
    case Axis::kAll:
      return "all";
    case Axis::kRow:
      return "row";
    case Axis::kHead:
      return "head";
    case Axis::kColumn:
      return "column";
    case Axis::kBlock:
      return "block";
  }
  return "?";
}

std::string ListText(const std::vector<int64_t>& indices, size_t most) {
  std::string text;
  size_t runs = 0;
  for (size_t i = 0; i < indices.size();) {
    size_t j = i;
    while (j + 1 < indices.size() && indices[j + 1] == indices[j] + 1) ++j;
    if (runs++ == most) return text + ", ...";
    if (i > 0) text += ", ";
    text += std::to_string(indices[i]);
    if (j > i) text.append("-").append(std::to_string(indices[j]));
    i = j + 1;
  }
  return text;
}

Result<Answer> Explain(const Problem& problem, const Options& options) {
  ASSAY_RETURN_IF_ERROR(Check(problem));
  const Evidence evidence(problem, options);
  Answer answer;
  answer.count = evidence.size();
  answer.wrong = evidence.wrong_count();
  answer.residual = evidence.residual();
  answer.within_noise = answer.wrong == 0;
  if (answer.within_noise) return answer;
  for (const auto fit : {FitCandidates, FitScales, FitSums, FitMoves, FitLayouts, FitValues}) {
    fit(evidence, &answer.found);
  }
  // Stable: of explanations that cost the same the one that was tried first stays in front, on every machine.
  std::stable_sort(answer.found.begin(), answer.found.end(), [](const Explanation& a, const Explanation& b) {
    return a.cost != b.cost ? a.cost < b.cost : a.residual < b.residual;
  });
  return answer;
}

}  // namespace assay::fit
