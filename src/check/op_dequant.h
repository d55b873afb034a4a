// Codes and scales of a recording as numbers, by the declared layout or by another one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "check/op_common.h"

namespace assay::op {

// What a decoder may take otherwise than declared.
struct DequantVariant {
  bool other_scale_layout = false;  // linear where swizzled is declared, or the reverse
  bool high_nibble_first = false;
  double zero = 0;          // added to every code, in steps of the code's scale
  bool drop_signs = false;  // codebook
  int64_t entries = 0;      // codebook: index taken modulo so many, 0: as it is
  int64_t slice = -1;       // of codes [E, N, K] of several matrices: this one; -1: all is one
};

// Codes, zero points and scales taken apart, so that a cause can change one of them: value = (code - zero) * scale
// under `global`.
struct DequantParts {
  std::string quant;           // as declared: "gptq", "fp8_block", ...
  int64_t rows = 0, cols = 0;  // of the decoded tensor
  std::vector<float> code;     // what each code stands for before its scale
  std::vector<float> zero;     // of each element, in steps of the scale; empty: none
  std::vector<double> scale;   // as stored, decoded
  std::vector<int32_t> group;  // scale of each element
  // Grid of scales in the order of the matrix, and the elements that share one; block_cols 0: columns in any order.
  int64_t grid_rows = 1, grid_cols = 1, block_rows = 1, block_cols = 1;
  double global = 1;
  bool integers = false;  // codes are integers, and may have zero points
  int bits = 8;           // of an integer

  double ScaleOf(int64_t element) const { return scale[static_cast<size_t>(group[static_cast<size_t>(element)])]; }
  // [rows, cols].
  oracle::Array Values() const;
};

// Parts of the value that NAME.codes (or NAME.q) and its fellows stand for. `parts` is NAME up to the dot:
// "layers.0.mlp.down_proj.weight." or "layers.0.mlp.act."; the codes are NAME.q when `activation`. kBadInput: parts
// missing, shapes that do not fit, or a format that is not known.
Result<DequantParts> TakeApart(const Subject& subject, const std::string& parts, bool activation,
                               const DequantVariant& variant = {});
// `value` [rows, cols] of these parts, under the result's shape, as an engine may round it: the scaled code, and the
// zero point before or behind the scale. docs/numerics.md, "Each operation", dequantisation.
oracle::Computed Decoded(const oracle::Array& value, const DequantParts& parts, const std::vector<int64_t>& shape);
// The value itself: [rows, columns].
Result<oracle::Array> Dequantise(const Subject& subject, const std::string& parts, bool activation,
                                 const DequantVariant& variant = {});
bool HasCodes(const Subject& subject, const std::string& parts, bool activation);

}  // namespace assay::op
