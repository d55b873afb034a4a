#include <gtest/gtest.h>

#include <cmath>

#include "io/json.h"
#include "model/config.h"

namespace assay {
namespace {

// The smallest config of each kind; tests add, change and remove keys.
constexpr const char* kMla = R"({"model_type":"deepseek_v3","vocab_size":32,"hidden_size":16,"intermediate_size":24,
  "num_hidden_layers":4,"num_attention_heads":4,"kv_lora_rank":8,"q_lora_rank":6,"qk_nope_head_dim":6,
  "qk_rope_head_dim":4,"v_head_dim":5,"n_routed_experts":8,"num_experts_per_tok":2,"moe_intermediate_size":7,
  "n_group":2,"topk_group":1})";
constexpr const char* kLlama = R"({"model_type":"llama","vocab_size":32,"hidden_size":16,"intermediate_size":24,
  "num_hidden_layers":3,"num_attention_heads":4})";

Result<ModelConfig> Parse(const char* json, const std::vector<std::string>& overrides = {}) {
  return ParseModelConfig(json, "config.json", overrides);
}

ModelConfig Good(const char* json, const std::vector<std::string>& overrides = {}) {
  Result<ModelConfig> config = Parse(json, overrides);
  EXPECT_TRUE(config.ok()) << config.status().message();
  return config.ok() ? *config : ModelConfig{};
}

// The message begins with the file and contains `part`: which key, and what is wrong with it.
void ExpectRefused(const char* json, const std::vector<std::string>& overrides, const std::string& part) {
  const Result<ModelConfig> config = Parse(json, overrides);
  ASSERT_FALSE(config.ok()) << "accepted, expected: " << part;
  EXPECT_EQ(config.status().code(), Code::kBadInput);
  EXPECT_EQ(config.status().message().rfind("config.json", 0), 0u) << config.status().message();
  EXPECT_NE(config.status().message().find(part), std::string::npos) << config.status().message();
}

TEST(Config, ShippedModelIsRead) {
  const Result<ModelConfig> config = LoadModelConfig(ASSAY_SOURCE_DIR "/models/kjv-mla-10m");
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config->family, Family::kDeepseekV3);
  EXPECT_EQ(config->q_lora_rank, 128);
  EXPECT_EQ(config->qk_head_dim(), 256);
  EXPECT_EQ(config->moe_layer, (std::vector<uint8_t>{0, 0, 1, 1}));
  EXPECT_TRUE(config->rope.interleaved);
  EXPECT_EQ(config->eos_token_ids, (std::vector<int64_t>{1}));
  EXPECT_EQ(config->shared_intermediate_size, 128);
  EXPECT_EQ(SoftmaxScale(*config), 1.0 / 16);
  EXPECT_TRUE(config->notes.empty()) << config->notes[0];
}

// Defaults are those of transformers' configuration classes, which checkpoints rely on by leaving keys out.
TEST(Config, AbsentKeysTakeTheFamilysDefaults) {
  const ModelConfig v3 = Good(kMla, {"num_hidden_layers=5"});
  EXPECT_EQ(v3.moe_layer, (std::vector<uint8_t>{0, 0, 0, 1, 1}));
  EXPECT_EQ(v3.routed_scaling_factor, 2.5);
  EXPECT_TRUE(v3.scoring_sigmoid && v3.correction_bias && v3.norm_topk_prob && v3.group_top2_sum);
  EXPECT_EQ(v3.n_shared_experts, 1);
  EXPECT_EQ(v3.rms_norm_eps, 1e-6);

  const ModelConfig v2 = Good(kMla, {"model_type=deepseek_v2"});
  EXPECT_EQ(v2.moe_layer, (std::vector<uint8_t>{1, 1, 1, 1}));
  EXPECT_EQ(v2.n_shared_experts, 2);
  EXPECT_EQ(v2.shared_intermediate_size, 14);
  EXPECT_EQ(v2.n_group, 1) << "greedy routing knows no groups";
  EXPECT_FALSE(v2.scoring_sigmoid || v2.correction_bias || v2.norm_topk_prob);
  EXPECT_TRUE(v2.rope.interleaved);

  const ModelConfig dsa = Good(kMla, {"model_type=glm_moe_dsa"});
  EXPECT_EQ(dsa.rms_norm_eps, 1e-5);
  EXPECT_EQ(dsa.latent_norm_eps, 1e-6);
  ASSERT_EQ(dsa.notes.size(), 1u);
  EXPECT_NE(dsa.notes[0].find("index_topk = 2048"), std::string::npos);

  const ModelConfig llama = Good(kLlama);
  EXPECT_EQ(llama.n_kv_heads, 4);
  EXPECT_EQ(llama.head_dim, 4);
  EXPECT_FALSE(llama.attention_bias || llama.o_bias || llama.qk_norm || llama.rope.interleaved);
  EXPECT_EQ(llama.rope.theta, 10000.0);

  const ModelConfig qwen2 = Good(kLlama, {"model_type=qwen2", "num_key_value_heads=2"});
  EXPECT_TRUE(qwen2.attention_bias);
  EXPECT_FALSE(qwen2.o_bias);
  const ModelConfig qwen3 = Good(kLlama, {"model_type=qwen3", "num_key_value_heads=2"});
  EXPECT_EQ(qwen3.head_dim, 128);
  EXPECT_TRUE(qwen3.qk_norm);
  const ModelConfig glm4 = Good(kLlama, {"model_type=glm4"});
  EXPECT_EQ(glm4.n_kv_heads, 2);
  EXPECT_EQ(MakeRopeTable(glm4).rotary_dim, 64);
  EXPECT_TRUE(glm4.sandwich_norm && glm4.rope.interleaved && glm4.attention_bias);
}

// config.json of published checkpoints, whole: none of their keys may be refused or unknown.
TEST(Config, PublishedConfigsAreReadWithoutSurprise) {
  const ModelConfig v3 = Good(
      R"({"architectures":["DeepseekV3ForCausalLM"],"attention_bias":false,"attention_dropout":0.0,
      "auto_map":{"AutoConfig":"configuration_deepseek.DeepseekV3Config"},"aux_loss_alpha":0.001,"bos_token_id":0,
      "eos_token_id":1,"ep_size":1,"first_k_dense_replace":3,"hidden_act":"silu","hidden_size":7168,
      "initializer_range":0.02,"intermediate_size":18432,"kv_lora_rank":512,"max_position_embeddings":163840,
      "model_type":"deepseek_v3","moe_intermediate_size":2048,"moe_layer_freq":1,"n_group":8,"n_routed_experts":256,
      "n_shared_experts":1,"norm_topk_prob":true,"num_attention_heads":128,"num_experts_per_tok":8,
      "num_hidden_layers":61,"num_key_value_heads":128,"num_nextn_predict_layers":1,"pretraining_tp":1,
      "q_lora_rank":1536,"qk_nope_head_dim":128,"qk_rope_head_dim":64,
      "quantization_config":{"activation_scheme":"dynamic","fmt":"e4m3","quant_method":"fp8",
      "weight_block_size":[128,128]},"rms_norm_eps":1e-06,"rope_scaling":{"beta_fast":32,"beta_slow":1,"factor":40,
      "mscale":1.0,"mscale_all_dim":1.0,"original_max_position_embeddings":4096,"type":"yarn"},"rope_theta":10000,
      "routed_scaling_factor":2.5,"scoring_func":"sigmoid","seq_aux":true,"tie_word_embeddings":false,"topk_group":4,
      "topk_method":"noaux_tc","torch_dtype":"bfloat16","transformers_version":"4.33.1","use_cache":true,
      "v_head_dim":128,"vocab_size":129280})",
      {"quantization_config=null"});
  EXPECT_EQ(v3.notes, (std::vector<std::string>{"the 1 draft (MTP) layer(s) are left out"}));
  EXPECT_NEAR(SoftmaxScale(v3), std::pow(192, -0.5) * 1.3688879454113936 * 1.3688879454113936, 1e-15);
  EXPECT_EQ(MakeRopeTable(v3).scaling, 1.0);

  const ModelConfig llama = Good(
      R"({"architectures":["LlamaForCausalLM"],"attention_bias":false,"attention_dropout":0.0,"bos_token_id":128000,
      "eos_token_id":[128001,128008,128009],"hidden_act":"silu","hidden_size":4096,"initializer_range":0.02,
      "intermediate_size":14336,"max_position_embeddings":131072,"mlp_bias":false,"model_type":"llama",
      "num_attention_heads":32,"num_hidden_layers":32,"num_key_value_heads":8,"pretraining_tp":1,"rms_norm_eps":1e-05,
      "rope_scaling":{"factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,
      "original_max_position_embeddings":8192,"rope_type":"llama3"},"rope_theta":500000.0,
      "tie_word_embeddings":false,"torch_dtype":"bfloat16","transformers_version":"4.42.3","use_cache":true,
      "vocab_size":128256})");
  EXPECT_TRUE(llama.notes.empty());
  EXPECT_EQ(llama.eos_token_ids.size(), 3u);
  EXPECT_EQ(llama.head_dim, 128);

  const ModelConfig qwen2 = Good(
      R"({"architectures":["Qwen2ForCausalLM"],"attention_dropout":0.0,"bos_token_id":151643,"eos_token_id":151645,
      "hidden_act":"silu","hidden_size":3584,"initializer_range":0.02,"intermediate_size":18944,
      "max_position_embeddings":32768,"max_window_layers":28,"model_type":"qwen2","num_attention_heads":28,
      "num_hidden_layers":28,"num_key_value_heads":4,"rms_norm_eps":1e-06,"rope_theta":1000000.0,
      "sliding_window":131072,"tie_word_embeddings":false,"torch_dtype":"bfloat16","transformers_version":"4.43.1",
      "use_cache":true,"use_sliding_window":false,"vocab_size":152064})");
  EXPECT_TRUE(qwen2.notes.empty());
  EXPECT_EQ(qwen2.sliding_window, 0);

  const ModelConfig qwen3_moe = Good(
      R"({"architectures":["Qwen3MoeForCausalLM"],"attention_bias":false,"attention_dropout":0.0,
      "bos_token_id":151643,"decoder_sparse_step":1,"eos_token_id":151645,"head_dim":128,"hidden_act":"silu",
      "hidden_size":2048,"initializer_range":0.02,"intermediate_size":6144,"max_position_embeddings":40960,
      "max_window_layers":48,"mlp_only_layers":[],"model_type":"qwen3_moe","moe_intermediate_size":768,
      "norm_topk_prob":true,"num_attention_heads":32,"num_experts":128,"num_experts_per_tok":8,
      "num_hidden_layers":48,"num_key_value_heads":4,"output_router_logits":false,"rms_norm_eps":1e-06,
      "rope_scaling":null,"rope_theta":1000000.0,"router_aux_loss_coef":0.001,"sliding_window":null,
      "tie_word_embeddings":false,"torch_dtype":"bfloat16","transformers_version":"4.51.0","use_cache":true,
      "use_sliding_window":false,"vocab_size":151936})");
  EXPECT_TRUE(qwen3_moe.notes.empty());
  EXPECT_EQ(qwen3_moe.n_routed_experts, 128);
  EXPECT_TRUE(qwen3_moe.qk_norm);
}

TEST(Config, KimiK2IsDeepseekV3) {
  const ModelConfig kimi = Good(kMla, {"model_type=kimi_k2"});
  EXPECT_EQ(kimi.family, Family::kDeepseekV3);
  EXPECT_EQ(kimi.model_type, "kimi_k2");
}

// DeepSeek-V2-Lite writes null: queries come from one projection, without a latent.
TEST(Config, NullQueryLatentMeansPlainProjection) { EXPECT_EQ(Good(kMla, {"q_lora_rank=null"}).q_lora_rank, 0); }

TEST(Config, MissingSizeIsNamed) {
  for (const char* key : {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank",
                          "qk_nope_head_dim", "v_head_dim", "num_experts_per_tok", "moe_intermediate_size"}) {
    ExpectRefused(kMla, {std::string(key) + "=null", "first_k_dense_replace=0"},
                  "key \"" + std::string(key) + "\" is missing");
  }
  ExpectRefused(R"({"model_type":"deepseek_v3","vocab_size":32})", {}, "key \"hidden_size\" is missing");
}

TEST(Config, WrongTypesAndRangesAreNamed) {
  ExpectRefused(kLlama, {"hidden_size=\"16\""}, "key \"hidden_size\" = \"16\": expected an integer");
  ExpectRefused(kLlama, {"hidden_size=16.5"}, "expected an integer");
  ExpectRefused(kLlama, {"hidden_size=0"}, "outside 1 .. 16777216");
  ExpectRefused(kLlama, {"num_hidden_layers=-3"}, "outside");
  ExpectRefused(kLlama, {"vocab_size=9223372036854775807"}, "outside");
  ExpectRefused(kLlama, {"vocab_size=18446744073709551615"}, "outside");
  ExpectRefused(kLlama, {"rms_norm_eps=\"x\""}, "expected a number");
  ExpectRefused(kLlama, {"tie_word_embeddings=1"}, "expected true or false");
  ExpectRefused(kLlama, {"eos_token_id=[1,\"x\"]"}, "expected an integer >= 0");
  ExpectRefused(kLlama, {"num_attention_heads=3"}, "not a multiple of num_attention_heads");
  ExpectRefused(kLlama, {"num_key_value_heads=3"}, "does not divide");
  EXPECT_EQ(Good(kLlama, {"hidden_size=32.0"}).hidden_size, 32);
}

TEST(Config, UnknownFamilyIsNamedWithTheKnownOnes) {
  ExpectRefused(kLlama, {"model_type=gpt2"}, "\"gpt2\": unknown family; known are deepseek_v2, deepseek_v3");
  ExpectRefused("{}", {}, "\"model_type\"");
  ExpectRefused("[1]", {}, "no JSON object");
  ExpectRefused("{\"a\":", {}, "invalid JSON");
}

// A key that would change the arithmetic must not be passed over: the run would be taken for a reference.
TEST(Config, WhatIsNotImplementedIsRefusedByKey) {
  ExpectRefused(kLlama, {"hidden_act=gelu"}, "only silu");
  ExpectRefused(kLlama, {"mlp_bias=true"}, "\"mlp_bias\"");
  ExpectRefused(kLlama, {"sliding_window=8"}, "llama has no sliding window");
  ExpectRefused(kLlama, {"partial_rotary_factor=0.5"}, "part rotation");
  ExpectRefused(kLlama, {"rope_interleave=true"}, "pairs channels the other way");
  ExpectRefused(kMla, {"model_type=deepseek_v2", "rope_interleave=false"}, "pairs channels the other way");
  ExpectRefused(kMla, {"model_type=deepseek_v2", "norm_topk_prob=true"}, "\"norm_topk_prob\"");
  ExpectRefused(kMla, {"model_type=deepseek_v2", "topk_method=noaux_tc"}, "\"topk_method\"");
  ExpectRefused(kMla, {"scoring_func=softmax"}, "\"scoring_func\"");
  ExpectRefused(kMla, {"topk_method=greedy"}, "\"topk_method\"");
  ExpectRefused(kMla, {"moe_layer_freq=2"}, "only 1 is implemented");
  ExpectRefused(kMla, {"num_key_value_heads=2"}, "as many key as query heads");
  ExpectRefused(kMla, {"q_lora_rank=null", "model_type=glm_moe_dsa"}, "has a query latent");
  ExpectRefused(kLlama, {"model_type=qwen2", "num_key_value_heads=4", "layer_types=[\"a\",\"b\",\"c\"]"},
                "\"a\" is not implemented");
}

// A key of unknown meaning is not refused, as most say nothing of the arithmetic, but the user is told.
TEST(Config, UnknownKeyBecomesANote) {
  const ModelConfig config = Good(kLlama, {"residual_multiplier=2"});
  ASSERT_EQ(config.notes.size(), 1u);
  EXPECT_NE(config.notes[0].find("\"residual_multiplier\""), std::string::npos);
}

TEST(Config, RoutingSizesThatCannotWorkAreRefused) {
  ExpectRefused(kMla, {"n_group=3"}, "does not divide the 8 experts");
  ExpectRefused(kMla, {"topk_group=3"}, "above n_group");
  ExpectRefused(kMla, {"n_group=8"}, "fewer than two experts a group");
  ExpectRefused(kMla, {"num_experts_per_tok=5"}, "leaves fewer experts");
  ExpectRefused(kMla, {"num_experts_per_tok=9"}, "outside 1 .. 8");
  ExpectRefused(kMla, {"num_local_experts=4"}, "another key of the same meaning says 8");
}

// rope_scaling with rope_theta beside it (before transformers 5), and rope_parameters.
TEST(Config, BothRopeStylesMeanTheSame) {
  const ModelConfig with_new =
      Good(kMla, {"rope_parameters={\"rope_type\":\"yarn\",\"rope_theta\":5000,\"factor\":40,\"mscale\":1,"
                  "\"mscale_all_dim\":1,\"original_max_position_embeddings\":4096}"});
  const ModelConfig with_old = Good(kMla, {"rope_theta=5000",
                                           "rope_scaling={\"type\":\"yarn\",\"factor\":40,\"mscale\":1,"
                                           "\"mscale_all_dim\":1,\"original_max_position_embeddings\":4096}"});
  EXPECT_EQ(with_new.rope.theta, 5000);
  EXPECT_EQ(MakeRopeTable(with_new).inv_freq, MakeRopeTable(with_old).inv_freq);
  EXPECT_EQ(SoftmaxScale(with_new), SoftmaxScale(with_old));
}

TEST(Config, RopeFaultsAreRefusedByKey) {
  ExpectRefused(kLlama, {"rope_scaling={\"type\":\"dynamic\",\"factor\":2}"}, "key \"type\" = \"dynamic\"");
  ExpectRefused(kLlama, {"rope_parameters.rope_type=longrope"}, "key \"rope_type\" = \"longrope\"");
  ExpectRefused(kLlama, {"rope_scaling={\"type\":\"linear\",\"rope_type\":\"yarn\",\"factor\":2}"},
                "rope_type is there");
  ExpectRefused(kLlama,
                {"rope_scaling={\"type\":\"linear\",\"factor\":2}", "rope_parameters={\"rope_type\":\"default\"}"},
                "keep one of them");
  ExpectRefused(kLlama, {"rope_scaling={\"type\":\"linear\"}"}, "\"factor\" is missing");
  ExpectRefused(kLlama, {"rope_scaling={\"type\":\"yarn\",\"factor\":2}"}, "original_max_position_embeddings");
  ExpectRefused(kMla,
                {"rope_parameters={\"rope_type\":\"yarn\",\"rope_theta\":1,\"factor\":40,"
                 "\"original_max_position_embeddings\":4096}"},
                "rope_theta");
  ExpectRefused(kLlama, {"rope_parameters.mrope_section=[1,2]"}, "unknown RoPE key");
  ExpectRefused(kLlama, {"rope_parameters=3"}, "expected an object");
  ExpectRefused(kLlama, {"rope_theta=0"}, "outside");
  ExpectRefused(kLlama, {"head_dim=5"}, "5 channels");
  ExpectRefused(kMla, {"qk_rope_head_dim=5"}, "no positive even number");
}

// Which layers have a window is another rule in each family; a window that the config switches off is 0.
TEST(Config, WindowsFollowEachFamilysRule) {
  const ModelConfig qwen2 = Good(kLlama, {"model_type=qwen2", "num_key_value_heads=4", "use_sliding_window=true",
                                          "sliding_window=3", "max_window_layers=1"});
  EXPECT_EQ(qwen2.sliding_window, 3);
  EXPECT_EQ(qwen2.layer_windowed, (std::vector<uint8_t>{0, 1, 1}));
  const ModelConfig typed = Good(kLlama, {"model_type=qwen3", "num_key_value_heads=4", "use_sliding_window=true",
                                          "layer_types=[\"sliding_attention\",\"full_attention\",\"full_attention\"]"});
  EXPECT_EQ(typed.layer_windowed, (std::vector<uint8_t>{1, 0, 0}));
  EXPECT_EQ(typed.sliding_window, 4096);
  const std::vector<std::string> moe = {"num_key_value_heads=4",
                                        "num_experts=4",
                                        "num_experts_per_tok=2",
                                        "moe_intermediate_size=8",
                                        "sliding_window=5",
                                        "use_sliding_window=true",
                                        "shared_expert_intermediate_size=8"};
  std::vector<std::string> qwen2_moe = moe, qwen3_moe = moe;
  qwen2_moe.push_back("model_type=qwen2_moe");
  qwen3_moe.push_back("model_type=qwen3_moe");
  EXPECT_EQ(Good(kLlama, qwen2_moe).layer_windowed, (std::vector<uint8_t>{1, 0, 1}));
  EXPECT_TRUE(Good(kLlama, qwen3_moe).layer_windowed.empty());
  EXPECT_TRUE(Good(kLlama, qwen3_moe).windowed(2));
  EXPECT_EQ(Good(kLlama, {"model_type=qwen2", "num_key_value_heads=4", "sliding_window=3"}).sliding_window, 0);
  EXPECT_EQ(Good(kLlama, {"model_type=mistral", "num_key_value_heads=2"}).sliding_window, 4096);
  EXPECT_EQ(Good(kLlama, {"model_type=mistral", "num_key_value_heads=2", "sliding_window=null"}).sliding_window, 0);
}

TEST(Config, QwenMoeLayersFollowStepAndList) {
  const ModelConfig config = Good(
      kLlama, {"model_type=qwen3_moe", "num_key_value_heads=4", "num_hidden_layers=6", "num_experts=4",
               "num_experts_per_tok=2", "moe_intermediate_size=8", "decoder_sparse_step=2", "mlp_only_layers=[3]"});
  EXPECT_EQ(config.moe_layer, (std::vector<uint8_t>{0, 1, 0, 0, 0, 1}));
}

TEST(Config, DsaLayerTypesAreTaken) {
  const ModelConfig config = Good(
      kMla, {"model_type=glm_moe_dsa", "num_hidden_layers=3", "mlp_layer_types=[\"sparse\",\"dense\",\"sparse\"]"});
  EXPECT_EQ(config.moe_layer, (std::vector<uint8_t>{1, 0, 1}));
}

TEST(Config, OverridesNeedAnEqualsSignAndAnObject) {
  EXPECT_EQ(Parse(kLlama, {"hidden_size"}).status().code(), Code::kUsage);
  EXPECT_EQ(Parse(kLlama, {"hidden_size.x=3"}).status().code(), Code::kUsage);
  EXPECT_EQ(Good(kLlama, {"rope_parameters.rope_type=linear", "rope_parameters.factor=2"}).rope.factor, 2);
}

// Golden frequencies: transformers' own rope functions evaluated in float64 (head_dim 16).
struct RopeGolden {
  const char* name;
  const char* parameters;
  std::vector<double> inv_freq;
  double scaling;
};

TEST(Rope, TablesAgreeWithTransformersInFloat64) {
  const std::vector<RopeGolden> cases = {
      {"yarn of DeepSeek-V3",
       R"({"rope_type":"yarn","rope_theta":10000.0,"factor":40,"beta_fast":32,"beta_slow":1,"mscale":1.0,"mscale_all_dim":1.0,"original_max_position_embeddings":4096})",
       {1.0, 0.31622776601683794, 0.1, 0.023914724805023366, 0.005125, 0.0008498621211702518, 2.5e-05,
        7.905694150420947e-06},
       1.0},
      {"yarn with two magnitudes",
       R"({"rope_type":"yarn","rope_theta":10000.0,"factor":40,"mscale":0.707,"mscale_all_dim":0.5,"original_max_position_embeddings":4096})",
       {1.0, 0.31622776601683794, 0.1, 0.023914724805023366, 0.005125, 0.0008498621211702518, 2.5e-05,
        7.905694150420947e-06},
       1.064468903941252},
      {"yarn of Qwen, not truncated",
       R"({"rope_type":"yarn","rope_theta":1000000.0,"factor":4.0,"original_max_position_embeddings":32768,"truncate":false})",
       {1.0, 0.17782794100389226, 0.03162277660168379, 0.0055172704751341225, 0.0006074079378798391,
        4.445698525097307e-05, 7.905694150420949e-06, 1.4058533129758728e-06},
       1.138629436111989},
      {"llama3",
       R"({"rope_type":"llama3","rope_theta":500000.0,"factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":8192})",
       {1.0, 0.19392274474868576, 0.03760603093086393, 0.0072926647372171085, 0.0005248461609929547,
        3.428102195952591e-05, 6.647869871181236e-06, 1.2891731721515574e-06},
       1.0},
      {"linear",
       R"({"rope_type":"linear","rope_theta":10000.0,"factor":2.5})",
       {0.4, 0.12649110640673517, 0.04, 0.012649110640673516, 0.004, 0.0012649110640673515, 0.0004,
        0.00012649110640673518},
       1.0},
  };
  for (const RopeGolden& c : cases) {
    const ModelConfig config = Good(kLlama, {"head_dim=16", std::string("rope_parameters=") + c.parameters});
    const RopeTable table = MakeRopeTable(config);
    EXPECT_EQ(table.rotary_dim, 16) << c.name;
    ASSERT_EQ(table.inv_freq.size(), c.inv_freq.size()) << c.name;
    // A power, two divisions and a blend: each within 1 ulp or so, on both sides.
    for (size_t i = 0; i < c.inv_freq.size(); ++i) {
      EXPECT_NEAR(table.inv_freq[i], c.inv_freq[i], 8 * 0x1p-53 * c.inv_freq[i]) << c.name << " pair " << i;
    }
    EXPECT_NEAR(table.scaling, c.scaling, 4 * 0x1p-53 * c.scaling) << c.name;
  }
}

TEST(Rope, AttentionFactorReplacesTheFormula) {
  const ModelConfig config =
      Good(kLlama, {"head_dim=16",
                    "rope_parameters={\"rope_type\":\"yarn\",\"factor\":32,\"attention_factor\":1.3466,"
                    "\"original_max_position_embeddings\":64}"});
  EXPECT_EQ(MakeRopeTable(config).scaling, 1.3466);
}

TEST(Rope, YarnFactorFallsBackToTheRatioOfContexts) {
  const ModelConfig config =
      Good(kLlama, {"head_dim=16", "max_position_embeddings=512",
                    "rope_parameters={\"rope_type\":\"yarn\",\"original_max_position_embeddings\":64}"});
  EXPECT_EQ(config.rope.factor, 8);
}

// In MLA the magnitude goes into the softmax scale, squared (for query and key); other families' tables carry it.
TEST(Rope, SoftmaxScaleHasTheSquaredMagnitudeForMlaAlone) {
  const std::string yarn =
      "rope_parameters={\"rope_type\":\"yarn\",\"factor\":40,\"mscale_all_dim\":1,\"original_max_position_embeddings\":"
      "64}";
  const double magnitude = 0.1 * std::log(40.0) + 1;
  EXPECT_NEAR(SoftmaxScale(Good(kMla, {yarn})), std::pow(10.0, -0.5) * magnitude * magnitude, 1e-15);
  EXPECT_EQ(SoftmaxScale(Good(kMla)), 1 / std::sqrt(10.0));
  EXPECT_EQ(SoftmaxScale(Good(kLlama, {yarn})), 0.5);
}

}  // namespace
}  // namespace assay
