"""What buffers, slots, tables, scales and repeats must keep to. A rule is true when its observation breaks it."""

import numpy as np
from fits_memory import owners
from view import find, floats, positions


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32) if x.dtype == np.float32 else x


def fill_kept(rec, i, o, layer, stem) -> bool:
    """Unwritten elements after the operation; pools have a rule of their own."""
    if o.meta.get("audit") != "after" or stem.endswith("_cache"):
        return False
    before = [x for x in find(rec, o.site, step=o.step, rank=o.rank) if x.meta.get("audit") == "before"]
    return bool(before) and bool((bits(before[0].array) == bits(o.array)).any())


def changed_between_after_and_read(rec, i, o, layer, stem) -> bool:
    if o.meta.get("audit") != "after":
        return False
    later = [x for x in find(rec, o.site, step=o.step, rank=o.rank) if x.meta.get("audit") == "read"]
    return bool(later) and not np.array_equal(bits(later[0].array), bits(o.array))


def pool_changed_elsewhere(rec, i, o, layer, stem) -> bool:
    """Changed slots must be mapped in the step by a real row, or have had no owner and not be reserved."""
    if not stem.endswith("_cache") or o.meta.get("audit") != "after":
        return False
    before = next(x for x in find(rec, o.site, step=o.step) if x.meta.get("audit") == "before").array
    changed = set(np.flatnonzero((bits(before) != bits(o.array)).reshape(len(before), -1).any(-1)))
    mapping = find(rec, "slot_mapping", step=o.step)
    mapped = {int(m.array[r.row + j]) for m in mapping for r in m.rows if r.request for j in range(r.n)}
    reserved = {int(s) for s in o.meta.get("reserved_slots", "").split(",") if s}
    return bool((changed - mapped) & (set(owners(rec, o.step - 1)) | reserved))


def table_leads_elsewhere(rec, i, o, layer, stem) -> bool:
    """Entries for positions that a key window lets be read."""
    if stem != "block_table":
        return False
    size, own = int(o.meta["block_size"]), owners(rec, o.step)
    outs = [x for x in rec.observations if x.site.endswith("attn.out") and x.step == o.step]
    window = int(outs[0].meta.get("window", 0)) if outs else 0
    for b, run in enumerate(o.rows):
        first = 0
        if window and outs:
            q = next(r for r in outs[0].rows if r.request == run.request)
            first = max(0, q.position - window + 1)
        for p in range(first, run.position + 1):
            if own.get(int(o.array[b, p // size]) * size + p % size) != (run.request, p):
                return True
    return False


def read_is_not_what_was_written(rec, i, o, layer, stem) -> bool:
    """Rows under the request and position asked for; of a request that took blocks over, of one with equal tokens."""
    parts = {"attn.k_read": ("k",), "attn.v_read": ("v",), "attn.kv_read": ("kv_c_normed", "k_pe")}.get(stem)
    if not parts or not find(rec, f"{layer}attn.{parts[0]}"):
        return False
    for run in o.rows:
        for j in range(run.n):
            p = run.position + j
            rows = [
                row_of(rec, layer, parts, r, p, o)
                for r in [run.request, *rec.requests]
                if r.tokens[: p + 1] == run.request.tokens[: p + 1]
            ]
            rows = [r for r in rows if r is not None]
            if rows and not any(np.array_equal(floats(o.array[run.row + j]).ravel(), r) for r in rows):
                return True
    return False


def row_of(rec, layer, parts, request, position, o):
    out = []
    for part in parts:
        hits = [
            x.array[r.row + position - r.position]
            for x in find(rec, f"{layer}attn.{part}", rank=o.rank)
            for r in x.rows
            if r.request == request and r.position <= position < r.position + r.n and x.step <= o.step
        ]
        if not hits:
            return None
        out.append(floats(hits[-1]).ravel())
    return np.concatenate(out)


def write_is_not_the_row(rec, i, o, layer, stem) -> bool:
    if stem != "attn.kv_write":
        return False
    at = {"step": o.step, "rank": o.rank}
    k = [x for x in find(rec, layer + "attn.k", **at) if x.array.shape[0] == o.array.shape[0]]
    v = find(rec, layer + "attn.v", **at)
    new = floats(k[0].array) if not v else np.concatenate([floats(k[0].array), floats(v[0].array)], -1)
    eps = 2.0**-4 if o.meta.get("kv_cache_dtype", "").startswith("f8") else 0.0
    lost = 2.0**-9 * max(float(o.meta.get("k_scale", 0)), float(o.meta.get("v_scale", 0)))  # half of the smallest code
    return bool((np.abs(floats(o.array) - new) > eps * np.abs(new) + lost + 1e-12).any())


def scale_is_not_of_the_tensor(rec, i, o, layer, stem) -> bool:
    if (
        not stem.endswith("_scale")
        or o.meta.get("scale_rule") != "dynamic"
        or "quant" in o.meta
        or o.meta.get("audit") == "read"
    ):
        return False
    x = np.abs(floats(find(rec, o.meta["scale_of"], step=o.step, rank=o.rank)[-1].array))
    want = (x.max(-1) if o.array.size > 1 else x.max()) / 448
    return not np.allclose(o.array, want, rtol=1e-5) and bool(np.isfinite(want).all())


def repeats_differ(rec, i, o, layer, stem) -> bool:
    if "repeat" not in o.meta:
        return False
    return not np.array_equal(find(rec, o.site, rank=o.rank)[0].array, o.array)


def positions_differ(rec, i, o, layer, stem) -> bool:
    return stem == "positions" and not np.array_equal(o.array, positions(o))


def lengths_differ(rec, i, o, layer, stem) -> bool:
    return stem == "seq_lens" and not np.array_equal(o.array, positions(o) + 1)


def state_holds_other_rows(rec, i, o, layer, stem) -> bool:
    """state = earlier state + the sum of k v^T over the rows kept: all of a prefill, 1 + accepted of a step."""
    if stem != "attn.state":
        return False
    earlier = [x for x in find(rec, o.site) if x.step < o.step]
    k, v = (find(rec, layer + s, step=o.step)[0] for s in ("attn.k", "attn.v"))
    accepted = find(rec, "spec.accepted", step=o.step)
    for j, run in enumerate(k.rows):
        kept = run.n if not accepted else 1 + int(accepted[0].array[j])
        own = slice(run.row, run.row + kept)
        want = np.einsum("thd,the->hde", floats(k.array[own]), floats(v.array[own]))
        want = want + (earlier[-1].array[j] if earlier else 0)
        if np.abs(o.array[j] - want).max() > 1e-5 * np.abs(want).max():
            return True
    return False


def shards_wrong(rec, i, o, layer, stem) -> bool:
    """A replicated result must be the same on every rank that has these rows."""
    if o.shard is not None or rec.world_size == 1 or o.site.endswith(".partial") or not o.rows:
        return False
    first = find(rec, o.site, step=o.step)[0]
    same_rows = first.rank != o.rank and first.shard is None and first.rows == o.rows
    return same_rows and not np.array_equal(first.array, o.array, equal_nan=True)


MEMORY = (fill_kept, changed_between_after_and_read, pool_changed_elsewhere, table_leads_elsewhere,
          read_is_not_what_was_written, write_is_not_the_row, scale_is_not_of_the_tensor, repeats_differ,
          positions_differ, lengths_differ, state_holds_other_rows, shards_wrong)  # fmt: skip
