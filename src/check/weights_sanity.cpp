// What can be said of a checkpoint without anything to compare it with: scales, values, duplicates, ties, holes.
#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "check/weights_audit.h"
#include "check/weights_slab.h"
#include "tensor/decode.h"

namespace assay {
namespace {

// Typical sizes of a kind of weight may differ by this between layers; beyond it a scale is off by many binades.
constexpr double kAbsurdRatio = 1e4;
// A block's largest element is seldom beyond this many times that of the middle block of the same weight. Small scales
// say nothing: a block of tiny weights has one.
constexpr double kAbsurdScale = 1024;
constexpr int kMostHoles = 1000;  // missing layers that are listed: a forged configuration may ask for 10^18

// "3 of 4096".
std::string Count(uint64_t n, uint64_t of) { return std::to_string(n) + " of " + std::to_string(of); }

// The name without the numbers of layer and expert: weights of one kind.
std::string KindOf(const std::string& canonical) {
  std::string kind;
  for (size_t i = 0; i < canonical.size(); ++i) {
    if (canonical[i] >= '0' && canonical[i] <= '9' && i > 0 && (canonical[i - 1] == '.' || kind.back() == '#')) {
      if (kind.back() != '#') kind += '#';
    } else {
      kind += canonical[i];
    }
  }
  return kind;
}

// Over the finite elements.
double Rms(const WeightStats& s) {
  const uint64_t finite = s.count - s.nan - s.inf;
  return finite == 0 ? 0 : std::sqrt(s.sum_sq / static_cast<double>(finite));
}

// The outer key goes before the inner one of multimodal configs; *where says which one spoke.
bool IsTied(const WeightSource& source, std::string* where) {
  if (const Json* top = FindKey(source.config(), "tie_word_embeddings"); top != nullptr && top->is_boolean()) {
    *where = "tie_word_embeddings";
    return top->get<bool>();
  }
  const Json* inner = ConfigKey(source, "tie_word_embeddings");
  if (inner == nullptr || !inner->is_boolean()) return false;
  *where = "tie_word_embeddings of the inner configuration";
  return inner->get<bool>();
}

// DeepSeek's checkpoints say ue8m0 where scales are meant to be powers of two.
bool WantsPowersOfTwo(const WeightSource& source) {
  const Json* quant = ConfigKey(source, "quantization_config");
  const Json* format = quant == nullptr ? nullptr : FindKey(*quant, "scale_fmt");
  return format != nullptr && format->is_string() && format->get<std::string>() == "ue8m0";
}

// The largest scale under which something is not 0, held against the median of the weight's own scales: a block of
// zeros may have any scale. Read only where the largest of all is that far off.
void CheckLargestScale(const WeightAudit& audit, std::vector<WeightFinding>* found) {
  const ScaleStats& s = audit.scales;
  if (s.nonfinite > 0 || s.negative > 0 || !(s.median > 0) || s.max <= kAbsurdScale * s.median) return;
  const Weight& weight = *audit.weight;
  double top = 0, used = 0;  // scales with the global one, which drops out of used / top
  int64_t row = 0, col = 0;
  WeightParts parts;
  for (int64_t r = 0; r < weight.rows(); ++r) {
    weight.Parts(r, &parts);
    for (size_t c = 0; c < parts.scale.size(); ++c) {
      top = std::max(top, parts.scale[c]);
      if (parts.scale[c] > used && parts.code[c] != parts.zero[c]) {
        used = parts.scale[c], row = r, col = static_cast<int64_t>(c);
      }
    }
  }
  if (!(top > 0) || !std::isfinite(top)) return;
  const double largest = s.max * (used / top), ratio = largest / s.median;
  if (ratio <= kAbsurdScale) return;
  FirstBad bad = WeightBad(
      audit.canonical, fault_class::kQScale, "weights: scales", 0.8,
      {"the scale at row " + std::to_string(row) + ", column " + std::to_string(col) + " is " + NumberText(largest) +
       ", the median of the " + std::to_string(s.count) + " of this weight is " + NumberText(s.median)});
  bad.constant = "scale / median of the weight";
  bad.constant_value = bad.measured = ratio;
  bad.bound = kAbsurdScale;
  bad.bound_basis = "scales of one weight are seldom above this many times their median";
  found->push_back({-1, std::move(bad)});
}

// Equal bytes under two names of one kind, where the values are no mere constant.
void FindDuplicates(const std::vector<WeightAudit>& weights, std::vector<WeightFinding>* found) {
  std::map<uint64_t, const WeightAudit*> seen;
  for (const WeightAudit& audit : weights) {
    const WeightStats& s = audit.stats;
    if (audit.weight->is_view() || s.constant || audit.weight->rows() < 2 || s.count < 64) continue;
    const auto [at, fresh] = seen.emplace(s.digest, &audit);
    if (fresh || at->second->weight->shape() != audit.weight->shape()) continue;
    if (KindOf(at->second->canonical) != KindOf(audit.canonical)) continue;
    found->push_back({-1, WeightBad(audit.canonical, fault_class::kLoad, "weights: duplicates", 0.8,
                                    {"bytes are equal to those of " + at->second->canonical +
                                     ": one was written under both names, or loaded twice"})});
  }
}

// Against the median of its kind over the layers; at least three members, or the median is one of two.
void CompareKinds(const std::vector<WeightAudit>& weights, std::vector<WeightFinding>* found) {
  std::map<std::string, std::vector<const WeightAudit*>> kinds;
  for (const WeightAudit& audit : weights) {
    if (audit.weight->rows() >= 2 && audit.stats.count >= 64) kinds[KindOf(audit.canonical)].push_back(&audit);
  }
  for (const auto& [kind, members] : kinds) {
    if (members.size() < 3) continue;
    std::vector<double> sizes;
    for (const WeightAudit* audit : members) sizes.push_back(Rms(audit->stats));
    std::nth_element(sizes.begin(), sizes.begin() + static_cast<std::ptrdiff_t>(sizes.size() / 2), sizes.end());
    const double median = sizes[sizes.size() / 2];
    for (const WeightAudit* audit : members) {
      const double rms = Rms(audit->stats);
      if (median == 0 || rms == 0 || (rms < kAbsurdRatio * median && rms * kAbsurdRatio > median)) continue;
      FirstBad bad = WeightBad(audit->canonical, audit->weight->quantised() ? fault_class::kQScale : fault_class::kLoad,
                               "weights: sizes", 0.8,
                               {"root mean square " + NumberText(rms) + ", the median of the " +
                                std::to_string(members.size()) + " weights of this kind is " + NumberText(median)});
      bad.constant = "size / median of its kind";
      bad.constant_value = rms / median;
      bad.measured = rms / median;
      bad.bound = kAbsurdRatio;
      bad.bound_basis = "weights of one kind differ by less than this from layer to layer";
      found->push_back({-1, std::move(bad)});
    }
  }
}

// Scales of activations and caches, which belong to no weight. A learned one of another name may be negative.
void CheckLooseScales(const WeightSource& source, std::vector<WeightFinding>* found) {
  constexpr std::string_view kNames[] = {
      "input_scale", "input_global_scale", "output_scale", "q_scale", "k_scale", "v_scale", "kv_scale"};
  const std::set<std::string_view> others(source.others().begin(), source.others().end());
  for (const CheckpointTensor& t : source.stored()) {
    const std::string_view last = std::string_view(t.name).substr(t.name.rfind('.') + 1);
    if (!IsFloat(t.dtype) || std::find(std::begin(kNames), std::end(kNames), last) == std::end(kNames)) continue;
    if (others.count(t.name) == 0) continue;
    const int64_t n = ElementCount(t.shape);
    uint64_t wrong = 0;
    double first = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double value = DecodeBits(LoadBits(t.data, i, t.dtype), t.dtype);
      if (!(value > 0 && std::isfinite(value)) && wrong++ == 0) first = value;
    }
    if (wrong == 0) continue;
    found->push_back({-1, WeightBad(CanonicalWeightName(t.name), fault_class::kQScale, "weights: scales", 0.9,
                                    {Count(wrong, static_cast<uint64_t>(n)) +
                                     " scales of an activation or cache are no positive numbers; the first is " +
                                     NumberText(first)})});
  }
}

}  // namespace

// What no format allows, whatever the model.
void CheckScales(const WeightSource& source, const std::vector<WeightAudit>& weights,
                 std::vector<WeightFinding>* found) {
  CheckLooseScales(source, found);
  const bool powers = WantsPowersOfTwo(source);
  for (const WeightAudit& audit : weights) {
    const WeightStats& s = audit.stats;
    const ScaleStats& scales = audit.scales;
    const auto add = [&](std::string_view cls, std::string evidence) {
      found->push_back({-1, WeightBad(audit.canonical, cls, "weights: scales", 0.95, {std::move(evidence)})});
    };
    if (scales.nonfinite > 0)
      add(fault_class::kQScale, Count(scales.nonfinite, scales.count) + " scales are NaN or infinite");
    if (scales.negative > 0) add(fault_class::kQScale, Count(scales.negative, scales.count) + " scales are negative");
    // A float scale of 0 wipes its block out; an e4m3 one may be the rounding of a tiny block.
    const StoredPart* stored = audit.weight->part("scale");
    if (scales.zero > 0 && (scales.zero == scales.count || BitsOf(stored->tensor->dtype) >= 16) && !s.constant) {
      add(fault_class::kQScale, Count(scales.zero, scales.count) + " scales are 0");
    }
    if (powers && stored != nullptr && IsFloat(stored->tensor->dtype) && scales.not_power_of_two > 0) {
      add(fault_class::kQScale, Count(scales.not_power_of_two, scales.count) +
                                    " scales are no powers of two, which scale_fmt = ue8m0 promises");
    }
    if (const StoredPart* global = audit.weight->part("global_scale")) {
      const double value = DecodeBits(LoadBits(global->tensor->data, 0, global->tensor->dtype), global->tensor->dtype);
      if (!(value > 0) || !std::isfinite(value)) add(fault_class::kQScale, "the global scale is " + NumberText(value));
    }
    CheckLargestScale(audit, found);
    if (s.nan + s.inf > 0 && scales.nonfinite == 0) {
      // The codes of ggml's blocks are finite: what is not comes from the scales beside them.
      const bool blocks = audit.weight->part("blocks") != nullptr;
      add(blocks ? fault_class::kQScale : fault_class::kLoad,
          Count(s.nan + s.inf, s.count) + " elements are NaN or infinite" + (blocks ? ": their scales are" : ""));
    }
  }
}

// Holes, duplicates, sizes out of line, and heads whose tie the configuration leaves open.
void CheckStructure(const WeightSource& source, const std::vector<WeightAudit>& weights, const WeightsOptions& options,
                    std::vector<WeightFinding>* found, std::vector<std::string>* notes) {
  FindDuplicates(weights, found);
  CompareKinds(weights, found);

  std::set<std::string> have;
  std::set<int64_t> layers;
  for (const WeightAudit& audit : weights) {
    have.insert(audit.canonical);
    if (audit.canonical.rfind("layers.", 0) == 0) layers.insert(std::atoll(audit.canonical.c_str() + 7));
  }
  const auto add = [&](const std::string& name, std::string evidence) {
    found->push_back({-1, WeightBad(name, fault_class::kLoad, "weights: structure", 0.9, {std::move(evidence)})});
  };

  const int64_t n_layers = ConfigInt(source, "num_hidden_layers", -1);
  // Part of a model is a legitimate thing to look at: only what claims to be whole can lack something.
  const bool whole = have.count("embed_tokens.weight") != 0 && have.count("norm.weight") != 0 && n_layers > 0;
  if (!whole) {
    notes->push_back(
        "not a whole model (embedding, final norm and num_hidden_layers are not all there): missing tensors are not "
        "judged");
  } else {
    int holes = 0;
    for (int64_t l = 0; !options.held_against_config && l < n_layers && holes < kMostHoles; ++l) {
      if (layers.count(l) != 0) continue;
      ++holes;
      add("layers." + std::to_string(l) + ".input_layernorm.weight",
          "the configuration has " + std::to_string(n_layers) + " layers, the checkpoint has nothing of layer " +
              std::to_string(l));
    }
    const int64_t beyond =
        static_cast<int64_t>(std::count_if(layers.begin(), layers.end(), [&](int64_t l) { return l >= n_layers; }));
    if (beyond > 0) notes->push_back(std::to_string(beyond) + " layers beyond num_hidden_layers (draft layers?)");
  }

  std::string where;
  const bool tied = IsTied(source, &where);
  const Weight *head = source.find("lm_head.weight"), *embedding = source.find("model.embed_tokens.weight");
  if (whole && !options.held_against_config && head == nullptr && !tied &&
      ConfigKey(source, "tie_word_embeddings") != nullptr) {
    add("lm_head.weight",
        "there is no lm_head in the checkpoint and the configuration does not tie it to the embedding");
  }
  if (tied && head == nullptr) notes->push_back("lm_head is the embedding (" + where + ")");
  if (tied && head != nullptr && embedding != nullptr) {
    bool equal = head->shape() == embedding->shape();
    std::vector<float> a(static_cast<size_t>(head->cols())), b(static_cast<size_t>(embedding->cols()));
    // 64 rows spread over the vocabulary: a tied copy is equal in all of them.
    for (int64_t r = 0; equal && r < head->rows(); r += std::max<int64_t>(1, head->rows() / 64)) {
      head->Decode(r, 1, a.data());
      embedding->Decode(r, 1, b.data());
      equal = a == b;
    }
    if (!equal) {
      add("lm_head.weight", "stored, and different from the embedding that " + where +
                                " ties it to: engines will disagree on which one counts");
    }
  }
}

}  // namespace assay
