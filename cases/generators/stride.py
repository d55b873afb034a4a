"""STRIDE: a view is read or written by the strides of another tensor. `.storage` sites hold the memory behind it."""

from __future__ import annotations

import numpy as np

from . import lse, mini_tf, numerics as nx
from .mini_tf import Call, Run
from .recording import Recording
from .registry import Variant, case

META = {"softmax_scale": 8**-0.5, "causal": 1}


@case("B045")
def suffix_read_by_stride_of_prefix(rec: Recording, v: Variant, faulty: bool) -> None:
    """The suffix result is a view of 8 out of 12 columns a head; the merge steps from head to head by 8."""

    def attend(call: Call) -> tuple:
        if call.step == 0:
            return mini_tf.attend(call)
        n, name = len(call.q), f"{v.layer(call.layer)}attn.chunk."
        ranges = [[(0, r.position) for r in call.rows], [(r.position, r.position + r.n) for r in call.rows]]
        meta = [{"softmax_scale": call.cfg.scale, "causal": j, "keys": lse.text_of(x)} for j, x in enumerate(ranges)]
        parts = [tuple(nx.f32(x) for x in lse.partial(call, r, bool(j))) for j, r in enumerate(ranges)]
        memory = nx.f32(v.rng(60 + call.layer).standard_normal((n, 4, 12)))
        memory[..., :8] = parts[1][0]
        for j, (out, sums) in enumerate(parts):
            view = out if j == 0 else memory[..., :8]
            rec.record(f"{name}{j}.out", view, "T H dv", call.rows, step=1, meta=meta[j])
            rec.record(f"{name}{j}.lse", sums, "T H", call.rows, step=1, meta=meta[j])
        rec.record(f"{name}1.out.storage", memory.reshape(-1), "", step=1)
        suffix = parts[1][0]
        if faulty and call.layer >= v.fault_layer:
            at = np.arange(n)[:, None, None] * 48 + np.arange(4)[:, None] * 8 + np.arange(8)
            suffix = memory.reshape(-1)[at]
        return nx.merge([parts[0], (suffix, parts[1][1])])

    cfg = mini_tf.Config()
    model = mini_tf.Decoder(rec, v, cfg, {"attend": attend}, always=True)
    tokens = v.rng(3).integers(0, cfg.vocab, 19 + v.size)
    request = rec.request(tokens)
    model.step((Run(request, 0, 11),), tokens[:11])
    model.step((Run(request, 0, len(tokens) - 11, 11),), tokens[11:], 1)


@case("B046")
def rows_read_by_vocabulary(rec: Recording, v: Variant, faulty: bool) -> None:
    requests = [rec.request(v.rng(30 + i).integers(0, 60, n)) for i, n in enumerate((7, 4, 9))]
    for step in range(2):
        rows = tuple(Run(r, i, 1, len(r.tokens) - 1 + step) for i, r in enumerate(requests))
        memory = nx.f32(v.rng(5 + step).standard_normal((3, 64)) * 3)
        rec.record("logits", memory[:, :60], "T vocab", rows, step=step, phase="decode")
        rec.record("logits.storage", memory.reshape(-1), "", step=step, phase="decode")
        read = memory.reshape(-1)[np.arange(3)[:, None] * (60 if faulty else 64) + np.arange(60)].astype(np.float64)
        top = read.max(-1, keepdims=True)
        logprobs = read - top - np.log(np.exp(read - top).sum(-1, keepdims=True))
        rec.record("logprobs", nx.f32(logprobs), "T vocab", rows, step=step, phase="decode")


@case("B048")
def values_read_by_strides_of_keys(rec: Recording, v: Variant, faulty: bool) -> None:
    """Keys lie head by head, values row by row; both are views T H d."""
    n, rng = 9 + v.size, v.rng(5)
    rows = (Run(rec.request(v.rng(3).integers(0, 64, n)), 0, n),)
    seen = nx.visible(np.arange(n), np.arange(n))
    for i in range(2):
        name = v.layer(i) + "attn."
        q, val = (nx.f32(rng.standard_normal((n, 4, 8))) for _ in range(2))
        k = nx.f32(rng.standard_normal((4, n, 8))).transpose(1, 0, 2)
        for part, x in (("q", q), ("k", k), ("v", val)):
            rec.record(name + part, x, "T H d", rows)
        rec.record(name + "v.storage", val.reshape(-1), "")
        wrong = faulty and i >= v.fault_layer
        out, sums = nx.attention(q, k, val.reshape(4, n, 8).transpose(1, 0, 2) if wrong else val, seen, 8**-0.5)
        rec.record(name + "out", nx.f32(out), "T H dv", rows, meta=META)
        rec.record(name + "lse", nx.f32(sums), "T H", rows, meta=META)


@case("B050")
def page_runs_over_head_boundary(rec: Recording, v: Variant, faulty: bool) -> None:
    """A cache of 16 rows a head takes 8 rows a head; one writer stores all of them one behind the other."""
    rng, n, room = v.rng(5), 8, 16
    rows = (Run(rec.request(v.rng(3).integers(0, 64, n)), 0, n),)
    for i in range(2):
        name = v.layer(i) + "attn."
        k, val = (nx.f32(rng.standard_normal((n, 2, 8))) for _ in range(2))
        rec.record(name + "k", k, "T H d", rows)
        rec.record(name + "v", val, "T H d", rows)
        cache = nx.f32(rng.standard_normal((2, room, 16)))  # what earlier requests left
        new = np.concatenate([k, val], -1).transpose(1, 0, 2)
        if faulty and i >= v.fault_layer:
            cache.reshape(-1, 16)[: 2 * n] = new.reshape(-1, 16)
        else:
            cache[:, :n] = new
        rec.record(name + "kv_write", cache[:, :n].transpose(1, 0, 2), "T H d", rows)
        rec.record(name + "kv_write.storage", cache.reshape(-1), "")


@case("B051")
def head_offset_floors_to_zero(rec: Recording, v: Variant, faulty: bool) -> None:
    rng = v.rng(5)
    rows, tokens = mini_tf.prompts(rec, v, (9, 6))
    n = len(tokens)
    for i in range(2):
        name = v.layer(i) + "attn."
        q, k, val = (nx.f32(rng.standard_normal((n, 4, 8))) for _ in range(3))
        for part, x in (("q", q), ("k", k), ("v", val)):
            rec.record(name + part, x, "T H d", rows)
        heads = [0] * 4 if faulty and i >= v.fault_layer else list(range(4))
        out = mini_tf.self_attention(rows, q[:, heads], k[:, heads], val[:, heads], 8**-0.5)[0]
        rec.record(name + "out", nx.f32(out), "T H dv", rows, meta=META)
