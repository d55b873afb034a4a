#include "check/op_fused_order.h"

#include <array>
#include <string>
#include <vector>

#include "check/op_fitted.h"
#include "check/op_row_shards.h"
#include "oracle/embedding.h"
#include "oracle/linear.h"

namespace assay::op {
namespace {

using oracle::Array;

std::optional<Explanation> Try(const Subject& s, const Layer& layer, const oracle::Computed& right, const Array& w,
                               const Array& bias, const Explanation& why) {
  if (w.values == layer.w.values || !ProductMayFit(s, layer.x, 0, w, 0, bias)) return std::nullopt;
  const auto y = oracle::Linear(layer.x, w, bias);
  if (!FitsBetter(s, right, y)) return std::nullopt;
  return Weighed(s, right, *y, why);
}

// Queries, keys and values one behind the other, in units of heads of d rows.
struct Joined {
  Array w, bias;                      // bias: no values where there is none
  int64_t d = 0;                      // rows of a head
  std::array<int64_t, 3> heads = {};  // of q, k, v
};

constexpr std::string_view kParts[] = {"q_proj", "k_proj", "v_proj"};

// Out of the fused weight by its declared parts, or of the three that were recorded apart.
std::optional<Joined> Join(const Subject& s, const Layer& layer, const LinearSite& site, int64_t head_size) {
  Joined joined;
  joined.d = head_size;
  if (joined.d <= 0) return std::nullopt;
  const std::string fused = s.Sibling(site.fused);
  const bool of_fused = layer.weight == fused + ".weight";
  const TensorPtr stored = of_fused ? s.Weight(layer.weight) : nullptr,
                  codes = of_fused ? s.Weight(layer.weight + ".codes") : nullptr;
  for (size_t i = 0; i < 3; ++i) {
    Array part, bias;
    if (of_fused) {
      const TensorPtr& declared = stored != nullptr ? stored : codes;
      int64_t begin = 0, end = 0;
      if (declared == nullptr || !PartRows(*declared->info, layer.whole.rows(), kParts[i], &begin, &end))
        return std::nullopt;
      auto rows = RowsOf(layer.whole, begin, end - begin);
      if (!rows.ok()) return std::nullopt;
      part = *rows;
      if (const TensorPtr b = s.Weight(fused + ".bias"); b != nullptr && b->n() == layer.whole.rows())
        bias.values.assign(b->values.begin() + begin, b->values.begin() + end);
    } else {
      const std::string name = s.Sibling("attn." + std::string(kParts[i]));
      const TensorPtr w = s.Weight(name + ".weight"), b = s.Weight(name + ".bias");
      if (w == nullptr || w->row_size() != layer.x.cols()) return std::nullopt;
      part = {{w->n_rows(), w->row_size()}, w->values};
      if (b != nullptr) bias.values = b->values;
    }
    if (part.rows() % joined.d != 0) return std::nullopt;
    joined.heads[i] = part.rows() / joined.d;
    joined.w.values.insert(joined.w.values.end(), part.values.begin(), part.values.end());
    joined.bias.values.insert(joined.bias.values.end(), bias.values.begin(), bias.values.end());
  }
  const auto& [q, k, v] = joined.heads;
  joined.w.shape = {(q + k + v) * joined.d, layer.x.cols()};
  if (joined.bias.size() != joined.w.rows()) joined.bias.values.clear();
  joined.bias.shape = {joined.bias.size()};
  return joined;
}

// Where head `place` of the memory in groups lies in the concatenated one: each of m groups holds its queries, then its
// keys, then its values.
int64_t Concatenated(const std::array<int64_t, 3>& heads, int64_t m, int64_t place) {
  const int64_t q = heads[0] / m, k = heads[1] / m, v = heads[2] / m;
  const int64_t group = place / (q + k + v), within = place % (q + k + v);
  if (within < q) return group * q + within;
  if (within < q + k) return heads[0] + group * k + within - q;
  return heads[0] + heads[1] + group * v + within - q - k;
}

std::optional<Explanation> OtherOrder(const Subject& s, const Layer& layer, const LinearSite& site, int64_t head_size,
                                      const oracle::Computed& right) {
  const auto joined = Join(s, layer, site, head_size);
  if (!joined) return std::nullopt;
  const auto& heads = joined->heads;
  const int64_t part = site.part == "q_proj" ? 0 : site.part == "k_proj" ? 1 : 2, d = joined->d;
  const int64_t first = (part > 0 ? heads[0] : 0) + (part > 1 ? heads[1] : 0), all = heads[0] + heads[1] + heads[2];
  if (heads[static_cast<size_t>(part)] * d != layer.w.rows()) return std::nullopt;
  std::vector<int64_t> concatenated(static_cast<size_t>(all)), grouped(static_cast<size_t>(all));
  for (int64_t m = 2; m <= heads[1]; ++m) {
    if (heads[0] % m != 0 || heads[1] % m != 0 || heads[2] % m != 0) continue;
    for (int64_t place = 0; place < all; ++place) {
      const int64_t from = Concatenated(heads, m, place);
      concatenated[static_cast<size_t>(place)] = from;
      grouped[static_cast<size_t>(from)] = place;
    }
    for (const bool as_groups : {true, false}) {
      std::vector<int64_t> rows;
      Array bias{{0}, {}};
      for (int64_t r = 0; r < layer.w.rows(); ++r) {
        const auto head = static_cast<size_t>(first + r / d);
        rows.push_back((as_groups ? grouped : concatenated)[head] * d + r % d);
        if (joined->bias.size() > 0) bias.values.push_back(joined->bias[rows.back()]);
      }
      bias.shape = {bias.size()};
      const auto w = oracle::TakeRows(joined->w, rows);
      if (!w.ok()) continue;
      const std::string size =
          "[" + std::to_string(m) + ", " + std::to_string(all / m) + ", " + std::to_string(d) + "]";
      if (auto why = Try(s, layer, right, *w, bias,
                         {fault_class::kLoad, as_groups ? "fits rows of queries, keys and values one behind the other "
                                                          "that were read as groups of heads, " +
                                                              size
                                                        : "fits rows of groups of heads, " + size +
                                                              ", that were read as queries, keys and values one "
                                                              "behind the other"}))
        return why;
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<Explanation> ExplainOtherRows(const Subject& s, const Layer& layer, const LinearSite& site,
                                            int64_t head_size, const oracle::Computed& right) {
  if (SearchedEnough(s)) return std::nullopt;
  if (site.fused == "attn.qkv_proj") {
    if (auto why = OtherOrder(s, layer, site, head_size, right)) return why;
  }
  Array whole = layer.whole;
  int64_t own = layer.first_row;
  const int64_t rows = layer.w.rows();
  const bool fused = !site.fused.empty() && layer.weight == s.Sibling(site.fused) + ".weight";
  if (!fused && whole.rows() <= rows) {
    const auto shards = StitchRows(s, layer.weight);
    if (!shards || shards->rows != rows || shards->whole.cols() != layer.x.cols()) return std::nullopt;
    whole = shards->whole;
    own = shards->first;
  }
  for (int64_t first = 0; first + rows <= whole.rows(); ++first) {
    // Looked at in place: rows are copied only where a few elements fit.
    if (first == own || !ProductMayFit(s, layer.x, 0, whole, first, layer.bias)) continue;
    const auto w = RowsOf(whole, first, rows);
    if (!w.ok()) continue;
    if (auto why = Try(s, layer, right, *w, layer.bias,
                       {fused ? fault_class::kLoad : fault_class::kTpShard,
                        "fits rows " + std::to_string(first) + " to " + std::to_string(first + rows - 1) +
                            (fused ? " of the fused weight, " : " of all ranks' rows, ") + std::to_string(own) +
                            " to " + std::to_string(own + rows - 1) + " are due"}))
      return why;
  }
  return std::nullopt;
}

}  // namespace assay::op
