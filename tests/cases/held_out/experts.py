"""Routing, combination and activation of experts."""

from __future__ import annotations

import numpy as np

from cases.generators import numerics as nx

from .fault import fault, two_requests


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
