// Why a product over a quantised operand is not what its codes and scales give, told from the result alone.
//
// No checkpoint says what the kernel had in memory, and a result with few rows does not determine it. So conventions
// that go wrong are tried one by one (zero points, places of scales, codes in another order, ...), and where the result
// determines one number for each group of a scale, these numbers are solved for and then told in the fewest words that
// fit. Every cause counts only when the recomputed result fits to rounding.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "check/op_dequant.h"

namespace assay::op {

struct QuantisedProduct {
  std::string name;         // of the operand that was decoded: "layers.0.mlp.down_proj.weight"
  bool activation = false;  // its rows are rows of the result; otherwise they are columns of the result
  // By the declared layout or by another one.
  std::function<Result<DequantParts>(const DequantVariant&)> decode;
  // The result with this value of the operand in its place, all of its rows.
  std::function<Result<oracle::Computed>(const oracle::Array&)> product;
  oracle::Array other, bias;  // the other operand, [n, cols of the codes]; the bias, or no values
  bool is_value = false;      // the result is the decoded operand itself, no product of it
  bool plain = true;          // the result is the product itself (plus bias), not scaled or capped behind it
  int64_t first = 0;          // row of the operand that column 0 (activation: row 0) of the result belongs to
};

std::optional<Explanation> ExplainQuantised(const Subject& subject, const QuantisedProduct& product,
                                            const oracle::Computed& right);

// The families of causes: conventions, orders of codes, and numbers solved for. Only ExplainQuantised calls them.
class QuantTrial;
std::optional<Explanation> TryConventions(const QuantTrial& trial);
std::optional<Explanation> TryRuns(const QuantTrial& trial);
std::optional<Explanation> TrySolved(const QuantTrial& trial);

// One product under trial.
class QuantTrial {
 public:
  QuantTrial(const Subject& subject, const QuantisedProduct& product, const oracle::Computed& right,
             const DequantParts& parts);

  const Subject& subject() const { return subject_; }
  const QuantisedProduct& product() const { return product_; }
  const oracle::Computed& right() const { return right_; }
  const DequantParts& parts() const { return parts_; }
  const oracle::Array& declared() const { return declared_; }

  // The grid of scales (or zero points) in the order of the matrix.
  int64_t grid_rows() const { return grid_rows_; }
  int64_t grid_cols() const { return grid_cols_; }
  int64_t CellOf(int64_t row, int64_t col) const;
  const std::vector<double>& scales() const { return scales_; }  // of each cell
  const std::vector<double>& zeros() const { return zeros_; }    // of each cell; empty: none
  // Value of an element of these parts.
  double ValueOf(double code, double zero, double scale) const { return (code - zero) * scale * parts_.global; }
  double ZeroAt(int64_t element) const {
    return parts_.zero.empty() ? 0 : double{parts_.zero[static_cast<size_t>(element)]};
  }

  // `why` with how surely it fits, when the product of the operand with these elements fits the result. Elements are
  // asked for one by one, and few of them where a few already say that the cause does not fit; nullopt too where all
  // are as declared.
  using ElementAt = std::function<double(int64_t row, int64_t col)>;
  std::optional<Explanation> Try(const ElementAt& at, const Explanation& why) const;
  // The same with other codes, scales of the cells, zero points of the cells; the rest as declared.
  std::optional<Explanation> TryCodes(const ElementAt& code, const Explanation& why) const;
  std::optional<Explanation> TryScales(const std::vector<double>& cells, const Explanation& why) const;
  std::optional<Explanation> TryZeros(const std::vector<double>& cells, const Explanation& why) const;

 private:
  const Subject& subject_;
  const QuantisedProduct& product_;
  const oracle::Computed& right_;
  const DequantParts& parts_;
  oracle::Array declared_;
  int64_t grid_rows_ = 1, grid_cols_ = 1;
  std::vector<double> scales_, zeros_;
};

}  // namespace assay::op
