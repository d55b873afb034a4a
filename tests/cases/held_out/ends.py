"""Embedding, head, sampling of drafts."""

from __future__ import annotations

import numpy as np

from cases.generators import numerics as nx
from cases.generators.recording import Run

from .fault import fault, two_requests


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
