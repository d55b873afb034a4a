"""One fault for each hypothesis of the ladder that no other file confirms."""

from __future__ import annotations

import numpy as np

from cases.generators import numerics as nx
from cases.generators.recording import Run

from .fault import fault, two_requests

OUT = "layers.5.attn.out"


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
