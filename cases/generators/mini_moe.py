"""G-MOE: a router, eight routed experts and a shared one, on given rows. Layers are independent of each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import numpy as np

from . import mini_tf, numerics as nx
from .mini_tf import Run
from .recording import Recording
from .registry import Variant


@dataclass(frozen=True)
class Config:
    experts: int = 8
    top_k: int = 2
    hidden: int = 16
    inter: int = 8
    bias: bool = True  # correction bias of the router
    bias_low: float = 0.0
    bias_high: float = 0.3
    renormalise: bool = True
    factor: float = 2.5
    layout: str = "halves"
    activation: str = "silu"
    alpha: float = 1.702
    limit: float = 7.0
    logit_gain: float = 1.0
    round_to: str = "f32"
    expert_sites: bool = True
    row_sites: bool = True  # record what is sorted by expert

    def router_meta(self) -> dict[str, Any]:
        return {"scoring": "sigmoid", "renormalise": self.renormalise, "routed_scaling_factor": self.factor}

    def act_meta(self, layout: str) -> dict[str, Any]:
        meta: dict[str, Any] = {"activation": self.activation, "gate_up_layout": layout}
        if self.activation == "swiglu_oai":
            meta |= {"swiglu_alpha": self.alpha, "swiglu_limit": self.limit}
        return meta


def activate(x: np.ndarray, cfg: Config, layout: str) -> np.ndarray:
    """R 2f to R f."""
    x = np.asarray(x, np.float64)
    half = x.shape[-1] // 2
    gate, up = (x[..., 0::2], x[..., 1::2]) if layout == "interleaved" else (x[..., :half], x[..., half:])
    if cfg.activation == "silu":
        return nx.silu(gate) * up
    gate, up = np.minimum(gate, cfg.limit), np.clip(up, -cfg.limit, cfg.limit)
    return (up + 1) * gate * nx.sigmoid(cfg.alpha * gate)


def combine_weights(scores: np.ndarray, ids: np.ndarray, cfg: Config) -> np.ndarray:
    w = np.take_along_axis(np.asarray(scores, np.float64), ids, -1)
    if cfg.renormalise:
        w = w / (w.sum(-1, keepdims=True) + 1e-20)
    return w * cfg.factor


class Experts:
    """ops: logits(x, weight), weights(scores, bias, ids), act(x), combine(rows T k h, weights) replace the defaults
    from the faulty layer on."""

    def __init__(
        self, rec: Recording, v: Variant, cfg: Config, ops: dict[str, Callable[..., Any]] | None = None
    ) -> None:
        self.rec, self.v, self.cfg, self.ops = rec, v, cfg, ops or {}

    def op(self, name: str, i: int, default: Callable[..., Any]) -> Callable[..., Any]:
        return self.ops[name] if name in self.ops and i >= 1 + self.v.fault_layer else default

    def run(self, i: int, rows: tuple[Run, ...], x: np.ndarray, step: int = 0, phase: str = "prefill") -> None:
        """One layer (number i of the recorded ones) on the rows x T h."""
        c, rnd, rng, t = self.cfg, nx.ROUND[self.cfg.round_to], self.v.rng(70 + i), len(x)
        name = self.v.layer(i)

        def put(
            site: str,
            value: np.ndarray,
            axes: str,
            rows: tuple[Run, ...] = rows,
            meta: dict[str, Any] | None = None,
            how: Callable[[np.ndarray], np.ndarray] = rnd,
        ) -> np.ndarray:
            value = how(value)
            if c.row_sites or rows:
                self.rec.record(
                    name + site, value, axes, rows, step=step, phase=phase, meta=meta, compute_dtype=c.round_to
                )
            return value

        def weight(site: str, value: np.ndarray, axes: str) -> np.ndarray:
            if step == 0:
                self.rec.record(name + site, value, axes, step=-1, phase="load")
            return value

        def matrix(*shape: int) -> np.ndarray:
            return nx.bf16(rng.standard_normal(shape) / np.sqrt(shape[-1]))

        def exact(value: np.ndarray) -> np.ndarray:
            return value

        router = weight("mlp.gate.weight", nx.bf16(matrix(c.experts, c.hidden) * c.logit_gain), "E h")
        bias = nx.f32(rng.uniform(c.bias_low, c.bias_high, c.experts)) if c.bias else np.zeros(c.experts, np.float32)
        if c.bias:
            weight("mlp.gate.e_score_correction_bias", bias, "E")
        x = put("post_norm", x, "T h")
        logits = put(
            "moe.router_logits", self.op("logits", i, nx.linear)(x, router), "T E", meta={"store_dtype": c.round_to}
        )
        scores = nx.sigmoid(logits)
        chosen = scores + bias
        ids = nx.top_k(chosen, c.top_k)
        ranked = -np.sort(-chosen, -1)[:, : c.top_k + 1]
        put("moe.topk_ids.margin", -np.diff(ranked, axis=-1).max(-1), "T", how=nx.f32)
        put("moe.topk_ids", ids.astype(np.int64), "T k", how=exact)
        default = lambda scores, bias, ids: combine_weights(scores, ids, c)  # noqa: E731
        weights = put(
            "moe.topk_weights", self.op("weights", i, default)(scores, bias, ids), "T k", meta=c.router_meta()
        )
        if not c.expert_sites:
            return
        up = weight("mlp.experts.gate_up_proj", matrix(c.experts, 2 * c.inter, c.hidden) * 2, "E 2f h")
        up_bias = weight(
            "mlp.experts.gate_up_proj_bias", nx.bf16(0.3 * rng.standard_normal((c.experts, 2 * c.inter))), "E 2f"
        )
        down = weight("mlp.experts.down_proj", matrix(c.experts, c.hidden, c.inter), "E h f")
        order = np.argsort(ids.reshape(-1), kind="stable")
        expert, token = ids.reshape(-1)[order], order // c.top_k
        sent = put("moe.dispatched", x[token], "R h", ())
        put("moe.expert_counts", np.bincount(expert, minlength=c.experts).astype(np.int64), "E", (), how=exact)
        both = put(
            "moe.gate_up", np.einsum("rh,rfh->rf", sent.astype(np.float64), up[expert]) + up_bias[expert], "R 2f", ()
        )
        act = put(
            "moe.act", self.op("act", i, lambda y: activate(y, c, c.layout))(both), "R f", (), c.act_meta(c.layout)
        )
        y = put("moe.expert_out", np.einsum("rf,rhf->rh", act.astype(np.float64), down[expert]), "R h", ())
        back = np.empty((t * c.top_k, c.hidden))
        back[order] = y
        back = back.reshape(t, c.top_k, c.hidden)
        plain = lambda back, w: np.einsum("tkh,tk->th", back, np.asarray(w, np.float64))  # noqa: E731
        routed = put(
            "moe.routed",
            self.op("combine", i, plain)(back, weights),
            "T h",
            meta={"store_dtype": c.round_to, "accum_dtype": "f32"},
        )
        shared = put(
            "moe.shared",
            nx.linear(activate(nx.linear(x, matrix(2 * c.inter, c.hidden)), c, "halves"), matrix(c.hidden, c.inter)),
            "T h",
        )
        put("moe.out", routed.astype(np.float64) + shared, "T h")


def layers(
    rec: Recording,
    v: Variant,
    cfg: Config,
    ops: dict[str, Callable[..., Any]] | None = None,
    lengths: tuple[int, ...] = (13, 8),
) -> None:
    """The second and the third layer of a model whose first one is dense, on random rows of whole prompts."""
    rows, tokens = mini_tf.prompts(rec, v, lengths)
    model = Experts(rec, v, cfg, ops)
    for i in (1, 2):
        model.run(i, rows, v.rng(80 + i).standard_normal((len(tokens), cfg.hidden)))
