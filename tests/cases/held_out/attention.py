"""Attention: scale, masks, rows, heads, log-sum-exp, chunks and their merge."""

from __future__ import annotations

from typing import Any

import numpy as np

from cases.generators import numerics as nx
from cases.generators.recording import Run

from .fault import fault, two_requests


def attention(rec, rng, meta: dict[str, Any], used: dict[str, Any], layer=5, heads=6, kv_heads=3, d=12, dv=10,
              extra=lambda rec, rows, name: None, lse_factor=1.0, q_gain=1.5, round_to=nx.f32):  # fmt: skip
    """One call over two requests; `meta` as declared, `used` by the kernel: scale, causal, window, soft_cap, sinks,
    slopes, seen (T S of a request), kv_map, k_scale, v_scale."""
    rows = two_requests(rec, rng, 23, 14)
    t = sum(r.n for r in rows)
    q = nx.f32(rng.standard_normal((t, heads, d)) * q_gain)
    k, v = nx.f32(rng.standard_normal((t, kv_heads, d))), nx.f32(rng.standard_normal((t, kv_heads, dv)))
    out, lse = np.zeros((t, heads, dv)), np.zeros((t, heads))
    for run in rows:
        at, p = slice(run.row, run.row + run.n), np.arange(run.n)
        seen = used["seen"](p) if "seen" in used else nx.visible(p, p, used.get("causal", True), used.get("window", 0))
        keys = used.get("keys", k)[at]
        for h in range(heads):
            g = used["kv_map"](h) if "kv_map" in used else h // (heads // kv_heads)
            score = q[at, h].astype(float) @ keys[:, g].T.astype(float) * used["scale"] * used.get("k_scale", 1.0)
            if used.get("soft_cap"):
                score = used["soft_cap"] * np.tanh(score / used["soft_cap"])
            if "slopes" in used:
                score = score + used["slopes"][h] * (p[None, :] - p[:, None])
            score = np.where(seen, score, -np.inf)
            top = score.max(-1, keepdims=True)
            e = np.exp(score - top)
            total = e.sum(-1, keepdims=True)
            if used.get("sinks") is not None:
                total = total + np.exp(used["sinks"][h] - top)
            out[at, h] = e @ v[at, g].astype(float) / total * used.get("v_scale", 1.0)
            lse[at, h] = (top + np.log(total))[:, 0] * lse_factor
    name = f"layers.{layer}."
    for stem, x, axes in (("attn.q", q, "T H d"), ("attn.k", k, "T Hkv d"), ("attn.v", v, "T Hkv dv")):
        rec.record(name + stem, x, axes, rows)
    extra(rec, rows, name)
    meta = {"softmax_scale": d**-0.5, "causal": 1} | meta
    rec.record(name + "attn.out", round_to(out), "T H dv", rows, meta=meta)
    rec.record(name + "attn.lse", nx.f32(lse), "T H", rows, meta=meta)


D = 12**-0.5
OUT = "layers.5.attn.out"


@fault("softmax scale of a YaRN factor 40 with mscale 0.707 left out", OUT, "SCALE", 1 / nx.yarn_factor(40, 0.707) ** 2)
def _(rec, rng, bad):
    m = nx.yarn_factor(40, 0.707) ** 2
    attention(rec, rng, {"softmax_scale": D * m}, {"scale": D if bad else D * m})


@fault("softmax scale 1/d in place of 1/sqrt(d)", OUT, "SCALE", D, hypothesis="attention")
def _(rec, rng, bad):
    attention(rec, rng, {}, {"scale": 1 / 12 if bad else D}, q_gain=3.0)


@fault("window two keys too short", OUT, "MASK", -2)
def _(rec, rng, bad):
    attention(rec, rng, {"window": 9}, {"scale": D, "window": 7 if bad else 9})


@fault("window off in a group of one key head", OUT, "MASK", 1)
def _(rec, rng, bad):
    attention(rec, rng, {"window": 5}, {"scale": D, "window": 6 if bad else 5}, kv_heads=1, heads=3)


SLOPES = 2.0 ** -np.arange(1, 7)


def slopes(rec, rows, name):
    rec.record(name + "attn.alibi_slopes", nx.f32(SLOPES), "H", phase="load", step=-1)


@fault("ALiBi slopes left out", OUT, "MASK")
def _(rec, rng, bad):
    attention(rec, rng, {}, {"scale": D} | ({} if bad else {"slopes": SLOPES}), extra=slopes)


@fault("attention chunks ignored", OUT, "MASK")
def _(rec, rng, bad):
    def seen(p):
        near = p[:, None] // 8 == p[None, :] // 8
        return (p[None, :] <= p[:, None]) & (near | bad)

    attention(rec, rng, {"attention_chunk": 8}, {"scale": D, "seen": seen})


@fault("bidirectional prefix read causally", OUT, "MASK")
def _(rec, rng, bad):
    def seen(p):
        return (p[None, :] <= p[:, None]) | ((p[None, :] < 6) & (not bad))

    attention(rec, rng, {"prefix_len": 6}, {"scale": D, "seen": seen})


@fault("mask of a draft tree ignored", OUT, "MASK")
def _(rec, rng, bad):
    tree = np.tril(rng.random((23, 23)) < 0.7) | np.eye(23, dtype=bool)

    def extra(rec, rows, name):
        mask = np.zeros((37, 23), np.uint8)
        for r in rows:
            mask[r.row : r.row + r.n, : r.n] = tree[: r.n, : r.n]
        rec.record(name + "attn.mask", mask, "T K", rows)

    def seen(p):
        return nx.visible(p, p) if bad else tree[: len(p), : len(p)]

    attention(rec, rng, {}, {"scale": D, "seen": seen}, extra=extra)


@fault("encoder layer with a causal bound", OUT, "MASK")
def _(rec, rng, bad):
    attention(rec, rng, {"causal": 0}, {"scale": D, "causal": bad})


@fault("soft cap of scores left out", OUT, "MASK")
def _(rec, rng, bad):
    attention(rec, rng, {"soft_cap": 3.0}, {"scale": D, "soft_cap": 0 if bad else 3.0}, q_gain=4.0)


@fault("sink logits left out of the denominator", OUT, "MASK")
def _(rec, rng, bad):
    sinks = nx.f32(rng.standard_normal(6) + 1)

    def extra(rec, rows, name):
        rec.record(name + "attn.sinks", sinks, "H", phase="load", step=-1)

    attention(rec, rng, {}, {"scale": D, "sinks": None if bad else sinks}, extra=extra)


@fault("value scale of an int8 cache not applied", OUT, "KV-SCALE", 1 / 0.037)
def _(rec, rng, bad):
    attention(rec, rng, {"kv_cache_dtype": "i8", "v_scale": 0.037, "k_scale": 0.5},
              {"scale": D, "v_scale": 1 / 0.037 if bad else 1.0})  # fmt: skip


@fault("query heads paired with key heads by remainder", OUT, "KERNEL")
def _(rec, rng, bad):
    attention(rec, rng, {}, {"scale": D} | ({"kv_map": lambda h: h % 3} if bad else {}))


@fault("keys of the other request in the first block", OUT, "KV-IDENT")
def _(rec, rng, bad):
    rows = two_requests(rec, rng, 21, 13)
    q, k, v = (nx.f32(rng.standard_normal((34, 4, 8))) for _ in range(3))
    out = np.zeros((34, 4, 8))
    for run in rows:
        at, p = slice(run.row, run.row + run.n), np.arange(run.n)
        own_k, own_v = k[at].copy(), v[at].copy()
        if bad and run.row > 0:
            own_k[:4], own_v[:4] = k[:4], v[:4]
        out[at] = nx.attention(q[at], own_k, own_v, nx.visible(p, p), 8**-0.5)[0]
    for stem, x in (("q", q), ("k", k), ("v", v)):
        rec.record(f"layers.5.attn.{stem}", x, "T H d", rows)
    rec.record(OUT, nx.f32(out), "T H dv", rows, meta={"softmax_scale": 8**-0.5})


@fault("log-sum-exp to base 10", "layers.5.attn.lse", "LSE", 1 / np.log(10))
def _(rec, rng, bad):
    attention(rec, rng, {}, {"scale": D}, lse_factor=1 / np.log(10) if bad else 1.0)


@fault("attention output stored in bfloat16 where float32 is declared", OUT, "PRECISION")
def _(rec, rng, bad):
    attention(rec, rng, {"store_dtype": "f32"}, {"scale": D}, round_to=nx.bf16 if bad else nx.f32)


def chunks(rec, rng, tamper):
    """Two prefix chunks and the suffix of one request, merged by `tamper(parts)`."""
    request = rec.request(rng.integers(0, 50, 18))
    old, new = (Run(request, 0, 12),), (Run(request, 0, 6, 12),)
    k, v = (nx.f32(rng.standard_normal((18, 2, 8))) for _ in range(2))
    q = nx.f32(rng.standard_normal((18, 4, 8)))
    for step, rows, at in ((0, old, slice(0, 12)), (1, new, slice(12, 18))):
        for stem, x in (("q", q), ("k", k), ("v", v)):
            rec.record(f"layers.5.attn.{stem}", x[at], "T H d", rows, step=step)
    parts = []
    for j, (low, high) in enumerate(((0, 5), (5, 12), (12, 18))):
        p, s = np.arange(12, 18), np.arange(low, high)
        out, lse = nx.attention(q[12:], k[low:high], v[low:high], nx.visible(p, s, j == 2), 8**-0.5)
        out, lse = nx.f32(out), nx.f32(lse)
        meta = {"softmax_scale": 8**-0.5, "causal": int(j == 2), "keys": f"{low}:{high}"}
        rec.record(f"layers.5.attn.chunk.{j}.out", out, "T H dv", new, step=1, meta=meta)
        rec.record(f"layers.5.attn.chunk.{j}.lse", lse, "T H", new, step=1, meta=meta)
        parts.append((out, lse))
    rec.record(OUT, nx.f32(tamper(parts)), "T H dv", new, step=1, meta={"softmax_scale": 8**-0.5})


@fault("merge by powers of two of natural log-sum-exps", OUT, "LSE", hypothesis="chunked prefill and merge")
def _(rec, rng, bad):
    scale = np.log(2) if bad else 1.0
    chunks(rec, rng, lambda parts: nx.merge([(o, lse * scale) for o, lse in parts])[0])


@fault("merge that leaves out the middle chunk", OUT, "MASK")
def _(rec, rng, bad):
    chunks(rec, rng, lambda parts: nx.merge([parts[0], parts[2]] if bad else parts)[0])
