"""SCALE, ROPE, LSE, STRIDE, MASK, RANGE of attention and its operands."""

import numpy as np
from fits import fit
from view import attention, close, context, find, fitted_positions, floats, positions, unwritten

from cases.generators import numerics as nx


def softmax_scale_ratio(rec, layer):
    """The factor of the declared scale at which the oracle comes closest: a grid, then halving."""
    declared = float(find(rec, layer + "attn.out")[0].meta["softmax_scale"])

    def miss(logarithm):
        out, want = attention(rec, layer, 0, scale=declared * np.exp(logarithm))
        return np.linalg.norm(out - want)

    step = 0.05
    best = min(np.arange(-3.0, 3.01, step), key=miss)
    while step > 1e-4:
        step /= 2
        best = min((best - step, best, best + step), key=miss)
    return float(np.exp(best))


@fit("B001")
@fit("B005")
def scale(rec, layer, v):
    return softmax_scale_ratio(rec, layer)


@fit("B003")
def rope_factor(rec, layer, v):
    raw, done = (floats(find(rec, layer + s)[0].array) for s in ("attn.q_proj", "attn.q"))
    return np.linalg.norm(done) / np.linalg.norm(raw) / (0.1 * np.log(40) + 1)


@fit("B004")
def table_factor(rec, layer, v):
    table = find(rec, "rope.cos_sin")[0]
    c, s = np.split(floats(table.array), 2, -1)
    return np.sqrt((c * c + s * s).mean()) / float(table.meta["rope.attention_factor"])


@fit("B006")
def other_pairing(rec, layer, v):
    raw, done = (find(rec, layer + "attn.indexer." + s)[0] for s in ("q_proj", "q"))
    at, frequencies = positions(done), nx.inverse_frequencies(8)
    half, declared = (nx.rope(raw.array, at, frequencies, p) for p in ("half", done.meta["rope.pairing"]))
    return close(floats(done.array), half) and not close(floats(done.array), declared)


@fit("B010")
def offset_after_prefix(rec, layer, v):
    raw, done = (find(rec, layer + s, step=1)[0] for s in ("attn.k_proj", "attn.k"))
    (offset,) = {p - at for p, at in zip(fitted_positions(raw, done), positions(done))}
    return offset


@fit("B011")
def position_in_decode(rec, layer, v):
    used = [fitted_positions(*(find(rec, layer + s, step=i)[0] for s in ("attn.k_proj", "attn.k"))) for i in (1, 2, 3)]
    return used[0][0] if len({tuple(u) for u in used}) == 1 else -1


@fit("B013")
def offset_of_short_row(rec, layer, v):
    raw, done = (find(rec, layer + s, step=1)[0] for s in ("attn.q_proj", "attn.q"))
    offset = [p - at for p, at in zip(fitted_positions(raw, done), positions(done))]
    assert offset[0] == 0  # the longer request
    return offset[1]


def chunk_scores(rec, layer, chunk):
    """The recorded LSE of a chunk, its output, and scores T H of each key by the operands."""
    lse, out = (find(rec, f"{layer}attn.chunk.{chunk}.{s}", step=1)[-1] for s in ("lse", "out"))
    q, scale = find(rec, layer + "attn.q", step=1)[0], float(lse.meta["softmax_scale"])
    scores, values = [], []
    for run, span in zip(lse.rows, lse.meta["keys"].split(",")):
        k, val = context(rec, layer, 1, run.request)
        own = slice(*(int(x) for x in span.split(":")))
        k, val = (np.repeat(x[own], q.array.shape[1] // x.shape[1], 1) for x in (k, val))
        scores += list(np.einsum("thd,shd->ths", floats(q.array[run.row : run.row + run.n]), k) * scale)
        values += [val] * run.n
    return floats(lse.array), floats(out.array), scores, values


def true_lse(scores):
    return np.array([np.log(np.exp(s).sum(-1)) for s in scores])


def chunk_out_is_right(out, scores, values):
    return close(out, np.array([np.einsum("hs,shd->hd", nx.softmax(s), x) for s, x in zip(scores, values)]))


@fit("B014")
def base_of_lse(rec, layer, v):
    lse, out, scores, values = chunk_scores(rec, layer, 0)
    assert chunk_out_is_right(out, scores, values)
    return nx.fit_scalar(lse, true_lse(scores))


@fit("B016")
def lse_is_maximum(rec, layer, v):
    lse, out, scores, values = chunk_scores(rec, layer, 0)
    return chunk_out_is_right(out, scores, values) and close(lse, np.array([s.max(-1) for s in scores]))


@fit("B017")
def lse_at_other_stride(rec, layer, v):
    """Some needed slots keep the fill, the others hold what belongs (head, row) places further."""
    site = layer + "attn.chunk.0.lse"
    kept = unwritten(rec, site, step=1)
    lse, _, scores, _ = chunk_scores(rec, layer, 0)
    rows, heads = lse.shape
    pitch = find(rec, site)[0].strides[1]
    flat = true_lse(scores).T.ravel()  # written one head behind the other
    at = np.arange(heads)[None] * pitch + np.arange(rows)[:, None]
    inside = at < flat.size
    return bool(kept.any()) and close(lse[inside], flat[at[inside]], 1e-5) and bool((kept == ~inside).all())


@fit("B045")
def merge_by_stride_of_prefix(rec, layer, v):
    parts = [floats(find(rec, f"{layer}attn.chunk.{j}.out", step=1)[0].array) for j in range(2)]
    sums = [floats(find(rec, f"{layer}attn.chunk.{j}.lse", step=1)[0].array) for j in range(2)]
    memory = floats(find(rec, layer + "attn.chunk.1.out.storage", step=1)[0].array)
    view, prefix = (find(rec, f"{layer}attn.chunk.{j}.out", step=1)[0] for j in (1, 0))
    t, h, d = np.indices(view.array.shape)
    misread = memory[t * view.strides[0] + h * prefix.strides[1] + d]
    out = floats(find(rec, layer + "attn.out", step=1)[0].array)
    return close(out, nx.merge([(parts[0], sums[0]), (misread, sums[1])])[0])


@fit("B046")
def rows_by_shape(rec, layer, v):
    memory, logits = find(rec, "logits.storage", step=0)[0].array, find(rec, "logits", step=0)[0]
    n, width = logits.array.shape
    read = floats(memory[: n * width].reshape(n, width))
    return logits.strides[0] != width and close(
        floats(find(rec, "logprobs", step=0)[0].array), np.log(nx.softmax(read))
    )


@fit("B048")
def values_by_strides_of_keys(rec, layer, v):
    memory, k = find(rec, layer + "attn.v.storage")[0].array, find(rec, layer + "attn.k")[0]
    t, h, d = np.indices(k.array.shape)
    misread = floats(memory[t * k.strides[0] + h * k.strides[1] + d])
    out, q = find(rec, layer + "attn.out")[0], find(rec, layer + "attn.q")[0].array
    at = positions(out)
    want, lse = nx.attention(q, k.array, misread, nx.visible(at, at), float(out.meta["softmax_scale"]))
    return close(floats(out.array), want) and close(floats(find(rec, layer + "attn.lse")[0].array), lse)


@fit("B050")
def rows_in_the_tail_of_another_head(rec, layer, v):
    memory = find(rec, layer + "attn.kv_write.storage")[0].array
    k, val, back = (find(rec, layer + s)[0].array for s in ("attn.k", "attn.v", "attn.kv_write"))
    new = np.concatenate([k, val], -1)
    flat = new.transpose(1, 0, 2).ravel()
    return np.array_equal(back[:, 0], new[:, 0]) and np.array_equal(memory[: flat.size], flat)


@fit("B051")
def all_heads_are_head_zero(rec, layer, v):
    out, want = attention(rec, layer, 0)
    return close(out, np.repeat(want[:, :1], out.shape[1], 1))


@fit("B123")
def scores_over_two_heads(rec, layer, v):
    out, q, k, val = (find(rec, layer + s)[0] for s in ("attn.out", "attn.q", "attn.k", "attn.v"))
    wide = [np.concatenate([x.array, np.roll(x.array, -1, 1) * (np.arange(4) < 3)[None, :, None]], -1) for x in (q, k)]
    for run in out.rows:
        own, at = slice(run.row, run.row + run.n), np.arange(run.n)
        want, _ = nx.attention(wide[0][own], wide[1][own], val.array[own], nx.visible(at, at), 8**-0.5)
        if not close(floats(out.array[own]), want):
            return False
    return True


@fit("B056")
def heads_of_the_padding(rec, layer, v):
    for rank in range(2):
        out, want = attention(rec, layer, 0, rank=rank)
        if not close(out, want[:, np.arange(6) // 2]):
            return False
    return True


def window_beyond(rec, layer, step):
    declared = int(find(rec, layer + "attn.out", step=step)[0].meta["window"])
    fits = [w for w in range(1, 20) if close(*attention(rec, layer, step, window=w))]
    return fits[0] - declared if fits else None


@fit("B099")
def keys_beyond_window(rec, layer, v):
    return window_beyond(rec, layer, 0)


@fit("B100")
def keys_beyond_window_in_prefill(rec, layer, v):
    assert window_beyond(rec, layer, 1) == 0
    return window_beyond(rec, layer, 0)


@fit("B102")
def without_soft_cap(rec, layer, v):
    return close(*attention(rec, layer, 0, soft_cap=0.0)) and not close(*attention(rec, layer, 0))


@fit("B103")
def without_sinks(rec, layer, v):
    return close(*attention(rec, layer, 0, sinks=None)) and close(*attention(rec, layer, 1))


@fit("B088")
def sum_beyond_float16(rec, layer, v):
    """Infinite exactly where keys times value passes the largest float16."""
    out = find(rec, layer + "attn.out")[0]
    values = find(rec, layer + "attn.v_read")[0]
    bad = ~np.isfinite(out.array).all((1, 2))
    keys = np.concatenate([run.position + np.arange(run.n) + 1 for run in out.rows])
    mean = floats(values.array).mean()
    return bool(np.isfinite(values.array).all() and bad.any() and np.array_equal(bad, keys * mean > 65504))


@fit("B091")
def rescale_with_a_floor(rec, layer, v):
    """The oracle fails, and the rest is a positive share of the values of the first tile."""
    out, want = attention(rec, layer, 0)
    run = find(rec, layer + "attn.out")[0].rows[0]
    _, val = context(rec, layer, 0, run.request)
    rest = (out - want)[run.row + 6, 0]  # in the second tile
    basis = np.concatenate([val[:4, 0], want[run.row + 6, :1]]).T
    left = rest - basis @ np.linalg.lstsq(basis, rest, rcond=None)[0]
    at = run.row + 6
    return not close(out[at], want[at], 0.01) and np.linalg.norm(left) < 0.1 * np.linalg.norm(rest)


@fit("B093")
def nan_where_first_tile_is_masked(rec, layer, v):
    out = find(rec, layer + "attn.out")[0]
    first, tile = positions(out) - int(out.meta["window"]) + 1, int(out.meta["kv_tile"])
    operands = all(np.isfinite(find(rec, layer + s)[0].array).all() for s in ("attn.q", "attn.k", "attn.v"))
    return operands and np.array_equal(np.isnan(out.array).all((1, 2)), first >= tile)
