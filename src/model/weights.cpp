#include "model/weights.h"

#include <exception>

#include "model/layer_names.h"
#include "model/weights_match.h"

namespace assay {
namespace {

// ---- Visitors of layer_names.h ---------------------------------------------------------------------------------

// Decodes into the visited member.
class Loader {
 public:
  explicit Loader(const WeightSource& source) : source_(source) {}
  template <class T>
  Status Visit(const TensorPart& part, Matrix<T>* target) {
    ASSAY_RETURN_IF_ERROR(Visit(part, &target->data));
    target->rows = part.rows;
    target->cols = part.cols;
    return {};
  }
  template <class T>
  Status Visit(const TensorPart& part, std::vector<T>* target) {
    ASSAY_ASSIGN_OR_RETURN(const Weight* weight, FindPart(source_, part));
    target->resize(static_cast<size_t>(part.rows * part.cols));
    // Parts are whole rows; a vector is one.
    if (!target->empty()) weight->Decode(part.offset_elems / weight->cols(), part.rows, target->data());
    return {};
  }

 private:
  const WeightSource& source_;
};

// Adds up sizes without touching the file.
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

}  // namespace

struct WeightStore::Impl {
  std::shared_ptr<const WeightSource> source;
  ModelConfig config;
  std::vector<std::string> notes;
  std::vector<uint8_t> fused;  // per layer

  // Everything before anything is decoded: a run must not end at layer 60 for a tensor that the file never had.
  Status Check() {
    const std::vector<WeightMismatch> wrong = HoldAgainstConfig(*source, config, &notes);
    if (!wrong.empty()) return Status::BadInput(wrong.front().problem.what);
    for (int64_t l = 0; l < config.n_layers; ++l) fused.push_back(HasFusedExperts(*source, l) ? 1 : 0);
    return {};
  }
};

WeightStore::WeightStore() : impl_(std::make_unique<Impl>()) {}
WeightStore::~WeightStore() = default;

Result<std::shared_ptr<const WeightStore>> WeightStore::Open(std::shared_ptr<const Checkpoint> checkpoint,
                                                             const ModelConfig& config) {
  return Open(WeightSource::FromCheckpoint(std::move(checkpoint), nullptr), config);
}

Result<std::shared_ptr<const WeightStore>> WeightStore::Open(std::shared_ptr<const WeightSource> source,
                                                             const ModelConfig& config) {
  std::shared_ptr<WeightStore> store(new WeightStore);
  store->impl_->source = std::move(source);
  store->impl_->config = config;
  ASSAY_RETURN_IF_ERROR(store->impl_->Check());
  return std::shared_ptr<const WeightStore>(std::move(store));
}

const ModelConfig& WeightStore::config() const { return impl_->config; }
const WeightSource& WeightStore::source() const { return *impl_->source; }
const std::vector<std::string>& WeightStore::notes() const { return impl_->notes; }

int64_t WeightStore::layer_bytes_f32(int64_t layer) const {
  Counter counter;
  LayerWeights<float> none;
  const bool fused = impl_->fused[static_cast<size_t>(layer)] != 0;
  // The same walk as loading, with a visitor that only counts.
  const Status status = VisitLayer(impl_->config, layer, fused, true, &none, counter);
  return status.ok() ? counter.elements * 4 : 0;
}

// with_experts false leaves the routed ones out: a streamed run takes them one by one (LoadExpert).
template <class T>
Result<LayerWeights<T>> WeightStore::LoadLayer(int64_t layer, bool with_experts) const {
  if (layer < 0 || layer >= impl_->config.n_layers) {
    return Status::Usage("layer " + std::to_string(layer) + ": the model has layers 0 to " +
                         std::to_string(impl_->config.n_layers - 1));
  }
  const bool fused = impl_->fused[static_cast<size_t>(layer)] != 0;
  return Guarded("weights of layer " + std::to_string(layer), [&]() -> Result<LayerWeights<T>> {
    LayerWeights<T> weights;
    Loader loader(*impl_->source);
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
    Loader loader(*impl_->source);
    ASSAY_RETURN_IF_ERROR(VisitExpert(impl_->config, layer, fused, expert, &weights, loader));
    return weights;
  });
}

// A tied head is the embedding itself, read once more.
template <class T>
Result<EndWeights<T>> WeightStore::LoadEnd() const {
  return Guarded("final norm and head", [&]() -> Result<EndWeights<T>> {
    EndWeights<T> weights;
    Loader loader(*impl_->source);
    const int64_t h = impl_->config.hidden_size, vocab = impl_->config.vocab_size;
    ASSAY_RETURN_IF_ERROR(loader.Visit(WholeVector(kFinalNorm, h), &weights.final_norm));
    const char* head = impl_->config.tie_word_embeddings ? kEmbedding : kHead;
    ASSAY_RETURN_IF_ERROR(loader.Visit(WholeMatrix(head, vocab, h), &weights.lm_head));
    return weights;
  });
}

// Only the rows asked for: an embedding may take gigabytes.
template <class T>
Result<Matrix<T>> WeightStore::LoadEmbedding(const std::vector<int64_t>& ids) const {
  const int64_t h = impl_->config.hidden_size, vocab = impl_->config.vocab_size;
  ASSAY_ASSIGN_OR_RETURN(const Weight* weight, FindPart(*impl_->source, WholeMatrix(kEmbedding, vocab, h)));
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
      weight->Decode(ids[i], 1, rows.row(static_cast<int64_t>(i)));
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
