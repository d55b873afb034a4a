"""Views of transformers' tensors as the canonical sites have them: rows first, heads second, and the router's choice.

Nothing here looks at a session or a trace. B batch slots, T columns of the forward, H heads, d head size, E experts.
"""

from __future__ import annotations

from typing import Any

import torch

from ..._prepared import Extents, Fold


def fold_rows(heads: int = 0) -> Fold:
    """[B, T, X] as rows: [B*T, X], or [B*T, heads, X/heads]; [N, X] likewise. ValueError when it is no view."""

    def fold(shape: Extents, strides: Extents) -> tuple[Extents, Extents]:
        *lead, width = shape
        *steps, unit = strides
        rows, step = _merge(lead, steps)
        if not heads:
            return (rows, width), (step, unit)
        if width % heads:
            raise ValueError(f"{width} columns for {heads} heads")
        size = width // heads
        return (rows, heads, size), (step, size * unit, unit)

    return fold


def _merge(shape: list[int], strides: list[int]) -> tuple[int, int]:
    """The axes of these extents as one. ValueError when their elements are not evenly spaced."""
    rows, step = 1, 0
    for extent, stride in zip(reversed(shape), reversed(strides)):
        if extent == 1:
            continue
        if rows > 1 and stride != rows * step:
            raise ValueError(f"axes {shape} with strides {strides} are not one axis")
        step = step if rows > 1 else stride
        rows *= extent
    return rows, step or 1


def head_rows(tensor: Any) -> Any:
    """[B, H, T, d] -> [B*T, H, d], without a copy for one slot or one column."""
    return tensor.transpose(1, 2).flatten(0, 1)


def new_columns(tensor: Any, past: int, length: int) -> Any:
    """Of keys or values [B, H, S, d] of a whole cache, those of this forward's columns: [B, H, T, d]; None when they
    cannot be told. Caches that grow end with them, static ones (S beyond past + length) have room behind them."""
    total = tensor.shape[2]
    if total <= past + length:
        return tensor[:, :, total - length :] if total >= length else None
    return tensor[:, :, past : past + length]


def interleaved(tensor: Any) -> Any:
    """Rotated channels in the checkpoint's order again: pairs (2i, 2i + 1). transformers' interleaved rotation leaves
    the first members of all pairs before the second ones; keys and queries alike, so scores do not change."""
    return tensor.unflatten(-1, (2, tensor.shape[-1] // 2)).transpose(-1, -2).flatten(-2)


class Choice:
    """A router's choice in canonical form: experts by descending selection score, equal ones by number.

    ids i64 [T, k], weights [T, k], margin f32 [T]: the smallest gap between consecutive selection scores among the
    first k + 1, the choice of groups included; infinity when nothing was left out.
    """

    __slots__ = ("ids", "weights", "margin")

    def __init__(self, router: Any, logits: Any, weights: Any, ids: Any) -> None:
        """router: the module, which has the family's rules; logits [T, E], weights and ids [T, k] as it gave them."""
        scores, margin = _selection(router, logits.float(), ids.shape[1])
        ids, order = ids.long().sort(dim=1)
        chosen = scores.gather(1, ids)
        by_score = chosen.sort(dim=1, descending=True, stable=True).indices
        self.ids = ids.gather(1, by_score)
        self.weights = weights.gather(1, order.gather(1, by_score))
        self.margin = margin


def _selection(router: Any, logits: Any, k: int) -> tuple[Any, Any]:
    """Scores [T, E] that experts are chosen by, and the margin of the choice [T]."""
    bias = getattr(router, "e_score_correction_bias", None)
    scores = logits.softmax(1) if bias is None else logits.sigmoid() + bias.float()
    allowed = scores
    margin = torch.full((logits.shape[0],), torch.inf)
    groups = getattr(router, "num_group", None) or 1
    if groups > 1 and getattr(router, "topk_method", "") != "greedy":
        members = scores.unflatten(1, (groups, -1))
        best = members.topk(min(2, members.shape[2]), dim=2).values
        group_scores = best[..., 0] if bias is None else best.sum(2)
        keep = router.topk_group
        ranked, groups_kept = group_scores.sort(dim=1, descending=True)
        if keep < groups:
            margin = _finite_gaps(ranked[:, keep - 1 : keep + 1]).amin(1)
        mask = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, groups_kept[:, :keep], False)
        allowed = members.masked_fill(mask.unsqueeze(2), -torch.inf).flatten(1)
    top = allowed.topk(min(k + 1, allowed.shape[1]), dim=1).values
    if top.shape[1] > 1:
        margin = torch.minimum(margin, _finite_gaps(top).amin(1))
    return scores, margin


def _finite_gaps(ranked: Any) -> Any:
    gaps = ranked[:, :-1] - ranked[:, 1:]
    return gaps.masked_fill(~gaps.isfinite(), torch.inf)
