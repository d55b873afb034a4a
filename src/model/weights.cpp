#include "model/weights.h"

#include <charconv>
#include <cstring>
#include <exception>
#include <set>
#include <string_view>
#include <type_traits>

#include "model/layer_names.h"

namespace assay {
namespace {

constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kFinalNorm = "model.norm.weight";
constexpr const char* kHead = "lm_head.weight";

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

// ---- Conversion ------------------------------------------------------------------------------------------------
// Exact: every bf16, f16 and f32 is a float, every f32 and f64 a double. f64 to float rounds to nearest.

template <class U>
U LoadUnaligned(const std::byte* at) {
  U value;
  std::memcpy(&value, at, sizeof(U));
  return value;
}

float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

float HalfToFloat(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1f, fraction = half & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: fraction * 2^-24, exact in float
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  if (exponent == 0x1f) return FromBits(sign | 0x7f800000u | (fraction << 13));
  return FromBits(sign | ((exponent + 112) << 23) | (fraction << 13));
}

template <class T>
void Convert(const std::byte* from, DType dtype, size_t count, T* to) {
  switch (dtype) {
    case DType::kBF16:
      for (size_t i = 0; i < count; ++i) {
        to[i] = static_cast<T>(FromBits(static_cast<uint32_t>(LoadUnaligned<uint16_t>(from + 2 * i)) << 16));
      }
      break;
    case DType::kF16:
      for (size_t i = 0; i < count; ++i) to[i] = static_cast<T>(HalfToFloat(LoadUnaligned<uint16_t>(from + 2 * i)));
      break;
    case DType::kF32:
      for (size_t i = 0; i < count; ++i) to[i] = static_cast<T>(LoadUnaligned<float>(from + 4 * i));
      break;
    default:  // kF64, the only other type that CheckDType lets through
      for (size_t i = 0; i < count; ++i) to[i] = static_cast<T>(LoadUnaligned<double>(from + 8 * i));
  }
}

size_t ElementBytes(DType dtype) {
  if (dtype == DType::kF64) return 8;
  return dtype == DType::kF32 ? 4 : 2;
}

Status CheckDType(const CheckpointTensor& tensor) {
  switch (tensor.dtype) {
    case DType::kBF16:
    case DType::kF16:
    case DType::kF32:
    case DType::kF64:
      return {};
    default:
      return Status::BadInput(tensor.file + ": tensor \"" + tensor.name + "\" at offset " +
                              std::to_string(tensor.file_offset) +
                              ": weights are read as bf16, f16, f32 or f64, this one is not (quantised checkpoints "
                              "must be converted first)");
  }
}

// The tensor of a part, held against the shape the config asks for.
Result<const CheckpointTensor*> Find(const Checkpoint& checkpoint, const TensorPart& part) {
  const CheckpointTensor* tensor = checkpoint.find(part.name);
  if (tensor == nullptr) {
    return Status::BadInput(checkpoint.path() + ": tensor \"" + part.name + "\" of shape " + ShapeText(part.shape) +
                            " is missing; the config asks for it");
  }
  if (tensor->shape != part.shape) {
    return Status::BadInput(tensor->file + ": tensor \"" + part.name + "\" at offset " +
                            std::to_string(tensor->file_offset) + " has shape " + ShapeText(tensor->shape) +
                            ", the config asks for " + ShapeText(part.shape));
  }
  ASSAY_RETURN_IF_ERROR(CheckDType(*tensor));
  return tensor;
}

// ---- Visitors of layer_names.h ---------------------------------------------------------------------------------

class Checker {
 public:
  Checker(const Checkpoint& checkpoint, std::set<std::string, std::less<>>* used)
      : checkpoint_(checkpoint), used_(used) {}
  template <class Target>
  Status Visit(const TensorPart& part, Target*) {
    used_->insert(part.name);
    return Find(checkpoint_, part).status();
  }

 private:
  const Checkpoint& checkpoint_;
  std::set<std::string, std::less<>>* used_;
};

class Loader {
 public:
  explicit Loader(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}
  template <class T>
  Status Visit(const TensorPart& part, Matrix<T>* target) {
    ASSAY_RETURN_IF_ERROR(Visit(part, &target->data));
    target->rows = part.rows;
    target->cols = part.cols;
    return {};
  }
  template <class T>
  Status Visit(const TensorPart& part, std::vector<T>* target) {
    ASSAY_ASSIGN_OR_RETURN(const CheckpointTensor* tensor, Find(checkpoint_, part));
    target->resize(static_cast<size_t>(part.rows * part.cols));
    const size_t skip = static_cast<size_t>(part.offset_elems) * ElementBytes(tensor->dtype);
    Convert(tensor->data + skip, tensor->dtype, target->size(), target->data());
    return {};
  }

 private:
  const Checkpoint& checkpoint_;
};

struct Counter {
  int64_t elements = 0;
  template <class Target>
  Status Visit(const TensorPart& part, Target*) {
    elements += part.rows * part.cols;
    return {};
  }
};

// Allocation failures become a Status: a layer may well be larger than the memory at hand.
template <class F>
auto Guarded(const std::string& what, F&& load) -> decltype(load()) {
  try {
    return load();
  } catch (const std::exception&) {
    return Status::Environment(what + ": not enough memory");
  }
}

// The layer of "model.layers.N.…", or -1.
int64_t LayerOf(std::string_view name) {
  constexpr std::string_view kPrefix = "model.layers.";
  if (name.substr(0, kPrefix.size()) != kPrefix) return -1;
  int64_t layer = -1;
  const char* end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + kPrefix.size(), end, layer);
  return error == std::errc() && stop != end && *stop == '.' ? layer : -1;
}

}  // namespace

struct WeightStore::Impl {
  std::shared_ptr<const Checkpoint> checkpoint;
  ModelConfig config;
  std::vector<std::string> notes;
  std::vector<uint8_t> fused;  // per layer

  Status Check() {
    std::set<std::string, std::less<>> used;
    Checker checker(*checkpoint, &used);
    std::vector<float>* const unused = nullptr;
    const int64_t h = config.hidden_size, vocab = config.vocab_size;
    ASSAY_RETURN_IF_ERROR(checker.Visit(WholeMatrix(kEmbedding, vocab, h), unused));
    ASSAY_RETURN_IF_ERROR(checker.Visit(WholeVector(kFinalNorm, h), unused));
    if (!config.tie_word_embeddings) ASSAY_RETURN_IF_ERROR(checker.Visit(WholeMatrix(kHead, vocab, h), unused));
    for (int64_t l = 0; l < config.n_layers; ++l) {
      fused.push_back(HasFusedExperts(*checkpoint, l) ? 1 : 0);
      LayerWeights<float> none;
      ASSAY_RETURN_IF_ERROR(VisitLayer(config, l, fused.back() != 0, true, &none, checker));
    }
    return CheckUnused(used);
  }

  // A tensor that no part of the config asks for is either left out for a reason that can be named, or an error: a
  // bias or a norm that goes unused would make every result wrong.
  Status CheckUnused(const std::set<std::string, std::less<>>& used) {
    int64_t beyond = 0, indexer = 0;
    for (const CheckpointTensor& t : checkpoint->tensors()) {
      if (used.count(t.name) != 0) continue;
      if (LayerOf(t.name) >= config.n_layers) {
        ++beyond;
      } else if (config.family == Family::kGlmMoeDsa && t.name.find(".self_attn.indexer.") != std::string::npos) {
        ++indexer;
      } else if (t.name == kHead && config.tie_word_embeddings) {
        notes.push_back("lm_head.weight is in the checkpoint but the config ties it to the embedding, which is used");
      } else if (t.name.find("rotary_emb.inv_freq") == std::string::npos) {  // old exports; recomputed from the config
        return Status::BadInput(t.file + ": tensor \"" + t.name + "\" at offset " + std::to_string(t.file_offset) +
                                " has no place in a " + config.model_type +
                                " model with this config (a bias or norm that the config does not mention?)");
      }
    }
    if (beyond > 0) {
      notes.push_back(std::to_string(beyond) + " tensors of layers beyond num_hidden_layers = " +
                      std::to_string(config.n_layers) + " are left out");
    }
    if (indexer > 0) notes.push_back(std::to_string(indexer) + " tensors of the sparse-attention indexer are left out");
    return {};
  }
};

WeightStore::WeightStore() : impl_(std::make_unique<Impl>()) {}
WeightStore::~WeightStore() = default;

Result<std::shared_ptr<const WeightStore>> WeightStore::Open(std::shared_ptr<const Checkpoint> checkpoint,
                                                             const ModelConfig& config) {
  std::shared_ptr<WeightStore> store(new WeightStore);
  store->impl_->checkpoint = std::move(checkpoint);
  store->impl_->config = config;
  ASSAY_RETURN_IF_ERROR(store->impl_->Check());
  return std::shared_ptr<const WeightStore>(std::move(store));
}

const ModelConfig& WeightStore::config() const { return impl_->config; }
const Checkpoint& WeightStore::checkpoint() const { return *impl_->checkpoint; }
const std::vector<std::string>& WeightStore::notes() const { return impl_->notes; }

int64_t WeightStore::layer_bytes_f32(int64_t layer) const {
  Counter counter;
  LayerWeights<float> none;
  const bool fused = impl_->fused[static_cast<size_t>(layer)] != 0;
  const Status status = VisitLayer(impl_->config, layer, fused, true, &none, counter);
  return status.ok() ? counter.elements * 4 : 0;
}

template <class T>
Result<LayerWeights<T>> WeightStore::LoadLayer(int64_t layer, bool with_experts) const {
  if (layer < 0 || layer >= impl_->config.n_layers) {
    return Status::Usage("layer " + std::to_string(layer) + ": the model has layers 0 to " +
                         std::to_string(impl_->config.n_layers - 1));
  }
  const bool fused = impl_->fused[static_cast<size_t>(layer)] != 0;
  return Guarded("weights of layer " + std::to_string(layer), [&]() -> Result<LayerWeights<T>> {
    LayerWeights<T> weights;
    Loader loader(*impl_->checkpoint);
    ASSAY_RETURN_IF_ERROR(VisitLayer(impl_->config, layer, fused, with_experts, &weights, loader));
    return weights;
  });
}

template <class T>
Result<MlpWeights<T>> WeightStore::LoadExpert(int64_t layer, int64_t expert) const {
  if (layer < 0 || layer >= impl_->config.n_layers || !impl_->config.is_moe(layer) || expert < 0 ||
      expert >= impl_->config.n_routed_experts) {
    return Status::Usage("layer " + std::to_string(layer) + " has no expert " + std::to_string(expert));
  }
  const bool fused = impl_->fused[static_cast<size_t>(layer)] != 0;
  return Guarded("expert " + std::to_string(expert), [&]() -> Result<MlpWeights<T>> {
    MlpWeights<T> weights;
    Loader loader(*impl_->checkpoint);
    ASSAY_RETURN_IF_ERROR(VisitExpert(impl_->config, layer, fused, expert, &weights, loader));
    return weights;
  });
}

template <class T>
Result<EndWeights<T>> WeightStore::LoadEnd() const {
  return Guarded("final norm and head", [&]() -> Result<EndWeights<T>> {
    EndWeights<T> weights;
    Loader loader(*impl_->checkpoint);
    const int64_t h = impl_->config.hidden_size, vocab = impl_->config.vocab_size;
    ASSAY_RETURN_IF_ERROR(loader.Visit(WholeVector(kFinalNorm, h), &weights.final_norm));
    const char* head = impl_->config.tie_word_embeddings ? kEmbedding : kHead;
    ASSAY_RETURN_IF_ERROR(loader.Visit(WholeMatrix(head, vocab, h), &weights.lm_head));
    return weights;
  });
}

template <class T>
Result<Matrix<T>> WeightStore::LoadEmbedding(const std::vector<int64_t>& ids) const {
  const int64_t h = impl_->config.hidden_size, vocab = impl_->config.vocab_size;
  ASSAY_ASSIGN_OR_RETURN(const CheckpointTensor* tensor, Find(*impl_->checkpoint, WholeMatrix(kEmbedding, vocab, h)));
  const size_t row_bytes = static_cast<size_t>(h) * ElementBytes(tensor->dtype);
  return Guarded("embedding rows", [&]() -> Result<Matrix<T>> {
    Matrix<T> rows;
    rows.rows = static_cast<int64_t>(ids.size());
    rows.cols = h;
    rows.data.resize(ids.size() * static_cast<size_t>(h));
    for (size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] < 0 || ids[i] >= vocab) {
        return Status::Usage("token id " + std::to_string(ids[i]) + " at position " + std::to_string(i) +
                             " is outside the vocabulary of " + std::to_string(vocab));
      }
      Convert(tensor->data + static_cast<size_t>(ids[i]) * row_bytes, tensor->dtype, static_cast<size_t>(h),
              rows.row(static_cast<int64_t>(i)));
    }
    return rows;
  });
}

template Result<LayerWeights<float>> WeightStore::LoadLayer<float>(int64_t, bool) const;
template Result<LayerWeights<double>> WeightStore::LoadLayer<double>(int64_t, bool) const;
template Result<MlpWeights<float>> WeightStore::LoadExpert<float>(int64_t, int64_t) const;
template Result<MlpWeights<double>> WeightStore::LoadExpert<double>(int64_t, int64_t) const;
template Result<EndWeights<float>> WeightStore::LoadEnd<float>() const;
template Result<EndWeights<double>> WeightStore::LoadEnd<double>() const;
template Result<Matrix<float>> WeightStore::LoadEmbedding<float>(const std::vector<int64_t>&) const;
template Result<Matrix<double>> WeightStore::LoadEmbedding<double>(const std::vector<int64_t>&) const;

}  // namespace assay
