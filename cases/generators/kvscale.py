"""KV-SCALE: scales of a quantised cache and the codes that belong to them."""

from __future__ import annotations

import numpy as np

from . import mini_tf, numerics as nx
from .recording import Recording, Run
from .registry import Variant, case

TOP = 448.0  # largest e4m3 value


def e4m3(x: np.ndarray) -> np.ndarray:
    """To float8 e4m3fn and back, nearest even, saturating."""
    x = np.clip(np.asarray(x, np.float64), -TOP, TOP)
    exponent = np.floor(np.log2(np.maximum(np.abs(x), 2.0**-6)))
    step = 2.0 ** (exponent - 3)
    return np.clip(np.round(x / step) * step, -TOP, TOP)


def _rows(rec: Recording, v: Variant) -> tuple[tuple[Run, ...], int]:
    rows, tokens = mini_tf.prompts(rec, v, (13, 8))
    return rows, len(tokens)


def _write(
    rec: Recording,
    v: Variant,
    layer: int,
    rows: tuple[Run, ...],
    k: np.ndarray,
    val: np.ndarray,
    read: tuple[np.ndarray, np.ndarray],
    **meta: object,
) -> None:
    """k, v and the rows read back from the cache, key before value."""
    name = v.layer(layer) + "attn."
    rec.record(name + "k", k, "T H d", rows)
    rec.record(name + "v", val, "T H d", rows)
    rec.record(
        name + "kv_write",
        nx.f32(np.concatenate(read, -1)),
        "T H d",
        rows,
        meta={"kv_cache_dtype": "f8_e4m3fn"} | meta,
        compute_dtype="f8_e4m3fn",
    )


@case("B038")
def scales_dropped_at_read(rec: Recording, v: Variant, faulty: bool) -> None:
    k_scale, v_scale = 0.17, 0.011
    rows, n = _rows(rec, v)
    rng = v.rng(5)
    for i in range(2):
        q, k, val = (nx.f32(rng.standard_normal((n, h, 8)) * s) for h, s in ((4, 0.4), (2, 0.5), (2, 1.0)))
        stored = e4m3(k / k_scale), e4m3(val / v_scale)
        back = nx.f32(stored[0] * k_scale), nx.f32(stored[1] * v_scale)
        _write(rec, v, i, rows, k, val, back, k_scale=k_scale, v_scale=v_scale)
        wrong = faulty and i >= v.fault_layer
        at, meta = (
            mini_tf.positions_of(rows),
            {"softmax_scale": 8**-0.5, "causal": 1, "k_scale": k_scale, "v_scale": v_scale, "kv_source": "cache"},
        )
        out, lse = np.zeros((n, 4, 8)), np.zeros((n, 4))
        reads = [nx.f32(x) for x in stored] if wrong else back
        for run in rows:
            own = slice(run.row, run.row + run.n)
            out[own], lse[own] = nx.attention(
                q[own], reads[0][own], reads[1][own], nx.visible(at[own], at[own]), 8**-0.5
            )
        name = v.layer(i) + "attn."
        rec.record(name + "q", q, "T H d", rows)
        rec.record(name + "out", nx.f32(out), "T H dv", rows, meta=meta, compute_dtype="f8_e4m3fn")
        if v.lse:
            rec.record(name + "lse", nx.f32(lse), "T H", rows, meta=meta, compute_dtype="f8_e4m3fn")


@case("B040")
def scale_missing_at_write(rec: Recording, v: Variant, faulty: bool) -> None:
    s = 0.04
    rows, n = _rows(rec, v)
    rng = v.rng(5)
    for i in range(2):
        k, val = (nx.f32(rng.standard_normal((n, 2, 8)) * 3) for _ in range(2))
        by = 1.0 if faulty and i >= v.fault_layer else s
        _write(rec, v, i, rows, k, val, (e4m3(k / by) * s, e4m3(val / by) * s), k_scale=s, v_scale=s)


@case("B042")
def scale_of_warm_up(rec: Recording, v: Variant, faulty: bool) -> None:
    """The calibrated scale covers 0.5, real keys and values reach beyond 4."""
    s = (0.5 if faulty else 8.0) / TOP
    rows, n = _rows(rec, v)
    rng = v.rng(5)
    for i in range(2):
        k, val = (nx.f32(np.clip(rng.standard_normal((n, 2, 8)) * 1.5, -4, 4)) for _ in range(2))
        used = 8.0 / TOP if i < v.fault_layer else s
        _write(
            rec,
            v,
            i,
            rows,
            k,
            val,
            (e4m3(k / used) * used, e4m3(val / used) * used),
            k_scale=used,
            v_scale=used,
            scale_rule="static",
        )


@case("B043")
def amax_of_whole_workspace(rec: Recording, v: Variant, faulty: bool) -> None:
    """A workspace 64 wide of which this layer uses 32 columns; the others hold what was there before."""
    rows, n = _rows(rec, v)
    rng = v.rng(5)
    for i in range(2):
        space = np.full((n, 64), 1e4, np.float32)
        k = nx.f32(rng.uniform(-3.9, 3.9, (n, 32)))
        k[n // 2, 5] = -4.0
        space[:, :32] = k
        name = v.layer(i) + "attn."
        rec.record(name + "k", space.reshape(n, 8, 8)[:, :4], "T H d", rows)
        amax = 1e4 if faulty and i >= v.fault_layer else 4.0
        s = np.array([amax / TOP], np.float32)
        rec.record(
            name + "k_scale",
            s,
            "",
            meta={"scale_of": name + "k", "scale_rule": "dynamic", "kv_cache_dtype": "f8_e4m3fn"},
        )
        rec.record(
            name + "kv_write",
            nx.f32(e4m3(k / s) * s).reshape(n, 4, 8),
            "T H d",
            rows,
            meta={"kv_cache_dtype": "f8_e4m3fn", "k_scale": float(s[0])},
            compute_dtype="f8_e4m3fn",
        )


@case("B044")
def scale_views_share_memory(rec: Recording, v: Variant, faulty: bool) -> None:
    """One flat buffer holds the scales of three layers; rebuilt views all start at its beginning."""
    rows, n = _rows(rec, v)
    rng, flat = v.rng(5), np.zeros(3 * n * 2, np.float32)
    offset = [0 if faulty and i >= v.fault_layer else i * n * 2 for i in range(3)]
    if faulty and v.fault_layer:  # the aliases start at the first faulty layer
        offset = [i * n * 2 if i < v.fault_layer else v.fault_layer * n * 2 for i in range(3)]
    planes = [flat[o : o + n * 2].reshape(n, 2) for o in offset]
    for i in range(3):
        k = nx.f32(rng.standard_normal((n, 2, 8)) * (1 + i))
        name = v.layer(i) + "attn."
        rec.record(name + "k", k, "T H d", rows)
        planes[i][:] = np.abs(k).max(-1) / TOP
        rec.record(
            name + "k_scale",
            planes[i],
            "T H",
            rows,
            meta={"scale_of": name + "k", "scale_rule": "dynamic", "kv_cache_dtype": "f8_e4m3fn", "audit": "after"},
        )
    for i in range(3):
        rec.record(
            v.layer(i) + "attn.k_scale",
            planes[i],
            "T H",
            rows,
            meta={
                "scale_of": v.layer(i) + "attn.k",
                "scale_rule": "dynamic",
                "kv_cache_dtype": "f8_e4m3fn",
                "audit": "read",
            },
        )
