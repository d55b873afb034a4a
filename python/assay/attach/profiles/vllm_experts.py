"""Mixture of experts: the choice of experts and how close it was, and the experts' results before they are added.

Everything here is Python code of vLLM's runner, which a compiled run traces into its graph: there these sites are
seen only when they are asked for by name (vllm_compile).
"""

from __future__ import annotations

from typing import Any

from .vllm_attention import layer_of
from .vllm_steps import Recorder

RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner"
ROUTER = "vllm.model_executor.layers.fused_moe.router.fused_moe_router:FusedMoERouter"
SITES = ("moe.topk_ids", "moe.topk_ids.margin", "moe.topk_weights", "moe.routed", "moe.shared")


class Experts:
    """Probes of vLLM's MoE runner; install() after the model is loaded."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._session = recorder.session
        self._runner: Any = None  # whose experts are being chosen

    def install(self) -> None:
        session = self._session
        session.wrap(f"{RUNNER}._apply_quant_method", before=self._enters)
        session.wrap(f"{ROUTER}.select_experts", after=self._chosen)
        session.wrap(f"{RUNNER}._maybe_apply_routed_scale_to_output", after=self._scaled)

    def _enters(self, call: Any) -> None:
        self._runner = call.self

    def _chosen(self, call: Any, result: Any) -> None:
        """The choice comes unordered: it is recorded by falling weight."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        session, record, layer = self._session, self._recorder.record, layer_of(runner.layer_name)
        name = f"layers.{layer}.moe.topk"
        weights, ids = result
        if session.observed(f"{name}_ids", f"{name}_weights"):
            weights, order = weights.sort(dim=-1, descending=True)
            factor = float(runner.routed_scaling_factor)  # vLLM scales the experts' result instead
            record("moe.topk_ids", ids.gather(-1, order), layer)
            record("moe.topk_weights", weights * factor if factor != 1.0 else weights, layer)
        if session.observed(f"{name}_ids.margin"):
            logits = call.args[2] if len(call.args) > 2 else call.kwargs["router_logits"]
            margin = selection_margin(call.self, logits)
            if margin is not None:
                record("moe.topk_ids.margin", margin, layer, compute_dtype=logits.dtype)

    def _scaled(self, call: Any, result: Any) -> None:
        shared, routed = result
        runner = call.self
        config = runner.moe_config
        parts = config.tp_size > 1 or config.ep_size > 1
        suffix = ".partial" if parts and not runner._fused_output_is_reduced else ""
        layer = layer_of(runner.layer_name)
        self._recorder.record(f"moe.routed{suffix}", routed, layer)
        if shared is not None:
            self._recorder.record(f"moe.shared{suffix}", shared, layer)


def selection_margin(router: Any, logits: Any) -> Any:
    """Smallest gap between consecutive selection scores among the first k + 1, [T] f32, group choice included; None
    when the router chooses in another way (by hash, by a function of the model)."""
    import torch

    if any(getattr(router, n, None) is not None for n in ("custom_routing_function", "_hash_indices_table")):
        return None
    scoring = getattr(router, "scoring_func", "softmax")
    scores = logits.float()
    if scoring == "sigmoid":
        scores = scores.sigmoid()
    elif scoring == "softmax":
        scores = scores.softmax(dim=-1)
    else:
        return None
    bias = getattr(router, "e_score_correction_bias", None)
    if bias is not None:
        scores = scores + bias.unsqueeze(0)
    margins = []
    groups, kept = getattr(router, "num_expert_group", None) or 1, getattr(router, "topk_group", None) or 1
    if groups > kept:
        grouped = scores.view(scores.shape[0], groups, -1)
        best = grouped.topk(2, dim=-1)[0].sum(dim=-1) if bias is not None else grouped.max(dim=-1).values
        ranked = best.sort(dim=-1, descending=True).values
        margins.append(ranked[:, kept - 1] - ranked[:, kept])
        chosen = torch.zeros_like(best).scatter_(1, best.topk(kept, dim=-1)[1], 1).bool()
        scores = grouped.masked_fill(~chosen.unsqueeze(-1), float("-inf")).flatten(1)
    k = router.top_k
    ranked = scores.topk(min(k + 1, scores.shape[-1]), dim=-1).values
    gaps = ranked[:, :-1] - ranked[:, 1:]
    margins.append(gaps.masked_fill(~gaps.isfinite(), float("inf")).min(dim=-1).values)
    return torch.stack(margins).min(dim=0).values
