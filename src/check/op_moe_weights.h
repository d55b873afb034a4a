// Weights and biases of the experts as they were recorded: in one tensor of all experts, or expert by expert, plain or
// as codes with scales.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "check/op_common.h"
#include "check/op_dequant.h"

namespace assay::op {

// Codes of rows [first, first + rows) of one expert's weight.
struct ExpertPiece {
  std::string name;  // "layers.0.mlp.experts.3.gate_proj.weight"
  int64_t expert = 0, first = 0, rows = 0;
  int64_t slice = -1;  // of codes that hold all experts; -1: they are this expert's alone
};

struct ExpertWeights {
  std::string name;                 // of the tensor of all experts, recorded or not
  oracle::Array value;              // [E, out, in]; [out, in]: one for all rows
  std::vector<ExpertPiece> pieces;  // of what was decoded from codes; empty: recorded as it is
  bool quantised() const { return !pieces.empty(); }
  int64_t experts() const { return value.rank() == 3 ? value.shape[0] : 1; }
};

// stem: gate_up_proj (its rows are gate's, then up's, where these are recorded apart) or down_proj. prefix: of the
// layer. kBadInput with the name of what was not recorded.
Result<ExpertWeights> ExpertWeightsOf(const Subject& subject, const std::string& prefix, std::string_view stem);
// [E out], flat: mlp.experts.STEM_bias, or .bias of each expert's parts. No values: none was recorded.
oracle::Array ExpertBiasOf(const Subject& subject, const std::string& prefix, std::string_view stem, int64_t experts);

// Codes and scales of a piece.
Result<DequantParts> TakePiece(const Subject& subject, const ExpertPiece& piece, const DequantVariant& variant = {});

// Rows x through the weight of their expert, and its bias (flat [E out], or no values); a two-dimensional weight serves
// all rows.
Result<oracle::Computed> GroupedProduct(const oracle::Array& x, const oracle::Array& w, const oracle::Array& bias,
                                        std::span<const int64_t> expert);

}  // namespace assay::op
