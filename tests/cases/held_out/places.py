"""Rows, heads and columns in each other's places."""

from __future__ import annotations

import numpy as np

from cases.generators import numerics as nx

from .fault import fault, two_requests


def cached(rec, rng, placed, scale=None):
    rows = two_requests(rec, rng)
    k, v = (nx.f32(rng.standard_normal((18, 3, 8))) for _ in range(2))
    rec.record("layers.4.attn.k", k, "T Hkv d", rows)
    rec.record("layers.4.attn.v", v, "T Hkv d", rows)
    both = nx.f32(placed(k, v))
    meta = {}
    if scale is not None:
        both = nx.f32(np.clip(np.round(both / scale), -127, 127) * scale)
        meta = {"kv_cache_dtype": "i8", "k_scale": scale, "v_scale": scale}
    rec.record("layers.4.attn.kv_write", both, "T Hkv d", rows, meta=meta)


@fault("keys and values change places in the cache", "layers.4.attn.kv_write", "KV-IDENT")
def _(rec, rng, bad):
    cached(rec, rng, lambda k, v: np.concatenate([v, k] if bad else [k, v], -1))


@fault("keys and values change places in an int8 cache", "layers.4.attn.kv_write", "KV-IDENT")
def _(rec, rng, bad):
    cached(rec, rng, lambda k, v: np.concatenate([v, k] if bad else [k, v], -1), 0.03)


@fault("cache rows with their heads one on", "layers.4.attn.kv_write", "KV-IDENT")
def _(rec, rng, bad):
    cached(rec, rng, lambda k, v: np.roll(np.concatenate([k, v], -1), bad, 1))


@fault("heads of the keys alone one on in an int8 cache", "layers.4.attn.kv_write", "KV-IDENT")
def _(rec, rng, bad):
    cached(rec, rng, lambda k, v: np.concatenate([np.roll(k, bad, 1), v], -1), 0.03)


@fault("flat rows of the cache with the heads of their values two on", "layers.4.attn.kv_write", "KV-IDENT")
def _(rec, rng, bad):
    rows = two_requests(rec, rng)
    k, v = (nx.f32(rng.standard_normal((18, 3, 8))) for _ in range(2))
    rec.record("layers.4.attn.k", k, "T Hkv d", rows)
    rec.record("layers.4.attn.v", v, "T Hkv d", rows)
    flat = np.concatenate([k.reshape(18, 24), np.roll(v, 2 * bad, 1).reshape(18, 24)], -1)
    rec.record("layers.4.attn.kv_write", flat, "T c", rows)


@fault("latents and rotated keys change places in the cache", "layers.4.attn.kv_write", "KV-IDENT")
def _(rec, rng, bad):
    rows = two_requests(rec, rng)
    c, pe = nx.f32(rng.standard_normal((18, 16))), nx.f32(rng.standard_normal((18, 4)))
    rec.record("layers.4.attn.kv_c_normed", c, "T c", rows)
    rec.record("layers.4.attn.k_pe", pe, "T dr", rows)
    rec.record("layers.4.attn.kv_write", np.concatenate([pe, c] if bad else [c, pe], -1), "T c", rows)


@fault("rows of the cache one head's width on", "layers.4.attn.kv_write", "KV-IDENT")
def _(rec, rng, bad):
    cached(rec, rng, lambda k, v: np.roll(np.concatenate([k, v], -1).reshape(18, -1), 16 * bad, 1).reshape(18, 3, 16))


def product(rec, rng, name, weight, axes, out, placed):
    rows = two_requests(rec, rng)
    x, w = nx.f32(rng.standard_normal((18, 24))), nx.f32(rng.standard_normal((out, 24)) / 5)
    rec.record(weight, w, "out in", phase="load", step=-1)
    rec.record("final_norm" if name == "logits" else "layers.3.input_norm", x, "T h", rows)
    y = nx.f32(x.astype(float) @ placed(w.astype(float)).T)
    rec.record(name, y, axes, rows)


@fault("rows of the head's weight one on", "logits", "LOAD")
def _(rec, rng, bad):
    product(rec, rng, "logits", "lm_head.weight", "T vocab", 31, lambda w: np.roll(w, bad, 0))


@fault("rows of the value projection one head on", "layers.3.attn.v_proj", "LOAD")
def _(rec, rng, bad):
    product(rec, rng, "layers.3.attn.v_proj", "layers.3.attn.v_proj.weight", "T h", 24, lambda w: np.roll(w, 8 * bad, 0))


@fault("rows of the router's weight in reverse order", "layers.3.moe.router_logits", "LOAD")
def _(rec, rng, bad):
    rows = two_requests(rec, rng)
    x, w = nx.f32(rng.standard_normal((18, 24))), nx.f32(rng.standard_normal((10, 24)) / 5)
    rec.record("layers.3.mlp.gate.weight", w, "out in", phase="load", step=-1)
    rec.record("layers.3.post_norm", x, "T h", rows)
    y = nx.f32(x.astype(float) @ (w[::-1] if bad else w).astype(float).T)
    rec.record("layers.3.moe.router_logits", y, "T experts", rows)
