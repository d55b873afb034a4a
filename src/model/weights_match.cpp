#include "model/weights_match.h"

#include <charconv>
#include <set>
#include <string_view>
#include <utility>

namespace assay {
namespace {

using Names = std::set<std::string, std::less<>>;

// A forged configuration may ask for a million experts.
constexpr size_t kMaxMismatches = 1000;

// What the config wants, for messages.
std::string Asked(const TensorPart& part) { return "\"" + part.name + "\" of shape " + ShapeText(part.shape); }

// Where a weight is stored, for messages: "FILE: tensor "NAME" at offset N".
std::string Stored(const Weight& weight) {
  const CheckpointTensor& tensor = *weight.stored().front().tensor;
  return tensor.file + ": tensor \"" + tensor.name + "\" at offset " + std::to_string(tensor.file_offset);
}

// The matrix, or each of several, has its two extents exchanged.
bool IsTransposed(const std::vector<int64_t>& stored, std::vector<int64_t> asked) {
  if (stored.size() != asked.size() || asked.size() < 2 || stored == asked) return false;
  std::swap(asked[asked.size() - 1], asked[asked.size() - 2]);
  return stored == asked;
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

// Visitor of layer_names.h: presence, shape and dtype of everything; remembers the names. Never fails before the limit.
class Collector {
 public:
  Collector(const WeightSource& source, std::vector<WeightMismatch>* wrong) : source_(source), wrong_(wrong) {}

  // Experts that lie together are visited once each, under one name.
  template <class Target>
  Status Visit(const TensorPart& part, Target*) {
    if (!used_.insert(part.name).second) return {};
    const Result<const Weight*> found = FindPart(source_, part);
    if (found.ok()) {
      ++present_;
      return {};
    }
    const Weight* stored = source_.find(part.name);
    present_ += stored != nullptr ? 1 : 0;
    const bool transposed = stored != nullptr && IsTransposed(stored->shape(), part.shape);
    wrong_->push_back(
        {{part.name, transposed ? "Q-LAYOUT" : "LOAD", found.status().message()}, /*missing=*/stored == nullptr});
    return wrong_->size() < kMaxMismatches ? Status() : Status::BadInput("too many");
  }

  const Names& used() const { return used_; }
  int64_t present() const { return present_; }  // of the parts visited

 private:
  const WeightSource& source_;
  std::vector<WeightMismatch>* wrong_;
  Names used_;
  int64_t present_ = 0;
};

Status CollectEnds(const ModelConfig& config, Collector* collector) {
  std::vector<float>* const unused = nullptr;
  const int64_t h = config.hidden_size, vocab = config.vocab_size;
  ASSAY_RETURN_IF_ERROR(collector->Visit(WholeMatrix(kEmbedding, vocab, h), unused));
  ASSAY_RETURN_IF_ERROR(collector->Visit(WholeVector(kFinalNorm, h), unused));
  return config.tie_word_embeddings ? Status() : collector->Visit(WholeMatrix(kHead, vocab, h), unused);
}

// A layer that is not there at all is one finding, not one a tensor.
Status CollectLayer(const WeightSource& source, const ModelConfig& config, int64_t layer, Collector* collector,
                    std::vector<WeightMismatch>* wrong) {
  const size_t before = wrong->size();
  const int64_t present = collector->present();
  LayerWeights<float> none;
  const Status status = VisitLayer(config, layer, HasFusedExperts(source, layer), true, &none, *collector);
  if (collector->present() != present || wrong->size() < before + 2) return status;
  for (size_t i = before; i < wrong->size(); ++i) {
    if (FindProblem(source, (*wrong)[i].problem.name) != nullptr) return status;
  }
  wrong->resize(before + 1);
  wrong->back().problem.what = source.path() + ": nothing of layer " + std::to_string(layer) +
                               " is there; the config has " + std::to_string(config.n_layers) +
                               " layers (first missing: \"" + wrong->back().problem.name + "\")";
  return {};
}

// A tensor that no part of the config asks for is either left out for a reason that can be named, or an error: a bias
// or a norm that goes unused would make every result wrong.
void CollectUnused(const WeightSource& source, const ModelConfig& config, const Names& used,
                   std::vector<WeightMismatch>* wrong, std::vector<std::string>* notes) {
  // beyond: draft layers (MTP), which follow the decoder's in numbering.
  int64_t beyond = 0, indexer = 0, scales = 0;
  const auto add = [&](const std::string& name, std::string what) {
    if (wrong->size() < kMaxMismatches) wrong->push_back({{name, "LOAD", std::move(what)}, false});
  };
  for (const WeightPtr& weight : source.weights()) {
    const std::string& name = weight->name();
    if (used.count(name) != 0) continue;
    if (LayerOf(name) >= config.n_layers) {
      ++beyond;
    } else if (config.family == Family::kGlmMoeDsa && name.find(".self_attn.indexer.") != std::string::npos) {
      ++indexer;
    } else if (name == kHead && config.tie_word_embeddings) {
      notes->push_back("lm_head.weight is in the checkpoint but the config ties it to the embedding, which is used");
    } else {
      add(name, Stored(*weight) + " has no place in a " + config.model_type +
                    " model with this config (a bias or norm that the config does not mention?)");
    }
  }
  // Not weights: scales of activations and caches, rotary tables (recomputed from the config). Anything else would make
  // every result wrong.
  for (const std::string& name : source.others()) {
    // GGUF's form of Llama 3's scaling, which the configuration has been given from it.
    if (name == "rope_freqs.weight" && config.rope.kind == RopeKind::kLlama3) continue;
    if (name.find("rotary_emb.inv_freq") != std::string::npos || LayerOf(name) >= config.n_layers) continue;
    if (name.find("_scale") != std::string::npos) {
      ++scales;
      continue;
    }
    add(name,
        source.path() + ": tensor \"" + name + "\" has no place in a " + config.model_type + " model with this config");
  }
  if (scales > 0)
    notes->push_back(std::to_string(scales) + " scales of activations are left out: arithmetic is not quantised");
  if (beyond > 0) {
    notes->push_back(std::to_string(beyond) + " tensors of layers beyond num_hidden_layers = " +
                     std::to_string(config.n_layers) + " are left out");
  }
  if (indexer > 0) notes->push_back(std::to_string(indexer) + " tensors of the sparse-attention indexer are left out");
}

}  // namespace

Result<const Weight*> FindPart(const WeightSource& source, const TensorPart& part) {
  const Weight* weight = source.find(part.name);
  if (weight == nullptr) {
    if (const WeightProblem* problem = FindProblem(source, part.name)) return Status::BadInput(problem->what);
    return Status::BadInput(source.path() + ": tensor " + Asked(part) + " is missing; the config asks for it");
  }
  if (weight->shape() != part.shape) {
    const char* hint = IsTransposed(weight->shape(), part.shape) ? ": it is stored transposed" : "";
    return Status::BadInput(Stored(*weight) + " has shape " + ShapeText(weight->shape()) + ", the config asks for " +
                            ShapeText(part.shape) + hint);
  }
  // Integers are no weights of a model without their scales.
  const CheckpointTensor& tensor = *weight->stored().front().tensor;
  if (!weight->quantised() && tensor.dtype != DType::kInvalid &&
      (!IsFloat(tensor.dtype) || BitsOf(tensor.dtype) < 16)) {
    return Status::BadInput(Stored(*weight) +
                            ": weights are read as bf16, f16, f32, f64 or in a quantised format, this one is " +
                            std::string(NameOf(tensor.dtype)) + " without scales");
  }
  return weight;
}

std::vector<WeightMismatch> HoldAgainstConfig(const WeightSource& source, const ModelConfig& config,
                                              std::vector<std::string>* notes) {
  std::vector<WeightMismatch> wrong;
  Collector collector(source, &wrong);
  bool all = CollectEnds(config, &collector).ok();
  for (int64_t l = 0; all && l < config.n_layers; ++l) all = CollectLayer(source, config, l, &collector, &wrong).ok();
  // Beyond the limit the names that are in use are not all known.
  if (all) CollectUnused(source, config, collector.used(), &wrong, notes);
  return wrong;
}

}  // namespace assay
