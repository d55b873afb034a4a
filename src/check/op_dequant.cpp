#include "check/op_dequant.h"

#include <algorithm>
#include <cmath>

#include "check/helpers.h"
#include "quant/misreading.h"
#include "quant/weight.h"

namespace assay::op {
namespace {

using oracle::Array;

// Magnitudes of e2m1 by their three bits.
constexpr float kE2m1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

// Codes of an activation belong to the step, those of a weight to the load.
TensorPtr Part(const Subject& s, const std::string& name, bool activation) {
  return activation ? s.Beside(name) : s.Weight(name);
}

// Matrix `slice` of a weight's part that holds one for each of `of` matrices; the part itself where it is no such one.
TensorPtr SliceOf(const TensorPtr& all, int64_t slice, int64_t of) {
  if (all == nullptr || slice < 0 || all->n_rows() != of || all->shape.empty() || slice >= of) return all;
  auto one = std::make_shared<Tensor>();
  one->info = all->info;
  one->shape.assign(all->shape.begin() + 1, all->shape.end());
  if (one->shape.empty()) one->shape = {1};
  const auto row = all->row(slice);
  one->values.assign(row.begin(), row.end());
  const size_t bytes = all->bytes.size() / static_cast<size_t>(of);
  one->bytes = all->bytes.subspan(bytes * static_cast<size_t>(slice), bytes);
  return one;
}

// Of the event alone: what the process declares holds for the model, not for one tensor's codes.
std::string OwnOr(const Tensor& t, std::string_view key, std::string otherwise) {
  return Capture::OwnText(*t.info, key).value_or(std::move(otherwise));
}

// Words that hold several codes each, rather than one code in four bytes.
bool AreWords(const Tensor& code) {
  return BitsOf(code.info->event.dtype) == 32 &&
         std::any_of(code.values.begin(), code.values.end(), [](double x) { return x < 0 || x > 255; });
}

bool IsGrouped(const std::string& quant) { return quant.starts_with("gptq") || quant == "awq"; }

// Four-bit floats: one a value, or two a byte.
void DecodeFp4(const Tensor& code, bool packed, bool high_nibble_first, DequantParts* out) {
  const bool decoded = code.info->event.dtype == DType::kF4E2M1;
  packed = packed && !decoded;
  out->cols = code.row_size() * (packed ? 2 : 1);
  out->bits = 4;
  for (int64_t r = 0; r < out->rows; ++r) {
    const auto row = code.row(r);
    for (int64_t c = 0; c < out->cols; ++c) {
      if (decoded) {
        out->code.push_back(static_cast<float>(row[static_cast<size_t>(c)]));
        continue;
      }
      auto bits = static_cast<uint32_t>(check::IntegerOf(row[static_cast<size_t>(packed ? c / 2 : c)]));
      if (packed) bits = ((c % 2 == 0) != high_nibble_first ? bits : bits >> 4) & 15;
      out->code.push_back(bits & 8 ? -kE2m1[bits & 7] : kE2m1[bits & 7]);
    }
  }
}

// Each code names a vector of `length` values of the book; signs, where recorded, flip elements one by one.
Status DecodeCodebook(const Subject& s, const std::string& parts, bool activation, const Tensor& code,
                      const DequantVariant& variant, DequantParts* out) {
  const TensorPtr book = Part(s, parts + "codebook", activation), signs = Part(s, parts + "signs", activation);
  if (book == nullptr) return Status::BadInput(parts + "codebook was not recorded as payload");
  const int64_t length = book->shape.size() < 2 ? 1 : book->row_size();
  // Vectors of 4 to 16 values are in use; each code of a small file would stand for as many as its book says.
  constexpr int64_t kLongestVector = 256;
  if (length > kLongestVector)
    return Status::BadInput(parts + "codebook has vectors of " + std::to_string(length) + " values, at most " +
                            std::to_string(kLongestVector) + " are read");
  out->cols = code.row_size() * length;
  if (signs != nullptr && signs->n() != out->rows * out->cols)
    return Status::BadInput(parts + "signs has another shape than the codes stand for");
  for (int64_t r = 0; r < out->rows; ++r) {
    for (int64_t c = 0; c < out->cols; ++c) {
      int64_t index = check::IntegerOf(code.row(r)[static_cast<size_t>(c / length)]);
      if (variant.entries > 0 && index > 0) index %= variant.entries;
      if (index < 0 || index >= book->n_rows()) return Status::BadInput(parts + "codes leads beyond the codebook");
      auto x = static_cast<float>(book->row(index)[static_cast<size_t>(c % length)]);
      if (signs != nullptr && !variant.drop_signs && signs->values[static_cast<size_t>(r * out->cols + c)] != 0) x = -x;
      out->code.push_back(x);
    }
  }
  return {};
}

// Borrows the tensor's bytes: it must outlive the result.
CheckpointTensor Stored(const Tensor& tensor) {
  CheckpointTensor stored;
  stored.name = tensor.info->name;
  stored.dtype = tensor.info->event.dtype;
  stored.shape = tensor.shape;
  stored.data = tensor.bytes.data();
  stored.size_bytes = tensor.bytes.size();
  stored.file = "trace";
  return stored;
}

// A list of groups that is the order of the columns (checkpoints carry one in any case) leaves the blocks it describes.
void ForgetTrivialOrder(DequantParts* out) {
  const int64_t size = (out->cols + out->grid_cols - 1) / std::max<int64_t>(out->grid_cols, 1);
  for (int64_t c = 0; c < out->cols; ++c) {
    if (out->group[static_cast<size_t>(c)] != c / size) return;
  }
  out->block_cols = size;
}

// Words of 32 bits as checkpoints of GPTQ and AWQ hold them: decoded by the reader of such files.
Status DecodeWords(const Subject& s, const std::string& parts, const Tensor& code, const Tensor& scale,
                   const TensorPtr& zero, const TensorPtr& order, DequantParts* out) {
  const CheckpointTensor words = Stored(code), scales = Stored(scale);
  CheckpointTensor zeros, group;
  PackedIntTensors tensors;
  tensors.code = &words;
  tensors.scale = &scales;
  if (zero != nullptr) tensors.zero = &(zeros = Stored(*zero));
  if (order != nullptr) tensors.g_idx = &(group = Stored(*order));
  out->bits = static_cast<int>(s.capture().Integer(*code.info, "bits").value_or(4));
  const IntPacking packing = out->quant == "awq"    ? IntPacking::kAwq
                             : out->quant == "gptq" ? IntPacking::kGptq
                                                    : IntPacking::kGptqV2;
  ASSAY_ASSIGN_OR_RETURN(const WeightPtr weight, MakePackedIntWeight(parts, packing, out->bits, tensors));
  out->rows = weight->rows();
  out->cols = weight->cols();
  out->integers = true;
  out->grid_rows = out->rows;
  out->grid_cols = std::max<int64_t>(scale.n() / std::max<int64_t>(out->rows, 1), 1);
  out->block_cols = order != nullptr ? 0 : weight->block_cols();
  out->scale.assign(static_cast<size_t>(out->grid_rows * out->grid_cols), 0);
  WeightParts row;
  for (int64_t r = 0; r < out->rows; ++r) {
    weight->Parts(r, &row);
    for (size_t c = 0; c < row.code.size(); ++c) {
      const int64_t at = r * out->grid_cols + row.group[c];
      out->code.push_back(static_cast<float>(row.code[c]));
      out->zero.push_back(static_cast<float>(row.zero[c]));
      out->group.push_back(static_cast<int32_t>(at));
      out->scale[static_cast<size_t>(at)] = row.scale[c];
    }
  }
  if (order != nullptr) ForgetTrivialOrder(out);
  return {};
}

// Integers, one a value or two four-bit ones a byte.
void DecodeIntegers(const Tensor& code, bool packed, bool high_nibble_first, DequantParts* out) {
  out->integers = true;
  out->cols = code.row_size() * (packed ? 2 : 1);
  for (int64_t r = 0; r < out->rows; ++r) {
    const auto row = code.row(r);
    for (int64_t c = 0; c < out->cols; ++c) {
      auto x = static_cast<float>(row[static_cast<size_t>(packed ? c / 2 : c)]);
      if (packed) {
        const auto bits = static_cast<uint32_t>(check::IntegerOf(double{x}));
        x = static_cast<float>(((c % 2 == 0) != high_nibble_first ? bits : bits >> 4) & 15);
      }
      out->code.push_back(x);
    }
  }
}

// The scale of each element: one, one a row, or a grid of groups or blocks. order: the group of each column where a
// list gives it, else null.
Status PlaceScales(const Tensor& scale, int64_t group, const Tensor* order, bool swizzled, DequantParts* out) {
  const int64_t rows = out->rows, columns = out->cols, n = scale.n();
  out->grid_cols = scale.shape.size() < 2 ? (n == rows ? 1 : n) : scale.row_size();
  out->grid_rows = n / std::max<int64_t>(out->grid_cols, 1);
  out->block_rows = 1;
  out->block_cols = columns;
  if (n == 1) {
    out->block_rows = rows;
  } else {
    if (group <= 0) group = (columns + out->grid_cols - 1) / std::max<int64_t>(out->grid_cols, 1);
    group = std::clamp<int64_t>(group, 1, std::max({rows, columns, int64_t{1}}));  // of the file's word sums are formed
    out->block_cols = out->grid_cols == 1 ? columns : group;
    // As many rows of scales as the matrix has: one for each group of a row, whatever the format is called.
    if (out->quant == "fp8_block" && out->grid_rows < rows)
      out->block_rows = std::max<int64_t>(group, 1);
    else if (out->grid_rows < rows)
      out->block_rows = (rows + out->grid_rows - 1) / std::max<int64_t>(out->grid_rows, 1);
  }
  for (double x : scale.values) {
    // e8m0 recorded as plain bytes: the byte is the exponent, biased by 127.
    const bool exponent = out->quant == "mxfp4" && scale.info->event.dtype == DType::kU8;
    out->scale.push_back(exponent ? std::exp2(x - 127) : x);
  }
  if (order != nullptr) {
    if (order->n() != columns) return Status::BadInput(order->info->name + " is not one group for each column");
    out->block_cols = 0;
    for (double g : order->values) {
      if (!(g >= 0 && g < static_cast<double>(out->grid_cols)))
        return Status::BadInput(order->info->name + " names a group that has no scale");
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t m = r / out->block_rows;
      const int64_t k = order != nullptr ? check::IntegerOf(order->values[static_cast<size_t>(c)])
                                         : c / std::max<int64_t>(out->block_cols, 1);
      const int64_t at = n == 1 ? 0 : swizzled ? SwizzledPlace(m, k, out->grid_cols) : m * out->grid_cols + k;
      if (at >= n) return Status::BadInput(scale.info->name + " has too few scales");
      out->group.push_back(static_cast<int32_t>(at));
    }
  }
  if (order != nullptr) ForgetTrivialOrder(out);
  return {};
}

// Zero points: one, one a row, or one a scale.
Status PlaceZeros(const Tensor& zero, DequantParts* out) {
  const auto n = static_cast<size_t>(zero.n());
  if (n == 0) return {};
  const bool of_scales = n == out->scale.size() && zero.n() != out->rows;
  if (n != 1 && !of_scales && zero.n() != out->rows)
    return Status::BadInput(zero.info->name + " has neither one zero point a row nor one a scale");
  // GPTQ stores it less 1.
  const double more = out->quant == "gptq" ? 1 : 0;
  for (size_t i = 0; i < out->code.size(); ++i) {
    const size_t row = i / static_cast<size_t>(std::max<int64_t>(out->cols, 1));
    const double own = zero.values[n == 1 ? 0 : of_scales ? static_cast<size_t>(out->group[i]) : row];
    out->zero.push_back(static_cast<float>(own + more));
  }
  return {};
}

}  // namespace

Array DequantParts::Values() const {
  Array out = Array::Filled({rows, cols});
  for (size_t i = 0; i < code.size(); ++i) {
    out.values[i] = (double{code[i]} - (zero.empty() ? 0 : double{zero[i]})) * scale[static_cast<size_t>(group[i])];
    if (global != 1) out.values[i] *= global;
  }
  return out;
}

bool HasCodes(const Subject& s, const std::string& parts, bool activation) {
  return Part(s, parts + (activation ? "q" : "codes"), activation) != nullptr;
}

// `parts` is the prefix of the names: "NAME." with codes, scale, zero, global_scale behind it. kBadInput names what was
// not recorded or does not fit.
Result<DequantParts> TakeApart(const Subject& s, const std::string& parts, bool activation,
                               const DequantVariant& variant) {
  TensorPtr code = Part(s, parts + (activation ? "q" : "codes"), activation);
  const int64_t matrices = code != nullptr && code->shape.size() == 3 ? code->shape[0] : -1;
  const auto slice = [&](const TensorPtr& all) { return SliceOf(all, variant.slice, matrices); };
  code = slice(code);
  const TensorPtr scale = slice(Part(s, parts + (activation ? "q_scale" : "scale"), activation));
  if (code == nullptr || scale == nullptr)
    return Status::BadInput(parts + (activation ? "q and q_scale" : "codes and scale") +
                            " were not recorded as payload");
  DequantParts out;
  out.quant = OwnOr(*code, "quant", "");
  out.rows = code->n_rows();
  const auto number = [&](std::string_view key, int64_t otherwise) {
    return s.capture().Integer(*code->info, key).value_or(otherwise);
  };
  const std::string& quant = out.quant;
  const int64_t group = number("group_size", quant == "nvfp4" ? 16 : quant == "mxfp4" ? 32 : 0);
  const DType dtype = code->info->event.dtype;
  if (quant == "nvfp4" || quant == "mxfp4") {
    DecodeFp4(*code, number("packed", 1) != 0, variant.high_nibble_first, &out);
  } else if (quant == "codebook") {
    ASSAY_RETURN_IF_ERROR(DecodeCodebook(s, parts, activation, *code, variant, &out));
  } else if (IsGrouped(quant) && !activation && number("packed", AreWords(*code)) != 0 && BitsOf(dtype) == 32) {
    const TensorPtr zero = slice(s.Weight(parts + "zero")), order = slice(s.Weight(parts + "g_idx"));
    ASSAY_RETURN_IF_ERROR(DecodeWords(s, parts, *code, *scale, zero, order, &out));
    for (float& x : out.code) x += static_cast<float>(variant.zero);
    return out;
  } else if (IsGrouped(quant) || quant.starts_with("fp8") || quant.starts_with("int8") || quant.starts_with("int4")) {
    const bool four = IsGrouped(quant) || quant.starts_with("int4");
    // Two codes a byte where the grid of scales is as wide as that.
    const int64_t grid = scale->shape.size() < 2 ? 1 : scale->row_size();
    // The grid of scales tells the true width: two codes a byte double the columns.
    const bool halved = four && dtype == DType::kU8 && group > 0 && grid * group == 2 * code->row_size();
    if (four) out.bits = static_cast<int>(number("bits", 4));
    DecodeIntegers(*code, four && number("packed", halved ? 1 : 0) != 0, variant.high_nibble_first, &out);
    out.integers = !quant.starts_with("fp8");
  } else {
    return Status::BadInput(parts + "codes: quant=" + quant + " is not a format of codes with scales");
  }
  if (variant.zero != 0) {  // a sum with 0 would take the sign of a zero, which is a code of its own
    for (float& x : out.code) x += static_cast<float>(variant.zero);
  }
  // Act-order of GPTQ: also beside codes that are no words.
  const TensorPtr order = activation || !out.integers ? nullptr : slice(s.Weight(parts + "g_idx"));
  const bool swizzled = (OwnOr(*scale, "scale_layout", "linear") == "swizzle_128x4") != variant.other_scale_layout;
  ASSAY_RETURN_IF_ERROR(PlaceScales(*scale, group, order.get(), swizzled, &out));
  if (quant.starts_with("fp8") || out.integers) {
    if (const TensorPtr zero = slice(Part(s, parts + "zero", activation)))
      ASSAY_RETURN_IF_ERROR(PlaceZeros(*zero, &out));
  }
  if (const TensorPtr global = slice(Part(s, parts + "global_scale", activation));
      global != nullptr && global->n() == 1)
    out.global = global->values[0];
  return out;
}

// k: two products of code, scale and global scale, and the sum of a zero point that was scaled apart.
oracle::Computed Decoded(const Array& value, const DequantParts& parts, const std::vector<int64_t>& shape) {
  oracle::Computed y;
  y.value = y.scale = value;
  for (int64_t i = 0; i < value.size(); ++i) {
    const double zero = parts.zero.empty() ? 0 : double{parts.zero[static_cast<size_t>(i)]};
    y.scale[i] = std::abs(value[i]) + std::abs(zero * parts.ScaleOf(i) * parts.global);
  }
  y.value.shape = y.scale.shape = shape;
  y.k = 3;
  return y;
}

Result<Array> Dequantise(const Subject& s, const std::string& parts, bool activation, const DequantVariant& variant) {
  ASSAY_ASSIGN_OR_RETURN(const DequantParts apart, TakeApart(s, parts, activation, variant));
  return apart.Values();
}

}  // namespace assay::op
