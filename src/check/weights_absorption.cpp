#include "check/weights_absorption.h"

#include <algorithm>

#include "check/absorbed_heads.h"
#include "tensor/decode.h"

namespace assay {
namespace {

// Codes, zero points and scales of each element beside the values, groups numbered over bands of rows that share them.
void AddParts(const Weight& weight, KvHeads* heads) {
  WeightParts parts;
  const int64_t block_rows = std::max<int64_t>(weight.block_rows(), 1);
  for (int64_t r = 0; r < weight.rows(); ++r) {
    weight.Parts(r, &parts);
    for (size_t c = 0; c < static_cast<size_t>(heads->c); ++c) {
      heads->code.push_back(parts.code[c]);
      heads->zero.push_back(parts.zero[c]);
      heads->scale.push_back(parts.scale[c]);
      // A row has at most a group a column.
      heads->group.push_back(static_cast<int32_t>(r / block_rows * heads->c) + parts.group[c]);
    }
  }
}

}  // namespace

// These two exist in memory alone: no checkpoint has them.
bool IsAbsorbed(std::string_view name) { return name.ends_with("attn.W_UK_T") || name.ends_with("attn.W_UV"); }

void CheckAbsorption(const WeightSource& source, const WeightIndex& index, const MemoryTensor& t, double roundoff,
                     MemoryCheck* check, std::vector<WeightFinding>* found) {
  const std::string name = t.name.substr(0, t.name.find("attn.") + 5) + "kv_b_proj.weight";
  const auto at = index.find(name);
  if (at == index.end()) {
    check->note = "the checkpoint has no " + name;
    return;
  }
  const Weight& weight = *at->second;
  check->checkpoint = weight.name();
  KvHeads heads;
  heads.c = weight.cols();
  heads.dn = ConfigInt(source, "qk_nope_head_dim", 0);
  heads.dv = ConfigInt(source, "v_head_dim", 0);
  const auto& shape = t.event.shape;
  // Bounded before they are added: a configuration may be forged.
  const bool plausible = heads.dn > 0 && heads.dv > 0 && heads.dn <= weight.rows() && heads.dv <= weight.rows();
  if (shape.size() != 3 || !plausible || weight.rows() % heads.own() != 0) {
    check->note = shape.size() != 3
                      ? "shape " + ShapeText(shape) + ": heads and two inner axes are expected"
                      : "the configuration lacks qk_nope_head_dim and v_head_dim, or they do not fit " + weight.name();
    return;
  }
  heads.count = weight.rows() / heads.own();
  AbsorbedHeads absorbed{t.name, t.axes, shape, {}, 0, roundoff};
  if (t.event.shard.count > 1) absorbed.first_head = t.event.shard.index * shape[0];
  if (!WhyIncomparable(heads, absorbed).empty()) {
    check->note = "shape " + ShapeText(shape) + " does not fit " + std::to_string(heads.count) + " heads of " +
                  std::to_string(absorbed.key() ? heads.dn : heads.dv) + " x " + std::to_string(heads.c);
    return;
  }
  heads.values.resize(static_cast<size_t>(weight.rows() * weight.cols()));
  weight.Decode(0, weight.rows(), heads.values.data());
  absorbed.values.resize(static_cast<size_t>(shape[0] * shape[1] * shape[2]));
  DecodeTo(t.data, 0, static_cast<int64_t>(absorbed.values.size()), t.event.dtype, absorbed.values.data());
  if (IsCutOf(heads, absorbed)) return;
  if (weight.quantised()) {
    AddParts(weight, &heads);
    if (IsCutOf(heads, absorbed)) return;  // a zero point subtracted behind the scale
  }
  check->different = absorbed.values.size();
  MaybeExplained fit = ExplainAbsorbed(heads, absorbed);
  WeightExplanation why = fit ? *std::move(fit) : UnexplainedAbsorbed(SlabOf(heads, absorbed));
  FirstBad bad = WeightBad(t.name, why.cls, "weights: absorption", why.confidence, std::move(why.evidence));
  bad.constant = why.constant.meaning;
  bad.constant_value = why.constant.value;
  bad.ranks = {t.event.rank};
  bad.bound = 4 * roundoff;
  bad.bound_basis = "four roundings of each element to the type in memory";
  found->push_back({t.sequence, std::move(bad)});
}

}  // namespace assay
