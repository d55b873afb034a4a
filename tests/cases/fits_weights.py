"""Weights, experts, ranks and kernels."""

import tempfile

import numpy as np
from fits import fit
from view import close, find, floats, stored

from cases.generators import checkpoint, mini_moe
from cases.generators import numerics as nx


def held(rec, layer, name="mlp.down_proj"):
    return rec.one(f"{layer}{name}.weight")


def pieces(rec, layer, *suffixes):
    return [stored(rec, f"model.{layer}mlp.down_proj.{s}") for s in suffixes]


def unpacked(word, order=range(8)):
    """Eight codes of each int32, the last axis eight times as long."""
    code = np.zeros((*word.shape, 8), np.int64)
    for i, place in enumerate(order):
        code[..., place] = word.view(np.uint32) >> np.uint32(4 * i) & np.uint32(15)
    return code.reshape(*word.shape[:-1], -1)


def float8(rec, layer, scale="weight_scale_inv"):
    """Code, scale grid and the block-wise ratio used / expected."""
    code, grid = pieces(rec, layer, "weight", scale)
    n, k = (a // b for a, b in zip(code.shape, grid.shape))
    used = held(rec, layer)
    blocks = lambda x: x.reshape(grid.shape[0], n, grid.shape[1], k).transpose(0, 2, 1, 3).reshape(*grid.shape, -1)  # noqa: E731
    a, b = blocks(used), blocks(code * checkpoint.blocks(floats(grid), n, k))
    ratio = (a * b).sum(-1) / (b * b).sum(-1)
    assert close(a, b * ratio[..., None], 1e-4) or not np.isfinite(a).all()
    return code, floats(grid), ratio


@fit("B008")
@fit("B009")
def rows_in_another_order(rec, layer, v):
    site = find(rec, layer + "attn.k_proj.weight")[0]
    w, wide, heads = (
        stored(rec, f"model.{layer}self_attn.k_proj.weight"),
        floats(site.array),
        int(site.meta["rope_permuted"]),
    )
    right = w if heads == 0 else w.reshape(heads, 2, -1, w.shape[1]).swapaxes(1, 2).reshape(w.shape)
    same_rows = sorted(map(bytes, nx.f32(wide))) == sorted(map(bytes, nx.f32(w)))
    return same_rows and not np.array_equal(wide, right)


@fit("B064")
def zero_point_off(rec, layer, v):
    qweight, qzeros, scales = pieces(rec, layer, "qweight", "qzeros", "scales")
    code, zero, scale = unpacked(np.ascontiguousarray(qweight.T)).T, unpacked(qzeros), floats(scales)
    steps = (held(rec, layer).T - (code - np.repeat(zero, 32, 0)) * np.repeat(scale, 32, 0)) / np.repeat(scale, 32, 0)
    return float(np.round(steps, 2).mean()) if np.ptp(np.round(steps, 2)) == 0 else float("nan")


@fit("B066")
def zero_points_of_zero_off(rec, layer, v):
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    qweight, qzeros, scales = pieces(rec, layer, "qweight", "qzeros", "scales")
    code, zero, scale = (
        unpacked(qweight, order),
        np.repeat(unpacked(qzeros, order), 32, 0),
        np.repeat(floats(scales), 32, 0),
    )
    steps = np.round((held(rec, layer).T - (code - zero) * scale) / scale, 2)
    assert not steps[zero != 0].any()
    return float(steps[zero == 0].mean())


@fit("B067")
def scales_are_powers_of_two_above(rec, layer, v):
    _, grid, ratio = float8(rec, layer)
    return close(grid * ratio, 2.0 ** np.ceil(np.log2(grid)), 1e-4) and not close(ratio, np.ones_like(ratio), 0.05)


@fit("B073")
def scales_are_powers_of_two_below(rec, layer, v):
    _, grid, ratio = float8(rec, layer)
    return close(grid * ratio, 2.0 ** np.floor(np.log2(grid)), 1e-4) and not close(ratio, np.ones_like(ratio), 0.05)


@fit("B069")
def scales_from_bytes(rec, layer, v):
    _, grid, ratio = float8(rec, layer, "weight_scale")
    byte = np.frombuffer(grid.astype("<f4").tobytes(), np.uint8)[: grid.size].reshape(grid.shape).astype(int)
    used = grid * ratio
    return close(np.log2(np.abs(used)), np.clip(byte, None, 240) - 127.0, 1e-3)


@fit("B075")
def grid_transposed(rec, layer, v):
    _, grid, ratio = float8(rec, layer)
    return close(grid * ratio, grid.T.reshape(grid.shape), 1e-4)


@fit("B070")
def gate_ratio(rec, layer, v):
    name = f"model.{layer}mlp.experts.2.gate_proj."
    packed, scale, g = (stored(rec, name + s) for s in ("weight", "weight_scale", "weight_scale_2"))
    code = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
    right = checkpoint.e2m1_values(code) * np.repeat(scale, 16, 1) * float(g)
    return nx.fit_scalar(held(rec, layer, "mlp.experts.2.gate_proj"), right)


@fit("B072")
def global_scale_ratio(rec, layer, v):
    packed, scale, g = pieces(rec, layer, "weight_packed", "weight_scale", "weight_global_scale")
    code = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
    return nx.fit_scalar(held(rec, layer), checkpoint.e2m1_values(code) * np.repeat(scale, 16, 1) / float(g[0]))


@fit("B077")
def share_of_columns(rec, layer, v):
    packed, scale = pieces(rec, layer, "weight_packed", "weight_scale")
    code = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
    right = checkpoint.e2m1_values(code) * np.repeat(2.0 ** (scale.astype(float) - 127), 32, 1)
    kept = [close(a, b) and b.any() for a, b in zip(held(rec, layer).T, right.T)]
    return float(np.mean(kept))


@fit("B079")
def wrong_from_the_fourth_entry_on(rec, layer, v):
    import gguf

    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(rec.files["model.gguf"])
        file.flush()
        tensor = next(
            t
            for t in gguf.GGUFReader(file.name).tensors
            if t.name == layer.replace("layers", "blk") + "ffn_down.weight"
        )
        raw = np.array(tensor.data).reshape(24, -1, 18)
        right = gguf.quants.dequantize(np.array(tensor.data), tensor.tensor_type).reshape(24, -1)
    code = np.concatenate([raw[..., 2:] & 15, raw[..., 2:] >> 4], -1).reshape(24, -1)
    wrong = ~np.isclose(held(rec, layer), right, rtol=1e-5)
    return bool(wrong.any()) and np.array_equal(wrong, code >= 4)


@fit("B074")
def scales_in_rows(rec, layer, v):
    q, scale, x = (find(rec, layer + "mlp.act" + s)[0] for s in (".q", ".q_scale", ""))
    code = np.stack([q.array & 15, q.array >> 4], -1).reshape(x.array.shape)
    linear = checkpoint.e2m1_values(code) * np.repeat(floats(scale.array)[: len(code)], 16, 1)
    return bool(np.linalg.norm(linear - x.array) < 0.2 * np.linalg.norm(x.array))


@fit("B083")
def few_distinct_biases(rec, layer, v):
    name = "mlp.gate.e_score_correction_bias"
    used, right = rec.one(layer + name), floats(stored(rec, f"model.{layer}{name}"))
    return len(np.unique(used)) < 20 < len(np.unique(right)) and np.abs(used - right).max() <= 2.0**-6


def router(rec, layer):
    scores = nx.sigmoid(rec.one(layer + "moe.router_logits"))
    bias = rec.one(layer + "mlp.gate.e_score_correction_bias")
    ids, used = rec.one(layer + "moe.topk_ids"), rec.one(layer + "moe.topk_weights")
    assert np.array_equal(ids, nx.top_k(scores + bias, ids.shape[1]))
    return scores, bias, ids, used


@fit("B080")
def weights_hold_the_bias(rec, layer, v):
    scores, bias, ids, used = router(rec, layer)
    return close(used, mini_moe.combine_weights(scores + bias, ids, mini_moe.Config()))


@fit("B082")
def weights_cancelled(rec, layer, v):
    scores, _, ids, used = router(rec, layer)
    zero = (used == 0).all(-1)
    return bool(zero.any()) and np.array_equal(zero, np.take_along_axis(scores, ids, -1).max(-1) < 2.0**-22)


@fit("B085")
@fit("B087")
def other_layout(rec, layer, v):
    event = find(rec, layer + "moe.act")[0]
    cfg = mini_moe.Config(activation=event.meta["activation"])
    other = {"halves": "interleaved", "interleaved": "halves"}[event.meta["gate_up_layout"]]
    return close(floats(event.array), mini_moe.activate(rec.one(layer + "moe.gate_up"), cfg, other))


@fit("B094")
def logits_in_bfloat16(rec, layer, v):
    y = find(rec, layer + "moe.router_logits")[0]
    return y.meta["store_dtype"] == "f32" and np.array_equal(nx.bf16(y.array), y.array)


@fit("B095")
def error_beyond_one_rounding(rec, layer, v):
    ids, w, rows = (rec.one(layer + s) for s in ("moe.topk_ids", "moe.topk_weights", "moe.expert_out"))
    back = np.empty(rows.shape)
    back[np.argsort(ids.reshape(-1), kind="stable")] = rows
    right = np.einsum("tkh,tk->th", back.reshape(*ids.shape, -1), w)
    ulp = 2.0 ** (np.floor(np.log2(np.abs(right))) - 7)
    return float((np.abs(rec.one(layer + "moe.routed") - right) / ulp).max()) > 1.0


def times_shared(rec, layer):
    routed, shared, out = (floats(rec.all(layer + f"moe.{s}")[0]).ravel() for s in ("routed", "shared", "out"))
    a, b = np.linalg.lstsq(np.stack([routed, shared], 1), out, rcond=None)[0]
    assert abs(a - 1) < 1e-4
    return float(b)


@fit("B057")
@fit("B058")
@fit("B061")
def shared_times(rec, layer, v):
    return times_shared(rec, layer)


@fit("B059")
def shared_is_partial(rec, layer, v):
    return all(
        np.array_equal(rec.all(layer + "moe.shared", rank=r)[0], rec.all(layer + "moe.shared.partial", rank=r)[0])
        for r in range(4)
    )


@fit("B062")
def norm_by_own_energy(rec, layer, v):
    x = np.concatenate([rec.one(layer + "attn.out", rank=r).reshape(-1, 16) for r in range(2)], 1)
    w = np.concatenate([rec.one(layer + "attn.out_norm.weight", rank=r) for r in range(2)])
    return nx.fit_scalar(rec.one(layer + "attn.out_normed", rank=0), nx.rms_norm(x, w)[:, :16])


@fit("B052")
def equal_shards(rec, layer, v):
    a, b = (rec.one(layer + "attn.qkv_proj.weight", rank=r) for r in range(2))
    return np.array_equal(a, b) and not np.array_equal(
        *(rec.one(layer + "attn.o_proj.weight", rank=r) for r in range(2))
    )


@fit("B053")
def replicas_differ(rec, layer, v):
    events = find(rec, layer + "attn.k_norm.weight")
    return any(a.shard == b.shard and not np.array_equal(a.array, b.array) for a in events for b in events)


@fit("B089")
def residual_ratio(rec, layer, v):
    number = int(layer.split(".")[1])
    x, out = (rec.one(f"layers.{n}.out") for n in (number - 1, number))
    return nx.fit_scalar(out - rec.one(layer + "mlp.down"), x + rec.one(layer + "attn.o_proj"))


@fit("B109")
def operand_is_the_norm(rec, layer, v):
    return close(rec.one(layer + "out"), rec.one(layer + "post_norm") + rec.one(layer + "mlp.down"))


@fit("B111")
def not_rotated(rec, layer, v):
    return np.array_equal(rec.one(layer + "attn.indexer.q"), rec.one(layer + "attn.indexer.q_proj"))


@fit("B115")
def logits_of_another_matrix(rec, layer, v):
    want = nx.linear(rec.one("final_norm"), rec.one("embed_tokens.weight"))
    return np.linalg.norm(rec.one("logits") - want) > 0.5 * np.linalg.norm(want)


@fit("B117")
def slots_never_loaded(rec, layer, v):
    name = layer + "attn.qkv_proj.input_scale"
    before, after = rec.all(name)
    return (before.view(np.uint32) == after.view(np.uint32)).tolist() == [False, True, True]


@fit("B118")
def head_is_not_the_embedding(rec, layer, v):
    return not np.array_equal(rec.one("lm_head.weight"), stored(rec, "model.embed_tokens.weight"))


@fit("B119")
def next_row_added(rec, layer, v):
    x, w, y = rec.one(layer + "mlp.act"), held(rec, layer), rec.one(layer + "mlp.down")
    want = nx.linear(x, w)
    want[:-1, :-1] += nx.linear(x[1:], w[1:])
    return close(y, want)


@fit("B121")
def decode_table(rec, layer, v):
    """The values of the eight magnitudes by least squares over the results."""
    name, x, y = layer + "mlp.down_proj.weight.", rec.one(layer + "mlp.act"), rec.one(layer + "mlp.down")
    packed, scale = rec.one(name + "codes"), np.repeat(rec.one(name + "scale"), 16, 1)
    code = np.stack([packed & 15, packed >> 4], -1).reshape(scale.shape)
    sign = np.where(code & 8, -1.0, 1.0) * scale
    parts = np.stack([nx.linear(x, np.where(code & 7 == m, sign, 0.0)).ravel() for m in range(1, 8)], 1)
    table = np.linalg.lstsq(parts, y.ravel(), rcond=None)[0]
    return close(table, np.array([0.5, 1, 1.5, 2, 3, 4, 4.0]), 1e-4)


@fit("B122")
def signs_of_high_codes(rec, layer, v):
    name, x, y = layer + "mlp.down_proj.weight.", rec.one(layer + "mlp.act"), rec.one(layer + "mlp.down")
    code, grid, sign, scale = (rec.one(name + s) for s in ("codes", "codebook", "signs", "scale"))
    w = grid[code].reshape(24, 64) * (1.0 - 2.0 * sign) * np.repeat(scale, 32, 1)
    return close(y, nx.linear(x, np.where(np.repeat(code >= 32, 4, 1), -w, w)))


@fit("B126")
def repeats_differ(rec, layer, v):
    counts = np.array(rec.all(layer + "moe.expert_counts"))
    rows = rec.all(layer + "moe.topk_ids")[0].size
    odd = (counts != counts[0]).any(1)
    return (
        odd.sum() == 1
        and counts[odd].sum() != rows
        and len({x.tobytes() for x in rec.all(layer + "moe.topk_ids")}) == 1
    )
