"""ROPE-FORM and ROPE-POS of activations: the pairing, and the position that a row is rotated by."""

from __future__ import annotations

import numpy as np

from . import mini_tf, numerics as nx
from .mini_tf import Run
from .recording import Recording
from .registry import Variant, case

KEYS_ONLY = ("input_norm", "attn.k_proj", "attn.k", "attn.v_proj", "attn.v", "attn.o_proj", "out")


def indexer(rec: Recording, v: Variant, turn, meta: dict, rows: tuple[Run, ...]) -> None:
    """Sparse-attention indexer of two layers: q of four heads, one key head, the three best keys of each row.
    `turn(layer, name, x, positions)` rotates."""
    rng, at = v.rng(5), mini_tf.positions_of(rows)
    for i in range(2):
        name = v.layer(i) + "attn.indexer."
        raw = {"q": nx.f32(rng.standard_normal((len(at), 4, 8))), "k": nx.f32(rng.standard_normal((len(at), 1, 8)))}
        for part, x in raw.items():
            rec.record(f"{name}{part}_proj", x, "T H d", rows)
        done = {part: nx.f32(turn(i, part, x, at)) for part, x in raw.items()}
        for part, x in done.items():
            rec.record(name + part, x, "T H d", rows, meta=meta)
        score = np.einsum("thd,sd->ts", done["q"].astype(np.float64), done["k"][:, 0].astype(np.float64))
        for run in rows:
            own = slice(run.row, run.row + run.n)
            hidden = np.ones(score[own].shape, bool)
            hidden[:, own] = ~nx.visible(at[own], at[own])
            score[own][hidden] = -np.inf
        best = nx.top_k(score, 3)
        chosen = np.where(np.isfinite(np.take_along_axis(score, best, -1)), at[best], -1)
        rec.record(name + "topk", chosen.astype(np.int64), "T k", rows)


@case("B006")
def indexer_pairs_halves(rec: Recording, v: Variant, faulty: bool) -> None:
    rows, _ = mini_tf.prompts(rec, v, (12, 7))

    def turn(layer: int, part: str, x: np.ndarray, at: np.ndarray) -> np.ndarray:
        pairing = "half" if faulty and layer >= v.fault_layer else "interleaved"
        return nx.rope(x, at, nx.inverse_frequencies(8), pairing)

    indexer(rec, v, turn, {"rope.theta": 10000.0, "rope.pairing": "interleaved"}, rows)


@case("B010")
def prefix_one_token_short(rec: Recording, v: Variant, faulty: bool) -> None:
    """Ten tokens of which six are cached: rows from position 6 are rotated one too low, and one key is missing."""
    cfg, now = mini_tf.Config(), {"step": 0}

    def turn(name: str, x: np.ndarray, at: np.ndarray) -> np.ndarray:
        return mini_tf.rotate(x, at - (now["step"] == 1), cfg)

    def attend(call: mini_tf.Call) -> tuple:
        if call.step == 0:
            return mini_tf.attend(call)
        keep = np.arange(len(call.keys[0].positions)) != 5
        short = [mini_tf.Keys(k.k[keep], k.v[keep], k.positions[keep]) for k in call.keys]
        return mini_tf.attend(call.change(keys=short))

    ops = {"rope": turn, "attend": attend} if faulty else None
    model = mini_tf.Decoder(rec, v, cfg, ops, lambda name: name in KEYS_ONLY)
    tokens = v.rng(3).integers(0, cfg.vocab, 10 + 3 * v.size)
    request = rec.request(tokens)
    model.step((Run(request, 0, 6),), tokens[:6], 0)
    now["step"] = 1
    model.step((Run(request, 0, len(tokens) - 6, 6),), tokens[6:], 1)


@case("B011")
def decode_at_position_zero(rec: Recording, v: Variant, faulty: bool) -> None:
    cfg, now = mini_tf.Config(), {"step": 0}

    def turn(name: str, x: np.ndarray, at: np.ndarray) -> np.ndarray:
        return mini_tf.rotate(x, at if now["step"] == 0 else at * 0, cfg)

    model = mini_tf.Decoder(rec, v, cfg, {"rope": turn} if faulty else None, lambda name: name in KEYS_ONLY)
    rows, tokens = mini_tf.prompts(rec, v, (8,))
    model.step(rows, tokens)
    for step, token in enumerate(v.rng(4).integers(0, cfg.vocab, 4), 1):
        now["step"], rows = step, mini_tf.next_rows(rows)
        model.step(rows, np.array([token]), step, "decode")


@case("B013")
def left_padded_batch(rec: Recording, v: Variant, faulty: bool) -> None:
    """Two prompts, the second five tokens shorter; in decode its query stands where the longer one is."""
    cfg, now = mini_tf.Config(), {"step": 0}

    def turn(name: str, x: np.ndarray, at: np.ndarray) -> np.ndarray:
        moved = at.max() if name == "q" and now["step"] else at
        return mini_tf.rotate(x, at * 0 + moved, cfg)

    rows, tokens = mini_tf.prompts(rec, v, (12, 7))
    model = mini_tf.Decoder(rec, v, cfg, {"rope": turn} if faulty else None)
    model.step(rows, tokens)
    for step in (1, 2):
        now["step"], rows = step, mini_tf.next_rows(rows)
        model.step(rows, v.rng(step).integers(0, cfg.vocab, 2), step, "decode")
