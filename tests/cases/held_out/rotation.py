"""Rotary embedding: base, pairing, length, position, scaled frequencies."""

from __future__ import annotations

import numpy as np

from cases.generators import numerics as nx
from cases.generators.recording import Run

from .fault import fault, positions, two_requests


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


@fault("linear scaling of positions left out", Q, "ROPE-FORM", 4)
def _(rec, rng, bad):
    f = nx.inverse_frequencies(16)
    rotation(rec, rng, {"rope.type": "linear", "rope.factor": 4.0},
             lambda x, p: plain(x, p, frequencies=f if bad else f / 4))  # fmt: skip


@fault("linear scaling of positions applied twice", Q, "ROPE-FORM", 1 / 4)
def _(rec, rng, bad):
    f = nx.inverse_frequencies(16)
    rotation(rec, rng, {"rope.type": "linear", "rope.factor": 4.0},
             lambda x, p: plain(x, p, frequencies=f / (16 if bad else 4)))  # fmt: skip


@fault("linear scaling by 8 where 2 is declared", Q, "ROPE-FORM", 1 / 4)
def _(rec, rng, bad):
    f = nx.inverse_frequencies(16)
    rotation(rec, rng, {"rope.type": "linear", "rope.factor": 2.0},
             lambda x, p: plain(x, p, frequencies=f / (8 if bad else 2)))  # fmt: skip


@fault("linear scaling where none is declared", Q, "ROPE-FORM", 1 / 4)
def _(rec, rng, bad):
    f = nx.inverse_frequencies(16)
    rotation(rec, rng, {"rope.theta": 10000.0}, lambda x, p: plain(x, p, frequencies=f / (4 if bad else 1)))


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
