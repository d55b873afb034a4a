// Codes and scales of a recording as numbers, by the declared layout or by another one.
#pragma once

#include <string>

#include "check/op_common.h"

namespace assay::op {

// What a decoder may take otherwise than declared.
struct DequantVariant {
  bool other_scale_layout = false;  // linear where swizzled is declared, or the reverse
  bool high_nibble_first = false;
  double zero = 0;          // added to every code, in steps of the code's scale
  bool drop_signs = false;  // codebook
};

// The value that NAME.codes (or NAME.q) and its fellows stand for: [rows, columns]. `parts` is NAME up to the dot:
// "layers.0.mlp.down_proj.weight." or "layers.0.mlp.act." ; `codes` is "codes" or "q". kBadInput: parts missing, shapes
// that do not fit, or a format that is decoded from checkpoints alone.
Result<oracle::Array> Dequantise(const Subject& subject, const std::string& parts, bool activation,
                                 const DequantVariant& variant = {});
bool HasCodes(const Subject& subject, const std::string& parts, bool activation);

// Place of scale (m, k) in a swizzled buffer of tiles of 128 rows by 4 columns, `columns` the columns of the buffer.
int64_t SwizzledPlace(int64_t m, int64_t k, int64_t columns);

}  // namespace assay::op
