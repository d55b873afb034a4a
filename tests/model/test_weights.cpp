#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <filesystem>
#include <map>

#include "model/weights.h"
#include "model/weights_match.h"

namespace assay {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMla = R"({"model_type":"deepseek_v3","vocab_size":5,"hidden_size":4,"intermediate_size":3,
  "num_hidden_layers":2,"num_attention_heads":2,"kv_lora_rank":3,"q_lora_rank":2,"qk_nope_head_dim":2,
  "qk_rope_head_dim":2,"v_head_dim":2,"n_routed_experts":4,"num_experts_per_tok":2,"moe_intermediate_size":2,
  "n_group":1,"topk_group":1,"first_k_dense_replace":1,"num_nextn_predict_layers":0})";
constexpr const char* kLlama = R"({"model_type":"llama","vocab_size":5,"hidden_size":4,"intermediate_size":3,
  "num_hidden_layers":1,"num_attention_heads":2,"num_key_value_heads":1})";

// Element i of a generated tensor: its name decides the start, so that a mix-up of tensors shows.
float ValueAt(const std::string& name, size_t i) {
  return static_cast<float>(std::hash<std::string>{}(name) % 64) + static_cast<float>(i) / 64;
}

class Weights : public testing::Test {
 protected:
  void SetUp() override {
    path_ = (fs::temp_directory_path() / ("assay_weights_" + std::to_string(::getpid()) + ".safetensors")).string();
  }
  void TearDown() override { fs::remove(path_); }

  // A checkpoint that holds shapes_ as f32, opened under the config.
  Result<std::shared_ptr<const WeightStore>> OpenWith(const char* json,
                                                      const std::vector<std::string>& overrides = {}) {
    std::deque<std::vector<float>> storage;
    std::vector<CheckpointTensor> tensors;
    for (const auto& [name, shape] : shapes_) {
      size_t count = 1;
      for (const int64_t d : shape) count *= static_cast<size_t>(d);
      storage.emplace_back(count);
      for (size_t i = 0; i < count; ++i) storage.back()[i] = ValueAt(name, i);
      tensors.push_back(
          {name, DType::kF32, shape, reinterpret_cast<const std::byte*>(storage.back().data()), count * 4, "", 0});
    }
    EXPECT_TRUE(WriteSafetensors(path_, tensors, {}).ok());
    const auto checkpoint = Checkpoint::Open(path_);
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().message();
    const auto config = ParseModelConfig(json, "config.json", overrides);
    EXPECT_TRUE(config.ok()) << config.status().message();
    return WeightStore::Open(*checkpoint, *config);
  }

  void ExpectRefused(const char* json, const std::string& part) {
    const auto store = OpenWith(json);
    ASSERT_FALSE(store.ok()) << "accepted, expected " << part;
    EXPECT_EQ(store.status().code(), Code::kBadInput);
    EXPECT_NE(store.status().message().find(part), std::string::npos) << store.status().message();
  }

  void AddMla() {
    Add("model.embed_tokens.weight", {5, 4});
    Add("model.norm.weight", {4});
    Add("lm_head.weight", {5, 4});
    for (const std::string l : {"0", "1"}) {
      const std::string p = "model.layers." + l + ".", a = p + "self_attn.";
      Add(p + "input_layernorm.weight", {4});
      Add(p + "post_attention_layernorm.weight", {4});
      Add(a + "q_a_proj.weight", {2, 4});
      Add(a + "q_a_layernorm.weight", {2});
      Add(a + "q_b_proj.weight", {8, 2});
      Add(a + "kv_a_proj_with_mqa.weight", {5, 4});
      Add(a + "kv_a_layernorm.weight", {3});
      Add(a + "kv_b_proj.weight", {8, 3});
      Add(a + "o_proj.weight", {4, 4});
    }
    AddMlp("model.layers.0.mlp.", 3);
    Add("model.layers.1.mlp.gate.weight", {4, 4});
    Add("model.layers.1.mlp.gate.e_score_correction_bias", {4});
    AddMlp("model.layers.1.mlp.shared_experts.", 2);
    for (int e = 0; e < 4; ++e) AddMlp("model.layers.1.mlp.experts." + std::to_string(e) + ".", 2);
  }

  void AddLlama() {
    Add("model.embed_tokens.weight", {5, 4});
    Add("model.norm.weight", {4});
    Add("lm_head.weight", {5, 4});
    const std::string p = "model.layers.0.", a = p + "self_attn.";
    Add(p + "input_layernorm.weight", {4});
    Add(p + "post_attention_layernorm.weight", {4});
    Add(a + "q_proj.weight", {4, 4});
    Add(a + "k_proj.weight", {2, 4});
    Add(a + "v_proj.weight", {2, 4});
    Add(a + "o_proj.weight", {4, 4});
    AddMlp(p + "mlp.", 3);
  }

  void AddMlp(const std::string& prefix, int64_t f) {
    Add(prefix + "gate_proj.weight", {f, 4});
    Add(prefix + "up_proj.weight", {f, 4});
    Add(prefix + "down_proj.weight", {4, f});
  }
  void Add(const std::string& name, std::vector<int64_t> shape) { shapes_[name] = std::move(shape); }

  template <class T>
  static void ExpectIs(const Matrix<T>& m, const std::string& name, int64_t rows, int64_t cols, size_t skip = 0) {
    ASSERT_EQ(m.rows, rows) << name;
    ASSERT_EQ(m.cols, cols) << name;
    for (size_t i = 0; i < m.data.size(); ++i) ASSERT_EQ(m.data[i], ValueAt(name, i + skip)) << name << " " << i;
  }

  std::map<std::string, std::vector<int64_t>> shapes_;
  std::string path_;
};

TEST_F(Weights, LayersOfAnMlaModelAreLoaded) {
  AddMla();
  const auto store = OpenWith(kMla);
  ASSERT_TRUE(store.ok()) << store.status().message();
  EXPECT_TRUE((*store)->notes().empty());
  const auto dense = (*store)->LoadLayer<float>(0);
  ASSERT_TRUE(dense.ok());
  ExpectIs(dense->q_b, "model.layers.0.self_attn.q_b_proj.weight", 8, 2);
  ExpectIs(dense->kv_a, "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", 5, 4);
  ExpectIs(dense->mlp.down, "model.layers.0.mlp.down_proj.weight", 4, 3);
  EXPECT_EQ(dense->kv_a_norm[2], ValueAt("model.layers.0.self_attn.kv_a_layernorm.weight", 2));
  EXPECT_TRUE(dense->router.empty() && dense->experts.empty() && dense->k.empty());

  const auto moe = (*store)->LoadLayer<double>(1);
  ASSERT_TRUE(moe.ok());
  ExpectIs(moe->router, "model.layers.1.mlp.gate.weight", 4, 4);
  EXPECT_EQ(moe->router_bias.size(), 4u);
  ASSERT_EQ(moe->experts.size(), 4u);
  ExpectIs(moe->experts[3].up, "model.layers.1.mlp.experts.3.up_proj.weight", 2, 4);
  ExpectIs(moe->shared.gate, "model.layers.1.mlp.shared_experts.gate_proj.weight", 2, 4);
  EXPECT_TRUE(moe->mlp.gate.empty());
}

TEST_F(Weights, ExpertsAreLoadedOneByOneOnRequest) {
  AddMla();
  const auto store = OpenWith(kMla);
  ASSERT_TRUE(store.ok());
  EXPECT_TRUE((*store)->LoadLayer<float>(1, false)->experts.empty());
  ExpectIs((*store)->LoadExpert<float>(1, 2)->gate, "model.layers.1.mlp.experts.2.gate_proj.weight", 2, 4);
  EXPECT_EQ((*store)->LoadExpert<float>(0, 0).status().code(), Code::kUsage) << "layer 0 is dense";
  EXPECT_EQ((*store)->LoadExpert<float>(1, 4).status().code(), Code::kUsage);
  EXPECT_EQ((*store)->LoadLayer<float>(2).status().code(), Code::kUsage);
  EXPECT_EQ((*store)->LoadLayer<float>(-1).status().code(), Code::kUsage);
}

TEST_F(Weights, FusedExpertsAreSplit) {
  AddMla();
  for (int e = 0; e < 4; ++e) {
    for (const char* part : {"gate_proj", "up_proj", "down_proj"}) {
      shapes_.erase("model.layers.1.mlp.experts." + std::to_string(e) + "." + part + ".weight");
    }
  }
  Add("model.layers.1.mlp.experts.gate_up_proj", {4, 4, 4});
  Add("model.layers.1.mlp.experts.down_proj", {4, 4, 2});
  const auto store = OpenWith(kMla);
  ASSERT_TRUE(store.ok()) << store.status().message();
  const auto layer = (*store)->LoadLayer<float>(1);
  ASSERT_TRUE(layer.ok());
  ExpectIs(layer->experts[2].gate, "model.layers.1.mlp.experts.gate_up_proj", 2, 4, 2 * 16);
  ExpectIs(layer->experts[2].up, "model.layers.1.mlp.experts.gate_up_proj", 2, 4, 2 * 16 + 8);
  ExpectIs(layer->experts[3].down, "model.layers.1.mlp.experts.down_proj", 4, 2, 3 * 8);
  ExpectIs((*store)->LoadExpert<double>(1, 1)->up, "model.layers.1.mlp.experts.gate_up_proj", 2, 4, 16 + 8);
}

TEST_F(Weights, ByteCountIsThatOfTheLoadedLayer) {
  AddMla();
  const auto store = OpenWith(kMla);
  ASSERT_TRUE(store.ok());
  int64_t elements = 0;
  for (const auto& [name, shape] : shapes_) {
    if (name.rfind("model.layers.1.", 0) != 0) continue;
    int64_t count = 1;
    for (const int64_t d : shape) count *= d;
    elements += count;
  }
  EXPECT_EQ((*store)->layer_bytes_f32(1), elements * 4);
}

TEST_F(Weights, MissingTensorIsNamedWithItsShape) {
  AddMla();
  shapes_.erase("model.layers.1.self_attn.kv_b_proj.weight");
  ExpectRefused(kMla, "tensor \"model.layers.1.self_attn.kv_b_proj.weight\" of shape [8, 3] is missing");
}

TEST_F(Weights, WrongShapeIsNamedWithFileAndOffset) {
  AddMla();
  Add("model.layers.0.self_attn.q_b_proj.weight", {2, 8});
  ExpectRefused(kMla, path_ + ": tensor \"model.layers.0.self_attn.q_b_proj.weight\" at offset ");
  ExpectRefused(kMla, "has shape [2, 8], the config asks for [8, 2]");
}

TEST_F(Weights, TensorThatTheConfigDoesNotMentionIsRefused) {
  AddLlama();
  Add("model.layers.0.self_attn.q_proj.bias", {4});
  ExpectRefused(kLlama, "has no place in a llama model");
  Add("model.layers.0.self_attn.k_proj.bias", {2});
  Add("model.layers.0.self_attn.v_proj.bias", {2});
  Add("model.layers.0.self_attn.o_proj.bias", {4});
  const auto store = OpenWith(kLlama, {"attention_bias=true"});
  ASSERT_TRUE(store.ok()) << store.status().message();
  EXPECT_EQ((*store)->LoadLayer<float>(0)->o_bias[1], ValueAt("model.layers.0.self_attn.o_proj.bias", 1));
}

TEST_F(Weights, LayersBeyondTheModelAreLeftOutWithANote) {
  AddLlama();
  Add("model.layers.1.eh_proj.weight", {4, 8});
  const auto store = OpenWith(kLlama);
  ASSERT_TRUE(store.ok()) << store.status().message();
  ASSERT_EQ((*store)->notes().size(), 1u);
  EXPECT_EQ((*store)->notes()[0], "1 tensors of layers beyond num_hidden_layers = 1 are left out");
}

TEST_F(Weights, TiedHeadIsTheEmbedding) {
  AddLlama();
  const auto with_copy = OpenWith(kLlama, {"tie_word_embeddings=true"});
  ASSERT_TRUE(with_copy.ok());
  EXPECT_EQ((*with_copy)->notes().size(), 1u);
  ExpectIs((*with_copy)->LoadEnd<float>()->lm_head, "model.embed_tokens.weight", 5, 4);
  shapes_.erase("lm_head.weight");
  EXPECT_TRUE(OpenWith(kLlama, {"tie_word_embeddings=true"}).ok());
  ExpectRefused(kLlama, "\"lm_head.weight\" of shape [5, 4] is missing");
}

TEST_F(Weights, EmbeddingRowsFollowTheIds) {
  AddLlama();
  const auto store = OpenWith(kLlama);
  ASSERT_TRUE(store.ok());
  const auto rows = (*store)->LoadEmbedding<double>({4, 0, 4});
  ASSERT_TRUE(rows.ok());
  EXPECT_EQ(rows->rows, 3);
  EXPECT_EQ(rows->row(0)[1], ValueAt("model.embed_tokens.weight", 17));
  EXPECT_EQ(rows->row(1)[3], ValueAt("model.embed_tokens.weight", 3));
  EXPECT_EQ((*store)->LoadEmbedding<float>({5}).status().code(), Code::kUsage);
  EXPECT_EQ((*store)->LoadEmbedding<float>({-1}).status().code(), Code::kUsage);
  EXPECT_EQ((*store)->LoadEmbedding<float>({})->rows, 0);
}

// A checkpoint whose final norm has every bit pattern of a 16-bit type.
class SixteenBit : public Weights {
 protected:
  std::vector<float> Load(DType dtype) {
    std::vector<uint16_t> patterns(1 << 16);
    for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<uint16_t>(i);
    std::vector<CheckpointTensor> tensors;
    const std::vector<uint16_t> zeros(size_t{4} << 16);
    const auto add = [&](const std::string& name, std::vector<int64_t> shape, const std::vector<uint16_t>& data) {
      uint64_t bytes = 2;
      for (const int64_t d : shape) bytes *= static_cast<uint64_t>(d);
      tensors.push_back({name, dtype, std::move(shape), reinterpret_cast<const std::byte*>(data.data()), bytes, "", 0});
    };
    const int64_t h = 1 << 16;
    const std::string p = "model.layers.0.";
    add("model.embed_tokens.weight", {1, h}, zeros);
    add("model.norm.weight", {h}, patterns);
    add(p + "input_layernorm.weight", {h}, zeros);
    add(p + "post_attention_layernorm.weight", {h}, zeros);
    for (const char* name : {"self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"}) {
      add(p + name, {2, h}, zeros);
    }
    add(p + "self_attn.o_proj.weight", {h, 2}, zeros);
    add(p + "mlp.gate_proj.weight", {1, h}, zeros);
    add(p + "mlp.up_proj.weight", {1, h}, zeros);
    add(p + "mlp.down_proj.weight", {h, 1}, zeros);
    EXPECT_TRUE(WriteSafetensors(path_, tensors, {}).ok());
    const auto config = ParseModelConfig(R"({"model_type":"llama","vocab_size":1,"hidden_size":65536,
      "intermediate_size":1,"num_hidden_layers":1,"num_attention_heads":1,"head_dim":2,"tie_word_embeddings":true})",
                                         "config.json");
    const auto store = WeightStore::Open(*Checkpoint::Open(path_), *config);
    EXPECT_TRUE(store.ok()) << store.status().message();
    const auto as_double = (*store)->LoadEnd<double>();
    std::vector<float> values = (*store)->LoadEnd<float>()->final_norm;
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_TRUE(as_double->final_norm[i] == values[i] ||
                  (std::isnan(values[i]) && std::isnan(as_double->final_norm[i])));
    }
    return values;
  }
};

TEST_F(SixteenBit, EveryBf16PatternIsExact) {
  const std::vector<float> values = Load(DType::kBF16);
  for (uint32_t i = 0; i < values.size(); ++i) {
    uint32_t bits;
    std::memcpy(&bits, &values[i], 4);
    ASSERT_EQ(bits, i << 16);
  }
}

TEST_F(SixteenBit, EveryF16PatternIsExact) {
  const std::vector<float> values = Load(DType::kF16);
  for (uint32_t i = 0; i < values.size(); ++i) {
    const int sign = i >> 15 ? -1 : 1, exponent = (i >> 10) & 31, fraction = i & 1023;
    if (exponent == 31) {
      ASSERT_EQ(std::isnan(values[i]), fraction != 0) << i;
      ASSERT_EQ(std::isinf(values[i]), fraction == 0) << i;
    } else {
      const double expected = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
      ASSERT_EQ(values[i], sign * expected) << i;
    }
    ASSERT_EQ(std::signbit(values[i]), sign < 0) << i;
  }
}

TEST(ShippedModelWeights, EveryLayerLoads) {
  const std::string path = ASSAY_SOURCE_DIR "/models/kjv-mla-10m";
  const auto config = LoadModelConfig(path);
  ASSERT_TRUE(config.ok());
  const auto store = WeightStore::Open(*Checkpoint::Open(path), *config);
  ASSERT_TRUE(store.ok()) << store.status().message();
  EXPECT_TRUE((*store)->notes().empty());
  for (int64_t l = 0; l < config->n_layers; ++l) {
    const auto layer = (*store)->LoadLayer<float>(l);
    ASSERT_TRUE(layer.ok()) << layer.status().message();
    EXPECT_EQ(layer->experts.size(), config->is_moe(l) ? 8u : 0u);
  }
}

TEST_F(Weights, AllThatDoesNotFitIsCollectedUpToALimit) {
  AddMla();
  shapes_.erase("model.layers.0.self_attn.kv_a_layernorm.weight");
  shapes_.erase("model.layers.1.mlp.experts.2.up_proj.weight");
  shapes_["model.layers.0.mlp.up_proj.weight"] = {4, 3};
  shapes_["model.extra"] = {2};
  ASSERT_FALSE(OpenWith(kMla).ok());  // writes the file too
  const auto checkpoint = Checkpoint::Open(path_);
  ASSERT_TRUE(checkpoint.ok());
  const auto source = WeightSource::FromCheckpoint(*checkpoint, nullptr);
  std::vector<std::string> notes, seen;
  for (const WeightMismatch& wrong : HoldAgainstConfig(*source, *ParseModelConfig(kMla, "config.json"), &notes)) {
    seen.push_back(wrong.problem.cls + (wrong.missing ? " missing " : " ") + wrong.problem.name);
  }
  EXPECT_EQ(seen,
            (std::vector<std::string>{"LOAD missing model.layers.0.self_attn.kv_a_layernorm.weight",
                                      "Q-LAYOUT model.layers.0.mlp.up_proj.weight",
                                      "LOAD missing model.layers.1.mlp.experts.2.up_proj.weight", "LOAD model.extra"}));
  const auto forged = ParseModelConfig(kMla, "config.json", {"n_routed_experts=60000"});
  ASSERT_TRUE(forged.ok()) << forged.status().message();
  EXPECT_EQ(HoldAgainstConfig(*source, *forged, &notes).size(), 1000u);
}

}  // namespace
}  // namespace assay
