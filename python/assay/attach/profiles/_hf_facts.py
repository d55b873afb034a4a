"""Facts of a transformers model for the trace's metadata, under the names that the native reference uses (model.*)."""

from __future__ import annotations

from typing import Any

_SCALARS = (
    ("model.model_type", "model_type"),
    ("model.hidden_size", "hidden_size"),
    ("model.n_layers", "num_hidden_layers"),
    ("model.n_heads", "num_attention_heads"),
    ("model.n_kv_heads", "num_key_value_heads"),
    ("model.head_dim", "head_dim"),
    ("model.vocab_size", "vocab_size"),
    ("model.intermediate_size", "intermediate_size"),
    ("model.q_lora_rank", "q_lora_rank"),
    ("model.kv_lora_rank", "kv_lora_rank"),
    ("model.qk_nope_head_dim", "qk_nope_head_dim"),
    ("model.qk_rope_head_dim", "qk_rope_head_dim"),
    ("model.v_head_dim", "v_head_dim"),
    ("model.rms_norm_eps", "rms_norm_eps"),
    ("model.sliding_window", "sliding_window"),
    ("model.n_routed_experts", "num_local_experts"),
    ("model.n_routed_experts", "num_experts"),
    ("model.n_routed_experts", "n_routed_experts"),
    ("model.n_experts_per_tok", "num_experts_per_tok"),
    ("model.n_shared_experts", "n_shared_experts"),
    ("model.moe_intermediate_size", "moe_intermediate_size"),
    ("model.routed_scaling_factor", "routed_scaling_factor"),
    ("model.norm_topk_prob", "norm_topk_prob"),
    ("model.tie_word_embeddings", "tie_word_embeddings"),
)


def model_facts(model: Any) -> dict[str, object]:
    """Engine and model as the configuration states them; what the configuration lacks is left out.

    Values that only the code knows (the softmax scale it passes, the pairing it rotates by) are not taken from it: they
    may be the fault.
    """
    config = model.config.get_text_config()
    facts: dict[str, object] = {
        "class": type(model).__name__,
        "attention": getattr(model.config, "_attn_implementation", None) or "unknown",
        "experts": getattr(model.config, "_experts_implementation", None) or "none",
        "dtype": str(next((p.dtype for p in model.parameters() if p.is_floating_point()), "unknown")).split(".")[-1],
        "path": "materialised",
    }
    for name, key in _SCALARS:
        value = getattr(config, key, None)
        if isinstance(value, (bool, int, float)):
            facts[name] = _number(value)
        elif isinstance(value, str):
            facts[name] = value
    rope = getattr(config, "rope_parameters", None) or {}
    if isinstance(rope.get("rope_theta"), (int, float)):
        facts["model.rope_theta"] = _number(rope["rope_theta"])
        facts["model.rope_factor"] = _number(rope.get("factor", 1.0))
    return facts


def _number(value: float) -> str:
    """As the reference writes it, so that equal models have equal text."""
    return format(float(value), ".17g")
