"""The mathematics of the miniatures in float64, and rounding to the narrower types. Independent of assay."""

from __future__ import annotations

import numpy as np

F64 = np.float64


# ---- rounding ----------------------------------------------------------------------------------------------------


def f32(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, F64).astype(np.float32)


def bf16(x: np.ndarray) -> np.ndarray:
    """To bfloat16 and back, nearest even; held in float32. Non-finite values pass."""
    x = np.asarray(x, np.float32)
    bits = x.view(np.uint32).astype(np.uint64)
    out = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(x), out, x)


def f16(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(x, F64).astype(np.float16).astype(np.float32)


ROUND = {"f32": f32, "bf16": bf16, "f16": f16}


# ---- RoPE --------------------------------------------------------------------------------------------------------


def yarn_factor(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * np.log(factor) + 1.0 if factor > 1 else 1.0


def inverse_frequencies(dim: int, theta: float = 10000.0, yarn: dict | None = None) -> np.ndarray:
    """dim / 2 angles a position; yarn: factor, original_max_position, beta_fast, beta_slow."""
    plain = theta ** (-np.arange(0, dim, 2, dtype=F64) / dim)
    if not yarn:
        return plain

    def pair_of(rotations: float) -> float:  # pair that turns so many times over the original context
        return dim * np.log(yarn["original_max_position"] / (rotations * 2 * np.pi)) / (2 * np.log(theta))

    low = max(np.floor(pair_of(yarn["beta_fast"])), 0.0)
    high = min(np.ceil(pair_of(yarn["beta_slow"])), dim - 1.0)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    return plain * (1.0 - ramp) + plain / yarn["factor"] * ramp


def cos_sin(positions: np.ndarray, frequencies: np.ndarray, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    angle = np.asarray(positions, F64)[:, None] * frequencies[None, :]
    return np.cos(angle) * scale, np.sin(angle) * scale


def rope(
    x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray, pairing: str = "half", scale: float = 1.0
) -> np.ndarray:
    """x: T H d. half pairs (i, i + d/2), interleaved pairs (2i, 2i + 1)."""
    x = np.asarray(x, F64)
    c, s = (y[:, None, :] for y in cos_sin(positions, frequencies, scale))
    half = x.shape[-1] // 2
    if pairing == "half":
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * c - b * s, a * s + b * c], -1)
    a, b = x[..., 0::2], x[..., 1::2]
    return np.stack([a * c - b * s, a * s + b * c], -1).reshape(x.shape)


# ---- attention ---------------------------------------------------------------------------------------------------


def visible(query_positions: np.ndarray, key_positions: np.ndarray, causal: bool = True, window: int = 0) -> np.ndarray:
    """T S, true where the query sees the key; window counts the query's own key."""
    distance = query_positions[:, None] - key_positions[None, :]
    seen = np.ones(distance.shape, bool)
    if causal:
        seen &= distance >= 0
    if window:
        seen &= distance < window
    return seen


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    seen: np.ndarray,
    scale: float,
    soft_cap: float = 0.0,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """q: T H d, k: S Hkv d, v: S Hkv dv, seen: T S. Gives out T H dv and the natural log-sum-exp T H.

    A row that sees nothing (and has no sink) gives zeros and -inf. Keys that are not seen are not read."""
    q, k, v = (np.asarray(x, F64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    out = np.zeros((q.shape[0], q.shape[1], v.shape[2]))
    lse = np.full(q.shape[:2], -np.inf)
    for t in range(q.shape[0]):
        cols = np.flatnonzero(seen[t])
        for h in range(q.shape[1]):
            score = k[cols, h // group] @ q[t, h] * scale
            if soft_cap:
                score = soft_cap * np.tanh(score / soft_cap)
            every = score if sinks is None else np.append(score, sinks[h])
            if not every.size:
                continue
            top = every.max()
            p = np.exp(score - top)
            total = np.exp(every - top).sum()
            out[t, h] = p @ v[cols, h // group] / total
            lse[t, h] = top + np.log(total)
    return out, lse


def merge(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Joins partial attention results (out T H dv, natural lse T H) over disjoint keys."""
    lse = np.stack([np.asarray(p[1], F64) for p in parts])
    top = np.where(np.isfinite(lse.max(0)), lse.max(0), 0.0)
    weight = np.exp(lse - top)
    total = weight.sum(0)
    out = sum(w[..., None] * np.asarray(o, F64) for w, (o, _) in zip(weight, parts))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(total[..., None] > 0, out / total[..., None], 0.0), top + np.log(total)


# ---- the rest ----------------------------------------------------------------------------------------------------


def rms_norm(x: np.ndarray, weight: np.ndarray | float, eps: float = 1e-6) -> np.ndarray:
    x = np.asarray(x, F64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-np.asarray(x, F64)))


def silu(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, F64) * sigmoid(x)


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, F64)
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def linear(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x: T in, weight: out in."""
    return np.asarray(x, F64) @ np.asarray(weight, F64).T


def top_k(scores: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k largest of each row, largest first; equal scores in index order."""
    return np.argsort(-np.asarray(scores, F64), axis=-1, kind="stable")[..., :k]


def fit_scalar(actual: np.ndarray, wanted: np.ndarray) -> float:
    """Least-squares a in actual = a * wanted."""
    actual, wanted = np.ravel(actual).astype(F64), np.ravel(wanted).astype(F64)
    return float(actual @ wanted / (wanted @ wanted))
