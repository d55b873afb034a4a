"""RANGE and PRECISION of sums: float16 accumulators, rescaling, masked tiles; and two benign roundings."""

from __future__ import annotations

import numpy as np

from . import mini_tf, numerics as nx
from .mini_tf import Run
from .recording import Recording
from .registry import Variant, case

META = {"softmax_scale": 8**-0.5, "causal": 1}


def _request(rec: Recording, v: Variant, n: int, stream: int = 0):
    return rec.request(v.rng(30 + stream).integers(0, 64, n))


@case("B088")
def float16_sum_overflows(rec: Recording, v: Variant, faulty: bool) -> None:
    """2048 and 300 keys of equal score and values near 60: 2048 x 60 is beyond 65504, 300 x 60 is not."""
    lengths, rng = (2048, 300), v.rng(5)
    requests = [_request(rec, v, n, i) for i, n in enumerate(lengths)]
    context = tuple(Run(r, sum(lengths[:i]), n) for i, (r, n) in enumerate(zip(requests, lengths)))
    rows = tuple(Run(r, 2 * i, 2, n - 2) for i, (r, n) in enumerate(zip(requests, lengths)))
    for i in range(2):
        name = v.layer(i) + "attn."
        k = np.repeat(nx.f16(rng.standard_normal((1, 1, 8))), sum(lengths), 0)
        val, q = nx.f16(60 + 0.25 * rng.standard_normal((sum(lengths), 1, 8))), nx.f16(rng.standard_normal((4, 2, 8)))
        rec.record(name + "q", q, "T H d", rows, compute_dtype="f16")
        rec.record(name + "k_read", k, "T H d", context, compute_dtype="f16")
        rec.record(name + "v_read", val, "T H d", context, compute_dtype="f16")
        out = np.zeros((4, 2, 8))
        for run, c in zip(rows, context):
            at, own = run.position + np.arange(run.n), slice(c.row, c.row + c.n)
            right, _ = nx.attention(
                q[run.row : run.row + run.n], k[own], val[own], nx.visible(at, np.arange(c.n)), 8**-0.5
            )
            total = right * (at + 1)[:, None, None]  # what the accumulator holds before the division
            over = faulty and i >= v.fault_layer
            out[run.row : run.row + run.n] = np.where(over & (total > 65504), np.inf, right)
        rec.record(
            name + "out",
            nx.f16(out),
            "T H dv",
            rows,
            meta=META | {"accum_dtype": "f16", "store_dtype": "f16"},
            compute_dtype="f16",
        )


@case("B089")
def residual_divided_in_every_layer(rec: Recording, v: Variant, faulty: bool) -> None:
    """A factor of 2.5 is taken out of the residual once, in the first layer; one run takes it out of each."""
    layers = 3 + v.fault_layer
    declared = (0.4,) + (1.0,) * (layers - 1)
    used = tuple(0.4 if faulty and i > v.fault_layer else x for i, x in enumerate(declared))
    cfg = mini_tf.Config(layers=layers, residual_scale=declared)
    model = mini_tf.Decoder(rec, v, cfg)
    model.residual = used
    rows, tokens = mini_tf.prompts(rec, v, (9, 6))
    model.step(rows, tokens)


def _online(
    q: np.ndarray, k: np.ndarray, val: np.ndarray, seen: np.ndarray, tile: int, floor: float, finite_start: bool
) -> np.ndarray:
    """One head, tile by tile with a running maximum; `floor` is the smallest rescale factor that the kernel holds."""
    out = np.zeros((len(q), val.shape[1]))
    for t in range(len(q)):
        score = np.where(seen[t], k @ q[t] * 8**-0.5, -np.inf)
        top, total, acc = -np.inf, 0.0, np.zeros(val.shape[1])
        for s in range(0, len(k), tile):
            part = score[s : s + tile]
            new = max(top, part.max())
            if not np.isfinite(new) and finite_start:
                continue
            with np.errstate(invalid="ignore"):
                keep = np.exp(top - new)  # -inf - -inf is NaN
                p = np.exp(part - new)
            if floor and np.isfinite(top):
                keep = max(keep, floor)
            acc, total, top = acc * keep + p @ val[s : s + tile], total * keep + p.sum(), new
        out[t] = acc / total
    return out


def _tiled(rec: Recording, v: Variant, faulty: bool, window: int, jumps: bool, accum: str) -> None:
    rng = v.rng(5)
    lengths = (12 + 4 * v.size, 9)
    rows = tuple(Run(_request(rec, v, n, i), sum(lengths[:i]), n) for i, n in enumerate(lengths))
    meta = META | {"kv_tile": 4, "accum_dtype": accum} | ({"window": window} if window else {})
    for i in range(2):
        name, n = v.layer(i) + "attn.", sum(lengths)
        q, k, val = (nx.f32(rng.standard_normal((n, h, 8))) for h in (4, 2, 2))
        if jumps:  # along one direction scores rise by 18, then by 22, from tile to tile; early values are large
            for run in rows:
                tile = (np.arange(run.n) // 4)[:, None]
                k[run.row : run.row + run.n, :, 0] = np.array([0.0, 18.0, 40.0])[np.minimum(tile, 2)] * 8**0.5 / 2
                val[run.row : run.row + 4] *= 2000
            q[..., 0] = 2.0
        for part, x in (("q", q), ("k", k), ("v", val)):
            rec.record(name + part, x, "T H d", rows, compute_dtype="f16" if jumps else "f32")
        out, wrong = np.zeros((n, 4, 8)), faulty and i >= v.fault_layer
        for run in rows:
            own, at = slice(run.row, run.row + run.n), np.arange(run.n)
            seen = nx.visible(at, at, True, window)
            for h in range(4):
                out[own, h] = _online(
                    q[own, h].astype(np.float64),
                    k[own, h // 2].astype(np.float64),
                    val[own, h // 2].astype(np.float64),
                    seen,
                    4,
                    2.0**-14 if wrong and jumps else 0.0,
                    not wrong or jumps,
                )
        rec.record(
            name + "out",
            nx.f16(out) if jumps else nx.f32(out),
            "T H dv",
            rows,
            meta=meta,
            compute_dtype="f16" if jumps else "f32",
        )


@case("B091")
def rescale_factor_underflows(rec: Recording, v: Variant, faulty: bool) -> None:
    _tiled(rec, v, faulty, 0, True, "f16")


@case("B093")
def first_tile_masked(rec: Recording, v: Variant, faulty: bool) -> None:
    _tiled(rec, v, faulty, 3, False, "f32")


@case("B097")
def norm_rounded_at_another_point(rec: Recording, v: Variant, faulty: bool) -> None:
    """Benign: the normalised value is rounded to bfloat16 before the weight is applied, or is not."""
    rows, tokens = mini_tf.prompts(rec, v, (13, 8))
    for i in range(2):
        x = nx.bf16(v.rng(5 + i).standard_normal((len(tokens), 64)) * 3)
        weight = nx.bf16(1 + 0.1 * v.rng(8 + i).standard_normal(64))
        rec.record(v.layer(i) + "input_layernorm.weight", weight, "h", step=-1, phase="load")
        rec.record(
            "embed" if v.layer(i) == "layers.0." else f"layers.{v.first_layer + i - 1}.out",
            x,
            "T h",
            rows,
            compute_dtype="bf16",
        )
        y = nx.rms_norm(x, 1.0)
        y = nx.bf16((nx.bf16(y) if faulty else y) * weight.astype(np.float64))
        rec.record(v.layer(i) + "input_norm", y, "T h", rows, meta={"eps": 1e-6}, compute_dtype="bf16")


@case("B124")
def split_sum_depends_on_batch(rec: Recording, v: Variant, faulty: bool) -> None:
    """Benign: a sum over 256 columns in one piece or in four, in float32, stored in bfloat16."""
    rows, tokens = mini_tf.prompts(rec, v, (37, 29))
    for i in range(2):
        rng = v.rng(5 + i)
        act, down = nx.bf16(rng.standard_normal((len(tokens), 256))), nx.bf16(rng.standard_normal((192, 256)) / 16)
        rec.record(v.layer(i) + "mlp.down_proj.weight", down, "h f", step=-1, phase="load")
        rec.record(v.layer(i) + "mlp.act", act, "T f", rows, compute_dtype="bf16")
        y = split_linear(act, down, 4 if faulty else 1)
        rec.record(
            v.layer(i) + "mlp.down",
            nx.bf16(y),
            "T h",
            rows,
            compute_dtype="bf16",
            meta={"accum_dtype": "f32", "store_dtype": "bf16"},
        )


def split_linear(x: np.ndarray, weight: np.ndarray, splits: int) -> np.ndarray:
    """Sums term by term in float32, each split by itself, then the splits."""
    parts = []
    for at in np.array_split(np.arange(x.shape[1]), splits):
        total = np.zeros((len(x), len(weight)), np.float32)
        for j in at:
            total = total + x[:, j, None].astype(np.float32) * weight[None, :, j].astype(np.float32)
        parts.append(total)
    out = parts[0]
    for part in parts[1:]:
        out = out + part
    return out
