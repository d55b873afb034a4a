"""Norms, linear layers, sums over ranks, the residual stream."""

from __future__ import annotations

import numpy as np

from cases.generators import numerics as nx
from cases.generators.recording import Shard

from .fault import fault, two_requests


def normed(rec, rng, meta, norm):
    rows = two_requests(rec, rng)
    x, w = nx.f32(rng.standard_normal((18, 24)) * 0.01), nx.f32(1 + 0.3 * rng.standard_normal(24))
    rec.record("layers.2.input_layernorm.weight", w, "h", phase="load", step=-1)
    rec.record("layers.1.out", x, "T h", rows)
    rec.record("layers.2.input_norm", nx.f32(norm(x.astype(float), w)), "T h", rows, meta=meta)


@fault("eps of another norm", "layers.2.input_norm", "KERNEL", 1e-6, hypothesis="norm")
def _(rec, rng, bad):
    normed(rec, rng, {"eps": 1e-5}, lambda x, w: nx.rms_norm(x, w, 1e-6 if bad else 1e-5))


@fault("weight of a norm plus one", "layers.2.input_norm", "KERNEL")
def _(rec, rng, bad):
    normed(rec, rng, {"eps": 1e-6}, lambda x, w: nx.rms_norm(x, w + bad))


@fault("weight of a norm left at ones", "layers.2.input_norm", "LOAD", hypothesis="weights")
def _(rec, rng, bad):
    normed(rec, rng, {"eps": 1e-6}, lambda x, w: nx.rms_norm(x, 1.0 if bad else w))


@fault("LayerNorm without its mean", "layers.2.input_norm", "KERNEL")
def _(rec, rng, bad):
    def norm(x, w):
        y = x + 0.02
        centred = y - (0 if bad else y.mean(-1, keepdims=True))
        return centred / np.sqrt(((y - y.mean(-1, keepdims=True)) ** 2).mean(-1, keepdims=True) + 1e-5) * w

    rows = two_requests(rec, rng)
    x, w = nx.f32(rng.standard_normal((18, 24)) * 0.01 + 0.02), nx.f32(1 + 0.3 * rng.standard_normal(24))
    rec.record("layers.2.input_layernorm.weight", w, "h", phase="load", step=-1)
    rec.record("layers.1.out", x, "T h", rows)
    rec.record("layers.2.input_norm", nx.f32(norm(x.astype(float) - 0.02, w)), "T h", rows,
               meta={"op": "layernorm", "eps": 1e-5})  # fmt: skip


def projected(rec, rng, used, bias=None):
    rows = two_requests(rec, rng)
    x, w = nx.f32(rng.standard_normal((18, 24))), nx.f32(rng.standard_normal((20, 24)) / 5)
    rec.record("layers.3.attn.o_proj.weight", w, "out in", phase="load", step=-1)
    if bias is not None:
        rec.record("layers.3.attn.o_proj.bias", bias, "out", phase="load", step=-1)
    rec.record("layers.3.attn.out", x.reshape(18, 3, 8), "T H dv", rows)
    rec.record("layers.3.attn.o_proj", nx.f32(used(x.astype(float), w.astype(float))), "T h", rows)


@fault("bias of a projection left out", "layers.3.attn.o_proj", "KERNEL", hypothesis="linear layers")
def _(rec, rng, bad):
    bias = nx.f32(rng.standard_normal(20))
    projected(rec, rng, lambda x, w: x @ w.T + (0 if bad else bias), bias)


@fault("projection rounded to bfloat16 in a float32 model", "layers.3.attn.o_proj", "PRECISION")
def _(rec, rng, bad):
    projected(rec, rng, lambda x, w: nx.bf16(x @ w.T) if bad else x @ w.T)


def reduced(rec, rng, combine, world=4, name="layers.3.mlp.down", bias=None):
    rec.world_size = world
    rows = two_requests(rec, rng)
    parts = [nx.f32(rng.standard_normal((18, 16))) for _ in range(world)]
    if bias is not None:
        rec.record("layers.3.mlp.down_proj.bias", bias, "out", phase="load", step=-1)
    for r, p in enumerate(parts):
        rec.record(name + ".partial", p, "T h", rows, rank=r, shard=Shard(0, 1, 0, 0))
    for r in range(world):
        rec.record(name, nx.f32(combine([p.astype(float) for p in parts], r)), "T h", rows, rank=r,
                   meta={"world_size": world})  # fmt: skip


@fault("rank 2 of four missing from the sum", "layers.3.mlp.down", "REDUCE", hypothesis="reductions and shards")
def _(rec, rng, bad):
    reduced(rec, rng, lambda p, r: sum(p) - (p[2] if bad else 0))


@fault("each rank keeps its own part of the sum", "layers.3.mlp.down", "REDUCE")
def _(rec, rng, bad):
    reduced(rec, rng, lambda p, r: p[r] if bad else sum(p))


@fault("mean over ranks in place of the sum", "layers.3.mlp.down", "REDUCE", 0.25)
def _(rec, rng, bad):
    reduced(rec, rng, lambda p, r: sum(p) / (4 if bad else 1))


@fault("bias added on each of three ranks", "layers.3.mlp.down", "REDUCE", 3)
def _(rec, rng, bad):
    bias = nx.f32(rng.standard_normal(16))
    reduced(rec, rng, lambda p, r: sum(p) + bias.astype(float) * (3 if bad else 1), 3, bias=bias)


def stream(rec, rng, meta, out):
    rows = two_requests(rec, rng)
    x, o, f = (nx.f32(rng.standard_normal((18, 16))) for _ in range(3))
    for name, value in (("layers.3.out", x), ("layers.4.attn.o_proj", o), ("layers.4.mlp.down", f)):
        rec.record(name, value, "T h", rows)
    rec.record("layers.4.out", nx.f32(out(*(a.astype(float) for a in (x, o, f)))), "T h", rows, meta=meta)


@fault("branch scale left out of the FFN", "layers.4.out", "RANGE", 1 / 0.22)
def _(rec, rng, bad):
    stream(rec, rng, {"branch_scale": 0.22}, lambda x, o, f: x + 0.22 * o + (1 if bad else 0.22) * f)


@fault("attention left out of the residual stream", "layers.4.out", "KERNEL", hypothesis="residual stream")
def _(rec, rng, bad):
    stream(rec, rng, {}, lambda x, o, f: x + (0 if bad else o) + f)
