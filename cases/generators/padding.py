"""PADREAD: padding rows, tails of pages and reserved slots that reach real rows."""

from __future__ import annotations

import numpy as np

from . import kvscale, numerics as nx
from .mini_paged import Paged
from .recording import Recording, Run
from .registry import Variant, case


def _ids(v: Variant, n: int, stream: int) -> np.ndarray:
    return v.rng(30 + stream).integers(0, 64, n)


@case("B023")
def tail_of_last_page(rec: Recording, v: Variant, faulty: bool) -> None:
    """Pages of 4, 13 and 16 keys; slots that were never filled hold NaN. The kernel reads whole pages of values."""

    def attend(q, k, values, at, table, k_pool, v_pool):
        out, lse = run.attend(q, k, values, at, table, k_pool, v_pool)
        if faulty:
            whole = (table[table >= 0][:, None] * 4 + np.arange(4)).ravel()
            tail = v_pool[whole[len(k) :]]  # 0 * NaN
            out = out + np.repeat((tail * 0.0).sum(0), 2, axis=0)[None]
        return out, lse

    run = Paged(rec, v, sites=("tables", "pool"), hooks={"attend": attend})
    for pools in run.pools:
        for pool in pools:
            pool[:] = np.nan
    full, part = rec.request(_ids(v, 17, 0)), rec.request(_ids(v, 14, 1))
    run.step((Run(full, 0, 15), Run(part, 15, 12)), 0)
    run.step((Run(full, 0, 1, 15), Run(part, 1, 1, 12)), 1, "decode")


@case("B025")
def padded_request_poisons_scale(rec: Recording, v: Variant, faulty: bool) -> None:
    """Three decoding requests and a padding row. Softmax over no key is 0 / 0; one scale serves the whole tensor."""
    rng = v.rng(5)
    requests = [rec.request(_ids(v, n, i)) for i, n in enumerate((9, 6, 12))]
    rows = tuple(Run(r, i, 1, len(r.tokens) - 1) for i, r in enumerate(requests)) + (Run(None, 3, 1),)
    context = [Run(r, sum(len(x.tokens) for x in requests[:i]), len(r.tokens)) for i, r in enumerate(requests)]
    total = sum(r.n for r in context)
    for i in range(2):
        name = v.layer(i) + "attn."
        q, k, val = (nx.f32(rng.standard_normal((n, h, 8))) for n, h in ((4, 4), (total, 2), (total, 2)))
        o_proj = nx.bf16(rng.standard_normal((32, 32)) / 6)
        rec.record(name + "o_proj.weight", o_proj, "h h", step=-1, phase="load")
        rec.record(name + "q", q, "T H d", rows, phase="decode")
        rec.record(name + "k_read", k, "T H d", context, phase="decode")
        rec.record(name + "v_read", val, "T H d", context, phase="decode")
        out = np.zeros((4, 4, 8))
        for j, c in enumerate(context):
            own = slice(c.row, c.row + c.n)
            out[j : j + 1], _ = nx.attention(q[j : j + 1], k[own], val[own], np.ones((1, c.n), bool), 8**-0.5)
        if faulty and i >= v.fault_layer:
            out[3] = np.nan
        out = nx.f32(out)
        rec.record(name + "out", out, "T H dv", rows, phase="decode", meta={"softmax_scale": 8**-0.5, "causal": 1})
        scale = np.array([np.abs(out).max() / kvscale.TOP], np.float32)
        rec.record(
            name + "out.q_scale", scale, "", phase="decode", meta={"scale_of": name + "out", "scale_rule": "dynamic"}
        )
        with np.errstate(invalid="ignore"):
            y = kvscale.e4m3(out / scale) * scale
        rec.record(
            name + "o_proj",
            nx.f32(nx.linear(y.reshape(4, -1), o_proj)),
            "T h",
            rows,
            phase="decode",
            compute_dtype="f8_e4m3fn",
        )


@case("B026")
def padding_writes_reserved_slot(rec: Recording, v: Variant, faulty: bool) -> None:
    """17 slots, slot 0 reserved and zero. A padding row of NaN is mapped to slot 0; the next step reads it under a mask
    that multiplies."""
    c, dr, rng = 8, 4, v.rng(5)
    a = rec.request(_ids(v, 8, 0))
    prompt, pool = (Run(a, 0, 6),), [np.zeros((17, c + dr), np.float32) for _ in range(2)]
    later = (Run(a, 0, 1, 6), Run(None, 1, 1))
    last = (Run(a, 0, 1, 7), Run(None, 1, 1))
    mapped = 3 + np.arange(8)
    for step, rows in enumerate((prompt, later, last)):
        slots = mapped[:6] if step == 0 else np.array([mapped[5 + step], 0])
        rec.record("slot_mapping", slots.astype(np.int64), "T", rows, step=step)
        for i in range(2):
            name, n = v.layer(i) + "attn.", len(slots)
            new = nx.f32(rng.standard_normal((n, c + dr)))
            if step:
                new[1] = np.nan
            q = nx.f32(rng.standard_normal((n, 4, c + dr)))
            if step:
                q[1] = 0
            info = {"block_size": 1, "reserved_slots": 0}
            rec.record(name + "kv_c_normed", new[:, :c], "T c", rows, step=step)
            rec.record(name + "k_pe", new[:, None, c:], "T 1 dr", rows, step=step)
            rec.record(name + "kv_cache", pool[i], "S c+dr", step=step, meta=info | {"audit": "before"})
            keep = slots >= (0 if faulty and i >= v.fault_layer else 1)
            pool[i][slots[keep]] = new[keep]
            rec.record(name + "kv_cache", pool[i], "S c+dr", step=step, meta=info | {"audit": "after"})
            rec.record(name + "q_latent", q[..., :c], "T H c", rows, step=step)
            rec.record(name + "q_pe", q[..., c:], "T H dr", rows, step=step)
            key = pool[i][mapped[: rows[0].position + rows[0].n]][:, None]
            real = slice(0, rows[0].n)
            at = rows[0].position + np.arange(rows[0].n)
            out = np.zeros((n, 4, c))
            out[real], _ = nx.attention(q[real], key, key[..., :c], nx.visible(at, np.arange(len(key))), 0.3)
            out[real] += 0.0 * pool[i][0, :c]  # masked columns of the batch point at slot 0
            rec.record(
                name + "latent_out", nx.f32(out), "T H c", rows, step=step, meta={"softmax_scale": 0.3, "causal": 1}
            )


@case("B028")
def additive_mask_over_nan(rec: Recording, v: Variant, faulty: bool) -> None:
    """Ten keys in sixteen slots, the rest of the keys holds NaN. Adding -inf does not mask a NaN."""
    n, room, rng = 10, 16, v.rng(5)
    rows = (Run(rec.request(_ids(v, n, 0)), 0, n),)
    rec.record("slot_mapping", np.arange(n), "T", rows)
    rec.record("seq_lens", np.array([n], np.int64), "T", (Run(rows[0].request, 0, 1, n - 1),))
    for i in range(2):
        name = v.layer(i) + "attn."
        q, k, val = (nx.f32(rng.standard_normal((n, h, 8))) for h in (4, 2, 2))
        space = np.full((room, 2, 8), np.nan, np.float32)
        space[:n] = k
        for part, x in (("q", q), ("k", k), ("v", val)):
            rec.record(name + part, x, "T H d", rows)
        rec.record(name + "k_cache", space, "S H d", meta={"block_size": 1})
        scores = np.einsum("thd,shd->ths", q.astype(np.float64), np.repeat(space, 2, 1).astype(np.float64)) * 8**-0.5
        seen = np.arange(room)[None] <= np.arange(n)[:, None]
        hide = np.where(seen, 0.0, -np.inf)[:, None]
        wrong = faulty and i >= v.fault_layer
        scores = scores + hide if wrong else np.where(seen[:, None], scores, -np.inf)
        meta = {"softmax_scale": 8**-0.5, "causal": 1}
        rec.record(name + "scores", nx.f32(scores), "T H K", rows, meta=meta)
        probs = nx.softmax(scores)
        rec.record(name + "probs", nx.f32(probs), "T H K", rows)
        out = np.einsum("ths,shd->thd", probs[..., :n], np.repeat(val, 2, 1))
        rec.record(name + "out", nx.f32(out), "T H dv", rows, meta=meta)


@case("B029")
def padding_scales_used(rec: Recording, v: Variant, faulty: bool) -> None:
    """Rows are scaled in groups of 16 columns; the buffer of scales is rounded up to tiles of 8 rows, the rest of the
    last tile is not initialised (NaN). One kernel takes the largest scale of the tile."""
    r, k, width, group, tile = 21, 32, 24, 16, 8
    rng = v.rng(5)
    for i in (1, 2):
        name = v.layer(i) + "moe."
        x = nx.f32(rng.standard_normal((r, k)))
        weight = nx.bf16(rng.standard_normal((width, k)) / np.sqrt(k))
        room = -(-r // tile) * tile
        scales = np.full((room, k // group), np.nan, np.float32)
        grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        scales[:r] = kvscale.e4m3(np.abs(x).reshape(r, -1, group).max(-1) / 6)
        ratio = x.reshape(r, -1, group) / scales[:r, :, None]
        code = np.abs(np.abs(ratio)[..., None] - grid).argmin(-1)
        value = np.sign(ratio) * grid[code]
        nibble = (code + 8 * (ratio < 0)).reshape(r, k).astype(np.uint8)
        rec.record(v.layer(i) + "mlp.experts.gate_up_proj.weight", weight, "2f h", step=-1, phase="load")
        rec.record(name + "dispatched", x, "R h")
        info = {
            "quant": "nvfp4",
            "group_size": group,
            "scale_of": name + "dispatched",
            "scale_rule": "dynamic",
            "scale_layout": "linear",
        }
        rec.record(name + "dispatched.q", nibble[:, 0::2] | nibble[:, 1::2] << 4, "R h", meta=info | {"packed": 1})
        rec.record(name + "dispatched.q_scale", scales, "R n", meta=info)
        used = scales[:r]
        if faulty and i >= 1 + v.fault_layer:
            biggest = np.abs(scales).reshape(-1, tile, k // group).max(1)  # NaN wins
            used = np.where(np.isnan(biggest).any(-1)[:, None, None], np.nan, scales.reshape(-1, tile, k // group))
            used = used.reshape(room, -1)[:r]
        y = nx.linear((value * used[:, :, None]).reshape(r, k), weight)
        rec.record(name + "gate_up", nx.f32(y), "R 2f")
