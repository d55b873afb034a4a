"""Tensor parallelism: partial results before their reduction, and what the reduction gave.

All reductions of a forward pass go through one method of the group, in eager and in compiled runs: in compiled runs
from inside an opaque operation. Which site a reduction belongs to follows from its place in the pass: the embedding,
then attention and feed-forward of each layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .vllm_steps import Recorder

GROUP = "vllm.distributed.parallel_state:GroupCoordinator"


class Reductions:
    """Names the reductions of a pass by their order; a pass with another number of them is not recorded."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        session = self._session = recorder.session
        self._sites: list[str] = []
        self._recorded: frozenset[str] = frozenset()  # what the reductions give, as outputs of modules
        self._group: Any = None
        self._next = 0
        self._rows: Any = None
        session.wrap(f"{GROUP}._all_reduce_out_place", before=self._before, after=self._after)

    def expect(self, places: Iterable[Any], recorded: Iterable[str]) -> None:
        """From vllm_modules.places(); recorded: sites that are observed as outputs of modules."""
        self._recorded = frozenset(recorded)
        from vllm.distributed.parallel_state import get_tp_group

        self._group = get_tp_group()
        self._session.label(self._group, "vLLM's tensor-parallel group")  # a compiled graph knows it by this
        layers: dict[int, str] = {}
        embed = False
        for place in places:
            embed |= place.layer is None and place.path.endswith("embed_tokens")
            if place.layer is not None and place.path.endswith((".mlp.down_proj", ".mlp.gate")):
                layers[place.layer] = "moe.out" if place.path.endswith("gate") else "mlp.down"
        self._sites = ["embed"] if embed else []
        for number, ffn in sorted(layers.items()):
            self._sites += [f"layers.{number}.attn.o_proj", f"layers.{number}.{ffn}"]

    def _site(self) -> str | None:
        return self._sites[self._next] if self._next < len(self._sites) else None

    def _before(self, call: Any) -> None:
        if self._group is None or call.self is not self._group or self._group.world_size == 1:
            return
        rows = self._session.rows
        if rows is not self._rows:  # another pass
            self._rows, self._next = rows, 0
        site = self._site()
        if site is not None and rows is not None:
            self._recorder.record(f"{site}.partial", call.args[1], rows=rows)

    def _after(self, call: Any, result: Any) -> None:
        if self._group is None or call.self is not self._group or self._group.world_size == 1:
            return
        site = self._site()
        self._next += 1
        if site is not None and self._rows is not None and site not in self._recorded:
            self._recorder.record(site, result, rows=self._rows)
