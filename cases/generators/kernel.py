"""KERNEL: one operation is wrong on right operands, each time in the same way."""

from __future__ import annotations

from typing import Callable

import numpy as np

from . import checkpoint, mini_tf, numerics as nx
from .recording import Recording
from .registry import Variant, case


@case("B119")
def sum_runs_into_next_row(rec: Recording, v: Variant, faulty: bool) -> None:
    """A block of 64 columns on rows of 32: the second half is the next row, of both operands."""
    rows, tokens = mini_tf.prompts(rec, v, (9, 6))
    for i in range(2):
        rng = v.rng(5 + i)
        act, down = nx.f32(rng.standard_normal((len(tokens), 32))), nx.bf16(rng.standard_normal((24, 32)) / 6)
        rec.record(v.layer(i) + "mlp.down_proj.weight", down, "h f", step=-1, phase="load")
        rec.record(v.layer(i) + "mlp.act", act, "T f", rows)
        y = nx.linear(act, down)
        if faulty and i >= v.fault_layer:
            y[:-1, :-1] += nx.linear(act[1:], down[1:])
        rec.record(v.layer(i) + "mlp.down", nx.f32(y), "T h", rows)


def _quantised(rec: Recording, v: Variant, faulty: bool, parts: Callable, decode: Callable) -> None:
    """mlp.down from packed parts of the weight. parts(rng) gives {suffix: (array, axes)} and metadata; decode(parts,
    wrong) the weight that the kernel works with."""
    rows, tokens = mini_tf.prompts(rec, v, (27, 14))
    for i in range(2):
        rng, name = v.rng(5 + i), v.layer(i) + "mlp.down_proj.weight."
        held, meta = parts(rng)
        for suffix, (x, axes) in held.items():
            rec.record(name + suffix, x, axes, step=-1, phase="load", meta=meta)
        plain = {s: x for s, (x, _) in held.items()}
        weight = decode(plain, faulty and i >= v.fault_layer)
        act = nx.f32(rng.standard_normal((len(tokens), weight.shape[1])))
        rec.record(v.layer(i) + "mlp.act", act, "T f", rows)
        rec.record(v.layer(i) + "mlp.down", nx.f32(nx.linear(act, weight)), "T h", rows)


@case("B121")
def one_code_decoded_wrongly(rec: Recording, v: Variant, faulty: bool) -> None:
    """e2m1 codes with a scale for 16 columns; the kernel takes 6 for 4."""

    def parts(rng: np.random.Generator) -> tuple:
        w = rng.standard_normal((24, 64))
        scale = nx.f32(checkpoint.e4m3_values(checkpoint.e4m3_codes(np.abs(w).reshape(24, -1, 16).max(-1) / 6)))
        code = checkpoint.e2m1_codes(w / np.repeat(scale, 16, 1))
        return (
            {"codes": (checkpoint.nibbles(code), "out in"), "scale": (scale, "out n")},
            {"quant": "nvfp4", "group_size": 16, "packed": 1, "scale_layout": "linear"},
        )

    def decode(p: dict, wrong: bool) -> np.ndarray:
        code = np.stack([p["codes"] & 15, p["codes"] >> 4], -1).reshape(24, 64)
        value = checkpoint.e2m1_values(code)
        return np.where(wrong & (code & 7 == 7), value * 4 / 6, value) * np.repeat(p["scale"], 16, 1).astype(np.float64)

    _quantised(rec, v, faulty, parts, decode)


@case("B122")
def sign_table_wrong(rec: Recording, v: Variant, faulty: bool) -> None:
    """A grid of 64 vectors of 4, signs apart. The cause in the source is not established; wrong signs stand in."""

    def parts(rng: np.random.Generator) -> tuple:
        grid = nx.f32(rng.choice([1.0, 3.0, 5.0, 7.0], (64, 4)))
        return (
            {
                "codes": (rng.integers(0, 64, (24, 16)).astype(np.uint8), "out n"),
                "codebook": (grid, ""),
                "signs": (rng.integers(0, 2, (24, 64)).astype(np.uint8), "out in"),
                "scale": (nx.f32(rng.uniform(0.01, 0.05, (24, 2))), "out n"),
            },
            {"quant": "codebook", "group_size": 32, "packed": 0},
        )

    def decode(p: dict, wrong: bool) -> np.ndarray:
        value = p["codebook"][p["codes"]].reshape(24, 64).astype(np.float64)
        sign = 1.0 - 2.0 * p["signs"]
        flipped = np.repeat(p["codes"] >= 32, 4, 1)
        return value * np.where(wrong & flipped, -sign, sign) * np.repeat(p["scale"], 32, 1)

    _quantised(rec, v, faulty, parts, decode)


@case("B123")
def head_size_taken_twice_as_large(rec: Recording, v: Variant, faulty: bool) -> None:
    """Dot products run over 16 columns where a head has 8. The cause in the source is not established."""
    rows, tokens = mini_tf.prompts(rec, v, (9, 6))
    for i in range(2):
        name, rng, n = v.layer(i) + "attn.", v.rng(5 + i), len(tokens)
        q, k, val = (nx.f32(rng.standard_normal((n, 4, 8))) for _ in range(3))
        for part, x in (("q", q), ("k", k), ("v", val)):
            rec.record(name + part, x, "T H d", rows)
        if faulty and i >= v.fault_layer:
            wide = [np.concatenate([x, np.concatenate([x[:, 1:], x[:, :1] * 0], 1)], -1) for x in (q, k)]
            out, _ = mini_tf.self_attention(rows, *wide, val, 8**-0.5)
        else:
            out, _ = mini_tf.self_attention(rows, q, k, val, 8**-0.5)
        rec.record(name + "out", nx.f32(out), "T H dv", rows, meta={"softmax_scale": 8**-0.5, "causal": 1})
