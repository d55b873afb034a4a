#include "check/op_dequant.h"

#include <algorithm>
#include <cmath>

namespace assay::op {
namespace {

using oracle::Array;

constexpr double kE2m1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

TensorPtr Part(const Subject& s, const std::string& name, bool activation) {
  return activation ? s.Beside(name) : s.Weight(name);
}

}  // namespace

int64_t SwizzledPlace(int64_t m, int64_t k, int64_t columns) {
  return (m / 128 * ((columns + 3) / 4) + k / 4) * 512 + m % 32 * 16 + m % 128 / 32 * 4 + k % 4;
}

bool HasCodes(const Subject& s, const std::string& parts, bool activation) {
  return Part(s, parts + (activation ? "q" : "codes"), activation) != nullptr;
}

Result<Array> Dequantise(const Subject& s, const std::string& parts, bool activation, const DequantVariant& variant) {
  const TensorPtr code = Part(s, parts + (activation ? "q" : "codes"), activation);
  const TensorPtr scale = Part(s, parts + (activation ? "q_scale" : "scale"), activation);
  if (code == nullptr || scale == nullptr)
    return Status::BadInput(parts + (activation ? "q and q_scale" : "codes and scale") +
                            " were not recorded as payload");
  const auto text = [&](const Tensor& t, std::string_view key, std::string otherwise) {
    return Capture::OwnText(*t.info, key).value_or(std::move(otherwise));
  };
  const std::string quant = text(*code, "quant", "");
  const int64_t rows = code->n_rows();
  const auto number = [&](std::string_view key, int64_t otherwise) {
    return s.capture().Integer(*code->info, key).value_or(otherwise);
  };
  Array out;
  int64_t group = number("group_size", quant == "nvfp4" ? 16 : quant == "mxfp4" ? 32 : 0);
  if (quant == "nvfp4" || quant == "mxfp4") {
    const bool packed = number("packed", 1) != 0 && code->info->event.dtype != DType::kF4E2M1;
    const bool decoded = code->info->event.dtype == DType::kF4E2M1;
    const int64_t columns = code->row_size() * (packed ? 2 : 1);
    out = Array::Filled({rows, columns});
    for (int64_t r = 0; r < rows; ++r) {
      const auto row = code->row(r);
      for (int64_t c = 0; c < columns; ++c) {
        if (decoded) {
          out[r * columns + c] = row[static_cast<size_t>(c)];
          continue;
        }
        auto bits = static_cast<uint32_t>(row[static_cast<size_t>(packed ? c / 2 : c)]);
        if (packed) bits = ((c % 2 == 0) != variant.high_nibble_first ? bits : bits >> 4) & 15;
        out[r * columns + c] = (bits & 8 ? -1 : 1) * kE2m1[bits & 7];
      }
    }
  } else if (quant == "codebook") {
    const TensorPtr book = Part(s, parts + "codebook", activation), signs = Part(s, parts + "signs", activation);
    if (book == nullptr) return Status::BadInput(parts + "codebook was not recorded as payload");
    const int64_t length = book->row_size(), columns = code->row_size() * length;
    if (signs != nullptr && signs->n() != rows * columns) return Status::BadInput(parts + "signs has another shape");
    out = Array::Filled({rows, columns});
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) {
        const auto index = static_cast<int64_t>(code->row(r)[static_cast<size_t>(c / length)]);
        if (index < 0 || index >= book->n_rows()) return Status::BadInput(parts + "codes leads beyond the codebook");
        double x = book->row(index)[static_cast<size_t>(c % length)];
        if (signs != nullptr && !variant.drop_signs && signs->values[static_cast<size_t>(r * columns + c)] != 0) x = -x;
        out[r * columns + c] = x;
      }
    }
  } else if (quant.starts_with("fp8") || quant.starts_with("int8")) {
    out = ToArray({rows, code->row_size()}, code->values);
    if (const TensorPtr zero = Part(s, parts + "zero", activation); zero != nullptr && zero->n() > 0) {
      for (int64_t i = 0; i < out.size(); ++i) {
        out[i] -= zero->values[static_cast<size_t>(zero->n() == 1 ? 0 : std::min(i / out.cols(), zero->n() - 1))];
      }
    }
  } else {
    return Status::BadInput(parts + "codes: quant=" + quant +
                            " is decoded from checkpoints alone: use `assay weights`");
  }
  for (double& x : out.values) x += variant.zero;

  // The scales: one, one a row, or a grid of groups or blocks.
  const int64_t columns = out.cols();
  const int64_t grid_columns = scale->shape.size() < 2 ? (scale->n() == rows ? 1 : scale->n()) : scale->row_size();
  const int64_t grid_rows = scale->n() / std::max<int64_t>(grid_columns, 1);
  const bool swizzled = (text(*scale, "scale_layout", "linear") == "swizzle_128x4") != variant.other_scale_layout;
  const bool one = scale->n() == 1;
  int64_t block_rows = 1, block_columns = columns;
  if (!one) {
    if (group <= 0) group = (columns + grid_columns - 1) / grid_columns;
    block_columns = grid_columns == 1 ? columns : group;
    if (quant == "fp8_block")
      block_rows = std::max<int64_t>(group, 1);
    else if (grid_rows < rows)
      block_rows = (rows + grid_rows - 1) / grid_rows;
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      int64_t at = 0;
      if (!one) {
        const int64_t m = r / block_rows, k = c / block_columns;
        at = swizzled ? SwizzledPlace(m, k, grid_columns) : m * grid_columns + k;
      }
      if (at >= scale->n()) return Status::BadInput(scale->info->name + " has too few scales");
      double by = scale->values[static_cast<size_t>(at)];
      if (quant == "mxfp4" && scale->info->event.dtype == DType::kU8) by = std::exp2(by - 127);
      out[r * columns + c] *= by;
    }
  }
  if (const TensorPtr global = Part(s, parts + "global_scale", activation); global != nullptr && global->n() == 1) {
    for (double& x : out.values) x *= global->values[0];
  }
  return out;
}

}  // namespace assay::op
