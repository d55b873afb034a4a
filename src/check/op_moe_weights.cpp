#include "check/op_moe_weights.h"

#include <algorithm>

#include "oracle/linear.h"

namespace assay::op {
namespace {

using oracle::Array;

// Gate rows go in front of up rows.
std::vector<std::string> PartsOf(std::string_view stem) {
  if (stem == "gate_up_proj") return {"gate_proj", "up_proj"};
  return {std::string(stem)};
}

// Codes of one tensor that holds all experts: [E, out, in].
Result<ExpertWeights> Stacked(const Subject& s, std::string name) {
  const TensorPtr codes = s.Weight(name + ".codes");
  if (codes == nullptr || codes->shape.size() != 3) return NotRecorded(name);
  ExpertWeights all;
  all.name = std::move(name);
  for (int64_t e = 0; e < codes->shape[0]; ++e) {
    ExpertPiece piece{all.name, e, 0, 0, e};
    ASSAY_ASSIGN_OR_RETURN(const DequantParts parts, TakePiece(s, piece));
    piece.rows = parts.rows;
    const Array own = parts.Values();
    all.value.values.insert(all.value.values.end(), own.values.begin(), own.values.end());
    all.value.shape = {e + 1, parts.rows, parts.cols};
    all.pieces.push_back(std::move(piece));
  }
  return all;
}

}  // namespace

Result<DequantParts> TakePiece(const Subject& s, const ExpertPiece& piece, const DequantVariant& variant) {
  DequantVariant own = variant;
  own.slice = piece.slice;
  return TakeApart(s, piece.name + ".", false, own);
}

Result<ExpertWeights> ExpertWeightsOf(const Subject& s, const std::string& prefix, std::string_view stem) {
  const std::string experts = prefix + "mlp.experts.";
  ExpertWeights all;
  for (const char* suffix : {"", ".weight"}) {
    all.name = experts + std::string(stem) + suffix;
    if (const TensorPtr w = s.Weight(all.name)) {
      all.value = ToArray(*w);
      return all;
    }
    if (HasCodes(s, all.name + ".", false)) return Stacked(s, all.name);
  }
  all.name = experts + std::string(stem);
  // Expert by expert, until a number is missing: that is how many experts there are.
  for (int64_t e = 0;; ++e) {
    Array own;
    for (const std::string& part : PartsOf(stem)) {
      const std::string name = experts + std::to_string(e) + "." + part + ".weight";
      Array rows;
      if (const TensorPtr w = s.Weight(name)) {
        rows = {{w->n_rows(), w->row_size()}, w->values};
      } else if (HasCodes(s, name + ".", false)) {
        ExpertPiece piece{name, e, own.shape.empty() ? 0 : own.shape[0], 0, -1};
        ASSAY_ASSIGN_OR_RETURN(const DequantParts parts, TakePiece(s, piece));
        rows = parts.Values();
        piece.rows = parts.rows;
        all.pieces.push_back(std::move(piece));
      } else {
        if (e == 0 || !own.values.empty()) return NotRecorded(e == 0 ? all.name : name);
        all.value.shape.insert(all.value.shape.begin(), e);
        return all;
      }
      if (!own.shape.empty() && rows.cols() != own.shape[1])
        return Status::BadInput(name + " has other columns than the expert's gate_proj");
      own.values.insert(own.values.end(), rows.values.begin(), rows.values.end());
      own.shape = {(own.shape.empty() ? 0 : own.shape[0]) + rows.shape[0], rows.cols()};
    }
    if (e > 0 && own.shape != all.value.shape) return NotRecorded(all.name + " of one shape for all experts");
    all.value.shape = own.shape;
    all.value.values.insert(all.value.values.end(), own.values.begin(), own.values.end());
  }
}

Array ExpertBiasOf(const Subject& s, const std::string& prefix, std::string_view stem, int64_t experts) {
  const std::string base = prefix + "mlp.experts.";
  for (const char* suffix : {"_bias", ".bias"}) {
    if (const TensorPtr b = s.Weight(base + std::string(stem) + suffix)) return ToArray({b->n()}, b->values);
  }
  Array all{{0}, {}};
  for (int64_t e = 0; e < experts; ++e) {
    for (const std::string& part : PartsOf(stem)) {
      const TensorPtr b = s.Weight(base + std::to_string(e) + "." + part + ".bias");
      if (b == nullptr) return {{0}, {}};
      all.values.insert(all.values.end(), b->values.begin(), b->values.end());
    }
  }
  all.shape = {all.size()};
  return all;
}

Result<oracle::Computed> GroupedProduct(const Array& x, const Array& w, const Array& bias,
                                        std::span<const int64_t> expert) {
  if (w.rank() == 2) return oracle::Linear(x, w, bias);
  if (w.rank() != 3 || static_cast<int64_t>(expert.size()) != x.rows() || w.shape[2] != x.cols()) {
    return Status::BadInput("experts' weights do not fit their rows");
  }
  // Experts without rows cost nothing; the bound is that of the widest product among them.
  const int64_t out = w.shape[1], in = w.shape[2];
  oracle::Computed y;
  y.value = y.scale = Array::Filled({x.rows(), out});
  for (int64_t e = 0; e < w.shape[0]; ++e) {
    std::vector<int64_t> rows;
    for (size_t r = 0; r < expert.size(); ++r) {
      if (expert[r] == e) rows.push_back(static_cast<int64_t>(r));
    }
    if (rows.empty()) continue;
    ASSAY_ASSIGN_OR_RETURN(Array part, oracle::TakeRows(x, rows));
    const Array own = ToArray(
        {out, in}, std::span(w.values).subspan(static_cast<size_t>(e * out * in), static_cast<size_t>(out * in)));
    const Array b =
        bias.size() == w.shape[0] * out
            ? ToArray({out}, std::span(bias.values).subspan(static_cast<size_t>(e * out), static_cast<size_t>(out)))
            : Array{{0}, {}};
    ASSAY_ASSIGN_OR_RETURN(oracle::Computed z, oracle::Linear(part, own, b));
    y.k = std::max(y.k, z.k);
    y.stores = z.stores;
    for (size_t i = 0; i < rows.size(); ++i) {
      std::copy_n(z.value.values.begin() + static_cast<int64_t>(i) * out, out, y.value.values.begin() + rows[i] * out);
      std::copy_n(z.scale.values.begin() + static_cast<int64_t>(i) * out, out, y.scale.values.begin() + rows[i] * out);
    }
  }
  return y;
}

}  // namespace assay::op
