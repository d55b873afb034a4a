"""The checkpoints that the native runtime is held against: every family and every option that changes arithmetic.

Each case is a configuration of a real transformers model, small enough to be committed. `save` says how the weights lie
on disk. `tp` is the largest number of tensor-parallel shards that divides its heads, groups and FFN.
"""

from dataclasses import dataclass, field

VOCAB, HIDDEN = 64, 32


@dataclass(frozen=True)
class Case:
    name: str
    model_type: str
    config: dict
    dtype: str = "bfloat16"  # of the weights on disk
    shard_bytes: int = 0  # > 0: a sharded checkpoint with files of this size
    old_keys: bool = False  # config.json rewritten in the style of transformers 4
    fuse_experts: bool = False  # experts as one 3-D tensor a layer
    rename: str = ""  # another model_type in config.json
    prompt: int = 12  # tokens; the rest of the sequence is decoded token by token
    total: int = 16
    seed: int = 1
    large: bool = field(default=False)  # not committed


def yarn(**more):
    """YaRN whose ramp lies inside the few pairs of these heads: original context 32, stretched 4 times."""
    return {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32, **more}


def dense(**more):
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **more,
    }


def moe(**more):
    return {"moe_intermediate_size": 16, "num_experts_per_tok": 3, **more}


def mla(**more):
    """An MLA model: layer 0 dense, layer 1 MoE with 8 experts."""
    sizes = {
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
    }
    return dense(**{**sizes, **moe(), **more})


CASES = [
    # MLA: DeepSeek-V3, Kimi-K2, GLM-5.
    Case("v3_groups_yarn", "deepseek_v3", mla(rope_parameters=yarn(mscale=1.0, mscale_all_dim=1.0))),
    Case("v3_plain_rope_half_pairs", "deepseek_v3", mla(rope_interleave=False, routed_scaling_factor=1.0), dtype="float32"),
    Case("v3_no_q_latent", "deepseek_v3", mla(q_lora_rank=None, n_group=1, topk_group=1, norm_topk_prob=False), dtype="float16"),
    Case("v3_two_magnitudes", "deepseek_v3", mla(rope_parameters=yarn(mscale=0.707, mscale_all_dim=0.5, beta_fast=8.0))),
    Case("v3_attention_bias", "deepseek_v3", mla(attention_bias=True, n_shared_experts=2, rms_norm_eps=1e-3)),
    Case("v3_linear_rope", "deepseek_v3", mla(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0})),
    Case("v3_sharded", "deepseek_v3", mla(), shard_bytes=24_000),
    Case("v3_fused_experts", "deepseek_v3", mla(num_hidden_layers=1, first_k_dense_replace=0), fuse_experts=True),
    Case("v3_old_keys", "deepseek_v3", mla(rope_parameters=yarn(mscale=1.0, mscale_all_dim=1.0)), old_keys=True, seed=2),
    Case("kimi_k2", "deepseek_v3", mla(n_group=1, topk_group=1), rename="kimi_k2", seed=3),
    Case("v3_all_dense", "deepseek_v3", mla(first_k_dense_replace=2, tie_word_embeddings=True)),
    Case("glm_moe_dsa", "glm_moe_dsa", mla(n_group=1, topk_group=1, index_topk=64, index_head_dim=16, index_n_heads=2)),
    # MLA: DeepSeek-V2.
    Case("v2_greedy", "deepseek_v2", mla(q_lora_rank=None, n_shared_experts=2, topk_method="greedy", n_group=None, topk_group=None, rope_parameters=yarn(mscale=0.707, mscale_all_dim=0.707))),
    Case("v2_groups", "deepseek_v2", mla(topk_method="group_limited_greedy", routed_scaling_factor=4.0), dtype="float32"),
    # GLM-4.
    Case("glm4_moe", "glm4_moe", dense(**moe(), num_key_value_heads=2, head_dim=12, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, use_qk_norm=True, attention_bias=True, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5})),
    Case("glm4_moe_no_qk_norm", "glm4_moe", dense(**moe(), num_key_value_heads=4, head_dim=16, n_routed_experts=8, n_group=2, topk_group=1, first_k_dense_replace=0, num_hidden_layers=1, routed_scaling_factor=2.5)),
    Case("glm4", "glm4", dense(num_key_value_heads=2, head_dim=16)),
    # Dense Llama and Qwen.
    Case("llama_gqa_llama3", "llama", dense(num_key_value_heads=2, rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}), dtype="float32"),
    Case("llama_bias_tied_linear", "llama", dense(attention_bias=True, tie_word_embeddings=True, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}), dtype="float16"),
    Case("llama_yarn_no_truncate", "llama", dense(head_dim=16, rope_parameters=yarn(truncate=False))),
    Case("mistral_window", "mistral", dense(num_key_value_heads=1, sliding_window=5)),
    Case("qwen2_bias_window", "qwen2", dense(num_key_value_heads=2, use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    Case("qwen2_yarn_attention_factor", "qwen2", dense(num_key_value_heads=4, rope_parameters=yarn(attention_factor=1.3))),
    Case("qwen3_window_layers", "qwen3", dense(num_key_value_heads=2, head_dim=16, use_sliding_window=True, sliding_window=4, layer_types=["sliding_attention", "full_attention"])),
    Case("qwen3_bias", "qwen3", dense(num_key_value_heads=4, head_dim=10, attention_bias=True)),
    # Qwen MoE.
    Case("qwen2_moe", "qwen2_moe", dense(**moe(), num_key_value_heads=2, num_experts=8, shared_expert_intermediate_size=20, use_sliding_window=True, sliding_window=5, max_window_layers=2, mlp_only_layers=[0])),
    Case("qwen2_moe_norm", "qwen2_moe", dense(**moe(), num_key_value_heads=4, num_experts=4, shared_expert_intermediate_size=16, norm_topk_prob=True, num_hidden_layers=1, qkv_bias=False)),
    Case("qwen3_moe", "qwen3_moe", dense(**moe(), num_key_value_heads=2, head_dim=16, num_experts=8, norm_topk_prob=True, decoder_sparse_step=2)),
    Case("qwen3_moe_window", "qwen3_moe", dense(**moe(), num_key_value_heads=4, head_dim=8, num_experts=8, use_sliding_window=True, sliding_window=6, num_hidden_layers=1)),
    # The layer geometry of GLM-5: 64 heads of 192 + 64 / 256, kv_lora_rank 512; 36 MB, so it is generated where needed.
    Case("glm5_geometry", "glm_moe_dsa", mla(hidden_size=64, q_lora_rank=64, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, num_attention_heads=64, num_key_value_heads=64, num_hidden_layers=1, first_k_dense_replace=0, n_group=1, topk_group=1, index_topk=64, index_head_dim=64, index_n_heads=2), prompt=8, total=10, large=True),
]
