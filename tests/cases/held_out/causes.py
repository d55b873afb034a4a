"""Faults of single operations that leave a small explanation: another weight, another function, another head, a
constant."""

from __future__ import annotations

import math

import numpy as np
from cases.generators import numerics as nx
from cases.generators.recording import Run, Shard

from .attention import OUT, D, attention
from .fault import fault, positions, two_requests
from .layers import normed

erf = np.vectorize(math.erf)


# ---- feed-forward --------------------------------------------------------------------------------------------------


def activated(rec, rng, act, meta, up=True, record_up=True):
    rows = two_requests(rec, rng)
    gate, right = (nx.f32(rng.standard_normal((18, 14)) * 2) for _ in range(2))
    rec.record("layers.2.mlp.gate", gate, "T f", rows)
    if up and record_up:
        rec.record("layers.2.mlp.up", right, "T f", rows)
    y = act(gate.astype(float), right.astype(float)) if up else act(gate.astype(float))
    rec.record("layers.2.mlp.act", nx.f32(y), "T f", rows, meta=meta)


KINDS = {
    "silu": nx.silu,
    "gelu": lambda x: 0.5 * x * (1 + erf(x / np.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}
ACT = "layers.2.mlp.act"


def other_kind(declared, used):
    @fault(f"activation {used} where {declared} is declared", ACT, "KERNEL")
    def _(rec, rng, bad):
        kind = KINDS[used if bad else declared]
        activated(rec, rng, lambda g, u: kind(g) * u, {"activation": declared})


for pair in (("silu", "gelu"), ("gelu_tanh", "gelu"), ("gelu", "silu"), ("relu2", "relu"), ("quick_gelu", "gelu_tanh")):
    other_kind(*pair)


@fault("activation of an ungated layer", ACT, "KERNEL")
def _(rec, rng, bad):
    activated(rec, rng, KINDS["relu" if bad else "relu2"], {"activation": "relu2"}, up=False)


@fault("gate not multiplied by up", ACT, "KERNEL")
def _(rec, rng, bad):
    activated(rec, rng, lambda g, u: nx.silu(g) * (1 if bad else u), {})


# ---- other weights -------------------------------------------------------------------------------------------------


@fault("logits of the embedding under a head of its own", "logits", "LOAD")
def _(rec, rng, bad):
    rows = two_requests(rec, rng)
    table, head, x = (nx.f32(rng.standard_normal(shape)) for shape in ((40, 24), (40, 24), (18, 24)))
    rec.record("embed_tokens.weight", table, "vocab h", phase="load", step=-1)
    rec.record("lm_head.weight", head, "vocab h", phase="load", step=-1)
    rec.record("final_norm", x, "T h", rows)
    rec.record("logits", nx.f32(x.astype(float) @ (table if bad else head).T.astype(float)), "T vocab", rows)


@fault("projection with the weight of another layer", "layers.4.attn.o_proj", "LOAD")
def _(rec, rng, bad):
    rows = two_requests(rec, rng)
    weights = [nx.f32(rng.standard_normal((20, 24))) for _ in range(3)]
    for layer, w in zip((2, 3, 4), weights):
        rec.record(f"layers.{layer}.attn.o_proj.weight", w, "out in", phase="load", step=-1)
    for layer, w in zip((2, 3, 4), weights):
        x = nx.f32(rng.standard_normal((18, 24)))
        used = weights[1] if bad and layer == 4 else w
        rec.record(f"layers.{layer}.attn.out", x.reshape(18, 3, 8), "T H dv", rows)
        rec.record(f"layers.{layer}.attn.o_proj", nx.f32(x.astype(float) @ used.T.astype(float)), "T h", rows)


@fault("values from the key rows of a fused projection", "layers.4.attn.v_proj", "LOAD")
def _(rec, rng, bad):
    rows = two_requests(rec, rng)
    x, w = nx.f32(rng.standard_normal((18, 24))), nx.f32(rng.standard_normal((40, 24)))
    rec.record("layers.4.attn.qkv_proj.weight", w, "out in", phase="load", step=-1,
               meta={"parts": "q_proj:20,k_proj:10,v_proj:10"})  # fmt: skip
    rec.record("layers.4.input_norm", x, "T h", rows)
    for part, begin, end in (("q", 0, 20), ("k", 20, 30), ("v", 20 if bad else 30, 30 if bad else 40)):
        rec.record(f"layers.4.attn.{part}_proj", nx.f32(x.astype(float) @ w[begin:end].T.astype(float)), "T h", rows)


@fault("rank 2 with the rows of rank 1", "layers.4.mlp.up", "TP-SHARD")
def _(rec, rng, bad):
    rows = two_requests(rec, rng)
    x, w = nx.f32(rng.standard_normal((18, 24))), nx.f32(rng.standard_normal((40, 24)))
    for rank in range(4):
        rec.record("layers.4.mlp.up_proj.weight", w, "out in", phase="load", step=-1, rank=rank)
        rec.record("layers.4.post_norm", x, "T h", rows, rank=rank)
        own = 10 * (1 if bad and rank == 2 else rank)
        rec.record("layers.4.mlp.up", nx.f32(x.astype(float) @ w[own : own + 10].T.astype(float)), "T f", rows,
                   rank=rank, shard=Shard(rank, 4, 10 * rank, 40))  # fmt: skip


@fault("embedding rows one token further", "embed", "LOAD", 1)
def _(rec, rng, bad):
    tokens = rng.integers(0, 38, 13)
    request = rec.request(tokens)
    table = nx.f32(rng.standard_normal((40, 20)))
    rec.record("embed_tokens.weight", table, "vocab h", phase="load", step=-1)
    rec.record("embed", table[tokens + bad], "T h", (Run(request, 0, 13),))


@fault("norm with the weight of the other norm of its layer", "layers.2.input_norm", "LOAD")
def _(rec, rng, bad):
    other = nx.f32(1 + 0.3 * rng.standard_normal(24))
    rec.record("layers.2.post_attention_layernorm.weight", other, "h", phase="load", step=-1)
    normed(rec, rng, {"eps": 1e-6}, lambda x, w: nx.rms_norm(x, other if bad else w))


# ---- norms ---------------------------------------------------------------------------------------------------------

NORM = "layers.2.input_norm"


def root(x):
    return np.sqrt((x**2).mean(-1, keepdims=True))


@fault("eps that no model has", NORM, "KERNEL", 3.3e-5)
def _(rec, rng, bad):
    normed(rec, rng, {"eps": 1e-6}, lambda x, w: nx.rms_norm(x, w, 3.3e-5 if bad else 1e-6))


@fault("eps outside of the root", NORM, "KERNEL")
def _(rec, rng, bad):
    normed(rec, rng, {"eps": 1e-4}, lambda x, w: x / (root(x) + 1e-4) * w if bad else nx.rms_norm(x, w, 1e-4))


@fault("mean subtracted where none is declared", NORM, "KERNEL")
def _(rec, rng, bad):
    normed(rec, rng, {"eps": 1e-6}, lambda x, w: nx.rms_norm(x - x.mean(-1, keepdims=True) * bad, w, 1e-6))


# ---- heads ---------------------------------------------------------------------------------------------------------


@fault("values of the head before", OUT, "KERNEL")
def _(rec, rng, bad):
    attention(rec, rng, {}, {"scale": D} | ({"kv_map": lambda h: (h // 2 + 1) % 3} if bad else {}))


@fault("query heads that read key heads in reverse", OUT, "KERNEL")
def _(rec, rng, bad):
    attention(rec, rng, {}, {"scale": D} | ({"kv_map": lambda h: 2 - h // 2} if bad else {}))


# ---- cache ---------------------------------------------------------------------------------------------------------


def gathered(rec, rng, read):
    rows = two_requests(rec, rng)
    k = nx.f32(rng.standard_normal((18, 3, 8)))
    rec.record("layers.4.attn.k", k, "T Hkv d", rows)
    rec.record("layers.4.attn.k_read", nx.f32(read(k.copy(), positions(rows))), "T Hkv d", rows, step=1)


K_READ = "layers.4.attn.k_read"


@fault("rows gathered with a scale that was not declared", K_READ, "KV-SCALE", 0.05)
def _(rec, rng, bad):
    gathered(rec, rng, lambda k, p: k * (0.05 if bad else 1))


@fault("one head gathered with a scale of its own", K_READ, "KV-SCALE", 1.75)
def _(rec, rng, bad):
    gathered(rec, rng, lambda k, p: k * np.where(np.arange(3) == 1, 1.75 if bad else 1, 1)[None, :, None])


@fault("rows gathered of the other request", K_READ, "KV-IDENT")
def _(rec, rng, bad):
    def read(k, p):
        if bad:
            k[11:16] = k[1:6]
        return k

    gathered(rec, rng, read)


# ---- precision -----------------------------------------------------------------------------------------------------


@fault("logits stored in bfloat16 where float32 is declared", "logits", "PRECISION")
def _(rec, rng, bad):
    rows = two_requests(rec, rng)
    head, x = nx.f32(rng.standard_normal((40, 24))), nx.f32(rng.standard_normal((18, 24)))
    y = nx.f32(x.astype(float) @ head.T.astype(float))
    rec.record("lm_head.weight", head, "vocab h", phase="load", step=-1)
    rec.record("final_norm", x, "T h", rows)
    rec.record("logits", nx.bf16(y) if bad else y, "T vocab", rows)


# ---- what fit finds where an operation has no cause of its own ------------------------------------------------------

O_PROJ = "layers.3.attn.o_proj"


def projected(rec, rng, change):
    rows = two_requests(rec, rng)
    x, w = nx.f32(rng.standard_normal((18, 24))), nx.f32(rng.standard_normal((20, 24)) / 5)
    rec.record("layers.3.attn.o_proj.weight", w, "out in", phase="load", step=-1)
    rec.record("layers.3.attn.out", x.reshape(18, 3, 8), "T H dv", rows)
    rec.record(O_PROJ, nx.f32(change(x.astype(float) @ w.T.astype(float))), "T h", rows)


@fault("a quarter of the columns doubled", O_PROJ, "SCALE", 2)
def _(rec, rng, bad):
    projected(rec, rng, lambda y: y * np.where(np.arange(20) < 5, 1 + bad, 1))


@fault("columns in another order", O_PROJ, "STRIDE")
def _(rec, rng, bad):
    projected(rec, rng, lambda y: np.roll(y, 3 * bad, 1))


@fault("rows left at zero", O_PROJ, "UNWRITTEN")
def _(rec, rng, bad):
    projected(rec, rng, lambda y: y * np.where((np.arange(18) > 12) & bool(bad), 0, 1)[:, None])


# ---- experts -------------------------------------------------------------------------------------------------------

ROUTED, GATE_UP = "layers.6.moe.routed", "layers.6.moe.gate_up"


def combined(rec, rng, used, k=3, experts=8):
    rows = two_requests(rec, rng)
    logits = nx.f32(rng.standard_normal((18, experts)))
    ids = np.argsort(-logits, 1)[:, :k]
    w = np.take_along_axis(nx.softmax(logits.astype(float)), ids, 1)
    w, out = nx.f32(w / w.sum(1, keepdims=True)), nx.f32(rng.standard_normal((18, k, 10)))
    meta = {"scoring": "softmax", "renormalise": 1}
    rec.record("layers.6.moe.router_logits", logits, "T E", rows)
    rec.record("layers.6.moe.topk_ids", ids.astype(np.int32), "T k", rows, meta=meta)
    rec.record("layers.6.moe.topk_weights", w, "T k", rows, meta=meta)
    rec.record("layers.6.moe.expert_out", out, "T k h", rows)
    rec.record(ROUTED, nx.f32((out.astype(float) * used(w.astype(float))[..., None]).sum(1)), "T h", rows)


@fault("combine weights of each token in reverse", ROUTED, "MOE-ROUTE")
def _(rec, rng, bad):
    combined(rec, rng, lambda w: w[:, ::-1] if bad else w)


@fault("last choice of each token left out", ROUTED, "MOE-ROUTE")
def _(rec, rng, bad):
    combined(rec, rng, lambda w: w * np.array([1, 1, 1 - bad]))


@fault("equal weights for all choices", ROUTED, "MOE-ROUTE")
def _(rec, rng, bad):
    combined(rec, rng, lambda w: np.full_like(w, 0.3) if bad else w)


def multiplied(rec, rng, used, k=2, experts=4, h=12, f=10):
    """First product of the experts; `used` takes rows, this layer's weights, another layer's and the experts."""
    rows = two_requests(rec, rng)
    ids = np.sort(np.argsort(rng.standard_normal((18, experts)), 1)[:, :k], 1)
    order = np.argsort(ids.ravel(), kind="stable")
    x, own, other = (nx.f32(rng.standard_normal(shape)) for shape in ((18, h), (experts, f, h), (experts, f, h)))
    for layer, w in ((5, other), (6, own)):
        rec.record(f"layers.{layer}.mlp.experts.gate_up_proj", w, "E f h", phase="load", step=-1)
    rec.record("layers.6.post_norm", x, "T h", rows)
    rec.record("layers.6.moe.topk_ids", ids.astype(np.int32), "T k", rows)
    rec.record("layers.6.moe.dispatched", x[order // k], "R h")
    w = used(own.astype(float), other.astype(float))[ids.ravel()[order]]
    rec.record(GATE_UP, nx.f32(np.einsum("rh,rfh->rf", x[order // k].astype(float), w)), "R f")


@fault("two experts exchanged", GATE_UP, "MOE-ROUTE")
def _(rec, rng, bad):
    multiplied(rec, rng, lambda w, v: w[[0, 2, 1, 3]] if bad else w)


@fault("experts of another layer", GATE_UP, "LOAD")
def _(rec, rng, bad):
    multiplied(rec, rng, lambda w, v: v if bad else w)


@fault("up in front of gate in the experts' weights", GATE_UP, "MOE-LAYOUT")
def _(rec, rng, bad):
    multiplied(rec, rng, lambda w, v: np.roll(w, 5 * bad, 1))


# ---- operands of a projection --------------------------------------------------------------------------------------


def projected_heads(rec, rng, heads, biases=(), used=0, lost=20):
    """`heads` turns the input [T, 3, 8] into what the product takes; biases of layers 3, 2: `used` is added."""
    rows = two_requests(rec, rng)
    x, w = nx.f32(rng.standard_normal((18, 3, 8))), nx.f32(rng.standard_normal((20, 24)))
    rec.record("layers.3.attn.o_proj.weight", w, "out in", phase="load", step=-1)
    for layer, bias in zip((3, 2), biases):
        rec.record(f"layers.{layer}.attn.o_proj.bias", bias, "out", phase="load", step=-1)
    rec.record("layers.3.attn.out", x, "T H dv", rows)
    w = w.astype(float) * (np.arange(20) < lost)[:, None]
    y = heads(x.astype(float)).reshape(18, 24) @ w.T
    rec.record(O_PROJ, nx.f32(y + (biases[used] if biases else 0)), "T h", rows)


@fault("input with heads and columns swapped", O_PROJ, "STRIDE")
def _(rec, rng, bad):
    projected_heads(rec, rng, lambda x: x.transpose(0, 2, 1) if bad else x)


@fault("input with its heads moved by one", O_PROJ, "TP-SHARD")
def _(rec, rng, bad):
    projected_heads(rec, rng, lambda x: np.roll(x, bad, 1))


@fault("bias of another layer", O_PROJ, "LOAD")
def _(rec, rng, bad):
    projected_heads(rec, rng, lambda x: x, [nx.f32(rng.standard_normal(20)) for _ in range(2)], int(bad))


@fault("weight of which the last rows were not loaded", O_PROJ, "LOAD")
def _(rec, rng, bad):
    projected_heads(rec, rng, lambda x: x, [nx.f32(rng.standard_normal(20))], lost=13 if bad else 20)


@fault("absorbed values of another layer", "layers.1.attn.out", "LOAD")
def _(rec, rng, bad):
    rows = two_requests(rec, rng)
    weights = [nx.f32(rng.standard_normal((3, 20, 8))) for _ in range(2)]
    for layer, w in enumerate(weights):
        rec.record(f"layers.{layer}.attn.W_UV", w, "H c dv", phase="load", step=-1)
    latent = nx.f32(rng.standard_normal((18, 3, 20)))
    rec.record("layers.1.attn.latent_out", latent, "T H c", rows)
    out = np.einsum("thc,hcd->thd", latent.astype(float), weights[1 - bad].astype(float))
    rec.record("layers.1.attn.out", nx.f32(out), "T H dv", rows)


# ---- keys ----------------------------------------------------------------------------------------------------------


@fault("soft cap of another value", OUT, "MASK", 9.0)
def _(rec, rng, bad):
    attention(rec, rng, {"soft_cap": 5.0}, {"scale": D, "soft_cap": 9.0 if bad else 5.0}, q_gain=6)


@fault("first key left out", OUT, "MASK", -1)
def _(rec, rng, bad):
    def seen(p):
        return (p[None] <= p[:, None]) & ((p[None] > 0) | (p[:, None] == 0))

    attention(rec, rng, {}, {"scale": D} | ({"seen": seen} if bad else {}))


@fault("own key left out", OUT, "MASK", -1)
def _(rec, rng, bad):
    def seen(p):
        return (p[None] < p[:, None]) | ((p[:, None] == 0) & (p[None] == 0))

    attention(rec, rng, {}, {"scale": D} | ({"seen": seen} if bad else {}))
