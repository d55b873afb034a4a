// Values of attention as they came out of their projection: nothing lies between them. Where a model norms them, the
// event says so (op=rmsnorm) and is judged as declared.
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "check/op_checks.h"
#include "check/op_explain.h"
#include "check/op_fitted.h"
#include "check/op_rope.h"
#include "oracle/linear.h"
#include "oracle/norm.h"

namespace assay::check {
namespace {

using namespace op;
using oracle::Array;
using oracle::Computed;

Result<Computed> Copied(const Array& from) {
  const oracle::Term term{1, &from};
  return oracle::LinearCombination({&term, 1});
}

// Values turned by their positions, as queries and keys are.
bool FitsRotated(const Subject& s, const Array& from, const Computed& right) {
  auto rotation = RotationOf(s, from.cols());
  if (!rotation.ok() || s.tensor()->rows.empty()) return false;
  std::vector<double> positions;
  for (const RowId& id : s.tensor()->rows) positions.push_back(static_cast<double>(id.position));
  return FitsBetter(s, right, oracle::Rotate(from, positions, rotation->frequencies, rotation->layout));
}

// Which head of the projection each one is, whole in all judged rows; empty: they are no permutation, or in their
// order.
std::vector<int64_t> HeadsUsed(const Subject& s, const Array& from) {
  std::vector<int64_t> used;
  const int64_t n = from.shape[0], heads = from.shape[1], width = from.shape[2];
  const double room = 4 * s.precision().store;
  std::set<int64_t> taken;
  bool moved = false;
  for (int64_t h = 0; h < heads; ++h) {
    int64_t found = -1;
    for (int64_t g = 0; g < heads && found < 0; ++g) {
      bool same = true;
      for (int64_t t = 0; t < n && same; ++t) {
        if (!s.judged()[static_cast<size_t>(t)]) continue;
        for (int64_t c = 0; c < width && same; ++c) {
          const double want = from[(t * heads + g) * width + c];
          same = std::abs(s.actual()[(t * heads + h) * width + c] - want) <= room * std::abs(want);
        }
      }
      if (same) found = g;
    }
    if (found < 0 || !taken.insert(found).second) return {};
    moved |= found != h;
    used.push_back(found);
  }
  return moved ? used : std::vector<int64_t>{};
}

void JudgeValue(Subject& s) {
  // MLA's values come from the latent (op_absorption.cpp).
  if (s.capture().HasSite(s.Sibling("attn.k_nope")) || Capture::OwnText(s.info(), "op")) return;
  const TensorPtr projected = s.Operand(s.Sibling("attn.v_proj"));
  if (projected == nullptr || projected->n() != s.tensor()->n()) return Missing(s, s.Sibling("attn.v_proj"));
  const Array from{s.actual().shape, projected->values};
  Operation copy;
  copy.inputs = {{projected->info->name, projected}};
  copy.run = [&](std::span<const Array> in) { return Copied(Array{s.actual().shape, in[0].values}); };
  JudgeOperation(s, copy, [&](const Difference&, const Computed& right) -> std::optional<Explanation> {
    if (FitsRotated(s, from, right))
      return Explanation{fault_class::kRopeForm, "fits values rotated as queries and keys are"};
    if (const auto normed = oracle::RmsNorm(from, Array{{0}, {}}, s.Number("eps", 1e-6));
        FitsBetter(s, right, normed)) {
      return Explanation{fault_class::kKernel, "fits values that were normed, without a weight, as no op=rmsnorm says"};
    }
    if (from.rank() == 3) {
      if (const auto used = HeadsUsed(s, from); !used.empty()) {
        std::string order;
        for (int64_t h : used) order.append(order.empty() ? "" : ", ").append(std::to_string(h));
        return Explanation{fault_class::kTpShard, "fits the projection's heads in another order: " + order};
      }
    }
    const double c = ConstantRatio(s.actual(), right.value, s.judged(), std::max(1e-4, 8 * s.precision().store));
    if (std::isnan(c)) return std::nullopt;
    return Explanation{fault_class::kScale, "values are one constant off", c, "value used / expected"};
  });
}

}  // namespace

void JudgeValues(const Capture& capture, CheckReport* report) {
  constexpr std::string_view kValues[] = {"attn.v"};
  JudgeStems(capture, report, kValues, JudgeValue);
}

}  // namespace assay::check
