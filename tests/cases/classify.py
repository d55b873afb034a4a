"""The class of a fault from the recording and the first wrong tensor alone: the smallest explanation that fits.

It follows the table at the end of docs/adding-a-case.md and shows that the classes can be told apart. Explanations are
tried in a fixed order for each kind of site; what none of them explains is a fault of the kernel."""

from __future__ import annotations

import re

import numpy as np
from fits_memory import changed, owners
from judge import Judge, swizzled
from judge_weights import decoded
from view import attention, close, context, find, fitted_positions, floats, positions

from cases.generators import mini_moe, numerics as nx
from cases.generators.recording import Observation, Recording


def classify(rec: Recording, site: str) -> str:
    match = re.match(r"(layers\.\d+\.)?(.*)", site)
    layer, stem = match[1] or "", match[2]
    index, event = first_wrong(rec, site)
    if event.phase == "load" and stem != "rope.cos_sin":
        return of_weight(rec, event, stem)
    for pattern, rule in RULES:
        if re.fullmatch(pattern, stem):
            return rule(rec, event, layer, stem, index)
    return "KERNEL"


def first_wrong(rec: Recording, site: str) -> tuple[int, Observation]:
    """The event of the site that the judge stops at; of a site it blames from further on, the last one."""
    judge = Judge(rec)
    for i, o in enumerate(rec.observations):
        if o.site == site and o.meta.get("audit") != "before" and o.phase != "load":
            layer = re.match(r"(layers\.\d+\.)?", site)[0]
            if judge.by_operands(i, o, layer, site[len(layer) :]) or judge.by_memory(i, o, layer, site[len(layer) :]):
                return i, o
    events = [(i, o) for i, o in enumerate(rec.observations) if o.site == site]
    return events[-1]


def constant(a: np.ndarray, b: np.ndarray) -> float | None:
    """c when a = c * b to rounding, c away from 1."""
    if not np.isfinite(a).all() or not b.any():
        return None
    c = nx.fit_scalar(a, b)
    return c if abs(c - 1) > 1e-3 and close(a, c * b, 1e-4) else None


def unwritten(rec: Recording, event: Observation) -> bool:
    before = [o for o in find(rec, event.site, step=event.step, rank=event.rank) if o.meta.get("audit") == "before"]
    return bool(before) and event.meta.get("audit") == "after" and bool((before[0].array == event.array).any())


# ---- weights -----------------------------------------------------------------------------------------------------


def of_weight(rec: Recording, event: Observation, stem: str) -> str:
    if unwritten(rec, event) or stem == "lm_head.weight":
        return "LOAD"
    if event.shard is not None or not rec.files:
        return "TP-SHARD"
    want, have = decoded(rec, event.site), floats(event.array)
    if "e_score_correction_bias" in stem:
        return "MOE-ROUTE"
    if sorted(map(bytes, nx.f32(have))) == sorted(map(bytes, nx.f32(want))):
        return "ROPE-FORM"
    return of_quantised(have, want)


def of_quantised(have: np.ndarray, want: np.ndarray) -> str:
    """Blocks of 16 columns in one row never straddle a scale in the formats of the contract."""
    a, b = (x.reshape(len(x), -1, 16) for x in (have, want))
    ratio = (a * b).sum(-1) / np.maximum((b * b).sum(-1), 1e-300)
    if close(a, b * ratio[..., None], 1e-4):
        # A permutation of the scales leaves their multiset: the products of all ratios are 1.
        logs = np.log(np.abs(ratio[np.abs(ratio) > 0]))
        permuted = abs(logs.mean()) < 1e-6 and np.ptp(logs) > 1e-3
        return "Q-LAYOUT" if permuted else "Q-SCALE"
    error = a - b
    level = error.mean(-1, keepdims=True)
    touched = np.abs(error).max(-1) > 1e-9
    flat = np.abs(error - level).max(-1) <= 1e-4 * np.abs(level[..., 0]) + 1e-9
    return "Q-ZERO" if touched.any() and flat.all() else "Q-LAYOUT"


# ---- buffers, slots, scales --------------------------------------------------------------------------------------


def of_pool(rec, event, layer, stem, index) -> str:
    reserved = {int(s) for s in event.meta.get("reserved_slots", "").split(",") if s}
    return "PADREAD" if changed(rec, event.site, event.step) & reserved else "KV-IDENT"


def of_write(rec, event, layer, stem, index) -> str:
    k = find(rec, layer + "attn.k", step=event.step)[0]
    earlier = [o for o in find(rec, layer + "attn.k") if o.step < event.step and o.array.shape == k.array.shape]
    width = k.array.shape[-1]
    bound = event.meta.get(f"bound.{layer}attn.k")
    if event.in_graph and bound != hex(k.address):
        if any(np.array_equal(o.array, event.array[..., :width]) for o in earlier):
            return "GRAPH"
    storage = find(rec, event.site + ".storage")
    if storage:
        flat = storage[0].array.reshape(-1, event.array.shape[-1])
        rows = {bytes(r) for r in flat}
        new = np.concatenate([k.array, find(rec, layer + "attn.v", step=event.step)[0].array], -1)
        if all(bytes(r) in rows for r in new.reshape(-1, new.shape[-1])):
            return "STRIDE"
    have, want = floats(event.array[..., :width]), floats(k.array)
    top = 448 * float(event.meta.get("k_scale", np.inf))
    clipped = np.isclose(np.abs(have), top).mean() > 0.01
    ratio = nx.fit_scalar(have, want)
    off = abs(ratio - 1) > 0.05 and np.linalg.norm(have - ratio * want) < 0.1 * np.linalg.norm(have)
    return "KV-SCALE" if clipped or off else "KV-IDENT"


def of_positions(rec, event, layer, stem, index) -> str:
    accepted = find(rec, "spec.accepted", step=event.step - 1)
    off = (event.array - positions(event))[[r.row for r in event.rows]]
    drafts = int(event.meta.get("drafts", 0))
    return "SPEC" if accepted and np.array_equal(off, drafts - accepted[0].array) else "ROPE-POS"


def of_table(rec, event, layer, stem, index) -> str:
    return "SCALE" if constant(floats(event.array), Judge(rec).expected(index, event, layer, stem)) else "PRECISION"


def of_repeat(rec, event, layer, stem, index) -> str:
    if "repeat" in event.meta:
        first = find(rec, event.site)[0]
        return "NONDET" if not np.array_equal(first.array, event.array) else "KERNEL"
    return "UNWRITTEN" if unwritten(rec, event) else "KERNEL"


def of_q_scale(rec, event, layer, stem, index) -> str:
    """The layout that is not declared fits: the largest magnitude of each group over 6, in rows or swizzled."""
    x = floats(find(rec, event.meta["scale_of"], step=event.step)[0].array)
    amax = np.abs(x).reshape(len(x), -1, int(event.meta["group_size"])).max(-1) / 6
    declared_linear = event.meta["scale_layout"] == "linear"
    have = swizzled(floats(event.array), inverse=True) if declared_linear else floats(event.array)
    return "Q-LAYOUT" if np.allclose(have[: len(amax)], amax, rtol=2.0**-3) else "Q-SCALE"


# ---- results of operations ---------------------------------------------------------------------------------------


def of_rope(rec, event, layer, stem, index) -> str:
    raw = Judge(rec).before(index, layer + stem + "_proj")
    want, have = Judge(rec).expected(index, event, layer, stem), floats(event.array)
    if constant(have, want):
        return "SCALE"
    if np.array_equal(raw.array, event.array) and len(set(positions(event))) > 1:
        return "COMPILE"  # rows of several positions, none of them turned
    declared = event.meta.get("rope.pairing", "half")
    other = {"half": "interleaved", "interleaved": "half"}[declared]
    if close(have, nx.rope(raw.array, positions(event), nx.inverse_frequencies(have.shape[-1]), other)):
        return "ROPE-FORM"
    return "ROPE-POS" if None not in fitted_positions(raw, event, pairing=declared) else "KERNEL"


def of_lse(rec, event, layer, stem, index) -> str:
    return "LSE"


def of_chunk_out(rec, event, layer, stem, index) -> str:
    return "UNWRITTEN" if unwritten(rec, event) else "KERNEL"


def of_attention(rec, event, layer, stem, index) -> str:
    if unwritten(rec, event):
        return "UNWRITTEN"
    if not np.isfinite(event.array).all():
        return of_not_finite(rec, event, layer)
    if any(
        k.startswith("bound.") and v != hex(find(rec, k[6:], step=event.step)[0].address) for k, v in event.meta.items()
    ):
        return "GRAPH"
    if find(rec, layer + "attn.chunk.1.out.storage", step=event.step):
        return "STRIDE"  # the merge of right parts, of which one is a padded view
    out, want = attention(rec, layer, event.step)
    storage = find(rec, layer + "attn.v.storage")
    if storage:
        k = find(rec, layer + "attn.k")[0]
        t, h, d = np.indices(k.array.shape)
        v = floats(storage[0].array[t * k.strides[0] + h * k.strides[1] + d])
        at = positions(event)
        if close(out, nx.attention(find(rec, layer + "attn.q")[0].array, k.array, v, nx.visible(at, at), 8**-0.5)[0]):
            return "STRIDE"
    heads = [[j for j in range(out.shape[1]) if close(out[:, h], want[:, j])] for h in range(out.shape[1])]
    if all(heads):
        return "STRIDE" if {j for js in heads for j in js} == {0} else "TP-SHARD"
    return of_changed_attention(rec, event, layer, out)


def of_not_finite(rec, event, layer) -> str:
    """The source of what is not finite: memory that nobody owns, padding, or the operation itself."""
    padding = [r.row for r in event.rows if r.request is None]
    bad = ~np.isfinite(event.array).reshape(len(event.array), -1).all(-1)
    if padding and set(np.flatnonzero(bad)) <= set(padding):
        return "PADREAD"
    pools = [
        o for o in rec.observations if re.match(re.escape(layer) + r"attn\.\w+_cache$", o.site) and o.step == event.step
    ]
    owned = sorted(owners(rec, event.step))
    unowned = any(not np.isfinite(np.delete(o.array, owned, 0)).all() for o in pools)
    return "PADREAD" if unowned else "RANGE"


def of_changed_attention(rec, event, layer, out) -> str:
    step, meta = event.step, event.meta
    if "k_scale" in meta:
        k, v = float(meta["k_scale"]), float(meta["v_scale"])
        back = find(rec, layer + "attn.kv_write", step=step)[0].array
        at = np.concatenate([r.position + np.arange(r.n) for r in event.rows])
        want = np.zeros(out.shape)
        for run in event.rows:
            own = slice(run.row, run.row + run.n)
            half, q = back.shape[-1] // 2, find(rec, layer + "attn.q", step=step)[0].array
            seen = nx.visible(at[own], at[own])
            want[own], _ = nx.attention(q[own], back[own, :, :half] / k, back[own, :, half:] / v, seen, 8**-0.5)
        if close(out, want, 0.02):
            return "KV-SCALE"
    window = int(meta.get("window", 0))
    masks = [{"window": w} for w in (window - 1, window + 1, 0) if window and w >= 0]
    masks += [{"soft_cap": 0.0}] if "soft_cap" in meta else []
    masks += [{"sinks": None}] if find(rec, layer + "attn.sinks") else []
    if any(close(*attention(rec, layer, step, **m)) for m in masks):
        return "MASK"
    if fits_pool(rec, event, layer):
        return "KV-IDENT"
    if meta.get("accum_dtype") == "f16" and jumps(rec, event, layer):
        return "RANGE"
    return "SCALE" if fits_scale(rec, event, layer) else "KERNEL"


def fits_scale(rec, event, layer) -> bool:
    """One other softmax scale explains every row: a grid, then halving."""
    declared = float(event.meta["softmax_scale"])

    def miss(logarithm: float) -> float:
        out, want = attention(rec, layer, event.step, scale=declared * np.exp(logarithm))
        return float(np.linalg.norm(out - want) / np.linalg.norm(out))

    step = 0.05
    best = min(np.arange(-3.0, 3.01, step), key=miss)
    while step > 1e-6:
        step /= 2
        best = min((best - step, best, best + step), key=miss)
    return miss(best) < 1e-4


def fits_pool(rec, event, layer) -> bool:
    """Rows of the pool as the table leads to them now, from any first key on, where own keys do not fit."""
    pools = [find(rec, f"{layer}attn.{p}_cache", step=event.step) for p in ("k", "v")]
    tables = find(rec, "block_table", step=event.step)
    if not all(pools) or not tables:
        return False
    k, v, table = pools[0][0].array, pools[1][0].array, tables[0]
    size, q = int(table.meta["block_size"]), find(rec, layer + "attn.q", step=event.step)[0].array
    for b, run in enumerate(table.rows):
        row = next(r.row + r.n - 1 for r in event.rows if r.request == run.request)
        keys = np.arange(run.position + 1)
        slots = table.array[b, keys // size] * size + keys % size
        for first in range(run.position):
            seen = np.ones((1, len(slots) - first), bool)
            scale = float(event.meta["softmax_scale"])
            want, _ = nx.attention(q[row : row + 1], k[slots[first:]], v[slots[first:]], seen, scale)
            own = first == max(0, run.position + 1 - int(event.meta.get("window", 0) or run.position + 1))
            if not own and close(floats(event.array[row : row + 1]), want):
                return True
    return False


def jumps(rec, event, layer) -> bool:
    """A running maximum that jumps between tiles by more than float16 holds: exp(-10) is below its smallest normal."""
    tile, scale = int(event.meta["kv_tile"]), float(event.meta["softmax_scale"])
    q = floats(find(rec, layer + "attn.q", step=event.step)[0].array)
    for run in event.rows:
        k, _ = context(rec, layer, event.step, run.request)
        score = np.einsum("hd,shd->hs", q[run.row + run.n - 1], np.repeat(k, q.shape[1] // k.shape[1], 1)) * scale
        tops = np.array([score[:, s : s + tile].max(-1) for s in range(0, score.shape[1], tile)])
        if len(tops) > 1 and np.diff(np.maximum.accumulate(tops, 0), axis=0).max() > 10:
            return True
    return False


def of_logprobs(rec, event, layer, stem, index) -> str:
    logits = find(rec, "logits", step=event.step)[0]
    return "STRIDE" if logits.strides[0] != logits.array.shape[1] else "KERNEL"


def of_sum(rec, event, layer, stem, index) -> str:
    partial = find(rec, event.site + ".partial", rank=event.rank)
    if partial and np.array_equal(partial[0].array, event.array):
        return "REDUCE"
    routed, shared = (find(rec, layer + f"moe.{s}", rank=event.rank, step=event.step) for s in ("routed", "shared"))
    if routed and shared and stem == "moe.out":
        basis = np.stack([floats(x[0].array).ravel() for x in (routed, shared)], 1)
        weights = np.linalg.lstsq(basis, floats(event.array).ravel(), rcond=None)[0]
        if close(basis @ weights, floats(event.array).ravel(), 1e-4) and abs(weights[0] - 1) < 1e-3:
            return "REDUCE"
    return "PRECISION" if event.compute_dtype == "bf16" or event.meta.get("store_dtype") == "bf16" else "KERNEL"


def of_sharded_norm(rec, event, layer, stem, index) -> str:
    return "REDUCE" if rec.world_size > 1 else "KERNEL"


def of_router_logits(rec, event, layer, stem, index) -> str:
    coarse = np.array_equal(nx.bf16(event.array), event.array) and event.meta.get("store_dtype") == "f32"
    return "PRECISION" if coarse else "KERNEL"


def of_activation(rec, event, layer, stem, index) -> str:
    declared = event.meta["gate_up_layout"]
    cfg, x = mini_moe.Config(activation=event.meta["activation"]), find(rec, layer + "moe.gate_up")[0].array
    other = {"halves": "interleaved", "interleaved": "halves"}[declared]
    return "MOE-LAYOUT" if close(floats(event.array), mini_moe.activate(x, cfg, other)) else "KERNEL"


def of_stream(rec, event, layer, stem, index) -> str:
    judge = Judge(rec)
    x, o, down, norm = judge.stream(index, layer), *(floats(find(rec, layer + s)[0].array)
                                                     for s in ("attn.o_proj", "mlp.down", "post_norm"))  # fmt: skip
    rest = floats(event.array) - down
    if constant(rest, x + o):
        return "RANGE"
    return "COMPILE" if close(rest, norm) else "KERNEL"


def of_linear(rec, event, layer, stem, index) -> str:
    if not np.isfinite(event.array).all():
        operands = [o for o in rec.observations[:index] if o.site.startswith(layer)]
        return "RANGE" if all(np.isfinite(o.array).all() for o in operands) else "PADREAD"
    return "LOAD" if stem == "logits" and event.meta.get("tie_word_embeddings") == "1" else "KERNEL"


RULES = (
    (r"attn\.(k_|v_|kv_)cache", of_pool),
    (r"block_table|slot_mapping|attn\.(k|v|kv)_read", lambda *a: "KV-IDENT"),
    (r"attn\.kv_write", of_write),
    (r"positions", of_positions),
    (r"attn\.state", lambda *a: "SPEC"),
    (r"rope\.cos_sin", of_table),
    (r"attn\.(k|v)_scale", lambda *a: "KV-SCALE"),
    (r".*\.q_scale", of_q_scale),
    (r"moe\.expert_(counts|out)", of_repeat),
    (r"attn\.(indexer\.)?(q|k)", of_rope),
    (r"attn\.(chunk\.\d+\.)?lse", of_lse),
    (r"attn\.chunk\.\d+\.out", of_chunk_out),
    (r"attn\.(latent_)?out", of_attention),
    (r"attn\.scores", lambda rec, event, layer, *_: of_not_finite(rec, event, layer)),
    (r"attn\.out_normed", of_sharded_norm),
    (r"logprobs", of_logprobs),
    (r"moe\.(out|shared|routed)", of_sum),
    (r"moe\.topk_(ids|weights)", lambda *a: "MOE-ROUTE"),
    (r"moe\.router_logits", of_router_logits),
    (r"moe\.act", of_activation),
    (r"out", of_stream),
    (r"mlp\.\w+|moe\.gate_up|logits", of_linear),
)
