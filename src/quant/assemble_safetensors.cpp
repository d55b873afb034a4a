// Names of the parts of quantised weights, by the writers that are about: compressed-tensors, modelopt, DeepSeek's and
// transformers' fp8, AutoGPTQ and GPTQModel, AutoAWQ, gpt-oss. What a tensor is follows from its own name, type and
// companions; the configuration adds what these leave open (block sizes, bits, the GPTQ convention).
#include <algorithm>
#include <cstring>

#include "quant/assemble.h"

namespace assay {
namespace {

// Whole numbers alone: a config may hold anything.
int64_t IntOf(const Json* json, int64_t absent) {
  return json != nullptr && json->is_number_integer() ? json->get<int64_t>() : absent;
}

// [rows, cols] of the elements that share a scale.
void ReadBlock(const Json* json, QuantSettings* settings) {
  if (json == nullptr || !json->is_array() || json->size() != 2) return;
  const int64_t rows = IntOf(&(*json)[0], 0), cols = IntOf(&(*json)[1], 0);
  constexpr int64_t kMax = int64_t{1} << 31;
  if (rows > 0 && cols > 0 && rows < kMax && cols < kMax) settings->block_rows = rows, settings->block_cols = cols;
}

class Assembler {
 public:
  Assembler(const std::vector<CheckpointTensor>& tensors, const QuantSettings& settings, WeightAssembly* out)
      : tensors_(tensors), settings_(settings), out_(out) {}

  void Run() {
    for (const CheckpointTensor& t : tensors_) {
      if (used_.count(t.name) == 0) Take(t);
    }
    for (const CheckpointTensor& t : tensors_) {
      if (used_.count(t.name) == 0) Rest(t);
    }
  }

 private:
  // A tensor that is found counts as used up: the second pass leaves it alone.
  const CheckpointTensor* Find(const std::string& name) {
    const auto at = std::lower_bound(tensors_.begin(), tensors_.end(), name,
                                     [](const CheckpointTensor& t, const std::string& n) { return t.name < n; });
    if (at == tensors_.end() || at->name != name) return nullptr;
    used_.insert(name);
    return &*at;
  }

  // First pass: tensors that others are companions of.
  void Take(const CheckpointTensor& t) {
    if (t.name.ends_with(".qweight")) {
      Packed(t, t.name.substr(0, t.name.size() - 8));
    } else if (t.name.ends_with(".weight_packed")) {
      Compressed(t, t.name.substr(0, t.name.size() - 14));
    } else if (t.name.ends_with("_blocks")) {
      const std::string name = t.name.substr(0, t.name.size() - 7);
      const CheckpointTensor* scales = Find(name + "_scales");
      if (scales == nullptr) return;
      used_.insert(t.name);
      Fp4Layout layout;
      layout.group = 32;
      layout.exponent_scales = true;
      out_->Add(name, MakeFp4Weight(name, t, *scales, nullptr, layout));
    } else if (BitsOf(t.dtype) <= 8) {
      Bytes(t);
    }
  }

  // One-byte codes "NAME" beside "NAME_scale_inv", "NAME_scale" (and "NAME_scale_2"), "NAME_zero_point".
  void Bytes(const CheckpointTensor& t) {
    const CheckpointTensor* scale = Find(t.name + "_scale_inv");
    if (scale == nullptr) scale = Find(t.name + "_scale");
    const CheckpointTensor* global = Find(t.name + "_scale_2");
    const CheckpointTensor* zero = Find(t.name + "_zero_point");
    if (scale == nullptr) {  // without a scale only floats are a weight
      if (!IsFloat(t.dtype) || t.name.ends_with("_scale")) return;
      used_.insert(t.name);
      // Float8 without any scale is taken at its value; a checkpoint that says it is quantised lacks one.
      if (!settings_.method.empty() && t.name.ends_with(".weight")) {
        return out_->Add(t.name, BadTensor(t, "its scale (\"" + t.name + "_scale\" or \"_scale_inv\") is missing"),
                         kOfLoad);
      }
      out_->Add(t.name, MakePlainWeight(t.name, t));
      return;
    }
    used_.insert(t.name);
    if (t.dtype == DType::kU8 || t.dtype == DType::kF4E2M1) {  // modelopt's
      return Fp4(t.name, t, *scale, global, t.name + "_scale_2", /*divide_global=*/false);
    }
    int64_t rows = 0, cols = 0;
    if (scale->shape.size() == 3 && t.shape.size() == 3) {
      rows = settings_.block_rows, cols = settings_.block_cols;  // experts that lie together
    } else if (scale->shape.size() == 2 && t.shape.size() == 2 &&
               !(scale->shape[1] == 1 && scale->shape[0] == t.shape[0])) {
      rows = settings_.block_rows, cols = settings_.block_cols;
      const int64_t gr = scale->shape[0], gc = scale->shape[1];
      if (rows == 0 && gr > 0 && gc > 0 && gr * gc > 1) {  // no word of it in the configuration: from the shapes
        rows = (t.shape[0] + gr - 1) / gr;
        cols = (t.shape[1] + gc - 1) / gc;
      }
      if (gr * gc == 1 && (t.shape[0] > rows || t.shape[1] > cols)) rows = cols = 0;
    }
    out_->Add(t.name, MakeByteWeight(t.name, t, scale, zero, rows, cols));
  }

  // Scales that are exponents have groups of 32 and no global scale, e4m3 ones groups of 16 and one.
  void Fp4(const std::string& name, const CheckpointTensor& t, const CheckpointTensor& scale,
           const CheckpointTensor* global, const std::string& global_name, bool divide_global) {
    Fp4Layout layout;
    layout.exponent_scales = scale.dtype == DType::kU8 || scale.dtype == DType::kF8E8M0;
    layout.group = layout.exponent_scales ? 32 : 16;
    layout.divide_global = divide_global;
    const bool matrix = t.shape.size() == 2 && scale.shape.size() == 2;
    if (layout.exponent_scales && matrix && t.shape[1] % 24 == 0 && t.shape[1] / 24 == scale.shape[1]) {
      return out_->Add(name, BadTensor(t, "mxfp6 is not decoded"), kOfNoFault);  // 32 codes in 24 bytes
    }
    if (scale.dtype == DType::kF8E4M3FN && global == nullptr) {
      return out_->Add(name, BadTensor(t, "its global scale \"" + global_name + "\" is missing"), kOfLoad);
    }
    out_->Add(name, MakeFp4Weight(name, t, scale, global, layout));
  }

  void Compressed(const CheckpointTensor& t, const std::string& stem) {
    const std::string name = stem + ".weight";
    const CheckpointTensor* scale = Find(name + "_scale");
    const CheckpointTensor* global = Find(name + "_global_scale");
    used_.insert(t.name);
    if (scale == nullptr) return out_->Add(name, BadTensor(t, "its scale \"" + name + "_scale\" is missing"), kOfLoad);
    if (BitsOf(t.dtype) == 8) {
      return Fp4(name, t, *scale, global, name + "_global_scale", /*divide_global=*/true);
    }
    PackedIntTensors parts;
    parts.code = &t;
    parts.scale = scale;
    parts.zero = Find(name + "_zero_point");
    parts.g_idx = Find(name + "_g_idx");
    parts.shape = Find(name + "_shape");
    int bits = settings_.bits;
    if (parts.shape != nullptr && parts.shape->size_bytes >= 16 && parts.shape->dtype == DType::kI64 &&
        t.shape.size() == 2) {
      int64_t k = 0;
      std::memcpy(&k, parts.shape->data + 8, 8);
      if (k > 0 && t.shape[1] > 0) {  // mixed precision: the shapes know better than one number for all
        for (const int b : {2, 4, 8}) {
          if ((k + 32 / b - 1) / (32 / b) == t.shape[1]) bits = b;
        }
      }
    }
    if (settings_.zero_points && parts.zero == nullptr) {
      return out_->Add(name, BadTensor(t, "its zero points \"" + name + "_zero_point\" are missing"), kOfLoad);
    }
    AddPacked(name, IntPacking::kCompressed, bits, parts);
  }

  void AddPacked(const std::string& name, IntPacking packing, int bits, const PackedIntTensors& parts) {
    const std::string_view cls = !DecodesPackedInts(packing, bits) ? kOfNoFault
                                 : parts.scale == nullptr          ? kOfLoad
                                                                   : kOfLayout;
    out_->Add(name, MakePackedIntWeight(name, packing, bits, parts), cls);
  }

  // AutoGPTQ, GPTQModel and AutoAWQ: "STEM.qweight" with "STEM.scales", "STEM.qzeros", "STEM.g_idx".
  void Packed(const CheckpointTensor& t, const std::string& stem) {
    const std::string name = stem + ".weight";
    PackedIntTensors parts;
    parts.code = &t;
    parts.scale = Find(stem + ".scales");
    parts.zero = Find(stem + ".qzeros");
    parts.g_idx = Find(stem + ".g_idx");
    used_.insert(t.name);
    // Other methods write one or the other: AWQ packs along the outputs.
    const bool along_out = parts.scale != nullptr && parts.scale->shape.size() == 2 && t.shape.size() == 2 &&
                           t.shape[1] > 0 && parts.scale->shape[1] % t.shape[1] == 0 &&
                           parts.scale->shape[1] / t.shape[1] == 8;
    const bool awq = settings_.method == "awq" || (settings_.method != "gptq" && along_out);
    const char* lacks = settings_.zero_points && parts.zero == nullptr          ? ".qzeros"
                        : settings_.act_order && !awq && parts.g_idx == nullptr ? ".g_idx"
                                                                                : nullptr;
    if (lacks != nullptr) {
      return out_->Add(name, BadTensor(t, "\"" + stem + lacks + "\" is missing, which the configuration asks for"),
                       kOfLoad);
    }
    const IntPacking packing = awq ? IntPacking::kAwq : settings_.gptq_v2 ? IntPacking::kGptqV2 : IntPacking::kGptq;
    AddPacked(name, packing, settings_.bits, parts);
  }

  // Second pass: plain numbers, codes of formats that nothing above knows, and what is left of companions.
  void Rest(const CheckpointTensor& t) {
    if (!settings_.method.empty() && BitsOf(t.dtype) == 8 && t.name.ends_with(".weight")) {
      return out_->Add(t.name,
                       BadTensor(t, std::string(NameOf(t.dtype)) +
                                        " codes without a scale of a known name: this form of quant_method \"" +
                                        settings_.method + "\" is not decoded"),
                       kOfNoFault);
    }
    for (const std::string_view part : {"_scale", "_scale_inv", "_scale_2", "_global_scale"}) {
      if (!t.name.ends_with(".weight" + std::string(part))) continue;
      const std::string name = t.name.substr(0, t.name.size() - part.size());
      if (Find(name) != nullptr || Find(name + "_packed") != nullptr || !alone_.insert(name).second) continue;
      return out_->Add(name, BadTensor(t, "what it scales, \"" + name + "\", is missing"), kOfLoad);
    }
    if (IsFloat(t.dtype) && BitsOf(t.dtype) >= 16 && !t.name.ends_with("_scale") && !t.name.ends_with(".k_scale") &&
        !t.name.ends_with(".v_scale") && t.name.find("rotary_emb") == std::string::npos) {
      out_->Add(t.name, MakePlainWeight(t.name, t));
    } else {
      out_->others.push_back(t.name);
    }
  }

  const std::vector<CheckpointTensor>& tensors_;
  const QuantSettings& settings_;
  WeightAssembly* out_;
  std::set<std::string, std::less<>> used_;
  std::set<std::string> alone_;  // names of weights of which only scales are there
};

}  // namespace

void WeightAssembly::Add(const std::string& name, Result<WeightPtr> weight, std::string_view cls) {
  if (weight.ok()) {
    const auto [at, added] = weights.try_emplace(name, *weight);
    if (added) return;
    const CheckpointTensor& other = *at->second->stored().front().tensor;
    problems.push_back({name, std::string(kOfLoad),
                        BadTensor(*(*weight)->stored().front().tensor,
                                  "this is \"" + name + "\", as \"" + other.name + "\" is, which is taken")
                            .message()});
    return;
  }
  problems.push_back({name, std::string(cls), weight.status().message()});
}

// Vision models keep their language model's config in an inner object.
QuantSettings ReadQuantSettings(const Json& config) {
  QuantSettings settings;
  const Json* quant = FindKey(config, "quantization_config");
  for (const char* inner : {"text_config", "language_config", "llm_config"}) {
    const Json* nested = FindKey(config, inner);
    if (quant == nullptr && nested != nullptr) quant = FindKey(*nested, "quantization_config");
  }
  if (quant == nullptr || !quant->is_object()) return settings;
  if (const Json* method = FindKey(*quant, "quant_method"); method != nullptr && method->is_string()) {
    settings.method = method->get<std::string>();
  }
  settings.bits = static_cast<int>(std::clamp<int64_t>(IntOf(FindKey(*quant, "bits"), 4), 1, 32));
  settings.group_size = IntOf(FindKey(*quant, "group_size"), 0);
  const auto says = [](const Json& in, const char* key, bool value) {
    const Json* found = FindKey(in, key);
    return found != nullptr && found->is_boolean() && found->get<bool>() == value;
  };
  settings.zero_points = says(*quant, "zero_point", true) || says(*quant, "sym", false);
  settings.act_order = says(*quant, "desc_act", true);
  ReadBlock(FindKey(*quant, "weight_block_size"), &settings);
  if (const Json* format = FindKey(*quant, "checkpoint_format"); format != nullptr && format->is_string()) {
    settings.gptq_v2 = format->get<std::string>() == "gptq_v2";
  }
  if (const Json* groups = FindKey(*quant, "config_groups"); groups != nullptr && groups->is_object()) {
    settings.zero_points = !groups->empty();  // of all groups: which one a weight is of is not looked up
    for (const auto& [key, group] : groups->get_ref<const Json::object_t&>()) {
      const Json* weights = FindKey(group, "weights");
      if (weights == nullptr) continue;
      settings.zero_points = settings.zero_points && says(*weights, "symmetric", false);
      settings.bits = static_cast<int>(std::clamp<int64_t>(IntOf(FindKey(*weights, "num_bits"), settings.bits), 1, 32));
      ReadBlock(FindKey(*weights, "block_structure"), &settings);
    }
  }
  return settings;
}

void AssembleSafetensors(const std::vector<CheckpointTensor>& tensors, const QuantSettings& settings,
                         WeightAssembly* out) {
  Assembler(tensors, settings, out).Run();
}

}  // namespace assay
