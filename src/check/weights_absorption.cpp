#include "check/weights_absorption.h"

#include <cmath>

#include "check/weights_slab.h"
#include "tensor/decode.h"

namespace assay {
namespace {

// kv_b_proj as heads of dn key rows and dv value rows over c latent columns.
// MLA's absorbed form (DeepSeek-V2, section 2.1.2): W_UK goes into the query and W_UV behind the attention, so that
// the cache holds latents alone. Both are slices of kv_b_proj [H (dn + dv), c].
struct Heads {
  int64_t count = 0, dn = 0, dv = 0, c = 0;
  std::vector<double> values;  // [count, dn + dv, c]

  double at(bool key, int64_t head, int64_t row, int64_t column) const {
    return values[static_cast<size_t>((head * (dn + dv) + (key ? 0 : dn) + row) * c + column)];
  }
};

// Heads of memory: element (head, row, column) whichever inner axis is which.
struct Absorbed {
  const std::vector<double>& values;
  int64_t d, c;
  bool latent_first;  // [H, c, d]

  double at(int64_t head, int64_t row, int64_t column) const {
    const int64_t within = latent_first ? column * d + row : row * c + column;
    return values[static_cast<size_t>(head * d * c + within)];
  }
};

// Head h of memory is head h + shift of the checkpoint, its key or value half, times `factor`.
// H, dn, dv, c as above; n heads of this rank, the first being first_head of the checkpoint. Four roundings are allowed
// for an element: engines dequantise and transpose in the model's type.
bool Fits(const Heads& heads, const Absorbed& a, bool key, int64_t first_head, int64_t n, int64_t shift, double factor,
          double roundoff) {
  for (int64_t h = 0; h < n; ++h) {
    const int64_t from = first_head + (h + shift + n) % n;
    if (from >= heads.count) return false;
    for (int64_t r = 0; r < a.d; ++r) {
      for (int64_t k = 0; k < a.c; ++k) {
        const double want = factor * heads.at(key, from, r, k);
        if (!(std::fabs(a.at(h, r, k) - want) <= 4 * roundoff * std::fabs(want) + 0x1p-149)) return false;
      }
    }
  }
  return true;
}

}  // namespace

// These two exist in memory alone: no checkpoint has them.
bool IsAbsorbed(std::string_view name) { return name.ends_with("attn.W_UK_T") || name.ends_with("attn.W_UV"); }

void CheckAbsorption(const WeightSource& source, const WeightIndex& index, const MemoryTensor& t, double roundoff,
                     MemoryCheck* check, std::vector<WeightFinding>* found) {
  const bool key = t.name.ends_with("W_UK_T");
  const std::string name = t.name.substr(0, t.name.find("attn.") + 5) + "kv_b_proj.weight";
  const auto at = index.find(name);
  if (at == index.end()) {
    check->note = "the checkpoint has no " + name;
    return;
  }
  const Weight& weight = *at->second;
  check->checkpoint = weight.name();
  Heads heads;
  heads.c = weight.cols();
  heads.dn = ConfigInt(source, "qk_nope_head_dim", 0);
  heads.dv = ConfigInt(source, "v_head_dim", 0);
  const auto& shape = t.event.shape;
  // Bounded before they are added: a configuration may be forged.
  const bool plausible = heads.dn > 0 && heads.dv > 0 && heads.dn <= weight.rows() && heads.dv <= weight.rows();
  if (shape.size() != 3 || !plausible || weight.rows() % (heads.dn + heads.dv) != 0) {
    check->note = shape.size() != 3
                      ? "shape " + ShapeText(shape) + ": heads and two inner axes are expected"
                      : "the configuration lacks qk_nope_head_dim and v_head_dim, or they do not fit " + weight.name();
    return;
  }
  heads.count = weight.rows() / (heads.dn + heads.dv);
  const int64_t n = shape[0], d = key ? heads.dn : heads.dv;
  // Both inner orders are in use: W_UK_T [H, c, dn] or [H, dn, c] by the batched product that reads it.
  const bool rows_first = shape[1] == d && shape[2] == heads.c, latent_first = shape[1] == heads.c && shape[2] == d;
  const int64_t first_head = t.event.shard.count > 1 ? t.event.shard.index * n : 0;
  if ((!rows_first && !latent_first) || first_head < 0 || n > heads.count - first_head) {
    check->note = "shape " + ShapeText(shape) + " does not fit " + std::to_string(heads.count) + " heads of " +
                  std::to_string(d) + " x " + std::to_string(heads.c);
    return;
  }
  heads.values.resize(static_cast<size_t>(weight.rows() * weight.cols()));
  weight.Decode(0, weight.rows(), heads.values.data());
  std::vector<double> values(static_cast<size_t>(n * d * heads.c));
  DecodeTo(t.data, 0, static_cast<int64_t>(values.size()), t.event.dtype, values.data());

  // Square inner axes: "H c dn" and "H dv c" say which is which; left unsaid, either will do.
  const bool square = d == heads.c, said = t.axes.find(" c ") != std::string::npos || t.axes.ends_with(" c");
  std::vector<bool> orders;
  if (!square || said) {
    orders = {square ? t.axes.find(" c ") != std::string::npos : latent_first};
  } else {
    orders = {true, false};
  }
  for (const bool order : orders) {
    if (Fits(heads, {values, d, heads.c, order}, key, first_head, n, 0, 1, roundoff)) return;
  }
  check->different = values.size();
  const Absorbed a{values, d, heads.c, orders.front()};
  WeightExplanation why;
  // From here on causes, the simplest first: heads moved, another rank's heads, the other half, a transposition, a
  // factor.
  for (int64_t shift = 1; shift < n && why.cls.empty(); ++shift) {
    if (Fits(heads, a, key, first_head, n, shift, 1, roundoff)) {
      why = Explained(fault_class::kTpShard, Constant{static_cast<double>(shift), "heads that it is shifted by"},
                      {"each head holds that of another head"});
    }
  }
  if (why.cls.empty() && n < heads.count) {
    for (int64_t first = 0; first + n <= heads.count && why.cls.empty(); first += n) {
      if (first != first_head && Fits(heads, a, key, first, n, 0, 1, roundoff)) {
        why = Explained(
            fault_class::kTpShard, {},
            {"it holds heads " + NumberText(first) + " to " + NumberText(first + n - 1) + ", those of another rank"});
      }
    }
  }
  if (why.cls.empty() && heads.dn == heads.dv && Fits(heads, a, !key, first_head, n, 0, 1, roundoff)) {
    why = Explained(fault_class::kLoad, {}, {"it holds the other half of kv_b_proj: key and value rows are exchanged"});
  }
  if (why.cls.empty() && square &&
      Fits(heads, {values, d, heads.c, !orders.front()}, key, first_head, n, 0, 1, roundoff)) {
    why = Explained(fault_class::kLoad, {}, {"each head is transposed"});
  }
  if (why.cls.empty()) {
    // The ratio is taken at the largest element, where rounding matters least, and then has to hold everywhere.
    double top = 0, ratio = 0, ab = 0, aa = 0, bb = 0;
    for (int64_t h = 0; h < n; ++h) {
      for (int64_t r = 0; r < d; ++r) {
        for (int64_t k = 0; k < heads.c; ++k) {
          const double want = heads.at(key, first_head + h, r, k), have = a.at(h, r, k);
          ab += want * have, aa += have * have, bb += want * want;
          if (std::fabs(want) > top) top = std::fabs(want), ratio = have / want;
        }
      }
    }
    if (ratio != 0 && std::isfinite(ratio) && Fits(heads, a, key, first_head, n, 0, ratio, roundoff)) {
      why = Explained(weight.quantised() ? fault_class::kQScale : fault_class::kScale,
                      Constant{ratio, "weight used / expected"},
                      {"all elements are " + NumberText(ratio) + " times those of kv_b_proj"});
    } else {
      why = Explained(fault_class::kLoad, {},
                      {"no explanation fits; cosine with kv_b_proj " + NumberText(ab / std::sqrt(aa * bb))}, 0.7);
    }
  }
  FirstBad bad = WeightBad(t.name, why.cls, "weights: absorption", why.confidence, std::move(why.evidence));
  bad.constant = why.constant.meaning;
  bad.constant_value = why.constant.value;
  bad.ranks = {t.event.rank};
  bad.bound = 4 * roundoff;
  bad.bound_basis = "four roundings of each element to the type in memory";
  found->push_back({t.sequence, std::move(bad)});
}

}  // namespace assay
