"""Facts of a run, as metadata of the process, and what each step's attention was told, as events.

What the model asks for (``model.*``) comes from its configuration, not from what a kernel did. The attention metadata
of a step is recorded under the names of docs/adding-a-case.md, so that `assay check` can judge it: positions,
seq_lens, slot_mapping, block_table; the padding of the step stands on ``positions``.
"""

from __future__ import annotations

import math
import os
import sys
from typing import Any


from ..rows import Rows
from .vllm_steps import RUNNERS, Recorder, Steps

FACTS = {  # of VllmConfig: our key -> path
    "dtype": "model_config.dtype",
    "quantization": "model_config.quantization",
    "max_model_len": "model_config.max_model_len",
    "enforce_eager": "model_config.enforce_eager",
    "tensor_parallel_size": "parallel_config.tensor_parallel_size",
    "pipeline_parallel_size": "parallel_config.pipeline_parallel_size",
    "block_size": "cache_config.block_size",
    "kv_cache_dtype": "cache_config.cache_dtype",
    "prefix_cache": "cache_config.enable_prefix_caching",
    "chunked_prefill": "scheduler_config.enable_chunked_prefill",
    "max_batch_tokens": "scheduler_config.max_num_batched_tokens",
    "max_num_seqs": "scheduler_config.max_num_seqs",
    "compile.mode": "compilation_config.mode",
    "compile.backend": "compilation_config.backend",
    "compile.custom_ops": "compilation_config.custom_ops",
    "cudagraph_mode": "compilation_config.cudagraph_mode",
    "autotune": "compilation_config.inductor_compile_config.max_autotune",
    "speculative": "speculative_config.method",
}
MODEL = {  # of the model's configuration file: key of the native runtime -> names
    "model_type": ("model_type",),
    "hidden_size": ("hidden_size",),
    "n_layers": ("num_hidden_layers",),
    "n_heads": ("num_attention_heads",),
    "n_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "intermediate_size": ("intermediate_size",),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_nope_head_dim": ("qk_nope_head_dim",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
    "rms_norm_eps": ("rms_norm_eps",),
    "sliding_window": ("sliding_window",),
    "n_routed_experts": ("n_routed_experts", "num_local_experts"),
    "n_experts_per_tok": ("num_experts_per_tok",),
    "n_shared_experts": ("n_shared_experts",),
    "moe_intermediate_size": ("moe_intermediate_size",),
    "routed_scaling_factor": ("routed_scaling_factor",),
    "norm_topk_prob": ("norm_topk_prob",),
    "n_group": ("n_group",),
    "topk_group": ("topk_group",),
    "tie_word_embeddings": ("tie_word_embeddings",),
}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        return f"{value:.17g}"  # as the native runtime writes it
    if isinstance(value, (list, tuple, set)):
        return ",".join(_text(v) for v in value)
    return str(getattr(value, "name", value)).removeprefix("torch.")


def model_facts(config: Any) -> dict[str, str]:
    """``model.*`` of a configuration of transformers, under the names of the native runtime."""
    facts = {}
    for key, names in MODEL.items():
        value = next((v for n in names if (v := getattr(config, n, None)) is not None), None)
        if value is not None:
            facts[f"model.{key}"] = _text(value)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    theta = rope.get("rope_theta", getattr(config, "rope_theta", None))
    if theta is not None:
        facts["model.rope_theta"] = _text(theta)
    factor = float(rope.get("factor", 1.0)) if rope.get("rope_type", "default") != "default" else 1.0
    facts["model.rope_factor"] = _text(factor)
    latent = getattr(config, "kv_lora_rank", None) is not None
    facts["model.rope_interleaved"] = _text(int(bool(getattr(config, "rope_interleave", latent))))
    if hasattr(config, "scoring_func"):
        facts["model.scoring_sigmoid"] = _text(int(config.scoring_func == "sigmoid"))
    if latent:
        scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
        all_dim = float(rope.get("mscale_all_dim", 0) or 0)
        if factor > 1.0 and all_dim:
            scale *= (0.1 * all_dim * math.log(factor) + 1.0) ** 2
        facts["model.softmax_scale"] = _text(scale)
    return facts


def _at(root: Any, path: str) -> Any:
    for part in path.split("."):
        root = root.get(part) if isinstance(root, dict) else getattr(root, part, None)
        if root is None:
            return None
    return root


class Facts:
    """Reads the configuration when a runner is made, and the attention metadata at each forward pass."""

    def __init__(self, recorder: Recorder, steps: Steps) -> None:
        self._recorder = recorder
        self._session = recorder.session
        self._steps = steps
        for runner in RUNNERS:
            self._session.wrap(f"{runner}.__init__", after=self._made)
            self._session.wrap(f"{runner}._model_forward", before=self._forward)

    def _made(self, call: Any, result: Any) -> None:
        config, session = call.self.vllm_config, self._session
        session.fact("engine", "vllm")
        for name in ("vllm", "torch", "transformers"):
            version = getattr(sys.modules.get(name), "__version__", None)
            if version is not None:
                session.fact(f"{name}.version", version)
        session.fact("model", os.path.basename(str(config.model_config.model).rstrip("/")))
        session.fact("mla", int(bool(config.model_config.use_mla)))
        session.fact("runner", f"{type(call.self).__module__}:{type(call.self).__qualname__}")
        for key, path in FACTS.items():
            value = _at(config, path)
            if value is not None:
                session.fact(key, _text(value))
        for key, text in model_facts(config.model_config.hf_text_config).items():
            session.fact(key, text)

    def _forward(self, call: Any) -> None:
        """call.self is the runner; the forward context is set."""
        if not self._session.observed("positions", "seq_lens", "slot_mapping", "block_table"):
            return
        sampled, rows = self._steps.sampled, self._session.rows
        if rows is None or sampled is None or rows.step is None:
            return
        from vllm.forward_context import get_forward_context

        context = get_forward_context()
        metadata = context.attn_metadata
        name, metadata = next(iter(metadata.items())) if isinstance(metadata, dict) else ("", metadata)
        positions = call.bound["positions"]
        padded = int(positions.shape[-1])
        note = {
            "num_actual_tokens": getattr(metadata, "num_actual_tokens", rows.n_rows),
            "num_padded_tokens": padded,
            "query_start_loc": _list(getattr(metadata, "query_start_loc", None)),
        }
        if positions.ndim == 1:
            self._recorder.record("positions", positions, axes="T", meta=note)
        each = Rows(sampled.runs, step=rows.step, phase=rows.phase)
        n = len(sampled.runs)
        lengths, table = self._lengths_and_blocks(metadata, call.self, n)
        if lengths is not None:
            self._recorder.record("seq_lens", lengths.long(), rows=each, axes="T")
        if table is not None:
            self._recorder.record("block_table", table.long(), rows=each, axes="T n")
        slots = context.slot_mapping.get(name) if isinstance(context.slot_mapping, dict) else None
        if slots is not None:
            self._recorder.record("slot_mapping", slots.flatten(), axes="T")

    def _lengths_and_blocks(self, metadata: Any, runner: Any, n: int) -> tuple[Any, Any]:
        """[n] and [n, blocks] of the requests in row order: as attention got them, else as the runner has them."""
        lengths = getattr(metadata, "seq_lens", None)
        table = getattr(metadata, "block_table", None)
        if table is None:  # MLA keeps them apart for decode and prefill
            parts: list[Any] = [getattr(metadata, "decode", None), getattr(metadata, "prefill", None)]
            tables = [p.block_table for p in parts if getattr(p, "block_table", None) is not None]
            if tables:
                import torch

                table = torch.cat(tables)
        if lengths is None:
            lengths = runner.seq_lens[:n]
        if table is None or table.shape[0] < n:
            return lengths[:n], None
        used = (int(lengths[:n].max()) - 1) // int(runner.cache_config.block_size) + 1
        return lengths[:n], table[:n, :used]


def _list(tensor: Any) -> str:
    return "" if tensor is None else ",".join(str(int(v)) for v in tensor.tolist()[:4096])


