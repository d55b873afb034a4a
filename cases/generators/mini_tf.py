"""G-TF: a small decoder. Every result is rounded before it is recorded, and the next operation starts from there.

A case replaces operations by name (`ops`): what is handed in takes the place of the default from `fault_layer` on, so
the fault spreads through the later tensors as it would in an engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Callable

import numpy as np

from . import numerics as nx
from .recording import Recording, Request, Run
from .registry import Variant


@dataclass(frozen=True)
class Config:
    layers: int = 2
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    d: int = 8
    dv: int = 8
    inter: int = 48
    vocab: int = 64
    theta: float = 10000.0
    pairing: str = "half"
    rope_scale: float = 1.0
    yarn: dict | None = None
    eps: float = 1e-6
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    gain: float = 1.0  # of q_proj and k_proj: how peaked the softmax is
    round_to: str = "f32"
    residual_scale: tuple[float, ...] = ()  # a layer; empty: 1
    tied: bool = False
    twin_tokens: bool = False  # every second row of the head almost equals the one before it
    compiled: bool = False

    @property
    def scale(self) -> float:
        return self.d**-0.5

    def rope_meta(self) -> dict[str, Any]:
        meta: dict[str, Any] = {"rope.type": "default", "rope.theta": self.theta, "rope.pairing": self.pairing}
        if self.yarn:
            meta |= {"rope.type": "yarn"} | {f"rope.{k}": v for k, v in self.yarn.items()}
        return meta

    def attention_meta(self) -> dict[str, Any]:
        meta: dict[str, Any] = {"softmax_scale": self.scale, "causal": 1}
        if self.window:
            meta["window"] = self.window
        if self.soft_cap:
            meta["soft_cap"] = self.soft_cap
        return meta


WEIGHTS = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}


@dataclass
class Keys:
    """What one request has in one layer, by position."""

    k: np.ndarray
    v: np.ndarray
    positions: np.ndarray


@dataclass
class Call:
    """One attention call: the new rows of every request and the keys of each."""

    layer: int
    step: int
    phase: str
    cfg: Config
    rows: tuple[Run, ...]
    q: np.ndarray
    keys: list[Keys]
    scale: float
    window: int
    soft_cap: float
    sinks: np.ndarray | None
    base: dict[str, Any] = field(default_factory=dict)

    def change(self, **fields: Any) -> "Call":
        return replace(self, **fields)


def attend(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """out T H dv and lse T H of all rows; padding rows are zeros and -inf."""
    t, h, _ = call.q.shape
    out, lse = np.zeros((t, h, call.keys[0].v.shape[2])), np.full((t, h), -np.inf)
    for run, keys in zip((r for r in call.rows if r.request is not None), call.keys):
        at = slice(run.row, run.row + run.n)
        seen = nx.visible(run.position + np.arange(run.n), keys.positions, True, call.window)
        out[at], lse[at] = nx.attention(call.q[at], keys.k, keys.v, seen, call.scale, call.soft_cap, call.sinks)
    return out, lse


def rotate(x: np.ndarray, positions: np.ndarray, cfg: Config) -> np.ndarray:
    frequencies = nx.inverse_frequencies(x.shape[-1], cfg.theta, cfg.yarn)
    return nx.rope(x, positions, frequencies, cfg.pairing, cfg.rope_scale)


def positions_of(rows: tuple[Run, ...]) -> np.ndarray:
    return np.concatenate([r.position + np.arange(r.n) for r in rows])


class Decoder:
    """Weights from a generator; `step` runs new rows and extends the cache."""

    def __init__(
        self,
        rec: Recording,
        variant: Variant,
        cfg: Config,
        ops: dict[str, Callable[..., Any]] | None = None,
        record: Callable[[str], bool] = lambda name: True,
        always: bool = False,
    ) -> None:
        self.rec, self.variant, self.cfg, self.ops, self.wanted = rec, variant, cfg, ops or {}, record
        self.first = 0 if always else variant.fault_layer  # layer from which the ops are in place
        self.round = nx.ROUND[cfg.round_to]
        self.linear: Callable[..., np.ndarray] = nx.linear
        rng = variant.rng(7)

        def matrix(out: int, into: int, gain: float = 1.0) -> np.ndarray:
            return nx.bf16(rng.standard_normal((out, into)) * gain / np.sqrt(into))

        c = cfg
        self.embedding = nx.bf16(rng.standard_normal((c.vocab, c.hidden)))
        self.head = self.embedding if c.tied else matrix(c.vocab, c.hidden, 2.0)
        self.residual = c.residual_scale or (1.0,) * c.layers  # as used; the configuration has it as declared
        if c.twin_tokens:
            self.head[1::2] = nx.bf16(self.head[0::2] * (1 + 2.0**-8 * rng.integers(-1, 2, self.head[1::2].shape)))
        self.final = nx.bf16(1 + 0.1 * rng.standard_normal(c.hidden))
        self.layers = [
            {
                "input_norm": nx.bf16(1 + 0.1 * rng.standard_normal(c.hidden)),
                "post_norm": nx.bf16(1 + 0.1 * rng.standard_normal(c.hidden)),
                "attn.q_proj": matrix(c.heads * c.d, c.hidden, c.gain),
                "attn.k_proj": matrix(c.kv_heads * c.d, c.hidden, c.gain),
                "attn.v_proj": matrix(c.kv_heads * c.dv, c.hidden),
                "attn.o_proj": matrix(c.hidden, c.heads * c.dv),
                "mlp.gate_proj": matrix(c.inter, c.hidden),
                "mlp.up_proj": matrix(c.inter, c.hidden),
                "mlp.down_proj": matrix(c.hidden, c.inter),
                "sinks": nx.f32(1.0 + 0.5 * rng.standard_normal(c.heads)),
            }
            for _ in range(c.layers)
        ]
        self.cache: list[dict[Request, Keys]] = [{} for _ in range(c.layers)]
        self.record_weights()

    def record_weights(self) -> None:
        """Under the checkpoint's own names, below the layer with self_attn as attn."""
        named = {
            f"{self.variant.layer(i)}{WEIGHTS.get(n, n)}.weight": w
            for i, x in enumerate(self.layers)
            for n, w in x.items()
        }
        named |= {"embed_tokens.weight": self.embedding, "norm.weight": self.final}
        if not self.cfg.tied:
            named["lm_head.weight"] = self.head
        for name, w in named.items():
            if not name.endswith("sinks.weight"):
                self.rec.record(name, w, "out in" if w.ndim == 2 else "", phase="load", step=-1)

    def op(self, name: str, layer: int, default: Callable[..., Any]) -> Callable[..., Any]:
        return self.ops[name] if name in self.ops and layer >= self.first else default

    def step(self, rows: tuple[Run, ...], tokens: np.ndarray, step: int = 0, phase: str = "prefill") -> np.ndarray:
        """New rows (padding allowed) with their tokens; gives the logits T vocab."""
        c, x = self.cfg, self.round(self.embedding[tokens])

        def put(
            name: str,
            value: np.ndarray,
            axes: str,
            meta: dict[str, Any] | None = None,
            exact: bool = False,
            layer: int = -1,
        ) -> np.ndarray:
            value = value if exact else self.round(value)
            stem = name
            if layer >= 0:
                name = self.variant.layer(layer) + name
            if self.wanted(stem):
                self.rec.record(name, value, axes, rows, step=step, phase=phase, meta=meta, compute_dtype=c.round_to)
            return value

        first = self.variant.first_layer
        put("embed" if first == 0 else f"layers.{first - 1}.out", x, "T h")
        n = len(tokens)
        for i, w in enumerate(self.layers):

            def site(
                name: str, value: np.ndarray, axes: str = "T h", meta: dict[str, Any] | None = None, exact: bool = False
            ) -> np.ndarray:
                return put(name, value, axes, meta, exact, i)

            a = site("input_norm", nx.rms_norm(x, w["input_norm"], c.eps), meta={"eps": c.eps})
            heads = {
                name: site(f"attn.{name}", self.linear(a, w[f"attn.{name}"]).reshape(n, count, size), "T H d")
                for name, count, size in (
                    ("q_proj", c.heads, c.d),
                    ("k_proj", c.kv_heads, c.d),
                    ("v_proj", c.kv_heads, c.dv),
                )
            }
            at = positions_of(rows)
            turn = self.op("rope", i, lambda name, y, p: rotate(y, p, c))
            q = site("attn.q", turn("q", heads["q_proj"], at), "T H d", c.rope_meta())
            k = site("attn.k", turn("k", heads["k_proj"], at), "T H d", c.rope_meta())
            v = site("attn.v", heads["v_proj"], "T H d")
            self.extend(i, rows, k, v)
            sinks = w["sinks"] if c.sinks else None
            if c.sinks and self.wanted("attn.sinks"):
                self.rec.record(self.variant.layer(i) + "attn.sinks", sinks, "H", step=step, phase=phase)
            call = Call(
                i,
                step,
                phase,
                c,
                rows,
                q,
                [self.cache[i][r.request] for r in rows if r.request is not None],
                c.scale,
                c.window,
                c.soft_cap,
                sinks,
            )
            out, lse = self.op("attend", i, attend)(call)
            meta = c.attention_meta()
            out = site("attn.out", out, "T H dv", meta)
            if self.variant.lse:
                site("attn.lse", lse, "T H", meta)
            o = site("attn.o_proj", self.linear(out.reshape(n, -1), w["attn.o_proj"]))
            h = self.round(x.astype(np.float64) + o)
            b = site("post_norm", nx.rms_norm(h, w["post_norm"], c.eps), meta={"eps": c.eps})
            gate = site("mlp.gate", self.linear(b, w["mlp.gate_proj"]), "T f")
            up = site("mlp.up", self.linear(b, w["mlp.up_proj"]), "T f")
            act = site("mlp.act", nx.silu(gate) * up, "T f", {"activation": "silu"})
            down = site("mlp.down", self.linear(act, w["mlp.down_proj"]))
            add = self.op("add", i, lambda x, o, down, b: self.residual[i] * (x.astype(np.float64) + o) + down)
            said = {"residual_scale": c.residual_scale[i]} if c.residual_scale else {}
            x = site("out", add(x, o, down, b), meta=said | ({"compiled": 1} if c.compiled else {}))
        y = put("final_norm", nx.rms_norm(x, self.final, c.eps), "T h", {"eps": c.eps})
        logits = put("logits", self.linear(y, self.head), "T vocab", {"tie_word_embeddings": 1} if c.tied else None)
        ranked = np.sort(logits, -1)
        put("next_token.margin", ranked[:, -1] - ranked[:, -2], "T")
        put("next_token", logits.argmax(-1).astype(np.int64), "T", exact=True)
        return logits

    def extend(self, layer: int, rows: tuple[Run, ...], k: np.ndarray, v: np.ndarray) -> None:
        for run in rows:
            if run.request is None:
                continue
            at = slice(run.row, run.row + run.n)
            new = Keys(k[at], v[at], run.position + np.arange(run.n))
            old = self.cache[layer].get(run.request)
            if old is not None:
                new = Keys(
                    np.concatenate([old.k, new.k]),
                    np.concatenate([old.v, new.v]),
                    np.concatenate([old.positions, new.positions]),
                )
            self.cache[layer][run.request] = new


def prompts(
    rec: Recording, variant: Variant, lengths: tuple[int, ...], vocab: int = 64
) -> tuple[tuple[Run, ...], np.ndarray]:
    """One request of each length (longer with the variant's size), rows one behind the other, and all their tokens."""
    rng, rows, tokens = variant.rng(3), [], []
    for n in lengths:
        ids = rng.integers(0, vocab, n + 3 * variant.size)
        rows.append(Run(rec.request(ids), sum(len(t) for t in tokens), len(ids)))
        tokens.append(ids)
    return tuple(rows), np.concatenate(tokens)


def next_rows(rows: tuple[Run, ...]) -> tuple[Run, ...]:
    """One new row for each request, behind what it has."""
    return tuple(Run(r.request, i, 1, r.position + r.n) for i, r in enumerate(rows))


def self_attention(
    rows: tuple[Run, ...], q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Causal attention of whole prompts, each over its own rows."""
    out, lse = np.zeros((*q.shape[:2], v.shape[2])), np.zeros(q.shape[:2])
    for run in rows:
        own, at = slice(run.row, run.row + run.n), run.position + np.arange(run.n)
        out[own], lse[own] = nx.attention(q[own], k[own], v[own], nx.visible(at, at), scale)
    return out, lse
