"""Operands out of a recording, by the rules of docs/adding-a-case.md. NumPy alone."""

from __future__ import annotations

import numpy as np

from cases.generators import checkpoint, numerics as nx
from cases.generators.recording import Observation, Recording


def floats(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


def find(rec: Recording, site: str, **fields) -> list[Observation]:
    return [o for o in rec.observations if o.site == site and all(getattr(o, k) == x for k, x in fields.items())]


def context(rec: Recording, layer: str, step: int, request, parts: tuple[str, str] = ("k", "v"), rank: int = 0):
    """Keys and values of a request by position, from all steps up to this one; positions 0, 1, …"""
    out = []
    for part in parts:
        rows = {}
        for o in find(rec, f"{layer}attn.{part}", rank=rank):
            for run in o.rows:
                if run.request == request and o.step <= step:
                    rows |= {run.position + j: floats(o.array[run.row + j]) for j in range(run.n)}
        out.append(np.array([rows[p] for p in range(len(rows))]))
    return out


def attention(rec: Recording, layer: str, step: int, parts: tuple[str, str] = ("k", "v"), rank: int = 0, **change):
    """(out recorded, out of the oracle with what is declared and then changed), real rows alone."""
    q, out = (
        find(rec, f"{layer}attn.q", step=step, rank=rank)[-1],
        find(rec, f"{layer}attn.out", step=step, rank=rank)[-1],
    )
    sinks = find(rec, f"{layer}attn.sinks", step=step)
    use = {
        "scale": float(out.meta["softmax_scale"]),
        "window": int(out.meta.get("window", 0)),
        "soft_cap": float(out.meta.get("soft_cap", 0)),
        "sinks": sinks[0].array if sinks else None,
    } | change
    right, real = [], []
    for run in out.rows:
        if run.request is None:
            continue
        k, v = context(rec, layer, step, run.request, parts, rank)
        own = slice(run.row, run.row + run.n)
        seen = nx.visible(run.position + np.arange(run.n), np.arange(len(k)), True, use["window"])
        right.append(nx.attention(q.array[own], k, v, seen, use["scale"], use["soft_cap"], use["sinks"])[0])
        real.append(floats(out.array[own]))
    return np.concatenate(real), np.concatenate(right)


def close(a: np.ndarray, b: np.ndarray, eps: float = 1e-5) -> bool:
    """Equal to rounding, NaN never."""
    return a.shape == b.shape and bool(np.all(np.abs(a - b) <= eps * max(1.0, float(np.nanmax(np.abs(b), initial=0)))))


def unwritten(rec: Recording, site: str, **fields) -> np.ndarray:
    """Where the bits are the same before and after."""
    before, after = (find(rec, site, **fields) for _ in range(2))
    a = next(o for o in before if o.meta.get("audit") == "before").array
    b = next(o for o in after if o.meta.get("audit") == "after").array
    return a.view(np.uint32) == b.view(np.uint32) if a.dtype == np.float32 else a == b


def positions(o: Observation) -> np.ndarray:
    return np.concatenate([r.position + np.arange(r.n) for r in o.rows])


def fitted_positions(raw: Observation, done: Observation, limit: int = 64, pairing: str = "half") -> list[int | None]:
    """For each row the position by which raw becomes done, None when there is none."""
    out: list[int | None] = []
    frequencies = nx.inverse_frequencies(raw.array.shape[-1])
    for x, y in zip(raw.array, done.array):
        fits = [
            p for p in range(limit) if close(floats(y)[None], nx.rope(x[None], np.array([p]), frequencies, pairing))
        ]
        out.append(fits[0] if fits else None)
    return out


def stored(rec: Recording, name: str) -> np.ndarray:
    """A tensor of the checkpoint, decoded to numbers where its type has any."""
    dtype, shape, data = checkpoint.read_safetensors(rec.files["model.safetensors"])[name]
    if dtype == "BF16":
        return floats((np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape))
    if dtype == "F8_E4M3":
        return checkpoint.e4m3_values(np.frombuffer(data, np.uint8)).reshape(shape)
    kind = {"F32": "<f4", "F16": "<f2", "U8": "u1", "I32": "<i4"}[dtype]
    return np.frombuffer(data, kind).reshape(shape)
