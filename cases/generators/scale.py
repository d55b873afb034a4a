"""SCALE: the softmax scale, or the constant that YaRN puts on cosines and sines."""

from __future__ import annotations

import numpy as np

from . import mini_mla, mini_tf, numerics as nx
from .recording import Recording
from .registry import Variant, case


def _mla(rec: Recording, v: Variant, factor: float, used: float) -> None:
    """`used`: factor of the declared scale from the faulty layer on."""
    rows, tokens = mini_tf.prompts(rec, v, (12, 7))
    cfg = mini_mla.Config(scale_factor=factor)
    model = mini_mla.Model(rec, v, cfg, lambda layer: cfg.scale * (used if layer >= v.fault_layer else 1.0))
    model.run(rows, nx.bf16(v.rng(5).standard_normal((len(tokens), cfg.hidden))))


@case("B001")
def yarn_scale_missing(rec: Recording, v: Variant, faulty: bool) -> None:
    _mla(rec, v, 1.59, 1 / 1.59 if faulty else 1.0)


@case("B005")
def scale_exponent_sign(rec: Recording, v: Variant, faulty: bool) -> None:
    _mla(rec, v, 1.0, 12.0 if faulty else 1.0)


@case("B003")
def yarn_factor_of_rope_missing(rec: Recording, v: Variant, faulty: bool) -> None:
    factor = nx.yarn_factor(40.0)
    yarn = {"factor": 40.0, "original_max_position": 64, "beta_fast": 32.0, "beta_slow": 1.0}
    cfg = mini_tf.Config(yarn=yarn, rope_scale=factor)

    def plain(name: str, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return mini_tf.rotate(x, positions, cfg) / factor

    rows, tokens = mini_tf.prompts(rec, v, (16, 9))
    mini_tf.Decoder(rec, v, cfg, {"rope": plain} if faulty else None).step(rows, tokens)


@case("B004")
def yarn_factor_applied_twice(rec: Recording, v: Variant, faulty: bool) -> None:
    factor, attention_factor, dim, count = 32.0, 1.3466, 16, 40 + 8 * v.size
    yarn = {"factor": factor, "original_max_position": 128, "beta_fast": 32.0, "beta_slow": 1.0}
    used = nx.yarn_factor(factor, attention_factor) if faulty else attention_factor
    frequencies = nx.inverse_frequencies(dim, 10000.0, yarn)
    meta = {
        "rope.type": "yarn",
        "rope.theta": 10000.0,
        "rope.attention_factor": attention_factor,
        "rope.dim": dim,
        "rope.pairing": "half",
    } | {f"rope.{k}": x for k, x in yarn.items()}
    table = nx.f32(np.concatenate(nx.cos_sin(np.arange(count), frequencies, used), -1))
    rec.record("rope.cos_sin", table, "P dr", step=-1, phase="load", meta=meta)
    rows, _ = mini_tf.prompts(rec, v, (11, 5))
    x = nx.f32(v.rng(5).standard_normal((sum(r.n for r in rows), 3, dim)))
    c, s = (
        y[mini_tf.positions_of(rows), None].astype(np.float64) for y in (table[:, : dim // 2], table[:, dim // 2 :])
    )
    a, b = x[..., : dim // 2], x[..., dim // 2 :]
    rec.record(v.layer(0) + "attn.q_proj", x, "T H d", rows)
    rec.record(
        v.layer(0) + "attn.q", nx.f32(np.concatenate([a * c - b * s, a * s + b * c], -1)), "T H d", rows, meta=meta
    )
