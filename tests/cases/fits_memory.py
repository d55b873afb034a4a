"""UNWRITTEN, PADREAD, KV-IDENT, KV-SCALE, GRAPH, SPEC: buffers, slots, scales and what owns them."""

import numpy as np
from fits import fit
from view import attention, close, context, find, floats, positions, unwritten

from cases.generators import numerics as nx


@fit("B018")
def rows_without_keys_unwritten(rec, layer, v):
    site = layer + "attn.chunk.1.out"
    kept, event = unwritten(rec, site).all((1, 2)), find(rec, site)[0]
    empty = np.concatenate(
        [[a == b] * run.n for run, (a, b) in zip(event.rows, (r.split(":") for r in event.meta["keys"].split(",")))]
    )
    return kept.any() and np.array_equal(kept, empty)


@fit("B019")
def block_of_empty_expert_unwritten(rec, layer, v):
    kept = unwritten(rec, layer + "moe.expert_out").all((1, 2))
    return kept.any() and np.array_equal(kept, rec.all(layer + "moe.expert_counts")[0] == 0)


@fit("B022")
def first_row_unwritten(rec, layer, v):
    kept = unwritten(rec, layer + "attn.out").all((1, 2))
    return int(np.flatnonzero(kept)[0]) if kept.any() and kept[np.argmax(kept) :].all() else -1


def owners(rec, step):
    """Slot to (request, position) after all steps before this one and the step itself."""
    out = {}
    for o in find(rec, "slot_mapping"):
        if o.step <= step:
            for run in o.rows:
                for j in range(run.n):
                    slot = int(o.array[run.row + j])
                    if slot >= 0 and run.request is not None:
                        out[slot] = (run.request, run.position + j)
    return out


def changed(rec, site, step):
    """Slots whose bits changed in the step."""
    return set(np.flatnonzero(~unwritten(rec, site, step=step).reshape(len(find(rec, site)[0].array), -1).all(-1)))


@fit("B023")
@fit("B028")
def nan_from_unowned_slots(rec, layer, v):
    """Owned slots are finite, others are not, and neither is the result."""
    step = max(o.step for o in rec.observations)
    owned = sorted(owners(rec, step))
    for pool in (o for o in rec.observations if o.site.startswith(layer + "attn.") and o.site.endswith("_cache")):
        if pool.step == step and not np.isfinite(pool.array[owned]).all():
            return False
    bad = ~np.isfinite(find(rec, layer + "attn.out", step=step)[0].array)
    return bool(bad.any())


@fit("B025")
def padding_row_then_every_row(rec, layer, v):
    out, y = floats(find(rec, layer + "attn.out")[0].array), floats(find(rec, layer + "attn.o_proj")[0].array)
    real = [r.row for r in find(rec, layer + "attn.out")[0].rows if r.request is not None]
    return bool(np.isfinite(out[real]).all() and np.isnan(out[3]).all() and np.isnan(y).all())


@fit("B026")
def reserved_slot_written(rec, layer, v):
    site = layer + "attn.kv_cache"
    reserved = int(find(rec, site)[0].meta["reserved_slots"])
    return any(reserved in changed(rec, site, step) for step in range(3))


@fit("B029")
def tile_with_padding_is_nan(rec, layer, v):
    y, scale = find(rec, layer + "moe.gate_up")[0].array, find(rec, layer + "moe.dispatched.q_scale")[0].array
    bad = np.isnan(y).all(-1)
    return bool(np.isfinite(scale[: len(y)]).all() and bad.any() and np.flatnonzero(bad)[0] == len(y) // 8 * 8)


@fit("B030")
def slot_nobody_mapped(rec, layer, v):
    written = changed(rec, layer + "attn.kv_cache", 1)
    mapped = set(find(rec, "slot_mapping", step=1)[0].array.tolist()) - {-1}
    return bool(written - mapped) and written - mapped <= set(owners(rec, 0))


@fit("B032")
def row_of_another_history(rec, layer, v):
    """A row read differs from what a request with the same first tokens wrote, and equals another one's."""
    read = find(rec, layer + "attn.k_read", step=2)[0]
    request, foreign = read.rows[0].request, 0
    for old in rec.requests[:2]:
        same = old.tokens[:4] == request.tokens[:4]
        k, _ = context(rec, layer, 2, old)
        hits = [np.array_equal(read.array[p], k[p]) for p in range(4)]
        if same and not all(hits):
            foreign += 1
        if not same and hits[3]:
            foreign += 1
    return foreign == 2


@fit("B033")
def entry_of_another_owner(rec, layer, v):
    table = find(rec, "block_table", step=2)[0]
    size, own = int(table.meta["block_size"]), owners(rec, 2)
    foreign = [
        (b, i)
        for b, run in enumerate(table.rows)
        for i in range(run.position // size + 1)
        for p in range(i * size, min((i + 1) * size, run.position + 1))
        if own.get(int(table.array[b, i]) * size + p % size) != (run.request, p)
    ]
    return set(foreign) == {(1, 1)}


@fit("B035")
def fits_with_the_pool_alone(rec, layer, v):
    """Own keys do not explain the row at any window; what the table leads to now does, from the second block on."""
    step, row = 2, 1
    if any(close(*(x[row:] for x in attention(rec, layer, step, window=w))) for w in range(1, 22)):
        return False
    q, out, table = (find(rec, s, step=step)[0] for s in (layer + "attn.q", layer + "attn.out", "block_table"))
    k, val = (find(rec, f"{layer}attn.{s}_cache", step=step)[0].array for s in ("k", "v"))
    at = out.rows[1].position
    keys = np.arange(4, at + 1)
    slots = table.array[1, keys // 4] * 4 + keys % 4
    want, _ = nx.attention(q.array[row:], k[slots], val[slots], np.ones((1, len(slots)), bool), 8**-0.5)
    return close(floats(out.array[row:]), want)


@fit("B036")
def row_of_another_position(rec, layer, v):
    """Rank r, position p: the row at r + 2 p was gathered, not that at p."""
    for rank in range(2):
        read = find(rec, layer + "attn.kv_read", rank=rank)[0]
        for run in read.rows:
            latent = find(rec, layer + "attn.kv_c_normed", rank=rank)[0]
            start = next(r.row for r in latent.rows if r.request == run.request)
            if not np.array_equal(latent.array[start + rank + 2 * run.position], read.array[run.row, :8]):
                return False
    return True


@fit("B037")
def zeros_in_a_live_block(rec, layer, v):
    site = layer + "attn.kv_cache"
    live = sorted(changed(rec, site, 1) & set(owners(rec, 0)))
    after = [o for o in find(rec, site) if o.meta["audit"] == "after"][0].array
    return int(after[live].size) if live and not after[live].any() else -1


@fit("B038")
def output_without_scales(rec, layer, v):
    """Least squares over the values after the logits were scaled by 1 / k_scale."""
    out = find(rec, layer + "attn.out")[0]
    back = find(rec, layer + "attn.kv_write")[0].array
    q, k_scale = find(rec, layer + "attn.q")[0].array, float(out.meta["k_scale"])
    best = []
    for ratio in (1.0, 1 / k_scale):
        want = np.zeros(out.array.shape)
        for run in out.rows:
            own, at = slice(run.row, run.row + run.n), np.arange(run.n)
            want[own], _ = nx.attention(q[own], back[own, :, :8] * ratio, back[own, :, 8:], nx.visible(at, at), 8**-0.5)
        a = nx.fit_scalar(out.array, want)
        best.append((np.linalg.norm(out.array - a * want), a))
    return min(best)[1]


@fit("B040")
def read_back_ratio(rec, layer, v):
    back, k = floats(find(rec, layer + "attn.kv_write")[0].array)[..., :8], floats(find(rec, layer + "attn.k")[0].array)
    return nx.fit_scalar(back, k)


@fit("B042")
def saturated(rec, layer, v):
    back = find(rec, layer + "attn.kv_write")[0]
    top = 448 * float(back.meta["k_scale"])
    k = floats(find(rec, layer + "attn.k")[0].array)
    stuck = np.isclose(np.abs(floats(back.array[..., :8])), top)
    return stuck.mean() > 0.3 and np.array_equal(stuck, np.abs(k) >= top * (1 - 1 / 32))


@fit("B043")
def scale_over_valid_columns(rec, layer, v):
    k = floats(find(rec, layer + "attn.k")[0].array)
    return float(rec.one(layer + "attn.k_scale")[0] / (np.abs(k).max() / 448))


@fit("B044")
def planes_at_one_address(rec, layer, v):
    events = [o for o in rec.observations if o.site.endswith("k_scale") and o.meta["audit"] == "read"]
    mine = find(rec, layer + "attn.k_scale")
    shared = [o for o in events if o.site != mine[0].site and o.address == mine[0].address]
    return bool(shared) and not np.array_equal(mine[0].array, mine[1].array)


@fit("B105")
def row_of_the_captured_block(rec, layer, v):
    stale = []
    for step in range(1, 7):
        k, back = (find(rec, layer + s, step=step)[0] for s in ("attn.k", "attn.kv_write"))
        if not np.array_equal(back.array[..., :8], k.array):
            earlier = [
                s
                for s in range(1, step)
                if np.array_equal(find(rec, layer + "attn.k", step=s)[0].array, back.array[..., :8])
            ]
            moved = back.meta[f"bound.{layer}attn.k"] != hex(k.address)
            stale.append((step, moved, *earlier))
    return stale == [(4, True, 1), (5, True, 2), (6, True, 3)]


@fit("B107")
def keys_up_to_the_captured_length(rec, layer, v):
    for step in (2, 3):
        out, q, now = (find(rec, s, step=step)[0] for s in (layer + "attn.out", layer + "attn.q", "seq_lens"))
        captured = find(rec, "seq_lens", step=1)[0]
        if out.meta["bound.seq_lens"] == hex(now.address):
            return False
        for j, run in enumerate(out.rows):
            k, val = context(rec, layer, step, run.request)
            n = int(captured.array[j])
            want, _ = nx.attention(q.array[run.row : run.row + 1], k[:n], val[:n], np.ones((1, n), bool), 8**-0.5)
            if not close(floats(out.array[run.row : run.row + 1]), want):
                return False
    return True


@fit("B128")
def further_tokens_in_state(rec, layer, v):
    """How many rows behind the accepted ones the state of the first request holds."""
    before, after = (rec.all(layer + "attn.state", step=s)[0] for s in (0, 1))
    k, val = (find(rec, layer + s, step=1)[0] for s in ("attn.k", "attn.v"))
    run, accepted = k.rows[0], int(rec.all("spec.accepted", step=1)[0][0])
    for n in range(run.n + 1):
        own = slice(run.row, run.row + n)
        if close(floats(after[0]), before[0] + np.einsum("thd,the->hde", floats(k.array[own]), floats(val.array[own]))):
            return n - 1 - accepted
    return -1


@fit("B130")
def advanced_by_drafts(rec, layer, v):
    used, accepted = find(rec, "positions", step=2)[0], rec.all("spec.accepted", step=1)[0]
    off = (used.array - positions(used))[[run.row for run in used.rows]]
    return bool(off.any()) and np.array_equal(off, int(used.meta["drafts"]) - accepted)
