// The native runtime against real transformers: logits of every family and option, on every path the runtime has.
//
// tests/parity/make_checkpoints.py wrote tests/parity/checkpoints and the reference logits in them. ASSAY_PARITY_DIR
// names another folder of that form to take instead (tests/parity/test_parity.py makes one, the GLM-5 geometry
// included).
//
// Tolerances, relative to the largest |logit| of the reference. The script measured noise_f32: how far the logits of
// the float64 model move when every weight is disturbed by a random relative error of up to u = 2^-24. That is the
// effect of one rounding of every product w x. A sum of K such products also rounds its K partial sums: for terms of
// like size s and random signs the partial sum after k terms is about sqrt(k) s, the roundings add up to about u s
// sqrt(1 + 2 + ... + K) = u s K / sqrt(2), the disturbed weights to u s sqrt(K): sqrt(K / 2) times as much. With K the
// longest reduction of the model, and 8 for everything else (norms, softmax, rotation, routing, the reference's own
// rounding, the tail of a maximum over all logits):
//   float32 against float64:  (8 + sqrt(K / 2)) noise_f32; transformers' own float32 error is held against it too, so
//                             that a tolerance that is too tight for its purpose fails.
//   float64 against float64:  2^-29 of that: the same roundings with u = 2^-53.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>

#include "io/json.h"
#include "io/safetensors.h"
#include "model/config.h"
#include "model/engine.h"
#include "model/weights.h"

namespace assay {
namespace {

namespace fs = std::filesystem;

const char* const kCommitted = ASSAY_SOURCE_DIR "/tests/parity/checkpoints";

// Folders of `dir` that hold a reference.
std::vector<fs::path> CheckpointsIn(const fs::path& dir) {
  std::vector<fs::path> paths;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(dir, error)) {
    if (fs::exists(entry.path() / "reference.safetensors")) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

std::vector<fs::path> Checkpoints() {
  const char* other = std::getenv("ASSAY_PARITY_DIR");
  return CheckpointsIn(other != nullptr ? other : kCommitted);
}

template <class T>
std::vector<T> Values(const CheckpointTensor& tensor) {
  std::vector<T> values(tensor.size_bytes / sizeof(T));
  std::memcpy(values.data(), tensor.data, values.size() * sizeof(T));
  return values;
}

// What transformers said about one checkpoint.
struct Reference {
  std::vector<int64_t> tokens;  // [T]
  size_t prompt = 0;            // of them
  size_t vocab = 0;
  std::vector<double> logits;  // [T, vocab], float64
  double scale = 0;            // largest |logit|
  double noise_f32 = 0, error_f32 = 0;
  double tolerance_f32 = 0, tolerance_f64 = 0;

  // Largest difference of the given rows from the reference, relative to the scale.
  double ErrorOf(const std::vector<double>& rows) const {
    double worst = 0;
    for (size_t i = 0; i < logits.size(); ++i) {
      const double error = std::fabs(rows[i] - logits[i]);
      if (!(error <= worst)) worst = std::isnan(error) ? std::numeric_limits<double>::infinity() : error;
    }
    return worst / scale;
  }
};

class Parity : public testing::TestWithParam<fs::path> {
 protected:
  void SetUp() override {
    const auto file = Checkpoint::Open((GetParam() / "reference.safetensors").string());
    ASSERT_TRUE(file.ok()) << file.status().message();
    reference_.tokens = Values<int64_t>(*(*file)->find("tokens"));
    reference_.logits = Values<double>(*(*file)->find("logits_f64"));
    reference_.vocab = reference_.logits.size() / reference_.tokens.size();
    for (const double x : reference_.logits) reference_.scale = std::max(reference_.scale, std::fabs(x));
    ASSERT_GT(reference_.scale, 0.1);
    const auto text = ReadFile(GetParam() / "parity.json");
    const auto facts = ParseJson(text, "parity.json");
    ASSERT_TRUE(facts.ok());
    reference_.prompt = (*facts)["prompt"].get<size_t>();
    reference_.noise_f32 = (*facts)["noise_f32"].get<double>();
    reference_.error_f32 = (*facts)["error_f32"].get<double>();
    // A folder without config.json holds the reference of a shipped model of the same name.
    fs::path model = GetParam();
    if (!fs::exists(model / "config.json")) model = fs::path(ASSAY_SOURCE_DIR "/models") / model.filename();
    const auto config = LoadModelConfig(model.string());
    ASSERT_TRUE(config.ok()) << config.status().message();
    config_ = *config;
    const int64_t longest = std::max({config_.hidden_size, config_.intermediate_size, config_.q_lora_rank,
                                      config_.kv_lora_rank, config_.n_heads * config_.value_head_dim()});
    reference_.tolerance_f32 = (8 + std::sqrt(static_cast<double>(longest) / 2)) * reference_.noise_f32;
    reference_.tolerance_f64 = 0x1p-29 * reference_.tolerance_f32;
    // reference.safetensors is no part of the checkpoint: a folder means model.safetensors or its index.
    const auto checkpoint = Checkpoint::Open(model.string());
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
    checkpoint_ = *checkpoint;
  }

  static std::string ReadFile(const fs::path& path) {
    std::string text(fs::file_size(path), '\0');
    std::FILE* file = std::fopen(path.c_str(), "rb");
    EXPECT_EQ(std::fread(text.data(), 1, text.size(), file), text.size());
    std::fclose(file);
    return text;
  }

  // Runs the whole sequence: the prompt prefilled, the rest decoded token by token. Logits of every row. beside:
  // another, longer request is in every batch.
  std::vector<double> Run(EngineOptions options, bool beside = false) {
    const auto& tokens = reference_.tokens;
    const auto split = tokens.begin() + static_cast<ptrdiff_t>(reference_.prompt);
    std::vector<double> logits(reference_.logits.size(), std::numeric_limits<double>::quiet_NaN());
    options.max_tokens = static_cast<int64_t>(tokens.size() - reference_.prompt) + 1;
    options.ignore_eos = true;
    options.all_logits = true;
    auto engine = Engine::Create(checkpoint_, config_, options);
    if (!engine.ok()) {
      ADD_FAILURE() << engine.status().message();
      return logits;
    }
    const auto sink = [&](int64_t request, int64_t position, std::span<const double> row) {
      if (request == 0 && position < static_cast<int64_t>(tokens.size()) && row.size() == reference_.vocab) {
        std::copy(row.begin(), row.end(), logits.begin() + position * static_cast<int64_t>(reference_.vocab));
      }
    };
    const PromptInput prompt{{tokens.begin(), split}, {split, tokens.end()}};
    std::vector<PromptInput> prompts = {prompt};
    if (beside) prompts.push_back({{tokens.rbegin(), tokens.rend()}, {}});
    const auto generated = (*engine)->Generate(prompts, nullptr, sink);
    if (!generated.ok()) ADD_FAILURE() << generated.status().message();
    return logits;
  }

  void ExpectAgrees(const std::string& name, const EngineOptions& options, double tolerance, bool beside = false) {
    const char* what = name.c_str();
    const double error = reference_.ErrorOf(Run(options, beside));
    std::printf("parity %-28s %-28s error %.2e  tolerance %.2e\n", GetParam().filename().c_str(), what, error,
                tolerance);
    EXPECT_LE(error, tolerance) << what;
  }

  // One run a path and way of cutting the work, in the given arithmetic.
  void ExpectAllPathsAgree(ComputeDType dtype, double tolerance) {
    const int most_shards = static_cast<int>(std::min<int64_t>(8, config_.mla() ? config_.n_heads : 4));
    for (const AttentionPath path : {AttentionPath::kMaterialised, AttentionPath::kAbsorbed}) {
      if (path == AttentionPath::kAbsorbed && !config_.mla()) continue;
      const std::string name = path == AttentionPath::kAbsorbed ? "absorbed" : "materialised";
      EngineOptions options;
      options.path = path;
      options.dtype = dtype;
      ExpectAgrees(name, options, tolerance);
      options.chunk = 5;
      options.block_size = 4;
      ExpectAgrees(name + ", chunks of 5", options, tolerance);
      ExpectAgrees(name + ", beside another", options, tolerance, true);
      options.chunk = 0;
      options.shards = 2;
      ExpectAgrees(name + ", 2 shards", options, tolerance);
      options.shards = most_shards;
      options.stream = true;
      ExpectAgrees(name + ", " + std::to_string(most_shards) + " shards", options, tolerance);
    }
  }

  Reference reference_;
  ModelConfig config_;
  std::shared_ptr<const Checkpoint> checkpoint_;
};

TEST_P(Parity, EveryTensorHasItsPlace) {
  const auto store = WeightStore::Open(checkpoint_, config_);
  ASSERT_TRUE(store.ok()) << store.status().message();
  for (int64_t l = 0; l < config_.n_layers; ++l) EXPECT_TRUE((*store)->LoadLayer<float>(l).ok());
  EXPECT_TRUE((*store)->LoadEnd<double>().ok());
}

TEST_P(Parity, Float64LogitsAreThoseOfTransformers) {
  ExpectAllPathsAgree(ComputeDType::kF64, reference_.tolerance_f64);
}

TEST_P(Parity, Float32LogitsAreWithinFloat32Rounding) {
  const double tolerance = reference_.tolerance_f32;
  EXPECT_LE(reference_.error_f32, tolerance) << "transformers itself in float32";
  ExpectAllPathsAgree(ComputeDType::kF32, tolerance);
}

// Every option that a checkpoint is there for must matter in it: changed in the config alone, the logits move by far
// more than the tolerance. Without this the agreement above could be that of a model that ignores the option.
struct Option {
  const char* name;
  bool (*applies)(const ModelConfig&);
  void (*change)(ModelConfig*);
};

const Option kOptions[] = {
    {"other rope pairing", [](const ModelConfig&) { return true; },
     [](ModelConfig* c) { c->rope.interleaved = !c->rope.interleaved; }},
    {"rope theta", [](const ModelConfig&) { return true; }, [](ModelConfig* c) { c->rope.theta *= 2; }},
    {"rope scaling left out", [](const ModelConfig& c) { return c.rope.kind != RopeKind::kDefault; },
     [](ModelConfig* c) { c->rope.kind = RopeKind::kDefault; }},
    {"rope factor", [](const ModelConfig& c) { return c.rope.kind != RopeKind::kDefault; },
     [](ModelConfig* c) { c->rope.factor *= 2; }},
    {"attention factor", [](const ModelConfig& c) { return c.rope.attention_factor > 0; },
     [](ModelConfig* c) { c->rope.attention_factor = 0; }},
    {"magnitude of the softmax scale", [](const ModelConfig& c) { return c.mla() && c.rope.mscale_all_dim > 0; },
     [](ModelConfig* c) { c->rope.mscale_all_dim *= 2; }},
    {"truncation of the yarn range",
     [](const ModelConfig& c) { return c.rope.kind == RopeKind::kYarn && !c.rope.truncate; },
     [](ModelConfig* c) { c->rope.truncate = true; }},
    {"part rotation", [](const ModelConfig& c) { return c.rope.partial_rotary_factor < 1; },
     [](ModelConfig* c) { c->rope.partial_rotary_factor = 1; }},
    {"window one wider", [](const ModelConfig& c) { return c.sliding_window > 0; },
     [](ModelConfig* c) { c->sliding_window += 1; }},
    {"windows on other layers", [](const ModelConfig& c) { return !c.layer_windowed.empty() && c.sliding_window > 0; },
     [](ModelConfig* c) {
       for (uint8_t& w : c->layer_windowed) w = w == 0;
     }},
    {"norm epsilon", [](const ModelConfig&) { return true; }, [](ModelConfig* c) { c->rms_norm_eps += 1e-4; }},
    {"latent norm epsilon", [](const ModelConfig& c) { return c.mla(); },
     [](ModelConfig* c) { c->latent_norm_eps += 1e-4; }},
    {"groups", [](const ModelConfig& c) { return c.n_group > 1; },
     [](ModelConfig* c) { c->n_group = c->topk_group = 1; }},
    {"group score", [](const ModelConfig& c) { return c.n_group > 1; },
     [](ModelConfig* c) { c->group_top2_sum = !c->group_top2_sum; }},
    {"weights normalised", [](const ModelConfig& c) { return c.n_routed_experts > 0; },
     [](ModelConfig* c) { c->norm_topk_prob = !c->norm_topk_prob; }},
    {"routed scaling", [](const ModelConfig& c) { return c.n_routed_experts > 0; },
     [](ModelConfig* c) { c->routed_scaling_factor *= 1.5; }},
    {"scoring", [](const ModelConfig& c) { return c.n_routed_experts > 0; },
     [](ModelConfig* c) { c->scoring_sigmoid = !c->scoring_sigmoid; }},
    {"experts a token", [](const ModelConfig& c) { return c.n_experts_per_tok > 1; },
     [](ModelConfig* c) { c->n_experts_per_tok -= 1; }},
};

TEST_P(Parity, EveryOptionOfTheCheckpointMatters) {
  const ModelConfig right = config_;
  EngineOptions options;
  options.dtype = ComputeDType::kF64;
  const double tolerance = reference_.tolerance_f64;
  for (const Option& option : kOptions) {
    if (!option.applies(right)) continue;
    config_ = right;
    option.change(&config_);
    EXPECT_GT(reference_.ErrorOf(Run(options)), 1e5 * tolerance) << option.name;
  }
}

std::string NameOfCase(const testing::TestParamInfo<fs::path>& param_info) {
  std::string name = param_info.param.filename().string();
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, Parity, testing::ValuesIn(Checkpoints()), NameOfCase);

TEST(ParitySet, HoldsEveryFamily) {
  std::vector<bool> seen(static_cast<size_t>(Family::kMistral) + 1, false);
  for (const fs::path& path : CheckpointsIn(kCommitted)) {
    if (!fs::exists(path / "config.json")) continue;
    const auto config = LoadModelConfig(path.string());
    ASSERT_TRUE(config.ok()) << config.status().message();
    seen[static_cast<size_t>(config->family)] = true;
  }
  for (size_t f = 0; f < seen.size(); ++f) EXPECT_TRUE(seen[f]) << NameOf(static_cast<Family>(f));
}

}  // namespace
}  // namespace assay
