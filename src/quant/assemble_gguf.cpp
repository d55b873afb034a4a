// ggml's names for the tensors of a decoder, mapped to those of transformers, and its layouts undone.
#include <algorithm>
#include <cstdlib>

#include "quant/assemble.h"

namespace assay {
namespace {

// Prefixes; what stands behind ("weight", "bias") is kept.
struct NamePair {
  std::string_view ggml, ours;
};

constexpr NamePair kModelNames[] = {
    {"token_embd.", "model.embed_tokens."}, {"output_norm.", "model.norm."}, {"output.", "lm_head."}};

// Behind "blk.N." and before "weight" or "bias".
constexpr NamePair kLayerNames[] = {
    {"attn_norm.", "input_layernorm."},
    {"ffn_norm.", "post_attention_layernorm."},
    {"attn_q.", "self_attn.q_proj."},
    {"attn_k.", "self_attn.k_proj."},
    {"attn_v.", "self_attn.v_proj."},
    {"attn_qkv.", "self_attn.qkv_proj."},
    {"attn_output.", "self_attn.o_proj."},
    {"attn_q_norm.", "self_attn.q_norm."},
    {"attn_k_norm.", "self_attn.k_norm."},
    {"attn_q_a.", "self_attn.q_a_proj."},
    {"attn_q_a_norm.", "self_attn.q_a_layernorm."},
    {"attn_q_b.", "self_attn.q_b_proj."},
    {"attn_kv_a_mqa.", "self_attn.kv_a_proj_with_mqa."},
    {"attn_kv_a_norm.", "self_attn.kv_a_layernorm."},
    {"attn_kv_b.", "self_attn.kv_b_proj."},
    {"attn_sinks.", "self_attn.sinks."},
    {"indexer.k_norm.", "self_attn.indexer.k_norm."},
    {"indexer.proj.", "self_attn.indexer.weights_proj."},
    {"indexer.attn_k.", "self_attn.indexer.wk."},
    {"indexer.attn_q_b.", "self_attn.indexer.wq_b."},
    {"ffn_gate.", "mlp.gate_proj."},
    {"ffn_up.", "mlp.up_proj."},
    {"ffn_down.", "mlp.down_proj."},
    {"ffn_gate_inp.", "mlp.gate."},
    {"ffn_gate_inp_shexp.", "mlp.shared_expert_gate."},
};

// [E, out, in], cut into one weight an expert.
constexpr NamePair kExpertNames[] = {{"ffn_gate_exps.weight", "gate_proj.weight"},
                                     {"ffn_up_exps.weight", "up_proj.weight"},
                                     {"ffn_down_exps.weight", "down_proj.weight"}};
// All shared experts of a layer are one tensor in the file, as in transformers.
constexpr NamePair kSharedNames[] = {{"ffn_gate_shexp.weight", "gate_proj.weight"},
                                     {"ffn_up_shexp.weight", "up_proj.weight"},
                                     {"ffn_down_shexp.weight", "down_proj.weight"}};

constexpr int64_t kMaxExperts = int64_t{1} << 16;

// Only this architecture's converter permutes; the others rotate as transformers does.
bool IsRopeLlama(const std::string& architecture) { return architecture == "llama"; }

// Of a tensor of this type that is no weight.
std::string_view ClassOf(uint32_t type) { return DecodesGgml(type) ? kOfLayout : kOfNoFault; }

// Logical row of transformers' (head, half s, pair j) lies at row (head, pair j, half s) of the file.
std::vector<int64_t> UnpermutedRows(int64_t rows, int64_t heads) {
  std::vector<int64_t> order(static_cast<size_t>(rows));
  const int64_t d = rows / heads, half = d / 2;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t head = r / d, s = r % d / half, j = r % half;
    order[static_cast<size_t>(r)] = head * d + 2 * j + s;
  }
  return order;
}

class Assembler {
 public:
  Assembler(const std::vector<CheckpointTensor>& tensors, const std::vector<uint32_t>& types, const GgufParts& parts,
            WeightAssembly* out)
      : tensors_(tensors), types_(types), parts_(parts), out_(out) {}

  // Tensors first: the halves of kv_b_proj meet when all have been seen. A whole one in the file goes before the
  // halves.
  void Run() {
    for (size_t i = 0; i < tensors_.size(); ++i) Take(tensors_[i], types_[i]);
    for (auto& [prefix, halves] : halves_) {
      if (halves.first != nullptr && halves.second != nullptr) {
        const std::string name = prefix + "self_attn.kv_b_proj.weight";
        if (out_->weights.count(name) == 0) out_->Add(name, MakeJoinedKvB(name, halves.first, halves.second));
      } else {
        Lone(prefix, halves);
      }
    }
    for (const auto& [name, i] : unknown_) Unknown(name, i);
  }

 private:
  // A tensor by its name.
  void Take(const CheckpointTensor& t, uint32_t type) {
    std::string_view name = t.name;
    for (const NamePair& pair : kModelNames) {
      if (name.substr(0, pair.ggml.size()) == pair.ggml) {
        const std::string ours = std::string(pair.ours) + std::string(name.substr(pair.ggml.size()));
        out_->Add(ours, MakeGgmlWeight(ours, t, type), ClassOf(type));
        return;
      }
    }
    const size_t dot = name.substr(0, 4) == "blk." ? name.find('.', 4) : std::string_view::npos;
    if (dot == std::string_view::npos) {
      unknown_.emplace_back(t.name, &t - tensors_.data());
      return;
    }
    const std::string prefix = "model.layers." + std::string(name.substr(4, dot - 4)) + ".";
    Layer(t, type, prefix, name.substr(dot + 1));
  }

  // rest: the name behind "blk.N.".
  void Layer(const CheckpointTensor& t, uint32_t type, const std::string& prefix, std::string_view rest) {
    // Elsewhere that is a norm behind the attention, beside the one before the MLP.
    if (rest == "post_attention_norm.weight" && parts_.architecture == "glm4moe") rest = "ffn_norm.weight";
    for (const NamePair& pair : kLayerNames) {
      if (rest.substr(0, pair.ggml.size()) == pair.ggml) {
        const std::string ours = prefix + std::string(pair.ours) + std::string(rest.substr(pair.ggml.size()));
        out_->Add(ours, Unpermuted(ours, pair.ggml, MakeGgmlWeight(ours, t, type)), ClassOf(type));
        return;
      }
    }
    for (const NamePair& pair : kExpertNames) {
      if (rest == pair.ggml) return Experts(t, type, prefix + "mlp.experts.", std::string(pair.ours));
    }
    for (const NamePair& pair : kSharedNames) {
      if (rest == pair.ggml) {
        const bool one = parts_.architecture == "qwen2moe";
        const std::string ours = prefix + (one ? "mlp.shared_expert." : "mlp.shared_experts.") + std::string(pair.ours);
        return out_->Add(ours, MakeGgmlWeight(ours, t, type), ClassOf(type));
      }
    }
    if (rest == "exp_probs_b.bias" || rest == "exp_probs_b") {
      const std::string ours = prefix + "mlp.gate.e_score_correction_bias";
      return out_->Add(ours, MakeGgmlWeight(ours, t, type), ClassOf(type));
    }
    if (rest == "attn_k_b.weight" || rest == "attn_v_b.weight") {
      Result<WeightPtr> half = MakeGgmlWeight(t.name, t, type);
      if (!half.ok()) return out_->Add(prefix + "self_attn.kv_b_proj.weight", std::move(half), ClassOf(type));
      (rest == "attn_k_b.weight" ? halves_[prefix].first : halves_[prefix].second) = std::move(half).value();
      return;
    }
    unknown_.emplace_back(prefix + std::string(rest), &t - tensors_.data());
  }

  // Half of a kv_b_proj whose other half is not there.
  void Lone(const std::string& prefix, const std::pair<WeightPtr, WeightPtr>& halves) {
    const WeightPtr& half = halves.first != nullptr ? halves.first : halves.second;
    const char* other = halves.first != nullptr ? "attn_v_b.weight" : "attn_k_b.weight";
    out_->Add(prefix + "self_attn.kv_b_proj.weight",
              BadTensor(*half->stored().front().tensor,
                        std::string("its other half, \"") + other + "\" of the layer, is missing"),
              kOfLoad);
  }

  // A tensor that no rule knows is a weight under its own name: an audit measures it, and whoever holds the names
  // against a configuration finds no place for it. Factors of RoPE frequencies are no weight.
  void Unknown(const std::string& name, std::ptrdiff_t i) {
    const CheckpointTensor& t = tensors_[static_cast<size_t>(i)];
    const uint32_t type = types_[static_cast<size_t>(i)];
    if (name == "rope_freqs.weight") return out_->others.push_back(name);
    out_->Add(name, MakeGgmlWeight(name, t, type), ClassOf(type));
  }

  // llama.cpp stores the query and key rows of this architecture with pairs side by side.
  Result<WeightPtr> Unpermuted(const std::string& name, std::string_view ggml, Result<WeightPtr> weight) {
    const bool query = ggml == "attn_q.", key = ggml == "attn_k.";
    if (!weight.ok() || !IsRopeLlama(parts_.architecture) || (!query && !key)) return weight;
    const bool vector = (*weight)->shape().size() == 1;  // a bias is one row; its elements are what is permuted
    const int64_t rows = (*weight)->rows(), heads = query ? parts_.n_heads : parts_.n_kv_heads;
    if (vector || heads <= 0 || rows % (2 * heads) != 0) {
      return BadTensor(*(*weight)->stored().front().tensor,
                       "its rows are stored in another order for " + std::to_string(heads) +
                           " heads, which cannot be undone for shape " + ShapeText((*weight)->shape()));
    }
    std::vector<int64_t> shape = (*weight)->shape();
    return MakeRowView(name, std::move(weight).value(), std::move(shape), UnpermutedRows(rows, heads));
  }

  // One stored tensor becomes a row view for each expert; nothing is copied.
  void Experts(const CheckpointTensor& t, uint32_t type, const std::string& prefix, const std::string& suffix) {
    Result<WeightPtr> all = MakeGgmlWeight(t.name, t, type);
    if (!all.ok() || t.shape.size() != 3 || t.shape[0] > kMaxExperts) {
      const Status status = all.ok() ? BadTensor(t, "[experts, out, in] expected") : all.status();
      return out_->problems.push_back(
          {prefix + "*." + suffix, std::string(ClassOf(type)), status.message(), /*of_experts=*/true});
    }
    const int64_t rows = t.shape[1];
    for (int64_t e = 0; e < t.shape[0]; ++e) {
      std::vector<int64_t> order(static_cast<size_t>(rows));
      for (int64_t r = 0; r < rows; ++r) order[static_cast<size_t>(r)] = e * rows + r;
      const std::string ours = prefix + std::to_string(e) + "." + suffix;
      out_->Add(ours, MakeRowView(ours, *all, {rows, t.shape[2]}, std::move(order)));
    }
  }

  const std::vector<CheckpointTensor>& tensors_;
  const std::vector<uint32_t>& types_;
  const GgufParts& parts_;
  WeightAssembly* out_;
  std::map<std::string, std::pair<WeightPtr, WeightPtr>> halves_;
  std::vector<std::pair<std::string, std::ptrdiff_t>> unknown_;  // name in our manner, place in tensors_
};

}  // namespace

void AssembleGguf(const std::vector<CheckpointTensor>& tensors, const std::vector<uint32_t>& types,
                  const GgufParts& parts, WeightAssembly* out) {
  Assembler(tensors, types, parts, out).Run();
}

}  // namespace assay
