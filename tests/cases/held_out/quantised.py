"""Faults of quantised weights that show in the result of their product alone: no checkpoint is at hand.

Codes, scales and zero points are recorded as `NAME.weight.codes` and its fellows; the kernel takes one of them
otherwise. One operation each, on shapes that are not square, over two requests, whole or one rank's rows.
"""

from __future__ import annotations

import numpy as np
from cases.generators import numerics as nx
from cases.generators.recording import Shard

from .fault import fault, two_requests

DOWN = "layers.3.mlp.down"


def product(rec, rng, parts, used, meta, wide=48, result=DOWN, weight="mlp.down_proj", source="mlp.act", shard=None):
    """The product with weight `used`, beside the parts of it as declared."""
    rows = two_requests(rec, rng)
    x = nx.f32(rng.standard_normal((18, wide)))
    for name, array in parts.items():
        axes = "out in" if array.ndim == 2 else "one"
        rec.record(f"layers.3.{weight}.weight.{name}", array, axes, phase="load", step=-1,
                   meta=meta if name == "codes" else {})  # fmt: skip
    rec.record(f"layers.3.{source}", x, "T f", rows)
    rec.record(result, nx.f32(x.astype(float) @ used.T), "T h", rows, shard=shard)


def spread(grid, group, block=1):
    return np.repeat(np.repeat(grid.astype(float), block, 0), group, 1)


# ---- integers with zero points, one scale a row --------------------------------------------------------------------


def by_row(rec, rng, used, n=20, wide=48):
    code = rng.integers(-110, 110, (n, wide)).astype(np.int8)
    scale = nx.f32(0.01 + 0.05 * rng.random((n, 1)))
    zero = rng.integers(-6, 7, (n, 1)).astype(np.int8)
    c, s, z = code.astype(float), scale.astype(float), zero.astype(float)
    product(rec, rng, {"codes": code, "scale": scale, "zero": zero}, used(c, s, z), {"quant": "int8_channel"}, wide)


def row_fault(name, cls, constant, used):
    @fault(f"int8 rows {name}", DOWN, cls, constant)
    def _(rec, rng, bad):
        by_row(rec, rng, used if bad else lambda c, s, z: (c - z) * s)


row_fault("whose zero points are three too small", "Q-ZERO", 3, lambda c, s, z: (c - z + 3) * s)
row_fault("whose zero points were dropped", "Q-ZERO", None, lambda c, s, z: c * s)
row_fault("whose zero points were added", "Q-ZERO", None, lambda c, s, z: (c + z) * s)
row_fault("whose zero points are those of the row before", "Q-LAYOUT", None, lambda c, s, z: (c - np.roll(z, 1, 0)) * s)
row_fault("half of which have 0.75 times their scale", "Q-SCALE", 0.75,
          lambda c, s, z: (c - z) * s * np.where(np.arange(20) < 10, 1, 0.75)[:, None])  # fmt: skip
row_fault("under the scale of the next row", "Q-LAYOUT", None, lambda c, s, z: (c - z) * np.roll(s, -1, 0))
row_fault("under shuffled scales", "Q-LAYOUT", None,
          lambda c, s, z: (c - z) * s[np.random.default_rng(5).permutation(20)])  # fmt: skip
row_fault("under one scale", "Q-SCALE", None, lambda c, s, z: (c - z) * s.max())
row_fault("whose scales were rounded to bfloat16", "Q-SCALE", None, lambda c, s, z: (c - z) * nx.bf16(s).astype(float))
row_fault("with neighbours exchanged", "Q-LAYOUT", None,
          lambda c, s, z: (c.reshape(20, 24, 2)[:, :, ::-1].reshape(20, 48) - z) * s)  # fmt: skip
row_fault("without every other column", "Q-LAYOUT", 0.5, lambda c, s, z: (c * (np.arange(48) % 2 == 0) - z) * s)


# ---- four bits in groups -------------------------------------------------------------------------------------------

G = 16


def by_group(rec, rng, quant, used, n=20, wide=48, low=1, high=14):
    code = rng.integers(0, 16, (n, wide)).astype(np.uint8)
    zero = rng.integers(low, high, (n, wide // G)).astype(np.int32)
    scale = nx.f32(0.01 + 0.05 * rng.random((n, wide // G)))
    meta = {"quant": quant, "group_size": G, "packed": 0}
    c, s, z = code.astype(float), scale.astype(float), zero.astype(float) + (quant == "gptq")
    product(rec, rng, {"codes": code, "scale": scale, "zero": zero}, used(c, s, z), meta, wide)


def right(c, s, z):
    return (c - spread(z, G)) * spread(s, G)


def group_fault(name, quant, cls, constant, used, **sizes):
    @fault(f"{quant} {name}", DOWN, cls, constant)
    def _(rec, rng, bad):
        by_group(rec, rng, quant, used if bad else right, **sizes)


group_fault("with the zero point of the other version", "gptq_v2", "Q-ZERO", -1,
            lambda c, s, z: (c - spread(z, G) - 1) * spread(s, G))  # fmt: skip
group_fault("whose zero points were read as they are", "gptq", "Q-ZERO", 1,
            lambda c, s, z: (c - spread(z, G) + 1) * spread(s, G))  # fmt: skip
group_fault("taken for symmetric", "awq", "Q-ZERO", None, lambda c, s, z: (c - 8) * spread(s, G))
group_fault("whose zero points of 0 wrapped", "gptq_v2", "Q-ZERO", -15,
            lambda c, s, z: (c - spread(np.where(z == 0, 15, z), G)) * spread(s, G), low=0, high=3)  # fmt: skip
group_fault("under the scale of the group before", "awq", "Q-LAYOUT", None,
            lambda c, s, z: (c - spread(z, G)) * spread(np.roll(s, 1, 1), G))  # fmt: skip
group_fault("under scales in the order of columns", "gptq_v2", "Q-LAYOUT", None,
            lambda c, s, z: (c - spread(z, G)) * spread(s.T.reshape(s.shape), G))  # fmt: skip
group_fault("in the order of another packing", "awq", "Q-LAYOUT", None,
            lambda c, s, z: (c.reshape(20, -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(c.shape) - spread(z, G))
            * spread(s, G))  # fmt: skip
group_fault("under groups of half the size", "gptq", "Q-LAYOUT", None,
            lambda c, s, z: (c - spread(z, G)) * spread(s, G // 2)[:, np.arange(48) % 24])  # fmt: skip
group_fault("with a third of the scales", "awq", "Q-SCALE", 1 / 3,
            lambda c, s, z: (c - spread(z, G)) * spread(s * np.where(np.arange(3) == 1, 1 / 3, 1), G))  # fmt: skip


# ---- words of eight codes, as in checkpoints -----------------------------------------------------------------------


@fault("gptq words whose zero points are one too large", DOWN, "Q-ZERO", -1)
def _(rec, rng, bad):
    n, wide = 24, 64
    code, zero = rng.integers(0, 16, (wide, n)).astype(np.uint32), rng.integers(0, 13, (wide // G, n)).astype(np.uint32)
    scale = (0.01 + 0.05 * rng.random((wide // G, n))).astype(np.float16)
    shift = (4 * np.arange(8)).astype(np.uint32)
    words = (code.reshape(-1, 8, n) << shift[None, :, None]).sum(1).astype(np.uint32).view(np.int32)
    zeros = (zero.reshape(-1, n // 8, 8) << shift).sum(2).astype(np.uint32).view(np.int32)
    used = (code.astype(float) - np.repeat(zero + 1.0 + bad, G, 0)) * np.repeat(scale.astype(float), G, 0)
    product(rec, rng, {"codes": words, "scale": scale, "zero": zeros}, used.T, {"quant": "gptq"}, wide)


# ---- float8 blocks -------------------------------------------------------------------------------------------------


def blocks(rec, rng, used, n=32, wide=96, b=16, result=DOWN, **kw):
    """Codes on a grid of 1/8 up to 448 that float8 holds, recorded as float32."""
    code = nx.f32(rng.choice([-1, 1], (n, wide)) * rng.choice([0.5, 1, 3, 7, 15, 28, 60, 208, 448], (n, wide)))
    scale = nx.f32(np.exp(rng.standard_normal((n // b, wide // b))) / 448)
    meta = {"quant": "fp8_block", "group_size": b}
    product(rec, rng, {"codes": code, "scale": scale}, code.astype(float) * spread(used(scale), b, b), meta, wide,
            result, **kw)  # fmt: skip


def block_fault(name, cls, constant, used, **sizes):
    @fault(f"float8 blocks {name}", DOWN, cls, constant)
    def _(rec, rng, bad):
        blocks(rec, rng, used if bad else lambda s: s, **sizes)


block_fault("whose scales were transposed at load", "Q-LAYOUT", None, lambda s: s.T.reshape(s.shape))
block_fault("whose square grid of scales was transposed", "Q-LAYOUT", None, lambda s: s.T, n=64, wide=64)
block_fault("whose scales were rounded up to powers of two", "Q-SCALE", None, lambda s: 2.0 ** np.ceil(np.log2(s)))
block_fault("one of which has twice its scale", "Q-SCALE", 2,
            lambda s: s * np.where(np.arange(s.size).reshape(s.shape) == 4, 2, 1))  # fmt: skip
block_fault("each of which has another scale", "Q-SCALE", None,
            lambda s: s * (1 + np.random.default_rng(3).random(s.shape)))  # fmt: skip
block_fault("with inverse scales", "Q-SCALE", None, lambda s: 1 / s.astype(float))


@fault("float8 blocks of rank 1 under the scales of rank 0", "layers.3.mlp.gate", "Q-LAYOUT")
def _(rec, rng, bad):
    n, wide, b = 32, 96, 16
    code = nx.f32(rng.choice([-1, 1], (2 * n, wide)) * rng.choice([0.5, 1, 3, 7, 15, 60, 208, 448], (2 * n, wide)))
    scale = nx.f32(np.exp(rng.standard_normal((2 * n // b, wide // b))) / 448)
    rows = two_requests(rec, rng)
    x = nx.f32(rng.standard_normal((18, wide)))
    for rank in (0, 1):
        for name, array in (("codes", code), ("scale", scale)):
            meta = {"quant": "fp8_block", "group_size": b} if name == "codes" else {}
            rec.record(f"layers.3.mlp.gate_proj.weight.{name}", array, "out in", phase="load", step=-1, rank=rank,
                       meta=meta)  # fmt: skip
        rec.record("layers.3.post_norm", x, "T h", rows, rank=rank)
        own, first = slice(rank * n, rank * n + n), n // b * (0 if bad else rank)
        used = code[own].astype(float) * spread(scale[first : first + n // b], b, b)
        rec.record("layers.3.mlp.gate", nx.f32(x.astype(float) @ used.T), "T f", rows, rank=rank,
                   shard=Shard(rank, 2, rank * n, 2 * n))  # fmt: skip


# ---- four-bit floats, and activations ------------------------------------------------------------------------------


@fault("scales of a four-bit activation in reverse", DOWN, "Q-LAYOUT")
def _(rec, rng, bad):
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    rows = two_requests(rec, rng)
    x, w = nx.f32(rng.standard_normal((18, 48))), nx.f32(rng.standard_normal((20, 48)))
    scale = nx.f32(np.abs(x).reshape(18, 3, 16).max(-1) / 6)
    y = x.reshape(18, 3, 16) / scale[..., None]
    code = (np.abs(np.abs(y)[..., None] - grid).argmin(-1) + 8 * (y < 0)).astype(np.uint8).reshape(18, 48)
    values = (np.where(code & 8, -1, 1) * grid[code & 7]).reshape(18, 3, 16)
    used = values * (scale[:, ::-1] if bad else scale)[..., None].astype(float)
    rec.record("layers.3.mlp.down_proj.weight", w, "out in", phase="load", step=-1)
    rec.record("layers.3.mlp.act", x, "T f", rows)
    rec.record("layers.3.mlp.act.q", (code[:, ::2] | code[:, 1::2] << 4).astype(np.uint8), "T f", rows,
               meta={"quant": "nvfp4"})  # fmt: skip
    rec.record("layers.3.mlp.act.q_scale", scale, "T g", rows)
    rec.record(DOWN, nx.f32(used.reshape(18, 48) @ w.T.astype(float)), "T h", rows)


# ---- bfloat16 models, fused weights, weights in use ----------------------------------------------------------------


def coarse_fault(name, cls, constant, used):
    @fault(f"bfloat16 product of int8 rows {name}", DOWN, cls, constant)
    def _(rec, rng, bad):
        rows = two_requests(rec, rng)
        x = nx.bf16(nx.f32(rng.standard_normal((18, 48))))
        code, zero = rng.integers(-110, 110, (20, 48)).astype(np.int8), rng.integers(-6, 7, (20, 1)).astype(np.int8)
        scale = nx.f32(0.01 + 0.05 * rng.random((20, 1)))
        for part, array in (("codes", code), ("scale", scale), ("zero", zero)):
            rec.record(f"layers.3.mlp.down_proj.weight.{part}", array, "out in", phase="load", step=-1,
                       meta={"quant": "int8_channel"} if part == "codes" else {})  # fmt: skip
        c, s, z = code.astype(float), scale.astype(float), zero.astype(float)
        w = used(c, s, z) if bad else (c - z) * s
        rec.record("layers.3.mlp.act", x, "T f", rows, compute_dtype="bf16")
        rec.record(DOWN, nx.bf16(nx.f32(x.astype(float) @ w.T)), "T h", rows, compute_dtype="bf16")


coarse_fault("whose zero points are three too small", "Q-ZERO", 3, lambda c, s, z: (c - z + 3) * s)
coarse_fault("some of which have half their scale", "Q-SCALE", 0.5,
             lambda c, s, z: (c - z) * s * np.where(np.arange(20) > 11, 0.5, 1)[:, None])  # fmt: skip
coarse_fault("under shuffled scales", "Q-LAYOUT", None,
             lambda c, s, z: (c - z) * s[np.random.default_rng(5).permutation(20)])  # fmt: skip


@fault("key rows of a fused int8 weight under the scales of the value rows", "layers.4.attn.k_proj", "Q-LAYOUT")
def _(rec, rng, bad):
    rows = two_requests(rec, rng)
    x, code = nx.f32(rng.standard_normal((18, 24))), rng.integers(-100, 100, (40, 24)).astype(np.int8)
    scale = nx.f32(0.01 + 0.05 * rng.random((40, 1)))
    name = "layers.4.attn.qkv_proj.weight"
    rec.record(f"{name}.codes", code, "out in", phase="load", step=-1,
               meta={"quant": "int8_channel", "parts": "q_proj:20,k_proj:10,v_proj:10"})  # fmt: skip
    rec.record(f"{name}.scale", scale, "out one", phase="load", step=-1)
    rec.record("layers.4.input_norm", x, "T h", rows)
    used = scale.astype(float)
    if bad:
        used[20:30] = scale[30:40]
    w = code.astype(float) * used
    for part, begin, end in (("q", 0, 20), ("k", 20, 30), ("v", 30, 40)):
        rec.record(f"layers.4.attn.{part}_proj", nx.f32(x.astype(float) @ w[begin:end].T), "T h", rows)


def in_use(name, cls, constant, used, round_to=nx.f32):
    """The weight that the kernel works with, beside the parts that it was decoded from."""

    @fault(f"weight in use {name}", "layers.3.mlp.down_proj.weight", cls, constant)
    def _(rec, rng, bad):
        code = nx.f32(rng.choice([-1, 1], (32, 96)) * rng.choice([0.5, 1, 3, 7, 15, 28, 60, 208, 448], (32, 96)))
        scale = nx.f32(np.exp(rng.standard_normal((2, 6))) / 448)
        w = round_to(nx.f32(code.astype(float) * spread(used(scale) if bad else scale, 16, 16)))
        meta = {"quant": "fp8_block", "group_size": 16}
        product(rec, rng, {"codes": code, "scale": scale}, w.astype(float), meta, 96)
        rec.record("layers.3.mlp.down_proj.weight", w, "out in", phase="load", step=-1)


in_use("with scales stored by columns", "Q-LAYOUT", None, lambda s: s.T.reshape(s.shape))
in_use("with a block under four times its scale", "Q-SCALE", 4,
       lambda s: s * np.where(np.arange(12).reshape(2, 6) == 7, 4, 1))  # fmt: skip
in_use("kept in bfloat16, under powers of two", "Q-SCALE", None, lambda s: 2.0 ** np.ceil(np.log2(s)), nx.bf16)
