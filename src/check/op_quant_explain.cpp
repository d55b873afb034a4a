#include "check/op_quant_explain.h"

#include <algorithm>
#include <cmath>

#include "check/op_fitted.h"
#include "check/op_quant_tables.h"
#include "check/weights_slab.h"
#include "tensor/dtype.h"

namespace assay::op {
using oracle::Array;

namespace {

constexpr int64_t kMostElements = int64_t{1} << 24;  // larger ones are not decoded once for each cause

// A decoded weight that was recorded is looked at like one in memory beside its checkpoint (assay weights).
std::optional<Explanation> AsWeight(const QuantTrial& t) {
  const DequantParts& p = t.parts();
  WeightSlab s;
  s.name = t.product().name;
  s.rows = p.rows, s.cols = p.cols;
  s.quantised = true;
  s.actual = t.subject().actual().values;
  s.expect = t.declared().values;
  if (s.actual.size() != s.expect.size()) return std::nullopt;
  s.code.assign(p.code.begin(), p.code.end());
  s.zero.assign(p.zero.begin(), p.zero.end());
  s.zero.resize(s.code.size(), 0);
  s.roundoff = std::max(t.subject().precision().store, UnitRoundoff(DType::kF32));
  s.n_groups = static_cast<int32_t>(t.scales().size());
  for (int64_t i = 0; i < s.size(); ++i) {
    s.scale.push_back(p.ScaleOf(i) * p.global);
    s.group.push_back(static_cast<int32_t>(t.CellOf(i / p.cols, i % p.cols)));
  }
  if (p.block_cols > 0) s.grid_rows = t.grid_rows(), s.grid_cols = t.grid_cols();
  const MaybeExplained found = FitWeight(s);
  // A coarser type is for the precision of the operation to judge.
  if (!found || found->cls == fault_class::kPrecision) return std::nullopt;
  std::string text = t.product().name + ": ";
  for (size_t i = 0; i < found->evidence.size(); ++i) text += (i > 0 ? ", " : "") + found->evidence[i];
  for (const std::string_view cls :
       {fault_class::kQLayout, fault_class::kQScale, fault_class::kQZero, fault_class::kLoad, fault_class::kKernel,
        fault_class::kTpShard, fault_class::kRopeForm, fault_class::kScale}) {
    if (cls == found->cls) return Explanation{cls, text, found->constant.value, found->constant.meaning};
  }
  return std::nullopt;
}

}  // namespace

// Scales and zero points are first brought to one entry a cell of the grid [grid_rows, grid_cols], row-major:
// conventions (transposed, shifted, of another block) are then permutations of cells, whatever layout the engine
// stores.
QuantTrial::QuantTrial(const Subject& subject, const QuantisedProduct& product, const oracle::Computed& right,
                       const DequantParts& parts)
    : subject_(subject), product_(product), right_(right), parts_(parts), declared_(parts.Values()) {
  grid_rows_ = (parts.rows + parts.block_rows - 1) / std::max<int64_t>(parts.block_rows, 1);
  grid_cols_ = parts.block_cols > 0 ? (parts.cols + parts.block_cols - 1) / parts.block_cols : parts.grid_cols;
  scales_.assign(static_cast<size_t>(grid_rows_ * grid_cols_), 0);
  if (!parts.zero.empty()) zeros_ = scales_;
  for (int64_t r = 0; r < parts.rows; ++r) {
    for (int64_t c = 0; c < parts.cols; ++c) {
      const auto cell = static_cast<size_t>(CellOf(r, c)), at = static_cast<size_t>(r * parts.cols + c);
      scales_[cell] = parts.scale[static_cast<size_t>(parts.group[at])];
      if (!zeros_.empty()) zeros_[cell] = double{parts.zero[at]};
    }
  }
}

// block_cols 0: columns are grouped by a list (act-order), and the group is the cell.
int64_t QuantTrial::CellOf(int64_t row, int64_t col) const {
  if (parts_.block_cols == 0) return parts_.group[static_cast<size_t>(row * parts_.cols + col)];
  return row / parts_.block_rows * grid_cols_ + col / parts_.block_cols;
}

// A few elements first: most conventions do not fit, and a full product of all rows is dear.
std::optional<Explanation> QuantTrial::Try(const ElementAt& at, const Explanation& why) const {
  if (product_.plain) {
    const OperandRows made{parts_.rows, parts_.cols, at};
    if (product_.activation ? !ProductMayFit(subject_, made, product_.first, product_.other, 0, product_.bias)
                            : !ProductMayFit(subject_, product_.other, 0, made, product_.first, product_.bias))
      return std::nullopt;
  }
  Array value = Array::Filled({parts_.rows, parts_.cols});
  for (int64_t r = 0; r < parts_.rows; ++r)
    for (int64_t c = 0; c < parts_.cols; ++c) value[r * parts_.cols + c] = at(r, c);
  if (value.values == declared_.values) return std::nullopt;
  const auto candidate = product_.product(value);
  if (!FitsBetter(subject_, right_, candidate)) return std::nullopt;
  return Weighed(subject_, right_, *candidate, why);
}

std::optional<Explanation> QuantTrial::TryCodes(const ElementAt& code, const Explanation& why) const {
  return Try(
      [&](int64_t r, int64_t c) {
        const int64_t i = r * parts_.cols + c;
        return ValueOf(code(r, c), ZeroAt(i), parts_.ScaleOf(i));
      },
      why);
}

std::optional<Explanation> QuantTrial::TryScales(const std::vector<double>& cells, const Explanation& why) const {
  return Try(
      [&](int64_t r, int64_t c) {
        const int64_t i = r * parts_.cols + c;
        return ValueOf(double{parts_.code[static_cast<size_t>(i)]}, ZeroAt(i),
                       cells[static_cast<size_t>(CellOf(r, c))]);
      },
      why);
}

// Zero points as floats, as they are kept.
std::optional<Explanation> QuantTrial::TryZeros(const std::vector<double>& cells, const Explanation& why) const {
  return Try(
      [&](int64_t r, int64_t c) {
        const int64_t i = r * parts_.cols + c;
        const auto zero = static_cast<float>(cells[static_cast<size_t>(CellOf(r, c))]);
        return ValueOf(double{parts_.code[static_cast<size_t>(i)]}, double{zero}, parts_.ScaleOf(i));
      },
      why);
}

std::optional<Explanation> ExplainQuantised(const Subject& subject, const QuantisedProduct& product,
                                            const oracle::Computed& right) {
  if (SearchedEnough(subject)) return std::nullopt;
  const auto parts = product.decode({});
  if (!parts.ok() || parts->rows * parts->cols > kMostElements) return std::nullopt;
  const QuantTrial trial(subject, product, right, *parts);
  // Conventions have no free number; solved scales have one a cell and would fit more.
  if (auto why = TryConventions(trial)) return why;
  if (auto why = TryByteTypes(trial)) return why;
  if (!product.is_value) {
    if (auto why = TryRuns(trial)) return why;
  }
  if (auto why = TrySolved(trial)) return why;
  if (auto why = TryTables(trial)) return why;
  return product.is_value && !product.activation ? AsWeight(trial) : std::nullopt;
}

}  // namespace assay::op
