"""Operations at names of their own, which say what they are by metadata."""

from __future__ import annotations

import numpy as np

from cases.generators import numerics as nx

from .fault import fault, two_requests


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
