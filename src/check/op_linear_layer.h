// The operands of a linear layer as its GEMM has them, put together from what was recorded: dequantised, cut out of
// fused weights, and joined over ranks.
//
// Nothing is judged here.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "check/op_explain.h"

namespace assay::op {

// A projection: result, input and weight by stem. A result may have several sources (attn.q_proj); the one that was
// recorded is taken.
struct LinearSite {
  std::string_view result, input, weight;
  std::string_view fused = "";  // weight that holds it among its parts
  std::string_view part = "";
};

// The operands of one product y = x wᵀ + bias, as the GEMM has them: x [T, in], w [out, in], bias [out] or empty.
struct Layer {
  Input input;
  oracle::Array x;  // as the GEMM takes it: dequantised where codes of it were recorded
  std::string weight;
  TensorPtr weight_tensor;  // null: decoded from codes
  oracle::Array w;          // rows of this result
  oracle::Array whole;      // weight that w is rows first_row and on of; no values: w itself
  int64_t first_row = 0;
  std::vector<int64_t> input_rows;  // of the input, that the result has; empty: all
  oracle::Array bias;               // may be empty
  bool quantised_input = false, quantised_weight = false;
};

// The operands of the result `subject`. Arrays are copies, tensors are shared with the capture. kBadInput with the name
// of what was not recorded, or does not fit.
Result<Layer> GatherLayer(const Subject& subject, const LinearSite& site);
// Rows [begin, end) of a fused weight of n_rows that `part` takes, by metadata `parts` of its event; false: none, or
// beyond its rows.
bool PartRows(const EventInfo& fused, int64_t n_rows, std::string_view part, int64_t* begin, int64_t* end);
// Rows [first, first + count) of w [rows, …]. kBadInput beyond its rows.
Result<oracle::Array> RowsOf(const oracle::Array& w, int64_t first, int64_t count);

}  // namespace assay::op
