"""Mixture of experts: the choice of experts and how close it was, and the experts' results before they are added.

Everything here is Python code of vLLM's runner, which a compiled run traces into its graph: there these sites are
seen only when they are asked for by name (vllm_compile).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .vllm_attention import layer_of
from .vllm_steps import Recorder

RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner"
ROUTER = "vllm.model_executor.layers.fused_moe.router.fused_moe_router:FusedMoERouter"
SITES = ("moe.topk_ids", "moe.topk_ids.margin", "moe.topk_weights", "moe.routed", "moe.shared")


def _names(layer: int | None) -> list[str]:
    return [f"layers.{layer}.{site}{suffix}" for site in SITES for suffix in ("", ".partial")]


class Experts:
    """Probes of vLLM's MoE runner; install() when the model is loaded."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._session = recorder.session
        self._layers: dict[int, int | None] = {}  # of routers and runners, by identity
        self._factors: dict[int, float] = {}  # likewise: what the runner multiplies the experts' result with, later
        self._logits: Any = None  # of the choice under way

    def install(self, model: Any, wanted: Callable[[list[str]], bool]) -> None:
        """wanted: whether any of these sites is to be recorded. In a compiled run each probe is part of the graph."""
        every = model.named_modules()
        runners = [(path, m) for path, m in every if hasattr(m, "routed_experts") and hasattr(m, "router")]
        runners = [(path, m) for path, m in runners if wanted(_names(layer_of(f"{path}.")))]
        if not runners:
            return
        session = self._session
        for path, runner in runners:
            for thing, name in ((runner, path), (runner.router, f"{path}.router")):
                session.label(thing, name)
                self._layers[id(thing)] = layer_of(f"{path}.")
                self._factors[id(thing)] = float(getattr(runner, "routed_scaling_factor", 1.0))
        session.wrap(f"{ROUTER}.select_experts", before=self._chooses, after=self._chosen)
        session.wrap(f"{RUNNER}._apply_quant_method", after=self._ran)

    def _chooses(self, call: Any) -> None:
        self._logits = call.args[2] if len(call.args) > 2 else call.kwargs.get("router_logits")

    def _chosen(self, call: Any, result: Any) -> None:
        """The choice comes unordered: it is recorded by falling weight. Its weights come without the factor that vLLM
        puts on the experts' result."""
        router = call.self
        if router is None or id(router) not in self._layers:
            return
        session, record, layer = self._session, self._recorder.record, self._layers[id(router)]
        name = f"layers.{layer}.moe.topk"
        weights, ids = result
        if session.observed(f"{name}_ids", f"{name}_weights"):
            weights, order = weights.sort(dim=-1, descending=True)
            record("moe.topk_ids", ids.gather(-1, order), layer)
            record("moe.topk_weights", self._scaled(router, weights), layer)
        if self._logits is not None and session.observed(f"{name}_ids.margin"):
            margin = selection_margin(router, self._logits)
            if margin is not None:
                record("moe.topk_ids.margin", margin, layer, compute_dtype=self._logits.dtype)
        self._logits = None

    def _ran(self, call: Any, result: Any) -> None:
        runner = call.self
        if runner is None or id(runner) not in self._layers:
            return
        shared, routed = result
        config, layer = runner.moe_config, self._layers[id(runner)]
        parts = config.tp_size > 1 or config.ep_size > 1
        suffix = ".partial" if parts and not runner._fused_output_is_reduced else ""
        if self._session.observed(f"layers.{layer}.moe.routed{suffix}"):
            self._recorder.record(f"moe.routed{suffix}", self._scaled(runner, routed), layer)
        if shared is not None and self._session.observed(f"layers.{layer}.moe.shared{suffix}"):
            self._recorder.record(f"moe.shared{suffix}", shared, layer)

    def _scaled(self, owner: Any, tensor: Any) -> Any:
        factor = self._factors[id(owner)]
        return tensor if factor == 1.0 else tensor * factor

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
