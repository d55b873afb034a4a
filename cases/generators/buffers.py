"""UNWRITTEN: an output, or a part of it, keeps what was in the buffer. Buffers are audited: filled, run, looked at."""

from __future__ import annotations

import numpy as np

from . import lse, mini_tf, numerics as nx
from .mini_tf import Call, Run
from .recording import Recording
from .registry import Variant, case

FILL = np.array([0xDEADBEEF], np.uint32).view(np.float32)[0]
BEFORE = {"audit": "before", "poison": "0xdeadbeef"}
AFTER = {"audit": "after"}


@case("B018")
def exhausted_sequence_skipped(rec: Recording, v: Variant, faulty: bool) -> None:
    """Prefixes of 12 and 4 keys in chunks of 8: the second request has no keys in the second chunk."""

    def attend(call: Call) -> tuple:
        if call.step == 0:
            return mini_tf.attend(call)
        chunks = [
            [
                (8 * j, min(8 * (j + 1), r.position)) if 8 * j < r.position else (r.position, r.position)
                for r in call.rows
            ]
            for j in range(2)
        ]
        parts = []
        for j, ranges in enumerate(chunks + [[(r.position, r.position + r.n) for r in call.rows]]):
            name, own = (
                f"{v.layer(call.layer)}attn.chunk.{j}.",
                {"softmax_scale": call.cfg.scale, "causal": j == 2, "keys": lse.text_of(ranges)},
            )
            out = np.full((len(call.q), call.cfg.heads, call.cfg.dv), FILL, np.float32)
            sums = np.full(out.shape[:2], FILL, np.float32)
            for what in (BEFORE, AFTER):
                if what is AFTER:
                    right = lse.partial(call, ranges, j == 2)
                    for run, (low, high) in zip(call.rows, ranges):
                        at = slice(run.row, run.row + run.n)
                        if low < high or not faulty or call.layer < v.fault_layer:
                            out[at], sums[at] = right[0][at], right[1][at]
                rec.record(name + "out", out, "T H dv", call.rows, step=1, meta=own | what)
                rec.record(name + "lse", sums, "T H", call.rows, step=1, meta=own | what)
            parts.append((out, sums))
        with np.errstate(all="ignore"):
            return nx.merge(parts)

    cfg = mini_tf.Config()
    model = mini_tf.Decoder(rec, v, cfg, {"attend": attend}, always=True)
    tokens = [v.rng(40 + i).integers(0, cfg.vocab, n) for i, n in enumerate((12 + 5, 4 + 3))]
    a, b = (rec.request(t) for t in tokens)
    model.step((Run(a, 0, 12), Run(b, 12, 4)), np.concatenate([tokens[0][:12], tokens[1][:4]]))
    model.step((Run(a, 0, 5, 12), Run(b, 5, 3, 4)), np.concatenate([tokens[0][12:], tokens[1][4:]]), 1)


@case("B019")
def empty_expert_skipped(rec: Recording, v: Variant, faulty: bool) -> None:
    """A grouped GEMM over blocks of a fixed capacity; the expert without tokens is skipped."""
    experts, capacity, f, h = 8, 4 + v.size, 8, 16
    rng = v.rng(5)
    counts = np.array([3, 1, 4, 0, 2, 4, 1, 3], np.int64)
    for i in (1, 2):
        name = v.layer(i) + "moe."
        act = nx.f32(rng.standard_normal((experts, capacity, f)))
        act[np.arange(capacity)[None] >= counts[:, None]] = 0
        down = nx.bf16(rng.standard_normal((experts, h, f)) / np.sqrt(f))
        rec.record(v.layer(i) + "mlp.experts.down_proj", down, "E h f", step=-1, phase="load")
        rec.record(name + "expert_counts", counts, "E")
        rec.record(name + "act", act, "E C f")
        out = np.full((experts, capacity, h), FILL, np.float32)
        rec.record(name + "expert_out", out, "E C h", meta=BEFORE)
        for e in range(experts):
            if counts[e] or not faulty or i < 1 + v.fault_layer:
                out[e] = nx.linear(act[e], down[e])
        rec.record(name + "expert_out", out, "E C h", meta=AFTER)


@case("B022")
def offset_wraps(rec: Recording, v: Variant, faulty: bool) -> None:
    """Element offsets in eight bits: from row 8 on (2^7 / 16 elements a row) the store goes elsewhere."""
    n, heads, d = min(11 + v.size, 15), 2, 8
    rng, rows = v.rng(5), (Run(rec.request(v.rng(3).integers(0, 64, n)), 0, n),)
    meta = {"softmax_scale": d**-0.5, "causal": 1}
    for i in range(2):
        name = v.layer(i) + "attn."
        q, k, val = (nx.f32(rng.standard_normal((n, heads, d))) for _ in range(3))
        for part, x in (("q", q), ("k", k), ("v", val)):
            rec.record(name + part, x, "T H d", rows)
        out = np.full((n, heads, d), FILL, np.float32)
        rec.record(name + "out", out, "T H dv", rows, meta=meta | BEFORE)
        right, _ = nx.attention(q, k, val, nx.visible(np.arange(n), np.arange(n)), d**-0.5)
        offset = (np.arange(n) * heads * d).astype(np.int8)
        keep = offset >= 0 if faulty and i >= v.fault_layer else np.ones(n, bool)
        out[keep] = right[keep]
        rec.record(name + "out", out, "T H dv", rows, meta=meta | AFTER)
