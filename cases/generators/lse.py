"""LSE: partial attention results are right, the log-sum-exp that they are merged by is not."""

from __future__ import annotations

from typing import Callable

import numpy as np

from . import mini_tf, numerics as nx
from .mini_tf import Call
from .recording import Recording
from .registry import Variant, case

Tamper = Callable[[int, np.ndarray, np.ndarray, Call], tuple[np.ndarray, np.ndarray]]


def partial(call: Call, ranges: list[tuple[int, int]], causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Attention over the keys whose positions lie in the request's range."""
    keys = []
    for k, (low, high) in zip(call.keys, ranges):
        at = (k.positions >= low) & (k.positions < high)
        keys.append(mini_tf.Keys(k.k[at], k.v[at], k.positions[at]))
    return mini_tf.attend(call.change(keys=keys))


def text_of(ranges: list[tuple[int, int]]) -> str:
    return ",".join(f"{low}:{high}" for low, high in ranges)


def chunked(
    rec: Recording,
    v: Variant,
    call: Call,
    prefix: list[list[tuple[int, int]]],
    tamper: Tamper,
    audit: dict[str, str] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Prefix chunks (a range for each request) and the causal suffix, recorded, then merged. `audit` goes with each
    log-sum-exp."""
    suffix = [(r.position, r.position + r.n) for r in call.rows]
    parts = []
    for j, ranges in enumerate(prefix + [suffix]):
        last = j == len(prefix)
        out, lse = (nx.f32(x) for x in partial(call, ranges, last))
        out, lse = tamper(j, out, lse, call)
        meta = {"softmax_scale": call.cfg.scale, "causal": last, "keys": text_of(ranges)}
        name = f"{v.layer(call.layer)}attn.chunk.{j}."
        rec.record(name + "out", out, "T H dv", call.rows, step=call.step, meta=meta)
        rec.record(name + "lse", lse, "T H", call.rows, step=call.step, meta=meta | (audit or {}))
        parts.append((out, lse))
    return nx.merge(parts)


def untouched(j: int, out: np.ndarray, lse: np.ndarray, call: Call) -> tuple[np.ndarray, np.ndarray]:
    return out, lse


def prefix_hit(
    rec: Recording,
    v: Variant,
    tamper: Tamper,
    lengths: tuple[tuple[int, int], ...],
    audit: dict[str, str] | None = None,
) -> None:
    """Step 0 fills the prefix of each request, step 1 runs the rest over the prefix as one chunk and the suffix.
    `tamper` sees the partial results of every layer before they are recorded."""
    cfg = mini_tf.Config()

    def attend(call: Call) -> tuple:
        if call.step == 0:
            return mini_tf.attend(call)
        return chunked(rec, v, call, [[(0, r.position) for r in call.rows]], tamper, audit)

    model = mini_tf.Decoder(rec, v, cfg, {"attend": attend}, always=True)
    rng, done, rest, head, tail = v.rng(3), [], [], [], []
    for n, m in lengths:
        ids = rng.integers(0, cfg.vocab, n + m + 5 * v.size)
        request, split = rec.request(ids), n + 4 * v.size
        done.append(mini_tf.Run(request, sum(map(len, head)), split))
        head.append(ids[:split])
        rest.append(mini_tf.Run(request, sum(map(len, tail)), len(ids) - split, split))
        tail.append(ids[split:])
    model.step(tuple(done), np.concatenate(head))
    model.step(tuple(rest), np.concatenate(tail), 1)


@case("B014")
def base_two(rec: Recording, v: Variant, faulty: bool) -> None:
    def tamper(j: int, out: np.ndarray, lse: np.ndarray, call: Call) -> tuple:
        wrong = j == 0 and call.layer >= v.fault_layer
        return out, nx.f32(lse / np.log(2.0)) if wrong else lse

    prefix_hit(rec, v, tamper if faulty else untouched, ((96, 8),))


@case("B016")
def tile_maximum_only(rec: Recording, v: Variant, faulty: bool) -> None:
    def tamper(j: int, out: np.ndarray, lse: np.ndarray, call: Call) -> tuple:
        if j or call.layer < v.fault_layer:
            return out, lse
        top = np.zeros_like(lse)
        for run, keys in zip(call.rows, call.keys):
            k = keys.k[keys.positions < run.position].astype(np.float64)
            for t in range(run.row, run.row + run.n):
                for h in range(call.q.shape[1]):
                    top[t, h] = (k[:, h // 2] @ call.q[t, h] * call.scale).max()
        return out, nx.f32(top)

    prefix_hit(rec, v, tamper if faulty else untouched, ((24, 6), (17, 4)))


@case("B017")
def accumulator_layout(rec: Recording, v: Variant, faulty: bool) -> None:
    """Both partial results write their LSE into one buffer [split, head, row] whose head stride is padded."""
    poison = np.array([0xDEADBEEF], np.uint32).view(np.float32)[0]
    buffers: dict[int, np.ndarray] = {}

    def tamper(j: int, out: np.ndarray, lse: np.ndarray, call: Call) -> tuple:
        rows, heads = lse.shape
        pitch = rows + 2
        if j == 0:
            buffers[call.layer] = np.full((2, heads * pitch), poison, np.float32)
        flat = buffers[call.layer][j]
        view = flat.reshape(heads, pitch)[:, :rows].T
        wrong = faulty and call.layer >= v.fault_layer
        meta = {"audit": "before", "poison": "0xdeadbeef"}
        rec.record(f"{v.layer(call.layer)}attn.chunk.{j}.lse", view, "T H", call.rows, step=call.step, meta=meta)
        for h in range(heads):
            start = h * (rows if wrong else pitch)
            flat[start : start + rows] = lse[:, h]
        return out, view

    prefix_hit(rec, v, tamper, ((9, 6),), {"audit": "after"})
