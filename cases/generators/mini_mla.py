"""G-MLA: attention with a joint key/value latent, by the materialised and by the absorbed path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import numpy as np

from . import numerics as nx
from .mini_tf import positions_of
from .recording import Recording, Run
from .registry import Variant


@dataclass(frozen=True)
class Config:
    layers: int = 2
    hidden: int = 32
    heads: int = 4
    dn: int = 8
    dr: int = 4
    dv: int = 8
    c: int = 16
    eps: float = 1e-6
    scale_factor: float = 1.0  # of the declared softmax scale: YaRN factor squared
    path: str = "materialised"
    round_to: str = "f32"

    @property
    def scale(self) -> float:
        return (self.dn + self.dr) ** -0.5 * self.scale_factor


class Model:
    """Layers of attention alone, on a residual stream. One call of `run` handles whole prompts."""

    def __init__(
        self, rec: Recording, variant: Variant, cfg: Config, scale_of_layer: Callable[[int], float] | None = None
    ) -> None:
        self.rec, self.variant, self.cfg = rec, variant, cfg
        self.scale_of_layer = scale_of_layer or (lambda layer: cfg.scale)
        rng, c = variant.rng(11), cfg

        def matrix(out: int, into: int, gain: float = 1.0) -> np.ndarray:
            return nx.bf16(rng.standard_normal((out, into)) * gain / np.sqrt(into))

        self.layers = [
            {
                "attn.q_proj": matrix(c.heads * (c.dn + c.dr), c.hidden, 1.5),
                "attn.kv_a_proj_with_mqa": matrix(c.c + c.dr, c.hidden, 1.5),
                "attn.kv_a_layernorm": nx.bf16(1 + 0.1 * rng.standard_normal(c.c)),
                "attn.kv_b_proj": matrix(c.heads * (c.dn + c.dv), c.c, 1.5),
                "attn.o_proj": matrix(c.hidden, c.heads * c.dv),
            }
            for _ in range(c.layers)
        ]

    def run(self, rows: tuple[Run, ...], x: np.ndarray) -> np.ndarray:
        c, rnd, at = self.cfg, nx.ROUND[self.cfg.round_to], positions_of(rows)
        n, turn = len(x), nx.inverse_frequencies(c.dr)
        meta = {"softmax_scale": c.scale, "causal": 1}
        rope = {"rope.type": "default", "rope.theta": 10000.0, "rope.pairing": "interleaved", "rope.dim": c.dr}
        for i, w in enumerate(self.layers):

            def site(name: str, value: np.ndarray, axes: str, meta: dict[str, Any] | None = None) -> np.ndarray:
                value = rnd(value)
                self.rec.record(self.variant.layer(i) + name, value, axes, rows, meta=meta, compute_dtype=c.round_to)
                return value

            for name, value in w.items():
                self.rec.record(f"{self.variant.layer(i)}{name}.weight", value, "", step=-1, phase="load")
            a = site("input_norm", nx.rms_norm(x, 1.0), "T h")
            q = site("attn.q_proj", nx.linear(a, w["attn.q_proj"]).reshape(n, c.heads, -1), "T H d")
            kv_a = site("attn.kv_a", nx.linear(a, w["attn.kv_a_proj_with_mqa"]), "T c+dr")
            latent = site(
                "attn.kv_c_normed", nx.rms_norm(kv_a[:, : c.c], w["attn.kv_a_layernorm"], c.eps), "T c", {"eps": c.eps}
            )
            k_pe = site("attn.k_pe", nx.rope(kv_a[:, None, c.c :], at, turn, "interleaved"), "T 1 dr", rope)
            q_nope = site("attn.q_nope", q[..., : c.dn], "T H dn")
            q_pe = site("attn.q_pe", nx.rope(q[..., c.dn :], at, turn, "interleaved"), "T H dr", rope)
            kv_b = w["attn.kv_b_proj"].reshape(c.heads, c.dn + c.dv, c.c).astype(np.float64)
            w_uk, w_uv = kv_b[:, : c.dn], kv_b[:, c.dn :]  # H dn c, H dv c
            full_q = site("attn.q", np.concatenate([q_nope, q_pe], -1), "T H d", rope)
            scale = self.scale_of_layer(i)
            seen = np.zeros((n, n), bool)
            for run in rows:
                own = slice(run.row, run.row + run.n)
                seen[own, own] = nx.visible(at[own], at[own])
            if c.path == "materialised":
                k_nope = site("attn.k_nope", np.einsum("tc,hdc->thd", latent, w_uk), "T H dn")
                k = site(
                    "attn.k", np.concatenate([k_nope, np.broadcast_to(k_pe, (n, c.heads, c.dr))], -1), "T H d", rope
                )
                v = site("attn.v", np.einsum("tc,hdc->thd", latent, w_uv), "T H dv")
                out, lse = nx.attention(full_q, k, v, seen, scale)
            else:
                self.rec.record(
                    self.variant.layer(i) + "attn.W_UV",
                    nx.f32(w_uv.transpose(0, 2, 1)),
                    "H c dv",
                    step=-1,
                    phase="load",
                )
                q_latent = site("attn.q_latent", np.einsum("thd,hdc->thc", q_nope, w_uk), "T H c")
                key = np.concatenate([latent[:, None], k_pe], -1)
                wide, lse = nx.attention(np.concatenate([q_latent, q_pe], -1), key, latent[:, None], seen, scale)
                wide = site("attn.latent_out", wide, "T H c", meta)
                out = np.einsum("thc,hdc->thd", wide, w_uv)
            out = site("attn.out", out, "T H dv", meta)
            if self.variant.lse:
                site("attn.lse", lse, "T H", meta)
            o = site("attn.o_proj", nx.linear(out.reshape(n, -1), w["attn.o_proj"]), "T h")
            x = site("out", x.astype(np.float64) + o, "T h")
        return x
