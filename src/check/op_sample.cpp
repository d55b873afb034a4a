#include "check/op_sample.h"

#include <algorithm>
#include <memory>

#include "base/hash.h"
#include "oracle/linear.h"

namespace assay::op {

using oracle::Array;

// One row of each of `most` equal stretches: stratified, so that no stretch of the batch (a request, the tail) is left
// out, and random within it, so that no stride of the data falls in step with the sample.
std::vector<int64_t> SampleRows(std::span<const char> judged, int64_t most) {
  std::vector<int64_t> all;
  for (size_t r = 0; r < judged.size(); ++r) {
    if (judged[r]) all.push_back(static_cast<int64_t>(r));
  }
  const auto n = static_cast<int64_t>(all.size());
  if (n <= most) return all;
  std::vector<int64_t> rows;
  SplitMix64 random(kSampleSeed);
  for (int64_t i = 0; i < most; ++i) {
    const int64_t begin = i * n / most, end = (i + 1) * n / most;
    const auto step = static_cast<int64_t>(random.NextDouble() * static_cast<double>(end - begin));
    rows.push_back(all[static_cast<size_t>(begin + step)]);
  }
  return rows;
}

std::string SampleText(size_t sampled, std::span<const char> judged) {
  const auto n = std::count_if(judged.begin(), judged.end(), [](char c) { return c != 0; });
  return std::to_string(sampled) + " of " + std::to_string(n) + " rows (seed " + std::to_string(kSampleSeed) + ")";
}

std::vector<int64_t> SomeOf(const std::vector<int64_t>& rows, int64_t most) {
  const auto n = static_cast<int64_t>(rows.size());
  if (n <= most) return rows;
  std::vector<int64_t> some;
  for (int64_t i = 0; i < most; ++i) some.push_back(rows[static_cast<size_t>(i * n / most)]);
  return some;
}

TensorPtr TakeTensorRows(const Tensor& tensor, std::span<const int64_t> rows) {
  auto part = std::make_shared<Tensor>();
  part->info = tensor.info;
  part->shape = tensor.shape;
  part->shape[0] = static_cast<int64_t>(rows.size());
  part->sampled = tensor.sampled;
  for (int64_t r : rows) {
    const auto at = static_cast<size_t>(r);
    part->values.insert(part->values.end(), tensor.row(r).begin(), tensor.row(r).end());
    if (at < tensor.rows.size()) part->rows.push_back(tensor.rows[at]);
    if (at < tensor.row_numbers.size()) part->row_numbers.push_back(tensor.row_numbers[at]);
  }
  return part;
}

// Freivalds' check (1977) on real numbers: a random combination of the columns of y against that of w, at the cost of
// one column a row instead of the whole product.
std::vector<int64_t> WrongByProjection(const Subject& s, const Array& x, const Array& w, const Array& bias) {
  std::vector<int64_t> wrong;
  const auto n_rows = static_cast<int64_t>(s.judged().size());
  if (n_rows == 0 || x.rows() != n_rows || s.actual().size() != n_rows * w.rows()) return wrong;
  const Array y{{n_rows, w.rows()}, s.actual().values};
  const auto checks = oracle::CheckLinear(x, w, bias, y, s.precision(), kSampleSeed);
  if (!checks.ok()) return wrong;
  for (int64_t r = 0; r < n_rows; ++r) {
    const oracle::RowCheck& check = (*checks)[static_cast<size_t>(r)];
    if (s.judged()[static_cast<size_t>(r)] && !(check.largest <= check.bound)) wrong.push_back(r);
  }
  return wrong;
}

}  // namespace assay::op
