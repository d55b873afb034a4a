"""Pairs of right runs that differ by rounding, order, path or by choices that rounding decides."""

from __future__ import annotations

import numpy as np

from . import mini_mla, mini_moe, mini_tf, numerics as nx, ranges
from .lse import chunked
from .mini_tf import Call, Run
from .recording import Recording
from .registry import Variant, control


def _decode(
    rec: Recording,
    v: Variant,
    cfg: mini_tf.Config,
    steps: int = 3,
    splits: int = 0,
    follow: np.ndarray | None = None,
    alone: bool = False,
) -> None:
    """Two prompts and decode steps, with the run's own tokens unless `follow` gives them (steps, requests)."""
    rows, tokens = mini_tf.prompts(rec, v, (14, 9))
    model = mini_tf.Decoder(rec, v, cfg)
    if splits:
        model.linear = lambda x, w: ranges.split_linear(x, w, splits)
    if alone:  # each request in a batch of its own
        for j, run in enumerate(rows):
            model.step((Run(run.request, 0, run.n),), tokens[run.row : run.row + run.n], j)
        return
    logits = model.step(rows, tokens)
    last = [r.row + r.n - 1 for r in rows]
    for step in range(1, steps + 1):
        chosen = logits[last].argmax(-1) if follow is None else follow[step - 1]
        rows = mini_tf.next_rows(rows)
        logits, last = model.step(rows, chosen, step, "decode"), list(range(len(rows)))


@control("bfloat16")
def bfloat16(a: Recording, b: Recording, v: Variant) -> None:
    follow = v.rng(4).integers(0, 64, (3, 2))
    _decode(a, v, mini_tf.Config(), follow=follow)
    _decode(b, v, mini_tf.Config(round_to="bf16"), follow=follow)


@control("reduction order")
def reduction_order(a: Recording, b: Recording, v: Variant) -> None:
    follow = v.rng(4).integers(0, 64, (3, 2))
    _decode(a, v, mini_tf.Config(), splits=1, follow=follow)
    _decode(b, v, mini_tf.Config(), splits=5, follow=follow)


@control("batch composition")
def batch_composition(a: Recording, b: Recording, v: Variant) -> None:
    _decode(a, v, mini_tf.Config(), 0, splits=1)
    _decode(b, v, mini_tf.Config(), 0, splits=3, alone=True)


@control("near-tied tokens")
def near_tied_tokens(a: Recording, b: Recording, v: Variant) -> None:
    _decode(a, v, mini_tf.Config(twin_tokens=True), 8)
    _decode(b, v, mini_tf.Config(twin_tokens=True, round_to="bf16"), 8)


@control("chunked attention")
def chunked_attention(a: Recording, b: Recording, v: Variant) -> None:
    def attend(call: Call) -> tuple:
        if call.step == 0:
            return mini_tf.attend(call)
        return chunked(
            b,
            v,
            call,
            [[(0, r.position // 2) for r in call.rows], [(r.position // 2, r.position) for r in call.rows]],
            lambda j, out, lse, call: (out, lse),
        )

    for rec, ops in ((a, None), (b, {"attend": attend})):
        model = mini_tf.Decoder(rec, v, mini_tf.Config(), ops, always=True)
        rows, tokens = mini_tf.prompts(rec, v, (21, 13))
        cut = [slice(r.row, r.row + 10) for r in rows], [slice(r.row + 10, r.row + r.n) for r in rows]
        for step, parts in enumerate(cut):
            counts = [s.stop - s.start for s in parts]
            model.step(
                tuple(Run(r.request, sum(counts[:j]), counts[j], 10 * step) for j, r in enumerate(rows)),
                np.concatenate([tokens[s] for s in parts]),
                step,
            )


@control("absorbed path")
def absorbed_path(a: Recording, b: Recording, v: Variant) -> None:
    for rec, path in ((a, "materialised"), (b, "absorbed")):
        rows, tokens = mini_tf.prompts(rec, v, (12, 7))
        model = mini_mla.Model(rec, v, mini_mla.Config(path=path))
        model.run(rows, nx.bf16(v.rng(5).standard_normal((len(tokens), 32))))


@control("near-tied experts")
def near_tied_experts(a: Recording, b: Recording, v: Variant) -> None:
    for rec, dtype in ((a, "f32"), (b, "bf16")):
        cfg = mini_moe.Config(experts=32, round_to=dtype, row_sites=False, bias=False)
        mini_moe.layers(rec, v, cfg, None, (81, 46))


@control("order of experts")
def order_of_experts(a: Recording, b: Recording, v: Variant) -> None:
    def combine(order: int):
        def add(back: np.ndarray, w: np.ndarray) -> np.ndarray:
            total = np.zeros(back[:, 0].shape, np.float32)
            for j in range(back.shape[1])[::order]:
                total += nx.f32(back[:, j] * w[:, j, None].astype(np.float64))
            return total

        return add

    for rec, order in ((a, 1), (b, -1)):
        mini_moe.layers(rec, v, mini_moe.Config(experts=16, top_k=6), {"combine": combine(order)})


@control("rounding point of a norm")
def rounding_point(a: Recording, b: Recording, v: Variant) -> None:
    ranges.norm_rounded_at_another_point(a, v, False)
    ranges.norm_rounded_at_another_point(b, v, True)


@control("split sums")
def split_sums(a: Recording, b: Recording, v: Variant) -> None:
    ranges.split_sum_depends_on_batch(a, v, False)
    ranges.split_sum_depends_on_batch(b, v, True)
