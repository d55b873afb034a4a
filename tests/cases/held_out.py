"""Faults that no case of the bank has: one operation each, recorded by the names and metadata of docs/adding-a-case.md.

`variants()` gives a name, the expected first wrong tensor, its class, a constant or None, and a function that records
the operation, right or faulty. NumPy alone computes; nothing of assay does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import numpy as np

from cases.generators import numerics as nx
from cases.generators.recording import Recording, Run, Shard

Body = Callable[[Recording, np.random.Generator, bool], None]


@dataclass(frozen=True)
class HeldOut:
    name: str
    first_bad: str
    fault_class: str
    constant: float | None
    hypothesis: str  # of the ladder, that it confirms and its clean twin rules out; empty: not asked
    body: Body


ALL: list[HeldOut] = []


def fault(
    name: str, first_bad: str, fault_class: str, constant: float | None = None, hypothesis: str = ""
) -> Callable[[Body], Body]:
    def add(body: Body) -> Body:
        ALL.append(HeldOut(name, first_bad, fault_class, constant, hypothesis, body))
        return body

    return add


def two_requests(rec: Recording, rng: np.random.Generator, n: int = 11, m: int = 7) -> tuple[Run, ...]:
    a, b = (rec.request(rng.integers(0, 50, k)) for k in (n, m))
    return (Run(a, 0, n), Run(b, n, m))


def positions(rows: tuple[Run, ...]) -> np.ndarray:
    return np.concatenate([r.position + np.arange(r.n) for r in rows])


# ---- attention -----------------------------------------------------------------------------------------------------


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


# ---- rotary embedding ----------------------------------------------------------------------------------------------


def rotation(rec, rng, meta, turn, heads=3, d=16, decode=False):
    rows = two_requests(rec, rng)
    if decode:
        rows = (Run(rows[0].request, 0, 1, 40), Run(rows[1].request, 1, 1, 27))
    x = nx.f32(rng.standard_normal((sum(r.n for r in rows), heads, d)))
    rec.record("layers.7.attn.q_proj", x, "T H d", rows)
    rec.record("layers.7.attn.q", nx.f32(turn(x, positions(rows))), "T H d", rows, meta=meta)


def plain(x, p, theta=10000.0, dim=None, frequencies=None, scale=1.0, pairing="half"):
    dim = dim or x.shape[-1]
    frequencies = nx.inverse_frequencies(dim, theta) if frequencies is None else frequencies
    return np.concatenate([nx.rope(x[..., :dim], p, frequencies, pairing, scale), x[..., dim:]], -1)


Q = "layers.7.attn.q"


@fault("rotation by another base", Q, "ROPE-FORM", hypothesis="rope")
def _(rec, rng, bad):
    rotation(rec, rng, {"rope.theta": 500000.0}, lambda x, p: plain(x, p, 10000.0 if bad else 500000.0))


@fault("rotation of the whole head where half of it is declared", Q, "ROPE-FORM")
def _(rec, rng, bad):
    rotation(rec, rng, {"rope.theta": 10000.0, "rope.dim": 8}, lambda x, p: plain(x, p, dim=16 if bad else 8))


@fault("interleaved pairs where halves are declared by default", Q, "ROPE-FORM")
def _(rec, rng, bad):
    rotation(rec, rng, {}, lambda x, p: plain(x, p, pairing="interleaved" if bad else "half"))


@fault("decode positions three too far", Q, "ROPE-POS", 3)
def _(rec, rng, bad):
    rotation(rec, rng, {"rope.theta": 10000.0}, lambda x, p: plain(x, p + (3 if bad else 0)), decode=True)


@fault("linear scaling of positions left out", Q, "ROPE-FORM")
def _(rec, rng, bad):
    f = nx.inverse_frequencies(16)
    rotation(rec, rng, {"rope.type": "linear", "rope.factor": 4.0},
             lambda x, p: plain(x, p, frequencies=f if bad else f / 4))  # fmt: skip


def llama3(f, factor=8.0, low=1.0, high=4.0, original=64.0):
    wave = 2 * np.pi / f
    smooth = np.clip((original / wave - low) / (high - low), 0, 1)
    return np.where(wave < original / high, f, np.where(wave > original / low, f / factor,
                    (1 - smooth) * f / factor + smooth * f))  # fmt: skip


@fault("llama3 scaling of frequencies left out", Q, "ROPE-FORM")
def _(rec, rng, bad):
    f = nx.inverse_frequencies(16)
    meta = {"rope.type": "llama3", "rope.factor": 8.0, "rope.low_freq_factor": 1.0, "rope.high_freq_factor": 4.0,
            "rope.original_max_position": 64}  # fmt: skip
    rotation(rec, rng, meta, lambda x, p: plain(x, p, frequencies=f if bad else llama3(f)))


@fault("rows that were not rotated at all", Q, "ROPE-FORM")
def _(rec, rng, bad):
    rotation(rec, rng, {"rope.theta": 10000.0}, lambda x, p: x if bad else plain(x, p))


# ---- norms, linear layers, sums ------------------------------------------------------------------------------------


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


# ---- experts -------------------------------------------------------------------------------------------------------


def routed(rec, rng, meta, weigh, ids=None, k=3, experts=8, bias=None):
    rows = two_requests(rec, rng)
    logits = nx.f32(rng.standard_normal((18, experts)))
    score = nx.softmax(logits) if meta.get("scoring") == "softmax" else nx.sigmoid(logits)
    chosen = nx.top_k(score if ids is None else ids(score), k)
    weights = weigh(np.take_along_axis(score, chosen, -1))
    rec.record("layers.6.moe.router_logits", logits, "T E", rows)
    rec.record("layers.6.moe.topk_ids", chosen.astype(np.int64), "T k", rows)
    rec.record("layers.6.moe.topk_weights", nx.f32(weights), "T k", rows, meta=meta)
    return rows, chosen, weights


TOPK = "layers.6.moe.topk_weights"


@fault("routed scaling factor left out", TOPK, "MOE-ROUTE", 1 / 2.446, hypothesis="moe")
def _(rec, rng, bad):
    routed(rec, rng, {"scoring": "sigmoid", "renormalise": 1, "routed_scaling_factor": 2.446},
           lambda w: w / w.sum(-1, keepdims=True) * (1 if bad else 2.446))  # fmt: skip


@fault("softmax over the chosen experts alone", TOPK, "MOE-ROUTE")
def _(rec, rng, bad):
    routed(rec, rng, {"scoring": "softmax", "renormalise": 0}, lambda w: w / w.sum(-1, keepdims=True) if bad else w)


@fault("groups of experts ignored", "layers.6.moe.topk_ids", "MOE-ROUTE")
def _(rec, rng, bad):
    def grouped(score):
        groups = score.reshape(len(score), 4, 2).max(-1)
        keep = nx.top_k(groups, 2)
        allowed = np.zeros_like(groups, bool)
        np.put_along_axis(allowed, keep, True, -1)
        return score if bad else np.where(np.repeat(allowed, 2, -1), score, -1.0)

    routed(rec, rng, {"scoring": "softmax", "renormalise": 0, "n_group": 4, "topk_group": 2}, lambda w: w, grouped)


@fault("combine weights applied twice", "layers.6.moe.routed", "MOE-ROUTE")
def _(rec, rng, bad):
    rows, chosen, w = routed(rec, rng, {"scoring": "softmax", "renormalise": 0}, lambda w: w)
    w = nx.f32(w).astype(float)
    rows_out = nx.f32(rng.standard_normal((18, 3, 10)))
    rec.record("layers.6.moe.expert_out", rows_out, "T k h", rows)
    y = (rows_out * (w * w if bad else w)[..., None]).sum(1)
    rec.record("layers.6.moe.routed", nx.f32(y), "T h", rows)


@fault("shared expert added by each of five ranks", "layers.6.moe.out", "REDUCE", 5)
def _(rec, rng, bad):
    rows = two_requests(rec, rng)
    a, b = (nx.f32(rng.standard_normal((18, 10))) for _ in range(2))
    rec.record("layers.6.moe.routed", a, "T h", rows)
    rec.record("layers.6.moe.shared", b, "T h", rows)
    rec.record("layers.6.moe.out", nx.f32(a.astype(float) + b.astype(float) * (5 if bad else 1)), "T h", rows,
               meta={"world_size": 5})  # fmt: skip


@fault("up in front of gate in a dense FFN", "layers.6.mlp.act", "MOE-LAYOUT")
def _(rec, rng, bad):
    rows = two_requests(rec, rng)
    gate, up = (nx.f32(rng.standard_normal((18, 20))) for _ in range(2))
    rec.record("layers.6.mlp.gate", gate, "T f", rows)
    rec.record("layers.6.mlp.up", up, "T f", rows)
    rec.record("layers.6.mlp.act", nx.f32(nx.silu(up) * gate if bad else nx.silu(gate) * up), "T f", rows)


# ---- ends of the model ---------------------------------------------------------------------------------------------


@fault("embedding not multiplied by the root of the hidden size", "embed", "SCALE", 20**-0.5, hypothesis="logits")
def _(rec, rng, bad):
    rows = two_requests(rec, rng)
    table = nx.f32(rng.standard_normal((50, 20)))
    tokens = np.array([t for r in rows for t in r.request.tokens])
    rec.record("embed_tokens.weight", table, "vocab h", phase="load", step=-1)
    rec.record("embed", nx.f32(table[tokens] * (1 if bad else 20**0.5)), "T h", rows, meta={"embed_scale": 20**0.5})


def head(rec, rng, meta, used):
    rows = two_requests(rec, rng)
    x, w = nx.f32(rng.standard_normal((18, 20))), nx.f32(rng.standard_normal((50, 20)))
    rec.record("lm_head.weight", w, "vocab h", phase="load", step=-1)
    rec.record("final_norm", x, "T h", rows)
    rec.record("logits", nx.f32(used(nx.linear(x, w))), "T vocab", rows, meta=meta)


@fault("logit scale left out", "logits", "SCALE", 16)
def _(rec, rng, bad):
    head(rec, rng, {"logit_scale": 0.0625}, lambda y: y * (1 if bad else 0.0625))


@fault("soft cap of logits left out", "logits", "MASK")
def _(rec, rng, bad):
    head(rec, rng, {"soft_cap": 5.0}, lambda y: y if bad else 5 * np.tanh(y / 5))


@fault("one draft too many accepted", "spec.accepted", "SPEC", hypothesis="speculation")
def _(rec, rng, bad):
    rows = two_requests(rec, rng)
    newest = tuple(Run(r.request, i, 1, r.n - 1) for i, r in enumerate(rows))
    draft, target = np.array([[3, 4, 5], [6, 7, 8]]), np.array([[3, 4, 9, 1], [2, 7, 8, 1]])
    rec.record("spec.draft_tokens", draft, "T k", newest, step=3, phase="decode")
    rec.record("spec.target_tokens", target, "T k", newest, step=3, phase="decode")
    rec.record("spec.accepted", np.array([3 if bad else 2, 0]), "T", newest, step=3, phase="decode", meta={"drafts": 3})


# ---- cache ---------------------------------------------------------------------------------------------------------


@fault("scale of an int8 cache not applied when read", "layers.4.attn.kv_write", "KV-SCALE", 1 / 0.03,
       hypothesis="cache write")  # fmt: skip
def _(rec, rng, bad):
    rows = two_requests(rec, rng)
    k, v = (nx.f32(rng.standard_normal((18, 2, 8))) for _ in range(2))
    both = np.concatenate([k, v], -1)
    codes = np.clip(np.round(both / 0.03), -127, 127)
    rec.record("layers.4.attn.k", k, "T Hkv d", rows)
    rec.record("layers.4.attn.v", v, "T Hkv d", rows)
    rec.record("layers.4.attn.kv_write", nx.f32(codes * (1 if bad else 0.03)), "T Hkv d", rows,
               meta={"kv_cache_dtype": "i8", "k_scale": 0.03, "v_scale": 0.03})  # fmt: skip


@fault("rows gathered one position late", "layers.4.attn.k_read", "KV-IDENT", hypothesis="cache read")
def _(rec, rng, bad):
    rows = two_requests(rec, rng)
    k = nx.f32(rng.standard_normal((18, 2, 8)))
    rec.record("layers.4.attn.k", k, "T Hkv d", rows)
    read = k.copy()
    if bad:
        read[4:8] = k[5:9]
    rec.record("layers.4.attn.k_read", read, "T Hkv d", rows, step=1)


@fault("output buffer that the kernel did not write", "layers.4.attn.out", "UNWRITTEN", hypothesis="output buffer")
def _(rec, rng, bad):
    rows = two_requests(rec, rng)
    poison = np.full((18, 2, 8), np.float32(-7.25e11))
    written = nx.f32(rng.standard_normal((18, 2, 8)))
    if bad:
        written[9:13] = poison[9:13]
    where = {"poison": hex(int(poison.view(np.uint32)[0, 0, 0]))}
    rec.record("layers.4.attn.out", poison, "T H dv", rows, meta=where | {"audit": "before"})
    rec.record("layers.4.attn.out", written, "T H dv", rows, meta={"audit": "after"})


# ---- operations at names of their own ------------------------------------------------------------------------------


def named(rec, rng, kind, inputs, result, rows_of=two_requests, **meta):
    rows = rows_of(rec, rng)
    arrays = [nx.f32(x) if x.dtype.kind == "f" else x for x in inputs]
    for i, x in enumerate(arrays):
        axes = " ".join("Tabc"[: x.ndim]) if len(x) == 18 else ""
        rec.record(f"layers.9.my.in{i}", x, axes, rows if axes else ())
    y = result(*(a.astype(float) if a.dtype.kind == "f" else a for a in arrays))
    names = ",".join(f"layers.9.my.in{i}" for i in range(len(arrays)))
    rec.record("layers.9.my.result", nx.f32(y) if y.dtype.kind == "f" else y, " ".join("Tabc"[: y.ndim]), rows,
               meta={"op": kind, "inputs": names} | meta)  # fmt: skip


MY = "layers.9.my.result"


@fault("named attention with twice the scale", MY, "SCALE", 2)
def _(rec, rng, bad):
    def result(q, k, v):
        out = np.zeros((18, 2, 8))
        for at in (slice(0, 11), slice(11, 18)):
            p = np.arange(at.stop - at.start)
            out[at] = nx.attention(q[at], k[at], v[at], nx.visible(p, p), (2 if bad else 1) * 8**-0.5)[0]
        return out

    named(rec, rng, "attention", [rng.standard_normal((18, 2, 8)) for _ in range(3)], result, softmax_scale=8**-0.5)


@fault("named merge without its second part", MY, "MASK")
def _(rec, rng, bad):
    arrays = [rng.standard_normal(s) for s in ((18, 2, 8), (18, 2), (18, 2, 8), (18, 2))]
    named(rec, rng, "merge", arrays, lambda a, x, b, y: nx.merge([(a, x)] if bad else [(a, x), (b, y)])[0])


@fault("named router without renormalisation", MY, "MOE-ROUTE")
def _(rec, rng, bad):
    logits = nx.f32(rng.standard_normal((18, 6)))
    ids = nx.top_k(nx.softmax(logits), 2)

    def result(x, ids):
        w = np.take_along_axis(nx.softmax(x), ids, -1)
        return w if bad else w / w.sum(-1, keepdims=True)

    named(rec, rng, "router", [logits, ids], result, scoring="softmax", renormalise=1)


@fault("named combine without weights", MY, "MOE-ROUTE")
def _(rec, rng, bad):
    arrays = [rng.standard_normal((18, 2, 8)), rng.random((18, 2))]
    named(rec, rng, "combine", arrays, lambda x, w: (x * (1 if bad else w[..., None])).sum(1))


@fault("named product of a transposed weight", MY, "KERNEL")
def _(rec, rng, bad):
    arrays = [rng.standard_normal((18, 12)), rng.standard_normal((12, 12))]
    named(rec, rng, "linear", arrays, lambda x, w: x @ (w if bad else w.T))


@fault("named activation of another kind", MY, "KERNEL")
def _(rec, rng, bad):
    arrays = [rng.standard_normal((18, 12)), rng.standard_normal((18, 12))]
    named(rec, rng, "activation", arrays, lambda g, u: (np.maximum(g, 0) if bad else nx.silu(g)) * u, activation="silu")


@fault("named sum of ranks taken twice", MY, "REDUCE", 2)
def _(rec, rng, bad):
    arrays = [rng.standard_normal((18, 8)) for _ in range(3)]
    named(rec, rng, "sum_ranks", arrays, lambda *x: sum(x) * (2 if bad else 1))


# ---- the rest of the ladder ----------------------------------------------------------------------------------------


@fault("latent query of one head with another's scale", "layers.1.attn.q_latent", "SCALE", 2, hypothesis="absorption")
def _(rec, rng, bad):
    rows = two_requests(rec, rng)
    q, w = nx.f32(rng.standard_normal((18, 3, 8))), nx.f32(rng.standard_normal((3, 20, 8)))
    rec.record("layers.1.attn.W_UK_T", w, "H c dn", phase="load", step=-1)
    rec.record("layers.1.attn.q_nope", q, "T H dn", rows)
    latent = np.einsum("thd,hcd->thc", q.astype(float), w.astype(float))
    rec.record("layers.1.attn.q_latent", nx.f32(latent * (2 if bad else 1)), "T H c", rows)


@fault("scale of an int8 activation halved", "layers.1.input_norm.q_scale", "Q-SCALE", 0.5, hypothesis="quantised layers")
def _(rec, rng, bad):
    rows = two_requests(rec, rng)
    x = nx.f32(rng.standard_normal((18, 32)))
    scale = nx.f32(np.abs(x).max(-1, keepdims=True) / 127)
    codes = np.clip(np.round(x / scale), -127, 127).astype(np.int8)
    rec.record("layers.1.input_norm", x, "T h", rows)
    rec.record("layers.1.input_norm.q", codes, "T h", rows, meta={"quant": "int8_token"})
    used = nx.f32(scale * (0.5 if bad else 1))
    rec.record("layers.1.input_norm.q_scale", used, "T s", rows, meta={"quant": "int8_token"})


@fault("another result on equal operands", "layers.1.mlp.down", "NONDET", hypothesis="autotune and backend")
def _(rec, rng, bad):
    rows = two_requests(rec, rng)
    x, y = (nx.f32(rng.standard_normal((18, 12))) for _ in range(2))
    for repeat in range(3):
        rec.record("layers.1.mlp.act", x, "T f", rows, meta={"repeat": repeat})
        now = y.copy()
        if bad and repeat == 1:
            now[5:7] *= 1.5
        rec.record("layers.1.mlp.down", now, "T h", rows, meta={"repeat": repeat})


@fault("queries of every head read from head 0", OUT, "STRIDE", hypothesis="shapes and broadcast")
def _(rec, rng, bad):
    rows = two_requests(rec, rng)
    q, k, v = (nx.f32(rng.standard_normal((18, 4, 8))) for _ in range(3))
    out = np.zeros((18, 4, 8))
    used = np.repeat(q[:, :1], 4, 1) if bad else q
    for run in rows:
        at, p = slice(run.row, run.row + run.n), np.arange(run.n)
        out[at] = nx.attention(used[at], k[at], v[at], nx.visible(p, p), 8**-0.5)[0]
    for stem, x in (("q", q), ("k", k), ("v", v)):
        rec.record(f"layers.5.attn.{stem}", x, "T H d", rows)
    rec.record(OUT, nx.f32(out), "T H dv", rows, meta={"softmax_scale": 8**-0.5})


@fault("keys of zeros to the end of the last block", OUT, "PADREAD", hypothesis="padding")
def _(rec, rng, bad):
    request = rec.request(rng.integers(0, 50, 20))
    old, new = (Run(request, 0, 20),), (Run(request, 0, 1, 20),)
    q, k, v = (nx.f32(rng.standard_normal((21, 2, 8))) for _ in range(3))
    p = np.arange(20)
    first = nx.attention(q[:20], k[:20], v[:20], nx.visible(p, p), 8**-0.5)[0]
    more = np.zeros((11, 2, 8)) if bad else np.zeros((0, 2, 8))  # 21 keys in blocks of 16
    keys, values = np.concatenate([k, more]), np.concatenate([v, more])
    last = nx.attention(q[20:], keys, values, np.ones((1, len(keys)), bool), 8**-0.5)[0]
    for step, rows, at, out in ((0, old, slice(0, 20), first), (1, new, slice(20, 21), last)):
        for stem, x in (("q", q), ("k", k), ("v", v)):
            rec.record(f"layers.5.attn.{stem}", x[at], "T H d", rows, step=step)
        rec.record(OUT, nx.f32(out), "T H dv", rows, step=step, meta={"softmax_scale": 8**-0.5})


@fault("a slot given to two rows", "slot_mapping", "KV-IDENT", hypothesis="slot and block ids")
def _(rec, rng, bad):
    rows = two_requests(rec, rng)
    slots = rng.permutation(40)[:18]
    if bad:
        slots[15] = slots[3]
    rec.record("slot_mapping", slots.astype(np.int64), "T", rows)


@fault("a launch that reads where its operand was", "layers.1.mlp.act", "GRAPH", hypothesis="captured graphs")
def _(rec, rng, bad):
    rows = two_requests(rec, rng)
    held = []
    for step in range(2):
        gate, up = (nx.f32(rng.standard_normal((18, 12))) for _ in range(2))
        held.append(gate)
        rec.record("layers.1.mlp.gate", gate, "T f", rows, step=step)
        rec.record("layers.1.mlp.up", up, "T f", rows, step=step)
        read = held[0] if bad else gate
        bound = hex(read.__array_interface__["data"][0])
        rec.record("layers.1.mlp.act", nx.f32(nx.silu(read) * up), "T f", rows, step=step, in_graph=True,
                   meta={"bound.layers.1.mlp.gate": bound})  # fmt: skip


@fault("an infinity out of finite operands", "layers.1.mlp.act", "RANGE", hypothesis="range")
def _(rec, rng, bad):
    rows = two_requests(rec, rng)
    gate, up = (nx.f32(rng.standard_normal((18, 12))) for _ in range(2))
    act = nx.f32(nx.silu(gate) * up)
    if bad:
        act[4, 5] = np.inf
    for stem, x in (("gate", gate), ("up", up), ("act", act)):
        rec.record(f"layers.1.mlp.{stem}", x, "T f", rows)


@fault("a token outside of the vocabulary", "next_token", "KERNEL", hypothesis="sampling")
def _(rec, rng, bad):
    rows = two_requests(rec, rng)
    logits = nx.f32(rng.standard_normal((18, 40)))
    token = logits.argmax(-1)
    if bad:
        token[2] = 40
    rec.record("logits", logits, "T vocab", rows)
    rec.record("next_token", token.astype(np.int64), "T", rows, meta={"temperature": 0})
